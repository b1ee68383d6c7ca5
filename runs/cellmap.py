"""The state of every cell of an attempt, as pixels: the worst state under a pixel wins."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from andon.detect.planes import HEALTHY, NONFINITE, SPIKE, SPREAD
from runs import planes
from runs.models import Finding, Run
from runs.rows import raw_cursor

MAX_EVENT_CELLS = 2_000_000

# A frame that fills its rectangle and has no bad cell is healthy all over: its plane stays on disk.
_FRAMES = """
SELECT step_first, step_last, lane_first, lane_last,
       CASE WHEN bad_cells = 0 AND rows = (step_last - step_first + 1) * (lane_last::bigint - lane_first + 1)
            THEN NULL ELSE state_plane END, state_plane IS NULL
FROM runs_frame
WHERE run_id = %s AND attempt = %s AND stream = 'rank'
      AND step_first <= %s AND step_last >= %s AND lane_first <= %s AND lane_last >= %s
"""
_EVENTS = """
SELECT step, rank,
       bool_or(flags ->> 'data.loss' IN ('nan', '+inf', '-inf')
               OR flags ->> 'data.grad_norm' IN ('nan', '+inf', '-inf')
               OR CASE WHEN jsonb_typeof(data -> 'nonfinite') = 'number'
                       THEN (data ->> 'nonfinite')::numeric::int & 63 <> 0 END),
       bool_and(view = 'local')
FROM runs_event
WHERE run_id = %s AND attempt = %s AND type = 'step' AND step BETWEEN %s AND %s
      AND (rank IS NULL OR rank BETWEEN %s AND %s)
GROUP BY step, rank LIMIT %s
"""
_FIRST_BAD = """
SELECT step, lane::int, view = 'local', skipped FROM runs_firstbad
WHERE run_id = %s AND attempt = %s AND stream = 'rank' AND step BETWEEN %s AND %s
      AND lane ~ '^[0-9]{1,9}$' AND lane::int BETWEEN %s AND %s
