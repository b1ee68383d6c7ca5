"""When the steps of a window happened, and the window drawn by time instead of by step.

All ranks of an attempt step together, so each step has one time: when its first report came. A step lasts
from the report of the one before to its own. A longer pause is its own stretch: held, or nothing posted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
from numpy.typing import NDArray

from andon.detect.planes import HELD, OUTSIDE
from runs import blocks
from runs.blocks import COLUMNS, TOP, Plane, steps_of
from runs.cellmap import Bins
from runs.models import DirectiveAck
from runs.rows import raw_cursor
from runs.uncompacted import Uncompacted

PAUSE_S = 60.0  # a step that took longer than this and than 20 usual ones began with a pause
PAUSE_STEPS = 20
TICKS, MAX_TICKS = 7, 40
_NICE_S = (
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.5,
    1,
    2,
    5,
    10,
    15,
    30,
    60,
    120,
    300,
    600,
    900,
    1_800,
    3_600,
    7_200,
    10_800,
    21_600,
    43_200,
    86_400,
)

_COLUMNS = """
SELECT number, columns FROM runs_gridblock
WHERE run_id = %s AND attempt = %s AND level = %s AND number BETWEEN %s AND %s
"""


@dataclass(frozen=True, slots=True, eq=False)
class Clock:
    """Columns of time over a window.

    Attributes:
        edges: int64[n + 1], the first step of each column, and the one after the last.
        times: float64[n + 1], when each column began and the last one ended, in seconds since 1970.
        column: int64[n], the bin of steps that a column shows; −2: a held pause, −1: another, of no post.
        begin, end: of the window, in seconds since 1970; the first and last column may reach beyond it.
    """

    edges: NDArray[np.int64]
    times: NDArray[np.float64]
    column: NDArray[np.int64]
    begin: float
    end: float

    def at(self, step: float) -> float:
        """Return the middle of a step, in seconds since 1970."""
        low, high = np.interp([step, step + 1], self.edges, self.times).tolist()
        return float(low + high) / 2

    def of(self, steps: Sequence[int]) -> list[float]:
        """Return the middle of many steps, in seconds since 1970."""
        at = np.asarray(steps, np.float64)
        low, high = np.interp(at, self.edges, self.times), np.interp(at + 1, self.edges, self.times)
        found: list[float] = ((low + high) / 2).tolist()
        return found

    def drawn(self, plane: Plane) -> Plane:
        """Return the columns of `plane` uint8[rows, bins] in the order of time, with the pauses."""
        rows = len(plane)
        pauses = np.array([[HELD, OUTSIDE]], np.uint8).repeat(rows, axis=0)
        wide = np.concatenate([plane, pauses], axis=1)
        # −1 and −2 count from the end: what was appended.
        return wide[:, self.column]

    def of_steps(self, plane: NDArray[np.uint8]) -> Plane:
        """Return the columns of `plane` uint8[rows, steps], one per step, as `drawn` gives those of bins."""
        first = int(self.edges[0])
        starts = np.clip(self.edges[:-1] - first, 0, plane.shape[1] - 1)
        worst: Plane = np.maximum.reduceat(plane, starts, axis=1)
        worst[:, self.column < 0] = OUTSIDE
        return worst

    def of_pixels(self, plane: Plane, width: int) -> Plane:
        """Return uint8[rows, width] of what `drawn` gives: the worst under each pixel."""
        marks = self.begin + (self.end - self.begin) * np.arange(width + 1) / width
        low = np.searchsorted(self.times, marks[:-1], side="right") - 1
        high = np.searchsorted(self.times, marks[1:], side="left")
        last = plane.shape[1]
        low, high = np.clip(low, 0, last - 1), np.clip(high, 1, last)
        padded = np.concatenate([plane, plane[:, -1:]], axis=1)
        pairs = np.stack([low, np.maximum(high, low + 1)], axis=1).reshape(-1)
        worst: Plane = np.maximum.reduceat(padded, pairs, axis=1)[:, ::2]
        return worst

    def document(self) -> dict[str, object]:
        """Return the edges as JSON-ready data."""
        times = np.round(self.times, 3).tolist()
        return {"s": self.edges.tolist(), "t": times, "begin": self.begin, "end": self.end}

    def ticks(self) -> tuple[list[float], list[str]]:
        """Return where the axis is marked, and the times in UTC."""
        every = next((s for s in _NICE_S if (self.end - self.begin) / s <= TICKS), _NICE_S[-1])
        first, last = int(-(-self.begin // every)), int(self.end // every)
        values = [round(n * every, 3) for n in range(first, last + 1)]
        form = "%H:%M:%S.%f" if every < 1 else "%H:%M:%S" if every < 60 else "%H:%M"
        form = "%d %b" if every == _NICE_S[-1] else form
        texts = [datetime.fromtimestamp(at, UTC).strftime(form) for at in values[:MAX_TICKS]]
        return values[:MAX_TICKS], [text[:-4] if every < 1 else text for text in texts]


def clock(run_id: int, attempt: int, steps: Bins, waiting: Uncompacted) -> Clock | None:
    """Return the columns of time of a window, None where too few of its steps have a time."""
    reported = _reported(run_id, attempt, steps, waiting)
    known = np.flatnonzero(reported)
    if len(known) < 2:
        return None
    ends = np.maximum.accumulate(reported[known]) / 1000
    usual = float(np.median(np.diff(ends) / np.diff(known)))
    places = np.arange(len(reported))
    times = np.interp(places, known, ends)
    # Before the first and after the last known time, steps are taken to be as long as usual.
    times += usual * (np.minimum(places - known[0], 0) + np.maximum(places - known[-1], 0))
    first = steps.start
    edges, at, column = [first << steps.shift], [float(times[0])], []
    limit = max(PAUSE_S, PAUSE_STEPS * usual)
    held = _held(run_id, attempt) if (np.diff(times) > limit).any() else []
    for index in range(steps.count):
        began, ended = at[-1], float(times[index + 1])
        if ended - began > limit:
            edges.append(edges[-1])
            at.append(ended - max(usual, (ended - began) / 1000))
            column.append(-2 if any(began <= moment <= ended for moment in held) else -1)
        edges.append((first + index + 1) << steps.shift)
        at.append(max(ended, at[-1] + 1e-6))
        column.append(index)
    window = np.interp([steps.first, steps.last + 1], edges, at).tolist()
    if steps.first == edges[0]:
        window[0] = at[0]  # a pause before the first step is in view
    return Clock(np.array(edges), np.array(at), np.array(column), *window)


def _reported(run_id: int, attempt: int, steps: Bins, waiting: Uncompacted) -> NDArray[np.int64]:
    """Return when the last step of each bin was first reported, in ms; one bin more, the one before."""
    level = min(TOP, steps.shift // 2)
    start = steps.start - 1
    reported = np.zeros(steps.count + 1, np.int64)
    first, last = steps.snapped()
    first = max(0, first - (1 << steps.shift))
    with raw_cursor() as cursor:
        cursor.execute(
            _COLUMNS,
            (run_id, attempt, level, blocks.number_of(first, level), blocks.number_of(last, level)),
        )
        for number, columns in cursor:
            _, of_block = blocks.read_columns(columns)
            at = np.arange(number * COLUMNS, (number + 1) * COLUMNS) * steps_of(level)
            _latest(reported, (at >> steps.shift) - start, of_block)
    for cells in waiting.cells:
        _latest(reported, (cells.steps >> steps.shift) - start, cells.clock)
    return reported


def _latest(reported: NDArray[np.int64], place: NDArray[np.int64], clock_ms: NDArray[np.int64]) -> None:
    inside = (place >= 0) & (place < len(reported)) & (clock_ms > 0)
    np.maximum.at(reported, place[inside], clock_ms[inside])


def _held(run_id: int, attempt: int) -> list[float]:
    acks = DirectiveAck.objects.filter(run_id=run_id, attempt=attempt, state="held")
    return [moment.timestamp() for moment in acks.values_list("occurred_at", flat=True)]
