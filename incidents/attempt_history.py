"""A run's attempts as `andon.seen` reads them: which checkpoint each began from, and what it reached."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from andon.intervals import Window
from andon.seen import Attempt, Mark
from incidents import loader_marks
from incidents.models import Permit
from runs.models import Attempt as Launch
from runs.models import Checkpoint, Grid, Run
from runs.rows import raw_cursor

_REACHED = """
SELECT a.run_id, a.number, f.step, f.occurred_at, l.step, l.occurred_at, m.step_s
FROM runs_attempt a
CROSS JOIN LATERAL (SELECT step, occurred_at FROM runs_event WHERE run_id = a.run_id AND attempt = a.number
    AND type = 'step' AND step IS NOT NULL ORDER BY step LIMIT 1) f
CROSS JOIN LATERAL (SELECT step, occurred_at FROM runs_event WHERE run_id = a.run_id AND attempt = a.number
    AND type = 'step' AND step IS NOT NULL ORDER BY step DESC LIMIT 1) l
CROSS JOIN LATERAL (
    SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY (data ->> 'step_time_s')::float8) AS step_s
    FROM (SELECT data FROM runs_event WHERE run_id = a.run_id AND attempt = a.number AND type = 'step'
          AND step IS NOT NULL ORDER BY step DESC LIMIT 200) AS newest
    WHERE jsonb_typeof(data -> 'step_time_s') = 'number' AND (data ->> 'step_time_s')::float8 > 0) m
