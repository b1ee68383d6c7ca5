"""Typed readers for settings that come from the environment.

A variable that is set to something unexpected stops the process at start-up with one line that
names the variable, what was wrong and what is accepted. Every reader also accepts `NAME_FILE`,
the path of a file that holds the value, for secrets mounted by an orchestrator.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from django.core.exceptions import ImproperlyConfigured

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


def text(name: str, default: str = "") -> str:
    """Return the value of `name`, or the content of the file that `name`_FILE points to."""
    value = os.environ.get(name)
    path = os.environ.get(f"{name}_FILE")
    if value is not None and path is not None:
        raise ImproperlyConfigured(f"{name} and {name}_FILE are both set: set one of them")
    if path is not None:
        try:
            return Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ImproperlyConfigured(f"{name}_FILE: cannot read {path}: {error}") from error
    return default if value is None else value.strip()


def boolean(name: str, default: bool) -> bool:
    """Return a switch; accepts 1/0, true/false, yes/no and on/off in any letter case."""
    value = text(name)
    if not value:
        return default
    if value.lower() in _TRUE:
        return True
    if value.lower() in _FALSE:
        return False
    raise ImproperlyConfigured(f"{name}={value!r}: expected one of 1, 0, true, false, yes, no, on, off")


def integer(name: str, default: int, minimum: int | None = None, maximum: int | None = None) -> int:
    """Return a whole number within [minimum, maximum]."""
    value = text(name)
    if not value:
        return default
    try:
        number = int(value)
    except ValueError:
        raise ImproperlyConfigured(f"{name}={value!r}: expected a whole number") from None
    if (minimum is not None and number < minimum) or (maximum is not None and number > maximum):
        raise ImproperlyConfigured(f"{name}={number}: expected {minimum} to {maximum}")
    return number


def choice(name: str, default: str, choices: Sequence[str]) -> str:
    """Return one of `choices`."""
    value = text(name, default)
    if value not in choices:
        raise ImproperlyConfigured(f"{name}={value!r}: expected one of {', '.join(choices)}")
    return value


def words(name: str, default: Sequence[str] = ()) -> list[str]:
    """Return a comma-separated list, blanks dropped."""
    value = text(name)
    return [word.strip() for word in value.split(",") if word.strip()] if value else list(default)
