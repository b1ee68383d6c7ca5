"""Tiles of the grid as images, and its exact cells as runs and counts."""

import numpy as np
from numpy.typing import NDArray

from runs import grid_findings, grid_png
from runs.cellmap import Bins, cell_bins
from runs.grid import WORDS, View, Window
from runs.grid_rows import Rows
from runs.models import FirstBad

MAX_RUNS = 5_000  # exact cells sent to the browser; above it: zoom in
MAX_EXACT_CELLS = 4_000_000  # cells read for exact runs: one frame's worth
MAX_TILE_PX = 4_096
BORDER_PX = 12  # a group's border is drawn while the group is at least so tall
ZOOM_IN = "zoom in for exact cells"

Plane = NDArray[np.uint8]


def states(view: View, steps: Bins, rows: Bins) -> Plane:
    """Return the worst state of each bin, uint8[rows, steps]: what was posted, what findings name, held."""
    window, extent = view.window, view.extent
    order = view.rows.order
    if order is not None:
        # Whole bins of rows, but never more rows than there are.
        first, last = rows.snapped()
        order = order[first : last + 1]
    over = grid_findings.of_attempt(view.run.pk, view.attempt, *steps.snapped())
    if extent.progress is not None and extent.progress.step >= window.step_first:
        over = over.joined(extent.progress.cells)
    return cell_bins(
        view.run,
        view.attempt,
        steps,
        rows,
        order=order,
        waiting=extent.waiting,
        over=over,
        held_after=extent.held_after,
    )


def tile(view: View, *, width: int, height: int, theme: str) -> bytes:
    """Return the window as a palette PNG of `width` × `height` pixels (both capped).

    A pixel shows the worst cell of the bin it begins in; at its right and lower edge also of what is left.
    """
    width, height = max(1, min(width, MAX_TILE_PX)), max(1, min(height, MAX_TILE_PX))
    window = view.window
    steps, rows = view.steps(width), Bins.over(window.row_first, window.row_last, height)
    plane = states(view, steps, rows)
    y_cell = rows.of_pixels(height)
    clock = view.clock(width)
    if clock is None:
        x_cell = steps.of_pixels(width)
        plane = _nothing_left(plane, x_cell, 1)
    else:
        x_cell = np.arange(width)
        plane = clock.of_pixels(clock.drawn(plane), width)
    plane = _nothing_left(plane, y_cell, 0)
    borders = group_borders(view.rows, window, height) if rows.shift == 0 else []
    known: list[tuple[int, int, int]] = []
    if clock is None and width >= grid_png.SLOTS_PX * window.steps and height >= window.rows:
        known = phases(view, plane)
    return grid_png.encode(grid_png.paint(plane, x_cell, y_cell, borders=borders, phases=known), theme)


def phases(view: View, plane: Plane) -> list[tuple[int, int, int]]:
    """Return row, column and phase of the cells in view at which a rank first went bad.

    Args:
        plane: uint8[rows, steps], one value per cell of the window.
    """
    window = view.window
    ranks = {view.rows.rank(row): row for row in range(window.row_first, window.row_last + 1)}
    found = FirstBad.objects.filter(
        run=view.run,
        attempt=view.attempt,
        stream="rank",
        step__range=(window.step_first, window.step_last),
        lane__in=map(str, ranks),
    ).order_by("-view")  # the local one last: it may name the rank
    places = {
        (ranks[int(lane)] - window.row_first, step - window.step_first): phase
        for lane, step, phase in found.values_list("lane", "step", "phase")
    }
    bad = (grid_png.NONFINITE, grid_png.SPREAD)
    return [(row, column, phase) for (row, column), phase in places.items() if plane[row, column] in bad]


def _nothing_left(plane: Plane, cell: NDArray[np.intp], axis: int) -> Plane:
    """Put the worst of bins that no pixel begins in, cut off at the window's end, into the last one shown."""
    last = int(cell[-1])
    if last == plane.shape[axis] - 1:
        return plane
    plane = plane.copy()
    if axis == 0:
        plane[last] = plane[last:].max(axis=0)
    else:
        plane[:, last] = plane[:, last:].max(axis=1)
    return plane


def group_borders(rows: Rows, window: Window, height: int) -> list[int]:
    """Return rows (from the window's first) where a group begins, if groups are at least 12 px tall."""
    if len(rows.groups) < 2 or window.rows * BORDER_PX > height * max(1, rows.count // len(rows.groups)):
        return []
    return [first - window.row_first for _, first in rows.groups]


def exact_runs(plane: Plane, window: Window) -> list[list[int]] | None:
    """Return not-healthy cells as rectangles [step, step, row, row, state], ends included.

    Runs along the steps of a row, joined over neighbouring rows with the same run.

    Args:
        plane: uint8[rows, steps], one value per cell of `window`.

    Returns:
        None when there are more than `MAX_RUNS`.
    """
    shown = np.where(plane > grid_png.HEALTHY, plane, 0).astype(np.uint8)
    # Rows alike are looked at once: in a dead run they are all alike.
    news = np.flatnonzero(np.append(True, (shown[1:] != shown[:-1]).any(axis=1)))
    tall = np.append(news[1:], len(shown))
    boxes: list[list[int]] = []
    above: dict[tuple[int, int, int], list[int]] = {}
    for row, end in zip(news.tolist(), tall.tolist(), strict=True):
        line = shown[row]
        edges = np.flatnonzero(np.diff(line, prepend=np.uint8(0), append=np.uint8(0)))
        current: dict[tuple[int, int, int], list[int]] = {}
        for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            state = int(line[start])
            if not state:
                continue
            box = above.get((start, stop, state))
            if box is None:
                if len(boxes) >= MAX_RUNS:
                    return None
                box = [
                    window.step_first + start,
                    window.step_first + stop - 1,
                    window.row_first + row,
                    0,
                    state,
                ]
                boxes.append(box)
            box[3] = window.row_first + end - 1
            current[start, stop, state] = box
        above = current
    return boxes


def exact(view: View) -> dict[str, object]:
    """Return exact cells of the window with counts per state, or the sentence that says to zoom in."""
    window = view.window
    if window.steps * window.rows > MAX_EXACT_CELLS:
        return {"runs": None, "counts": {}, "says": ZOOM_IN}
    steps, rows = Bins(window.step_first, window.step_last, 0), Bins(window.row_first, window.row_last, 0)
    plane = states(view, steps, rows)
    numbers = np.bincount(plane.reshape(-1), minlength=len(WORDS) + 1)
    counts = {WORDS[code]: int(numbers[code]) for code in WORDS if numbers[code]}
    runs = exact_runs(plane, window)
    return {"runs": runs, "counts": counts, "says": "" if runs is not None else ZOOM_IN}
