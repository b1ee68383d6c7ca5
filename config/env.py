"""Typed readers for settings that come from the environment.

A variable that is set to something unexpected stops the process at start-up with one line that
names the variable, what was wrong and what is accepted; so does a variable that starts with
`ANDON_` and that nobody reads. Every reader also accepts `NAME_FILE`, the path of a file that
holds the value, for secrets mounted by an orchestrator.
"""

import difflib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from django.core.exceptions import ImproperlyConfigured

PREFIX = "ANDON_"
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


@dataclass(frozen=True)
class Setting:
    """What one variable is: a row of docs/settings.md."""

    name: str
    kind: str
    default: str
    about: str


#: Every variable that was read, by name, in the order of reading.
SETTINGS: dict[str, Setting] = {}


def _declare(name: str, kind: str, default: str, about: str) -> None:
    SETTINGS[name] = Setting(name, kind, default, about)


def _read(name: str) -> str | None:
    value = os.environ.get(name)
    path = os.environ.get(f"{name}_FILE")
    if value is not None and path is not None:
        raise ImproperlyConfigured(f"{name} and {name}_FILE are both set: set one of them")
    if path is not None:
        try:
            value = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ImproperlyConfigured(f"{name}_FILE: cannot read {path}: {error}") from error
    # An empty variable is how compose files and unit files spell "not set".
    return (value.strip() or None) if value is not None else None


def text(name: str, default: str = "", *, about: str = "", shown: str | None = None) -> str:
    """Return the value of `name`, or the content of the file that `name`_FILE points to.

    `shown` is how the documentation spells a default that differs from machine to machine.
    """
    _declare(name, "text", default if shown is None else shown, about)
    value = _read(name)
    return default if value is None else value


def boolean(name: str, default: bool, *, about: str = "") -> bool:
    """Return a switch; accepts 1/0, true/false, yes/no and on/off in any letter case."""
    _declare(name, "switch", "1" if default else "0", about)
    value = _read(name)
    if value is None:
        return default
    if value.lower() in _TRUE:
        return True
    if value.lower() in _FALSE:
        return False
    raise ImproperlyConfigured(f"{name}={value!r}: expected one of 1, 0, true, false, yes, no, on, off")


def integer(
    name: str, default: int, *, minimum: int, maximum: int, about: str = "", shown: str | None = None
) -> int:
    """Return a whole number within [minimum, maximum]."""
    _declare(name, f"{minimum} to {maximum}", str(default) if shown is None else shown, about)
    value = _read(name)
    if value is None:
        return default
    try:
        number = int(value)
    except ValueError:
        raise ImproperlyConfigured(f"{name}={value!r}: expected a whole number") from None
    if not minimum <= number <= maximum:
        raise ImproperlyConfigured(f"{name}={number}: expected {minimum} to {maximum}")
    return number


def choice(name: str, default: str, choices: Sequence[str], *, about: str = "") -> str:
    """Return one of `choices`."""
    _declare(name, " · ".join(choices), default, about)
    value = _read(name)
    if value is None:
        return default
    if value not in choices:
        raise ImproperlyConfigured(f"{name}={value!r}: expected one of {', '.join(choices)}")
    return value


def words(name: str, default: Sequence[str] = (), *, about: str = "", shown: str | None = None) -> list[str]:
    """Return a comma-separated list, blanks dropped."""
    _declare(name, "comma-separated", ",".join(default) if shown is None else shown, about)
    value = _read(name)
    return list(default) if value is None else [word.strip() for word in value.split(",") if word.strip()]


def refuse_unknown(environment: Mapping[str, str], others: Collection[str] = ()) -> None:
    """Raise for every `ANDON_…` variable that no reader asked for, with the nearest known name.

    A misspelt variable would otherwise leave a default in force without a word. `others` are
    names that belong to somebody else in the same environment.
    """
    known = {*others, *SETTINGS, *(f"{name}_FILE" for name in SETTINGS)}
    complaints = []
    for name in sorted(set(environment) - known):
        if name.startswith(PREFIX):
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            advice = f"did you mean {near[0]}?" if near else "docs/settings.md lists the known ones"
            complaints.append(f"{name} is not a setting of Andon: {advice}")
    if complaints:
        raise ImproperlyConfigured("; ".join(complaints))
