"""What changed with the last launch, and how long ago it was."""

from typing import Any

from andon.diagnose.fact import Fact, step_words
from andon.diagnose.record import NEAR_STEPS, Launch, Record

_CODE = ("code_sha256", "revision", "git_revision", "git_sha", "commit")


def facts(record: Record) -> list[Fact]:
    """Return what the launch of the incident's attempt says against the one before it."""
    launch, before = record.launch, record.launch_before
    if launch is None:
        return []
    found: list[Fact] = []
    since = (
        record.step - launch.first_step if record.step is not None and launch.first_step is not None else None
    )
    if since is not None and since >= NEAR_STEPS:
        text = f"{since:,} steps since attempt {launch.number} was launched"
        found.append(Fact(id=launch.id, kind="no_restart_near", text=text))
    elif since is not None and since >= 0 and launch.number > 1:
        text = f"attempt {launch.number} began at {step_words(launch.first_step)}, {since} steps before"
        found.append(Fact(id=launch.id, kind="restart_just_before", text=text))
    if before is not None:
        found += _compared(launch, before)
    elif since is not None and since >= NEAR_STEPS:
        text = f"attempt {launch.number} has run on what it was launched with for {since:,} steps"
        found.append(Fact(id=launch.id, kind="long_unchanged", text=text))
    return found


def _compared(launch: Launch, before: Launch) -> list[Fact]:
    pairs: list[tuple[str, str, Any, Any]] = [
        ("code_changed", "code", _first(before.data, _CODE), _first(launch.data, _CODE)),
        ("config_changed", "configuration", before.config_sha256, launch.config_sha256),
        ("environment_changed", "environment", before.environment_sha256, launch.environment_sha256),
        ("scale_changed", "world size", before.world_size, launch.world_size),
        ("precision_changed", "precision", before.precision, launch.precision),
        ("nccl_changed", "NCCL", _environment(before, "nccl"), _environment(launch, "nccl")),
    ]
    known = [(kind, words, old, new) for kind, words, old, new in pairs if old and new]
    found = [
        Fact(
            id=launch.id,
            kind=kind,
            text=f"{words} {_short(old)} → {_short(new)} from attempt {before.number} to {launch.number}",
        )
        for kind, words, old, new in known
        if old != new
    ]
    named = {words for _, words, _, _ in known}
    if not found and {"code", "configuration", "environment"} <= named:
        text = f"code, configuration and environment as in attempt {before.number}"
        found.append(Fact(id=launch.id, kind="nothing_changed", text=text))
    return found


def _first(data: dict[str, Any], names: tuple[str, ...]) -> str:
    return next((str(data[name]) for name in names if isinstance(data.get(name), str) and data[name]), "")


def _environment(launch: Launch, name: str) -> str:
    told = launch.data.get("environment")
    value = told.get(name) if isinstance(told, dict) else None
    return str(value) if isinstance(value, str | int | float) else ""


def _short(value: Any) -> str:
    text = f"{value:,}" if isinstance(value, int) else str(value)
    return text if len(text) <= 16 else f"{text[:8]}…{text[-4:]}"
