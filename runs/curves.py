"""Curves of an attempt as pages draw them: reduced to a number of points without losing an extreme.

Read from the blocks at the level just below what is drawn, with what still waits for a worker taken in.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

from runs import curve_columns, curve_store, curve_values
from runs.blocks import TOP, steps_of
from runs.curve_columns import KINDS, Columns
from runs.curve_values import Said, how
from runs.models import Event, Run
from runs.rows import raw_cursor

MAX_PENDING = 4_000  # newest events that no worker has looked at yet; a page must not read a storm


class Point(TypedDict):
    """One point of a curve: `value` is null where it was nonfinite, and `flag` says which.

    `count` stands where a point is several nonfinite steps, `who` is the lane that said it (see
    `runs.node_readings`).
    """

    step: int
    value: float | None
    flag: str
    count: NotRequired[int]
    who: NotRequired[int]


@dataclass(frozen=True, slots=True)
class Window:
    """What a picture shows: whole columns of `width` steps, both ends included."""

    first: int
    last: int
    level: int
    width: int


def window(first: int, last: int, most: int) -> Window:
    """Return a window widened to whole columns, of which at most `most` are in it.

    What lies under a column is drawn by its extremes, so a column half outside would hide what is inside.
    """
    span = last - first + 1
    if span <= most:
        return Window(first, last, 0, 1)
    level = 0
    # Columns of the blocks are joined, up to four to one: so a picture has nearly as many as it may.
    while level < TOP and span >= most * steps_of(level + 1):
        level += 1
    wide = steps_of(level)
    times = -(-span // (wide * most))
    while True:
        width = wide * times
        low, high = first // width * width, (last // width + 1) * width - 1
        if (high - low + 1) // width <= most:
            return Window(low, high, level, width)
        times += 1


def read(
    run_id: int, attempts: Sequence[int], names: Sequence[str], shown: Window
) -> dict[tuple[int, str], Columns]:
    """Return the columns of each attempt and series in a window; where nothing is known there is none."""
    fresh = waiting(run_id, attempts, names)
    stored = curve_store.between(run_id, attempts, names, shown.level, shown.first, shown.last)
    found: dict[tuple[int, str], Columns] = {}
    for of in {*fresh, *stored}:
        name = of[1]
        columns = stored.get(of, curve_columns.empty())
        columns = columns[(columns["at"] >= shown.first) & (columns["at"] <= shown.last)]
        if of in fresh:
            columns = _with_fresh(columns, fresh[of].between(shown.first, shown.last), name, shown)
        if shown.width > steps_of(shown.level):
            columns = curve_columns.grouped(columns, shown.width, how(name), start=shown.first)
        if len(columns):
            found[of] = columns
    return found


def _with_fresh(columns: Columns, said: curve_columns.Reports, name: str, shown: Window) -> Columns:
    new = curve_columns.settled(said, how(name))
    if shown.level == 0:
        return curve_columns.merged(columns, new, how(name))
    new = curve_columns.grouped(new, steps_of(shown.level), how(name))
    return curve_columns.adjoined(columns, new, steps_of(shown.level), how(name))


_WAITING = """
SELECT attempt, curves FROM runs_gridwaiting WHERE run_id = %s AND attempt = ANY(%s) AND curves IS NOT NULL
"""
_PENDING = """
SELECT ref, received_at FROM runs_pending WHERE run_id = %s AND what = 'event' ORDER BY id DESC LIMIT %s
"""


def waiting(
    run_id: int, attempts: Sequence[int], names: Iterable[str]
) -> dict[tuple[int, str], curve_columns.Reports]:
    """Return what events said and no block holds yet, by attempt and series.

    Asked for before the blocks are: what is compacted in between is then met twice, which changes nothing
    but the mean of single ranks, until the next look.
    """
    with raw_cursor() as cursor:
        cursor.execute(_PENDING, (run_id, MAX_PENDING))
        pending = cursor.fetchall()
        cursor.execute(_WAITING, (run_id, list(attempts)))
        parts: dict[int, list[Said]] = defaultdict(list)
        for attempt, stored in cursor:
            parts[int(attempt)].append(curve_values.unpack(bytes(stored)))
    if pending:
        times = [row[1] for row in pending]
        events = Event.objects.filter(
            run_id=run_id,
            pk__in=[row[0] for row in pending],
            received_at__range=(min(times), max(times)),
            attempt__in=attempts,
        ).order_by("pk")
        for attempt, said in curve_values.of_events(events).items():
            parts[attempt].append(said)
    wanted = set(names)
    return {
        (attempt, name): reports
        for attempt, of_attempt in parts.items()
        for name, reports in curve_values.joined(of_attempt).items()
        if name in wanted
    }


def points(columns: Columns) -> list[Point]:
    """Return the extremes of each column at their own steps, and a mark where it was nonfinite."""
    found: list[Point] = []
    fields = ("lo", "hi", "lo_at", "hi_at", "n", "bad", "bad_at", "kind", "who")
    for lo, hi, lo_at, hi_at, n, bad, bad_at, kind, who in zip(
        *(columns[name].tolist() for name in fields), strict=True
    ):
        of_column: list[Point] = []
        if n:
            of_column.append({"step": lo_at, "value": lo, "flag": ""})
            if hi != lo:
                of_column.append({"step": hi_at, "value": hi, "flag": ""})
        if who:
            for point in of_column:
                point["who"] = who
        if bad:
            mark: Point = {"step": bad_at, "value": None, "flag": KINDS[kind]}
            if bad > 1:
                mark["count"] = bad
            of_column.append(mark)
        if len(of_column) > 1:
            of_column.sort(key=lambda point: point["step"])
        found += of_column
    return found


def series(
    run: Run, attempt: int, names: list[str], step_first: int, step_last: int, max_points: int
) -> dict[str, list[Point]]:
    """Return series by name, at most about `max_points` points each; every step where they are no more.

    Every column of steps keeps its least and its greatest value, and its nonfinite steps a mark of their
    own, so that no spike and no NaN is averaged away.
    """
    span = step_last - step_first + 1
    shown = window(step_first, step_last, max_points if span <= max_points else max(1, max_points // 3))
    columns = read(run.pk, [attempt], names, shown)
    return {name: points(columns[attempt, name]) if (attempt, name) in columns else [] for name in names}
