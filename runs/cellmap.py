"""The state of every cell of an attempt, as bins of steps and ranks: the worst state of a bin wins.

A bin is 2^n steps by 2^m ranks, aligned, and never larger than a pixel's neighbourhood: a tile of w pixels
shows w/2 to w bins. Blocks are read on the level below the bins, so that any window of any attempt reads
about one screen of cells; what is not compacted yet is drawn over them.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from andon.detect.planes import HELD, SPREAD
from runs import blocks
from runs.blocks import BAND, COLUMNS, FACTOR, FOLDS, MAX_RANKS, TOP, Plane, steps_of
from runs.models import Run
from runs.points import ALL_RANKS, Points
from runs.rows import raw_cursor
from runs.uncompacted import Uncompacted, uncompacted

_POISONED = """
SELECT min(step) FROM runs_firstbad
WHERE run_id = %s AND attempt = %s AND stream IN ('rank', 'layer') AND NOT skipped
"""
_BLOCKS = """
SELECT number, band, {form}, columns FROM runs_gridblock
WHERE run_id = %s AND attempt = %s AND level = %s AND number BETWEEN %s AND %s
      AND (band BETWEEN %s AND %s OR band = 0)
"""  # what a value of all ranks says lies in band 0
_FORMS = {1: "cells", 8: "by_8", 64: "by_64"}


@dataclass(frozen=True, slots=True)
class Bins:
    """Aligned bins over a window, ends included: bin n holds `n << shift` to `(n + 1 << shift) − 1`."""

    first: int
    last: int
    shift: int

    @classmethod
    def over(cls, first: int, last: int, most: int) -> "Bins":
        """Return the finest bins of which at most `most` cover the window."""
        shift = 0
        while (last >> shift) - (first >> shift) >= most:
            shift += 1
        return cls(first, last, shift)

    @property
    def start(self) -> int:
        """Number of the first bin."""
        return self.first >> self.shift

    @property
    def count(self) -> int:
        """How many there are."""
        return (self.last >> self.shift) - self.start + 1

    def snapped(self) -> tuple[int, int]:
        """Return the window widened to whole bins."""
        return self.start << self.shift, ((self.last >> self.shift) + 1 << self.shift) - 1

    def of_pixels(self, pixels: int) -> NDArray[np.intp]:
        """Return the bin that each pixel begins in, from the first; every bin but a cut last one has one."""
        size = self.last - self.first + 1
        at = [((self.first + pixel * size // pixels) >> self.shift) - self.start for pixel in range(pixels)]
        return np.array(at, np.intp)


class _Canvas:
    """uint8[bins of steps, rows]; a row is a bin of ranks, or one rank of a chosen order."""

    def __init__(self, steps: Bins, ranks: Bins, order: NDArray[np.int32] | None) -> None:
        self.steps, self.ranks = steps, ranks
        # In another order than that of the ranks, every rank of the window is drawn, and folded at the end.
        self.chosen = None if order is None else np.unique(order).astype(np.int64)
        rows = ranks.count if self.chosen is None else len(self.chosen)
        self.pixels = np.zeros((steps.count, rows), np.uint8)
        self.fold = 1 if order is not None else max(f for f in FOLDS if f <= 1 << ranks.shift)
        low, high = ranks.snapped() if self.chosen is None else (self.chosen[0], self.chosen[-1])
        self.bands = int(low) // BAND, min(int(high), MAX_RANKS - 1) // BAND

    def rows_of(self, ranks: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the row of each rank, and which of them are in view."""
        if self.chosen is None:
            rows = (ranks >> self.ranks.shift) - self.ranks.start
            return rows, (rows >= 0) & (rows < self.ranks.count)
        rows = np.minimum(np.searchsorted(self.chosen, ranks), len(self.chosen) - 1)
        return rows, self.chosen[rows] == ranks

    def draw(self, steps: NDArray[np.int64], ranks: NDArray[np.int64], part: Plane) -> None:
        """Draw `part` uint8[steps, ranks], both ascending; several may fall into one bin."""
        x = (steps >> self.steps.shift) - self.steps.start
        columns = slice(*np.searchsorted(x, [0, self.steps.count]).tolist())
        y, inside = self.rows_of(ranks)
        rows = np.flatnonzero(inside)
        if columns.start == columns.stop or not len(rows):
            return
        x, y = x[columns], y[rows]
        of_rows = slice(int(rows[0]), int(rows[-1]) + 1)
        whole = of_rows.stop - of_rows.start == len(rows)
        part = part[columns, of_rows] if whole else np.take(part[columns], rows, axis=1)
        part = _worst_of(_worst_of(part, x, 0), y, 1)
        x, y = _distinct(x), _distinct(y)
        if x[-1] - x[0] + 1 == len(x) and y[-1] - y[0] + 1 == len(y):
            here = self.pixels[x[0] : x[-1] + 1, y[0] : y[-1] + 1]
            np.maximum(here, part, out=here)
        else:
            at = np.ix_(x, y)
            self.pixels[at] = np.maximum(self.pixels[at], part)

    def points(self, steps: NDArray[np.int64], ranks: NDArray[np.int64], codes: Plane) -> None:
        """Draw single cells; rank −1 is all ranks."""
        x = (steps >> self.steps.shift) - self.steps.start
        seen = (x >= 0) & (x < self.steps.count) & (codes > 0)
        all_ranks = seen & (ranks == ALL_RANKS)
        for column, code in zip(x[all_ranks].tolist(), codes[all_ranks].tolist(), strict=True):
            np.maximum(self.pixels[column], code, out=self.pixels[column])
        y, inside = self.rows_of(ranks.astype(np.int64))
        seen &= inside & (ranks != ALL_RANKS)
        np.maximum.at(self.pixels, (x[seen], y[seen]), codes[seen])

    def held_after(self, step: int) -> None:
        """Draw the steps after `step` as held where nothing was posted."""
        late = self.pixels[max(0, (step + 1 >> self.steps.shift) - self.steps.start) :]
        np.maximum(late, HELD, out=late)

    def finished(self, order: NDArray[np.int32] | None) -> Plane:
        """Return uint8[rows, bins of steps], with the rows of a chosen order folded to bins."""
        if order is None or self.chosen is None:
            return np.ascontiguousarray(self.pixels.T)
        # `take`, not an index: along the last axis it is six times faster.
        taken = np.take(self.pixels, np.searchsorted(self.chosen, order), axis=1)
        first, _ = self.ranks.snapped()
        rows = (np.arange(first, first + len(order)) >> self.ranks.shift) - self.ranks.start
        return np.ascontiguousarray(_worst_of(taken, rows, 1).T)


