"""Series of an attempt as pages draw them: reduced to a number of points without losing an extreme."""

import math
from collections.abc import Sequence
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from andon.wire import decode_frame
from runs.ingest_frames import with_masks
from runs.models import Frame, Run
from runs.rows import raw_cursor

MAX_FRAMES = 400  # layer frames read for one picture


class Point(TypedDict):
    """One point of a series: `value` is null where it was nonfinite, and `flag` says which."""

    step: int
    value: float | None
    flag: str


# One value per step. Every node may report the same reduced value: the first stored stands. Where no
# one reported a reduced value, the mean over the ranks that reported their own.
_VALUES = """
WITH said AS (
    SELECT step, id, rank IS NULL OR view = 'reduced' OR (%(name)s = 'grad_norm' AND NOT data ? 'view')
               AS reduced,
           CASE WHEN jsonb_typeof(data -> %(name)s) = 'number' THEN (data ->> %(name)s)::float8 END AS value,
           coalesce(flags ->> %(path)s, '') AS flag
    FROM runs_event
    WHERE run_id = %(run)s AND attempt = %(attempt)s AND type = 'step' AND step BETWEEN %(first)s AND %(last)s
          AND data ? %(name)s
), kept AS (
    SELECT * FROM said
    WHERE flag IN ('nan', '+inf', '-inf') OR (value IS NOT NULL AND flag NOT IN ('not_measured'))
), one AS (
    SELECT DISTINCT ON (step) step, value, flag FROM kept WHERE reduced ORDER BY step, id
), mean AS (
    SELECT step, CASE WHEN max(flag) = '' THEN avg(value) END AS value, max(flag) AS flag
    FROM kept k WHERE NOT reduced AND NOT EXISTS (SELECT FROM one WHERE one.step = k.step) GROUP BY step
)
SELECT array_agg(step ORDER BY step), array_agg(value ORDER BY step), array_agg(flag ORDER BY step)
FROM (SELECT * FROM one UNION ALL SELECT * FROM mean) AS every
"""


def series(
    run: Run, attempt: int, names: list[str], step_first: int, step_last: int, max_points: int
) -> dict[str, list[Point]]:
    """Return series by name, at most about `max_points` points each.

    Every bucket of steps keeps its minimum and its maximum; nonfinite steps are kept as marks of
    their own, one per bucket, so that no spike and no NaN is averaged away.
    """
    found: dict[str, list[Point]] = {}
    for name in names:
        with raw_cursor() as cursor:
            cursor.execute(
                _VALUES,
                {
                    "name": name,
                    "path": f"data.{name}",
                    "run": run.pk,
                    "attempt": attempt,
                    "first": step_first,
                    "last": step_last,
                },
            )
            steps, values, flags = cursor.fetchone() or (None, None, None)
        found[name] = [] if steps is None else _decimated(steps, values, flags, max_points)
    return found


def _decimated(
    steps: Sequence[int], values: Sequence[float | None], flags: Sequence[str], max_points: int
) -> list[Point]:
    def point(i: int) -> Point:
        return {"step": steps[i], "value": values[i], "flag": flags[i] if values[i] is None else ""}

    if len(steps) <= max_points:
        return [point(i) for i in range(len(steps))]
    buckets = max(1, max_points // 3)
    step = np.asarray(steps, dtype=np.int64)
    value = np.array([np.nan if v is None else v for v in values])
    bucket = (step - step[0]) * buckets // (step[-1] - step[0] + 1)
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    keep: set[int] = {0, len(steps) - 1}
    for first, last in zip(starts.tolist(), [*starts[1:].tolist(), len(steps)], strict=True):
        part = value[first:last]
        finite = np.flatnonzero(~np.isnan(part))
        if len(finite):
            keep.add(first + int(finite[np.argmin(part[finite])]))
            keep.add(first + int(finite[np.argmax(part[finite])]))
        if len(finite) < len(part):
            keep.add(first + int(np.flatnonzero(np.isnan(part))[0]))
    return [point(i) for i in sorted(keep)]


def layer_series(
    run: Run, attempt: int, metric: str, step_first: int, step_last: int
) -> tuple[list[str], NDArray[np.int64], NDArray[np.float64]]:
    """Return layer names, steps and values float64[layers, steps] (NaN = nonfinite or not posted).

    Where several ranks reported a layer the largest value stands, and a nonfinite one above all.
    """
    frames = Frame.objects.filter(
        run_id=run.pk, attempt=attempt, stream="layer", step_first__lte=step_last, step_last__gte=step_first
    ).order_by("step_first", "pk")
    ids = list(frames.values_list("pk", "received_at", "bad_cells"))
    if len(ids) > MAX_FRAMES:
        stride = -(-len(ids) // MAX_FRAMES)
        ids = [one for i, one in enumerate(ids) if i % stride == 0 or one[2]][: 2 * MAX_FRAMES]
    names: dict[str, int] = {}
    cells: dict[tuple[int, int], float] = {}
    times = [received_at for _, received_at, _ in ids]
    wanted = (
        frames.filter(pk__in=[pk for pk, _, _ in ids], received_at__range=(min(times), max(times)))
        if ids
        else Frame.objects.none()
    )
    for body, content_type in wanted.values_list("body", "content_type"):
        frame = with_masks(decode_frame(bytes(body), content_type))
        column = frame.metrics.get(metric)
        if column is None:
            continue
        values = np.ma.getdata(column).astype(np.float64)
        known = ~np.ma.getmaskarray(column) & (frame.step >= step_first) & (frame.step <= step_last)
        lanes = frame.lane if isinstance(frame.lane, list) else [str(lane) for lane in frame.lane.tolist()]
        for i in np.flatnonzero(known).tolist():
            at = (names.setdefault(lanes[i], len(names)), int(frame.step[i]))
            value = float(values[i]) if np.isfinite(values[i]) else np.nan
            before = cells.get(at)
            if before is None or (not math.isnan(before) and not value <= before):
                cells[at] = value
    steps = np.unique(np.array([step for _, step in cells], dtype=np.int64))
    table = np.full((len(names), len(steps)), np.nan)
    for (layer, step), value in cells.items():
        table[layer, np.searchsorted(steps, step)] = value
    return list(names), steps, table