WHERE a.run_id = ANY(%s)
"""


@dataclass(frozen=True, slots=True)
class Reached:
    """First and last step an attempt reported, when they occurred, and its median step time in seconds."""

    first: int
    first_at: datetime
    last: int
    last_at: datetime
    step_s: float | None


def reached(run_ids: Sequence[int]) -> dict[tuple[int, int], Reached]:
    """Return what each attempt of these runs reached, by run and number; one without a step is left out.

    A step time nobody reported is that from the first step to the last, by the number of steps.
    """
    with raw_cursor() as cursor:
        cursor.execute(_REACHED, (list(run_ids),))
        found = {}
        for run_id, number, first, first_at, last, last_at, step_s in cursor.fetchall():
            mean_s = (last_at - first_at).total_seconds() / (last - first) if last > first else 0.0
            found[run_id, number] = Reached(first, first_at, last, last_at, step_s or mean_s or None)
    return found


@dataclass(frozen=True, slots=True)
class Begun:
    """Where an attempt began: the attempt of its checkpoint (None: from scratch) and that step."""

    parent: int | None
    step: int


def attempts_of(run: Run) -> list[Attempt]:
    """Return every attempt of a run with its marks, by number."""
    outline = outlines([run])[run.pk]
    kept = list(Checkpoint.objects.filter(run=run).defer("files", "verification").order_by("pk"))
    marks, dropped = loader_marks.of_run(run)
    for checkpoint in kept:
        mark = _of_checkpoint(checkpoint)
        if mark is not None:
            marks.setdefault(checkpoint.attempt, []).insert(0, mark)
    made = []
    for one in outline:
        permit = one.permit
        told = marks.get(one.attempt.number, [])
        start = _start(one.attempt, kept, permit, marks)
        first = min(told, key=lambda mark: mark.step, default=None)
        if start is not None and first is not None and first.position < start.position:
            start = None  # the loader was not restored: what it read is what it says, and was read before
        window = permit.request.plan.skip if permit is not None else None
        made.append(
            msgspec.structs.replace(
                one.attempt,
                start=start,
                marks=tuple(told),
                skips=(Window(int(window["from"]), int(window["to"])),) if window else (),
                dropped=frozenset(dropped.get(one.attempt.number, ())),
            )
        )
    return made


@dataclass(frozen=True, slots=True)
class Outline:
    """An attempt with its steps and parent, and no marks; its launch, and the permit it went on by."""

    attempt: Attempt
    launch: Launch
    permit: Permit | None
    reached: Reached | None


@dataclass(frozen=True, slots=True)
class _Kept:
    """What of a checkpoint tells where an attempt began."""

    attempt: int
    step: int
    uri: str


def outlines(runs: Sequence[Run]) -> dict[int, list[Outline]]:
    """Return the attempts of many runs, by run and in the order of their numbers: one query per table."""
    ids = [run.pk for run in runs]
    launches: dict[int, list[Launch]] = {pk: [] for pk in ids}
    for launch in Launch.objects.filter(run__in=ids).defer("nodes", "groups", "data").order_by("number"):
        launches[launch.run_id].append(launch)
    kept: dict[int, list[_Kept]] = {pk: [] for pk in ids}
    rows = Checkpoint.objects.filter(run__in=ids).order_by("pk")
    for pk, attempt, step, uri in rows.values_list("run_id", "attempt", "step", "uri"):
        kept[pk].append(_Kept(attempt, step, uri))
    permits: dict[int, dict[int, Permit]] = {pk: {} for pk in ids}
    used = Permit.objects.filter(run__in=ids, launches__gt=0).select_related("request__plan")
    for permit in used.order_by("pk"):
        permits[permit.run_id][permit.attempt] = permit
    found = reached(ids)
    grids: dict[tuple[int, int], int] = {}
    for pk, attempt, step in Grid.objects.filter(run__in=ids).values_list("run_id", "attempt", "step_last"):
        grids[pk, attempt] = step
    return {pk: _outline(pk, launches[pk], kept[pk], permits[pk], found, grids) for pk in ids}


def _outline(
    pk: int,
    launches: Sequence[Launch],
    kept: Sequence[_Kept],
    permits: Mapping[int, Permit],
    steps: Mapping[tuple[int, int], Reached],
    grids: Mapping[tuple[int, int], int],
) -> list[Outline]:
    last: dict[int, int] = {}
    for launch in launches:
        at = steps.get((pk, launch.number))
        last[launch.number] = max(at.last if at else 0, grids.get((pk, launch.number), 0))
    for checkpoint in kept:
        last[checkpoint.attempt] = max(checkpoint.step, last.get(checkpoint.attempt, 0))
    began: dict[int, Begun] = {}
    for launch in launches:
        began[launch.number] = _begun(launch, kept, permits.get(launch.number), began, last)
    for one in began.values():
        if one.parent is not None:
            # Its own reports may be gone already; that it reached this step is sure.
            last[one.parent] = max(last.get(one.parent, 0), one.step)
    return [
        Outline(
            Attempt(
                number=launch.number,
                parent=began[launch.number].parent,
                began=began[launch.number].step,
                last=max(last[launch.number], began[launch.number].step),
            ),
            launch,
            permits.get(launch.number),
            steps.get((pk, launch.number)),
        )
        for launch in launches
    ]


def _begun(
    launch: Launch,
    kept: Sequence[_Kept],
    permit: Permit | None,
    before: Mapping[int, Begun],
    last: Mapping[int, int],
) -> Begun:
    """Return where an attempt began: as its launch told, else by its permit, else by its first step."""
    told: dict[str, Any] = launch.began_from or {}
    plan = permit.request.plan if permit is not None else None
    for origin in (told, plan.checkpoint if plan is not None else {}):
        found = _told(origin, launch.number, kept, before, last)
        if found is not None:
            return found
    earlier = [number for number in before if number < launch.number]
    first = launch.first_step
    if plan is not None and earlier:
        parent = max(earlier)
        return Begun(parent, max(before[parent].step, last.get(parent, 0)))  # in place, from memory
    if first is None or first <= 1 or not earlier:
        return Begun(None, max(0, (first or 1) - 1))
    return Begun(_reaching(first - 1, earlier, before, last), first - 1)


def _told(
    origin: Mapping[str, Any],
    number: int,
    kept: Sequence[_Kept],
    before: Mapping[int, Begun],
    last: Mapping[int, int],
) -> Begun | None:
    address = origin.get("uri") or origin.get("checkpoint")
    by_address = [one for one in kept if one.uri == address and one.attempt < number]
    step = origin.get("step")
    if not isinstance(step, int) or isinstance(step, bool):
        step = by_address[-1].step if by_address else None
    if step is None:
        return None
    parent = origin.get("attempt")
    if isinstance(parent, int) and parent in before:
        return Begun(parent, step)
    same = [one for one in (by_address or kept) if one.step == step and one.attempt in before]
    if same:
        return Begun(max(one.attempt for one in same), step)
    return Begun(_reaching(step, list(before), before, last), step)


def _reaching(
    step: int, earlier: Sequence[int], before: Mapping[int, Begun], last: Mapping[int, int]
) -> int | None:
    """Return the newest earlier attempt that got to `step`; None: the run began from another's weights."""
    return max((n for n in earlier if before[n].step <= step <= last.get(n, 0)), default=None)


def _of_checkpoint(checkpoint: Checkpoint) -> Mark | None:
    if checkpoint.loader_position is None:
        return None
    return Mark(checkpoint.step, checkpoint.loader_position, checkpoint.consumed_samples)


def _start(
    origin: Attempt, kept: Sequence[Checkpoint], permit: Permit | None, marks: Mapping[int, list[Mark]]
) -> Mark | None:
    if origin.parent is None:
        return Mark(0, 0) if origin.began == 0 else None
    for checkpoint in kept:
        if (checkpoint.attempt, checkpoint.step) == (origin.parent, origin.began):
            mark = _of_checkpoint(checkpoint)
            if mark is not None:
                return mark
    if permit is not None and permit.request.plan.positions.get("loader_position") is not None:
        positions = permit.request.plan.positions
        return Mark(origin.began, positions["loader_position"], positions.get("consumed_samples"))
    return next((mark for mark in marks.get(origin.parent, ()) if mark.step == origin.began), None)