"""
_POISONED = """
SELECT min(step) FROM runs_firstbad
WHERE run_id = %s AND attempt = %s AND stream IN ('rank', 'layer') AND NOT skipped
"""


class _Canvas:
    """uint8[height, width] over a window of ranks and steps, ends included."""

    def __init__(self, steps: tuple[int, int], ranks: tuple[int, int], width: int, height: int) -> None:
        self.steps, self.ranks = steps, ranks
        self.pixels = np.zeros((height, width), dtype=np.uint8)

    def x(self, step: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the pixel column of each step."""
        first, last = self.steps
        return (step - first) * self.pixels.shape[1] // (last - first + 1)

    def y(self, rank: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the pixel row of each rank."""
        first, last = self.ranks
        return (rank - first) * self.pixels.shape[0] // (last - first + 1)

    def fill(self, steps: tuple[int, int], ranks: tuple[int, int], code: int) -> None:
        """Paint a whole rectangle."""
        x0, x1 = self.x(np.array([max(steps[0], self.steps[0]), min(steps[1], self.steps[1])]))
        y0, y1 = self.y(np.array([max(ranks[0], self.ranks[0]), min(ranks[1], self.ranks[1])]))
        part = self.pixels[y0 : y1 + 1, x0 : x1 + 1]
        np.maximum(part, code, out=part)

    def plane(self, steps: NDArray[np.int64], lanes: NDArray[np.int32], codes: NDArray[np.uint8]) -> None:
        """Paint codes uint8[steps, lanes]; both axes ascending."""
        s0, s1 = np.searchsorted(steps, [self.steps[0], self.steps[1] + 1])
        l0, l1 = np.searchsorted(lanes, [self.ranks[0], self.ranks[1] + 1])
        if s0 == s1 or l0 == l1:
            return
        x, y = self.x(steps[s0:s1]), self.y(lanes[l0:l1].astype(np.int64))
        part = codes[s0:s1, l0:l1]
        # Ascending axes: the cells of a pixel lie side by side, so two passes of a running maximum.
        xs, ys = np.flatnonzero(np.diff(x, prepend=-1)), np.flatnonzero(np.diff(y, prepend=-1))
        if len(xs) < len(x):
            part = np.maximum.reduceat(part, xs, axis=0)
        if len(ys) < len(y):
            part = np.maximum.reduceat(part, ys, axis=1)
        at = np.ix_(y[ys], x[xs])
        self.pixels[at] = np.maximum(self.pixels[at], part.T)

    def points(self, steps: NDArray[np.int64], ranks: NDArray[np.int64], codes: NDArray[np.uint8]) -> None:
        """Paint single cells."""
        inside = (steps >= self.steps[0]) & (steps <= self.steps[1])
        inside &= (ranks >= self.ranks[0]) & (ranks <= self.ranks[1])
        at = (self.y(ranks[inside]), self.x(steps[inside]))
        np.maximum.at(self.pixels, at, codes[inside])


def grid_states(
    run: Run,
    attempt: int,
    step_first: int,
    step_last: int,
    width: int,
    rank_first: int,
    rank_last: int,
    height: int,
) -> NDArray[np.uint8]:
    """Return the worst state code per pixel, uint8[height, width]; codes as in the page's legend.

    Bad cells of steps after the first applied one followed it and are drawn as spread.
    """
    canvas = _Canvas((step_first, step_last), (rank_first, rank_last), width, height)
    window = (step_first, step_last, rank_first, rank_last)
    with raw_cursor() as cursor:
        cursor.execute(_POISONED, (run.pk, attempt))
        row = cursor.fetchone()
        poisoned = None if row is None or row[0] is None else int(row[0])
        cursor.execute(_FRAMES, (run.pk, attempt, step_last, step_first, rank_last, rank_first))
        for first, last, low, high, plane, absent in cursor:
            if plane is None:
                if not absent:
                    canvas.fill((first, last), (low, high), HEALTHY)
                continue
            steps, lanes, codes = planes.unpack(plane)
            if poisoned is not None and steps[-1] > poisoned:
                late = (steps > poisoned)[:, None] & (codes == NONFINITE)
                codes = np.where(late, np.uint8(SPREAD), codes)
            canvas.plane(steps, lanes, codes)
        cursor.execute(_EVENTS, (run.pk, attempt, *window, MAX_EVENT_CELLS))
        _paint_events(canvas, cursor.fetchall(), poisoned)
        cursor.execute(_FIRST_BAD, (run.pk, attempt, *window))
        rows = cursor.fetchall()
    if rows:
        step, lane, local, skipped = (np.array(column) for column in zip(*rows, strict=True))
        origin = local.astype(bool)
        if poisoned is not None:
            origin &= skipped.astype(bool) | (step <= poisoned)
        canvas.points(step, lane, np.where(origin, NONFINITE, SPREAD).astype(np.uint8))
    _paint_spikes(canvas, run, attempt)
    return canvas.pixels


def _paint_events(canvas: _Canvas, rows: list[tuple[Any, ...]], poisoned: int | None) -> None:
    first, last = canvas.ranks
    for step, rank, bad, local in rows:
        if rank is None:
            # A reduced value is every rank's: a bad one spread to all, a good one names nobody.
            if bad:
                canvas.fill((step, step), (first, last), SPREAD)
            continue
        origin = local and (poisoned is None or step <= poisoned)
        code = HEALTHY if not bad else NONFINITE if origin else SPREAD
        canvas.fill((step, step), (rank, rank), code)


def _paint_spikes(canvas: _Canvas, run: Run, attempt: int) -> None:
    found = Finding.objects.filter(
        run=run, attempt=attempt, rule="spike", view="local", step__range=canvas.steps
    ).values_list("step", "lanes")[:10_000]
    for step, lanes in found:
        for lane in lanes:
            if step is not None and isinstance(lane, int) and canvas.ranks[0] <= lane <= canvas.ranks[1]:
                canvas.fill((step, step), (lane, lane), SPIKE)
