"""Where a run was: the four positions at the end of a step, from what the trainer reported.

Loader position, consumed samples, optimizer step and schedule position are four different numbers
(see the design's words); none is derived from another here. A loader position that no event named is
computed from the nearest checkpoint and the samples per step between two reports, and says so.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

from incidents.ledger import POSITIONS
from runs.models import Checkpoint, Run
from runs.rows import raw_cursor

_TYPES = ("step", "loader.position", "batch.seen", "skip", "checkpoint.committed")
# Other names under which loaders of the field report the same number.
_NAMES: dict[str, tuple[str, ...]] = {
    "loader_position": ("loader_position", "position", "loader_after", "next_sample"),
    "consumed_samples": ("consumed_samples",),
    "optimizer_step": ("optimizer_step",),
    "schedule_position": ("schedule_position", "lr_step"),
}
_COMPUTABLE = ("loader_position", "consumed_samples")
# This is asked while an incident opens, so the plans are kept (`runs.sql_ingest`). Most trainers name no
# position: the database looks through the newest events, and only those that can name one are decoded.
_AT = "SELECT step, data FROM andon_events_at(%s, %s, %s, %s, %s)"
_NEWEST = "SELECT step, data FROM andon_newest_events(%s, %s, %s, %s, 2000)"
_CHECKPOINTS = f"SELECT attempt, step, {', '.join(POSITIONS)} FROM runs_checkpoint WHERE run_id = %s"  # noqa: S608


@dataclass(frozen=True, slots=True)
class Known:
    """Positions by name (None: not known) and, for each that is not as reported, why."""

    values: dict[str, int | None]
    why_none: dict[str, str] = field(default_factory=dict)
    computed: dict[str, str] = field(default_factory=dict)

    def reasons(self, side: str) -> dict[str, str]:
        """Return `none_because` entries of a ledger row for `side` ("before" or "after")."""
        if all(value is None for value in self.values.values()):
            return {side: next(iter(self.why_none.values()), "no position was reported")}
        return {f"{side}.{name}": why for name, why in self.why_none.items()}


def _number(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if float(value).is_integer() and value >= 0 else None


def of_event(data: dict[str, Any]) -> dict[str, int]:
    """Return the positions one event's data names."""
    nested = data.get("positions")
    sources = [data] + ([nested] if isinstance(nested, dict) else [])
    found: dict[str, int] = {}
    for name, keys in _NAMES.items():
        for source in sources:
            for key in keys:
                value = _number(source.get(key))
                if value is not None:
                    found.setdefault(name, value)
    return found


def of_checkpoint(checkpoint: Checkpoint) -> Known:
    """Return the positions a checkpoint kept."""
    values = checkpoint.positions()
    return Known(
        values,
        {
            name: f"the checkpoint of step {checkpoint.step} does not keep it"
            for name in POSITIONS
            if values[name] is None
        },
    )


def at(run: Run, attempt: int, step: int) -> Known:
    """Return the positions after `step` of `attempt`."""
    return at_each(run, attempt, [step])[0]


def at_each(run: Run, attempt: int, steps: Sequence[int]) -> list[Known]:
    """Return the positions after each of `steps`, which should lie near each other."""
    told: dict[int, dict[str, int]] = {step: {} for step in steps}
    with raw_cursor() as cursor:
        cursor.execute(_AT, (run.pk, attempt, list(_TYPES), list(steps), 400 * len(steps)))
        rows = cursor.fetchall()
    for step, data in rows:
        for name, value in of_event(json.loads(data)).items():
            # Ranks of one step report the same number; a straggler's smaller one is its local view.
            told[step][name] = max(value, told[step].get(name, 0))
    reports = _Reports(run, attempt)
    for kept_by, step, values in reports.checkpoints:
        if kept_by == attempt and step in told:
            for name, kept in zip(POSITIONS, values, strict=True):
                if kept is not None:
                    told[step].setdefault(name, kept)
    return [_known(step, told[step], reports) for step in steps]


def _known(step: int, told: dict[str, int], reports: "_Reports") -> Known:
    values: dict[str, int | None] = {name: told.get(name) for name in POSITIONS}
    computed: dict[str, str] = {}
    for name in _COMPUTABLE:
        if values[name] is None:
            guess = _along_the_line(reports.points[name], step)
            if guess is not None:
                values[name], computed[name] = guess
    why_none = {
        name: f"no {name.replace('_', ' ')} was reported for step {step}"
        for name in POSITIONS
        if values[name] is None
    }
    return Known(values, why_none, computed)


def samples_per_step(run: Run, attempt: int, name: str = "loader_position") -> int | None:
    """Return how many samples one step of an attempt takes, from the two newest reports; None: unknown."""
    return _rate(_Reports(run, attempt).points[name])


class _Reports:
    """The newest reported positions of an attempt, read once and only if something must be computed."""

    def __init__(self, run: Run, attempt: int) -> None:
        self._run, self._attempt = run, attempt

    @cached_property
    def checkpoints(self) -> list[tuple[int, int, tuple[int | None, ...]]]:
        """Return attempt, step and `POSITIONS` of every checkpoint of the run."""
        with raw_cursor() as cursor:
            cursor.execute(_CHECKPOINTS, (self._run.pk,))
            return [(attempt, step, tuple(values)) for attempt, step, *values in cursor.fetchall()]

    @cached_property
    def points(self) -> dict[str, list[tuple[int, int]]]:
        """Return (step, position) as reported, newest step first, by the position's name."""
        found: dict[str, dict[int, int]] = {name: {} for name in _COMPUTABLE}
        for _, step, values in self.checkpoints:
            for name, value in zip(POSITIONS, values, strict=True):
                if value is not None and name in found:
                    found[name][step] = value
        keys = [key for name in _COMPUTABLE for key in _NAMES[name]]
        with raw_cursor() as cursor:
            cursor.execute(_NEWEST, (self._run.pk, self._attempt, list(_TYPES), [*keys, "positions"]))
            for step, data in cursor.fetchall():
                for name, value in of_event(json.loads(data)).items():
                    if name in found:
                        found[name][step] = max(value, found[name].get(step, 0))
        return {name: sorted(points.items(), reverse=True) for name, points in found.items()}


def _rate(points: list[tuple[int, int]]) -> int | None:
    for (later, after), (earlier, before) in pairwise(points):
        if later > earlier and after > before and (after - before) % (later - earlier) == 0:
            return (after - before) // (later - earlier)
    return None


def _along_the_line(points: list[tuple[int, int]], step: int) -> tuple[int, str] | None:
    rate = _rate(points)
    if rate is None:
        return None
    near, value = min(points, key=lambda point: abs(point[0] - step))
    if value + (step - near) * rate < 0:
        return None
    return (
        value + (step - near) * rate,
        f"computed from step {near} at {rate} samples a step: step {step} reported none",
    )
