"""Where a run was: the four positions at the end of a step, from what the trainer reported.

Loader position, consumed samples, optimizer step and schedule position are four different numbers
(see the design's words); none is derived from another here. A loader position that no event named is
computed from the nearest checkpoint and the samples per step between two reports, and says so.
"""

import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from django.db import connection

from incidents.ledger import POSITIONS
from runs.models import Checkpoint, Event, Run

_TYPES = ("step", "loader.position", "batch.seen", "skip", "checkpoint.committed")
# Other names under which loaders of the field report the same number.
_NAMES: dict[str, tuple[str, ...]] = {
    "loader_position": ("loader_position", "position", "loader_after", "next_sample"),
    "consumed_samples": ("consumed_samples",),
    "optimizer_step": ("optimizer_step",),
    "schedule_position": ("schedule_position", "lr_step"),
}
# Most trainers name no position: the database looks through the newest events, and only those that can name
# one are fetched and decoded. This runs while an incident opens.
_NEWEST = """
SELECT step, data::text FROM (
    SELECT step, data FROM runs_event
    WHERE run_id = %s AND attempt = %s AND type = ANY(%s) AND step IS NOT NULL
    ORDER BY step DESC LIMIT 2000
) AS newest WHERE data ?| %s
"""


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
    values: dict[str, int | None] = dict.fromkeys(POSITIONS)
    rows = Event.objects.filter(run_id=run.pk, attempt=attempt, step=step, type__in=_TYPES).order_by(
        "-received_at"
    )[:400]
    for row in rows:
        for name, value in of_event(row.data).items():
            # Ranks of one step report the same number; a straggler's smaller one is its local view.
            values[name] = max(value, values[name] or 0)
    kept = Checkpoint.objects.filter(run=run, attempt=attempt, step=step).first()
    if kept is not None:
        for name, of_kept in kept.positions().items():
            if values[name] is None:
                values[name] = of_kept
    computed: dict[str, str] = {}
    for name in ("loader_position", "consumed_samples"):
        if values[name] is None:
            guess = _along_the_line(run, attempt, step, name)
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
    points = _points(run, attempt, name)
    return _rate(points)


def _rate(points: list[tuple[int, int]]) -> int | None:
    for (later, after), (earlier, before) in pairwise(points):
        if later > earlier and after > before and (after - before) % (later - earlier) == 0:
            return (after - before) // (later - earlier)
    return None


def _points(run: Run, attempt: int, name: str) -> list[tuple[int, int]]:
    """Return (step, position) as reported, newest step first."""
    points: dict[int, int] = dict(
        Checkpoint.objects.filter(run=run, **{f"{name}__isnull": False}).values_list("step", name)
    )
    with connection.cursor() as cursor:
        cursor.execute(_NEWEST, [run.pk, attempt, list(_TYPES), [*_NAMES[name], "positions"]])
        for step, data in cursor.fetchall():
            value = of_event(json.loads(data)).get(name)
            if value is not None:
                points[step] = max(value, points.get(step, 0))
    return sorted(points.items(), reverse=True)


def _along_the_line(run: Run, attempt: int, step: int, name: str) -> tuple[int, str] | None:
    points = _points(run, attempt, name)
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