def _distinct(ascending: NDArray[np.int64]) -> NDArray[np.int64]:
    return ascending[np.flatnonzero(np.diff(ascending, prepend=-1))]


def _worst_of(part: Plane, place: NDArray[np.int64], axis: int) -> Plane:
    """Return the worst of neighbours with the same place, along an axis."""
    starts = np.flatnonzero(np.diff(place, prepend=-1))
    n = len(place)
    if len(starts) == n:
        return part
    size = n // len(starts)
    if size * len(starts) == n and size & (size - 1) == 0 and (starts == np.arange(0, n, size)).all():
        # Whole groups of a power of two: pairs, again and again, are far faster than any other maximum.
        while size > 1:
            part = (
                np.maximum(part[0::2], part[1::2]) if axis == 0 else np.maximum(part[:, 0::2], part[:, 1::2])
            )
            size //= 2
        return part
    worst: Plane = np.maximum.reduceat(part, starts, axis=axis)
    return worst


def poisoned(run_id: int, attempt: int) -> int | None:
    """Return the first step whose bad update was applied: later bad cells followed it."""
    with raw_cursor() as cursor:
        cursor.execute(_POISONED, (run_id, attempt))
        row = cursor.fetchone()
    return None if row is None or row[0] is None else int(row[0])


def cell_bins(
    run: Run,
    attempt: int,
    steps: Bins,
    ranks: Bins,
    *,
    order: NDArray[np.int32] | None = None,
    waiting: Uncompacted | None = None,
    over: Points | None = None,
    held_after: int | None = None,
) -> Plane:
    """Return the worst state of each bin, uint8[rows, bins of steps].

    Args:
        ranks: bins of ranks, or of rows where there is an `order`.
        order: the rank of each row, from the first of the first bin; None: row n is rank n.
        waiting: what is not compacted, where the caller has read it already.
        over: cells that findings name, drawn over what was posted.
        held_after: steps after it are held where nothing was posted.
    """
    # First what waits, then the blocks: what moves meanwhile is met twice, never missed.
    waiting = uncompacted(run.pk, attempt) if waiting is None else waiting
    bad_since = poisoned(run.pk, attempt)
    canvas = _Canvas(steps, ranks, order)
    _Reader(run.pk, attempt, canvas, bad_since).draw()
    for cells in waiting.between(*steps.snapped()):
        _draw_posted(canvas, cells, bad_since)
    if over is not None:
        canvas.points(over.steps, over.ranks.astype(np.int64), over.codes)
    if held_after is not None and held_after < steps.last:
        canvas.held_after(held_after)
    return canvas.finished(order)


