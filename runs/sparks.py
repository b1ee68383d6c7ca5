"""The small curves of the list of runs, of the newest steps, read for a whole page at once."""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from runs import curve_columns, curves
from runs.blocks import COLUMNS
from runs.curve_columns import Columns
from runs.curves import Point
from runs.rows import raw_cursor

STEPS, WIDTH, HEIGHT = 240, 120, 24
NAMES = ("loss", "grad_norm")
Newest = tuple[int, int, int]  # run, attempt, newest step

_BLOCKS = """
SELECT w.run, b.series, b.number, b.columns FROM unnest(%s::bigint[], %s::int[], %s::bigint[])
     AS w (run, attempt, number)
JOIN runs_curveblock b ON b.run_id = w.run AND b.attempt = w.attempt AND b.level = 0 AND b.series = ANY(%s)
     AND b.number = w.number
ORDER BY w.run, b.series, b.number
"""


@dataclass(frozen=True, slots=True)
class Spark:
    """A small curve: SVG points, and where it became nonfinite."""

    points: str
    nonfinite_x: float | None


def of_runs(newest: Iterable[Newest]) -> dict[tuple[int, str], Spark]:
    """Return the curves that there are, by run and series; what came in the last seconds may be missing."""
    wanted = [
        (run, attempt, number)
        for run, attempt, step in newest
        for number in range(max(0, step - STEPS) // COLUMNS, step // COLUMNS + 1)
    ]
    if not wanted:
        return {}
    last = {run: step for run, _, step in newest}
    found: dict[tuple[int, str], list[Columns]] = defaultdict(list)
    with raw_cursor() as cursor:
        cursor.execute(_BLOCKS, (*(list(column) for column in zip(*wanted, strict=True)), list(NAMES)))
        for run, series, number, stored in cursor:
            found[int(run), str(series)].append(curve_columns.unpack(bytes(stored), 0, int(number)))
    drawn: dict[tuple[int, str], Spark] = {}
    for (run, series), parts in found.items():
        columns = np.concatenate(parts)
        columns = columns[(columns["at"] > last[run] - STEPS) & (columns["at"] <= last[run])]
        one = spark(curves.points(columns), log=series == "grad_norm")
        if one is not None:
            drawn[run, series] = one
    return drawn


def spark(points: list[Point], *, log: bool = False) -> Spark | None:
    """Return a small curve of finite points; None with fewer than two."""
    usable = [
        (point["step"], math.log(value) if log else value)
        for point in points
        if (value := point["value"]) is not None and (not log or value > 0)
    ]
    if len(usable) < 2:
        return None
    first, last = points[0]["step"], points[-1]["step"]
    low, high = min(y for _, y in usable), max(y for _, y in usable)
    wide, tall = max(1, last - first), (high - low) or 1.0
    # Four steps to two pixels: of them the least and the greatest value, so that a spike stays.
    pixels: dict[int, list[float]] = defaultdict(list)
    for x, y in usable:
        pixels[2 * round((x - first) / wide * WIDTH / 2)].append(y)
    text = " ".join(
        f"{x},{2 + (1 - (y - low) / tall) * (HEIGHT - 4):.1f}"
        for x, ys in pixels.items()
        for y in ((min(ys), max(ys)) if len(ys) > 2 else ys)
    )
    bad = next((point["step"] for point in points if point["value"] is None and point["flag"]), None)
    return Spark(text, None if bad is None else round(min((bad - first) / wide * WIDTH, WIDTH - 9), 1))
