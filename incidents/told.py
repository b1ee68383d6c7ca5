"""What launches tell of code, config and software, under the names that launchers use.

Nobody has to tell any of it, and everybody calls it something else. Each fact is looked for at a few places
of `attempt.launched` (wire.md keeps extra keys); what is found is masked before it is shown.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from andon.masking import mask_value
from runs import formatting as words

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that may have changed: its name, and where launchers put it, the most telling place first."""

    name: str
    paths: tuple[Path, ...]


def _at(*spelled: str) -> tuple[Path, ...]:
    return tuple(tuple(one.split(".")) for one in spelled)


REVISION = Fact(
    "code revision",
    _at(
        *("revision", "git.revision", "git.commit", "git.sha", "commit", "code.revision", "code.commit"),
        *("code_sha256", "code.sha256", "code"),
    ),
)
DIFF_STAT = Fact("diff stat", _at("diff_stat", "git.diff_stat", "code.diff_stat", "git.diffstat"))
FACTS = (
    Fact("config", _at("config_sha256", "config.sha256", "config")),
    Fact("image", _at("image", "environment.image", "container", "environment.container")),
    Fact(
        "packages", _at("packages", "environment.packages", "versions", "environment.versions", "libraries")
    ),
    Fact(
        "driver",
        _at("driver", "environment.driver", "environment.driver_version", "environment.versions.driver"),
    ),
    Fact(
        "NCCL",
        _at(
            "nccl",
            "environment.nccl",
            "environment.versions.nccl",
            "versions.nccl",
            "environment.nccl_version",
        ),
    ),
)
DATA_MIX = Fact("data mix", _at("mixture", "mixture_weights", "dataset_version", "dataset", "data.mixture"))
# Versions that stand by themselves in an environment: told, but under no heading of their own.
_LOOSE = ("python", "torch", "cuda", "cudnn", "numpy", "transformers", "transformer_engine", "flash_attn")
_MOST_SHOWN = 6


def value_of(fact: Fact, told: Mapping[str, Any]) -> Any:
    """Return what a launch told of a fact, None when it told nothing."""
    for path in fact.paths:
        found = _walk(told, path)
        if found not in (None, "", {}, []):
            return found
    if fact.name == "packages":
        return loose_versions(told) or None
    return None


def loose_versions(told: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions of well-known parts that stand in `environment` or at the top."""
    inner = told.get("environment")
    sources = [told, inner] if isinstance(inner, dict) else [told]
    return {
        name: str(source[name])
        for source in sources
        for name in _LOOSE
        if isinstance(source.get(name), str | int | float) and not isinstance(source.get(name), bool)
    }


def _walk(told: Any, path: Path) -> Any:
    for name in path:
        if not isinstance(told, Mapping):
            return None
        told = told.get(name)
    return told


def text(value: Any) -> str:
    """Return a value as it is shown: masked, inert, a digest or a hash cut, a table as its size."""
    value = mask_value(value)
    if isinstance(value, dict):
        return words.plural(len(value), "value")
    if isinstance(value, list):
        return words.plural(len(value), "entry", "entries")
    said = str(value)
    hexadecimal = len(said) >= 40 and all(character in "0123456789abcdef" for character in said.lower())
    return said[:8] if hexadecimal else words.inert(said)


def differences(before: Any, after: Any) -> list[str]:
    """Return what differs between two tables or lists, name by name; [] where they are no tables."""
    old, new = _table(mask_value(before)), _table(mask_value(after))
    if old is None or new is None:
        return []
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    said = [f"{words.inert(name, 60)}: {_was(old, name)} → {_was(new, name)}" for name in names[:_MOST_SHOWN]]
    if len(names) > _MOST_SHOWN:
        said.append(f"and {words.count(len(names) - _MOST_SHOWN)} more")
    return said


def _was(table: Mapping[str, Any], name: str) -> str:
    return text(table[name]) if name in table else "none"


def _table(value: Any, before: str = "") -> dict[str, Any] | None:
    """Return a table with nested names joined by dots; of `pip freeze` lines one entry per package."""
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        pairs = (one.partition("==") for one in value)
        return {name: version or "present" for name, _, version in pairs}
    if not isinstance(value, dict):
        return None
    flat: dict[str, Any] = {}
    for name, inner in value.items():
        nested = _table(inner, f"{before}{name}.") if isinstance(inner, dict) else None
        if nested is None:
            flat[f"{before}{name}"] = inner
        else:
            flat |= nested
    return flat