def grid_states(
    run: Run,
    attempt: int,
    step_first: int,
    step_last: int,
    width: int,
    rank_first: int,
    rank_last: int,
    height: int,
) -> Plane:
    """Return the worst state per bin, uint8[≤ height, ≤ width]: one per cell where all fit."""
    steps, ranks = Bins.over(step_first, step_last, width), Bins.over(rank_first, rank_last, height)
    return cell_bins(run, attempt, steps, ranks)


def _draw_posted(
    canvas: _Canvas, cells: Points | tuple[NDArray[np.int64], NDArray[np.int32], Plane], bad_since: int | None
) -> None:
    if isinstance(cells, Points):
        codes = _followed(cells.codes, cells.steps, bad_since)
        canvas.points(cells.steps, cells.ranks.astype(np.int64), codes)
        return
    steps, lanes, codes = cells
    canvas.draw(steps, lanes.astype(np.int64), _followed(codes, steps[:, None], bad_since))


def _followed(codes: Plane, steps: NDArray[np.int64], bad_since: int | None) -> Plane:
    """Return codes with the nonfinite cells of later steps as spread (no other posted state is above it)."""
    if bad_since is None:
        return codes
    shown: Plane = np.where(steps > bad_since, np.minimum(codes, SPREAD), codes)
    return shown


class _Reader:
    """Draws the blocks of a window."""

    def __init__(self, run_id: int, attempt: int, canvas: _Canvas, bad_since: int | None) -> None:
        self.run_id, self.attempt, self.canvas, self.bad_since = run_id, attempt, canvas, bad_since

    def draw(self) -> None:
        steps = self.canvas.steps
        level = min(TOP, steps.shift // 2)
        first, last = steps.snapped()
        self._level(level, blocks.number_of(first, level), blocks.number_of(last, level))

    def _level(self, level: int, first: int, last: int, only: int | None = None) -> None:
        """Draw blocks `first` to `last` of a level, or only the column `only` of the attempt in one."""
        split = self._split(level)
        for number, band, cells, columns in self._stored(level, first, last):
            part = blocks.read_cells(cells)
            at = np.arange(number * COLUMNS, (number + 1) * COLUMNS)
            shared, _ = blocks.read_columns(columns)
            if only is not None:
                wanted = (at >= only) & (at < only + FACTOR)
                at, part, shared = at[wanted], part[wanted], shared[wanted]
            if self.bad_since is not None:
                part = _late_followed(part, at * steps_of(level), self.bad_since)
            if split is not None and (here := at == split).any():
                # Its steps are on both sides of where it began: drawn from the level below instead.
                part = np.where(here[:, None], np.uint8(0), part)
            self._draw(level, band, at, part, shared)
        if (
            split is not None
            and (only is None or only <= split < only + FACTOR)
            and self._in_view(split, level)
        ):
            child = split * FACTOR
            self._level(level - 1, child // COLUMNS, child // COLUMNS, only=child)

    def _split(self, level: int) -> int | None:
        """Return the column that has steps both before and after the attempt went bad, None without one."""
        size = steps_of(level)
        if self.bad_since is None or level == 0 or (self.bad_since + 1) % size == 0:
            return None
        return self.bad_since // size

    def _in_view(self, column: int, level: int) -> bool:
        first, last = self.canvas.steps.snapped()
        size = steps_of(level)
        return column * size <= last and (column + 1) * size > first

    def _draw(
        self, level: int, band: int, at: NDArray[np.int64], part: Plane, shared: NDArray[np.uint8]
    ) -> None:
        steps = at * steps_of(level)
        fold = self.canvas.fold
        self.canvas.draw(steps, band * BAND + np.arange(part.shape[1]) * fold, part)
        if shared.any():
            self.canvas.points(steps, np.full(len(steps), ALL_RANKS, np.int64), shared)

    def _stored(self, level: int, first: int, last: int) -> list[tuple[int, int, bytes, bytes]]:
        statement = _BLOCKS.format(form=_FORMS[self.canvas.fold])
        with raw_cursor() as cursor:
            cursor.execute(statement, (self.run_id, self.attempt, level, first, last, *self.canvas.bands))
            return cursor.fetchall()


def _late_followed(part: Plane, steps: NDArray[np.int64], bad_since: int) -> Plane:
    """Return columns, which begin at ascending `steps`, with the later ones' nonfinite cells as spread."""
    late = int(np.searchsorted(steps, bad_since, side="right"))
    if late == 0:
        return np.minimum(part, SPREAD)
    return part if late == len(steps) else np.concatenate([part[:late], np.minimum(part[late:], SPREAD)])
