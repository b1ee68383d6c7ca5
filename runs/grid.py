"""The first-failure grid: which part of an attempt is in view, and its cells as tile, runs and counts.

Every answer is made from `runs.queries.grid_states`, where the worst state of all cells under a
pixel wins, so no bad cell is ever averaged away by a zoom.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
from django.db.models import Count, Max, Sum
from numpy.typing import NDArray

from runs import grid_png, queries
from runs.models import Attempt, DirectiveAck, Event, FirstBad, Frame, Run, RunProgress

BEFORE_STEPS, AFTER_STEPS = 128, 11  # the window an incident opens on, around the first bad step
NEWEST_STEPS = 140
MAX_RUNS = 5_000  # exact cells sent to the browser; above it: zoom in
MAX_EXACT_CELLS = 4_000_000  # cells read for exact runs: one frame's worth
MAX_TILE_PX = 4_096
MAX_STEP = 2**63 - 1

WORDS = {
    grid_png.NONFINITE: "nonfinite",
    grid_png.CHECKSUM: "checksum differs",
    grid_png.NO_PROGRESS: "no progress",
    grid_png.SPIKE: "spike",
    grid_png.STRAGGLER: "straggler",
    grid_png.SPREAD: "spread",
    grid_png.MISSING: "missing",
    grid_png.HELD: "held",
    grid_png.HEALTHY: "healthy",
}
# Names of the symbols in the page's sprite.
SYMBOLS = {
    "nonfinite": "nonfinite",
    "checksum differs": "checksum",
    "no progress": "noprogress",
    "spike": "spike",
    "straggler": "straggler",
    "spread": "spread",
    "missing": "missing",
    "held": "held",
    "healthy": "healthy",
}


@dataclass(frozen=True, slots=True)
class Window:
    """What is in view: steps and ranks, both ends included."""

    step_first: int
    step_last: int
    rank_first: int
    rank_last: int

    @property
    def steps(self) -> int:
        """How many steps are in view."""
        return self.step_last - self.step_first + 1

    @property
    def ranks(self) -> int:
        """How many ranks are in view."""
        return self.rank_last - self.rank_first + 1


@dataclass(frozen=True, slots=True)
class Extent:
    """What an attempt has: its steps, its ranks, and after which step it was held.

    `version` changes whenever a cell may have changed: newest frame, first-bad rows, held step. A tile
    asked for by its version never changes.
    """

    step_first: int
    step_last: int
    ranks: int
    held_after: int | None
    version: str


def extent(run: Run, attempt: int) -> Extent:
    """Return the steps and ranks of an attempt as known from launch, frames, events and progress."""
    row = Attempt.objects.filter(run=run, number=attempt).only("first_step", "world_size").first()
    frames = Frame.objects.filter(run_id=run.pk, attempt=attempt)
    posted = frames.aggregate(last=Max("step_last"), lane=Max("lane_last"), id=Max("id"))
    progress = RunProgress.objects.filter(run=run).first()
    steps = [posted["last"]]
    if progress is not None and progress.attempt == attempt:
        steps.append(progress.step)
    held = DirectiveAck.objects.filter(run=run, attempt=attempt, state__in=["held", "exited"]).aggregate(
        step=Max("step")
    )["step"]
    known = [step for step in steps if step is not None]
    bad = FirstBad.objects.filter(run=run, attempt=attempt).aggregate(
        last=Max("step"), received=Max("received_at"), rows=Count("id"), steps=Sum("step")
    )
    if not known and bad["last"] is not None:
        known = [bad["last"]]
    last = max(known, default=0)
    first = row.first_step if row is not None and row.first_step is not None else 0
    ranks = row.world_size if row is not None else None
    if not ranks:
        spoken = Event.objects.filter(run_id=run.pk, attempt=attempt).aggregate(rank=Max("rank"))["rank"]
        ranks = max(posted["lane"] if posted["lane"] is not None else 0, spoken or 0) + 1
    version = hashlib.sha256(f"{posted['id']}|{bad}|{held}|{last}".encode()).hexdigest()[:16]
    return Extent(
        step_first=min(first, last),
        step_last=last,
        ranks=ranks,
        held_after=held if held is not None and held >= last else None,
        version=version,
    )


def opening_window(extent_: Extent, first_bad_step: int | None) -> Window:
    """Return the window a page opens on: around the first bad step, else the newest steps."""
    if first_bad_step is None:
        first = max(extent_.step_first, extent_.step_last - NEWEST_STEPS + 1)
        return Window(first, max(first, extent_.step_last), 0, extent_.ranks - 1)
    first = max(min(extent_.step_first, first_bad_step), first_bad_step - BEFORE_STEPS)
    return Window(first, first_bad_step + AFTER_STEPS, 0, extent_.ranks - 1)


def read_window(steps: str, ranks: str, opening: Window, extent_: Extent) -> Window:
    """Return the window asked for by `steps=17875-18014&ranks=0-63`; a bad or empty part keeps `opening`."""
    step_first, step_last = _pair(steps, opening.step_first, opening.step_last, MAX_STEP)
    rank_first, rank_last = _pair(ranks, opening.rank_first, opening.rank_last, extent_.ranks - 1)
    return Window(step_first, step_last, rank_first, rank_last)


def _pair(text: str, first: int, last: int, most: int) -> tuple[int, int]:
    low, dash, high = text.partition("-")
    if not (dash and low.isdecimal() and high.isdecimal() and len(low) < 20 and len(high) < 20):
        return first, last
    low_n, high_n = int(low), int(high)
    return (low_n, high_n) if low_n <= high_n <= most else (first, last)


def states(
    run: Run, attempt: int, window: Window, *, width: int, height: int, held_after: int | None
) -> NDArray[np.uint8]:
    """Return the worst state per pixel, uint8[≤ height, ≤ width]: one pixel per cell where cells are larger.

    Steps after the one on which the ranks were held are *held* where nothing was posted.
    """
    columns, rows = min(width, window.steps), min(height, window.ranks)
    plane = queries.grid_states(
        run,
        attempt,
        window.step_first,
        window.step_last,
        columns,
        window.rank_first,
        window.rank_last,
        rows,
    )
    if held_after is not None and held_after < window.step_last:
        # The first pixel that holds only steps after the held one.
        first = -(-(held_after + 1 - window.step_first) * columns // window.steps)
        first = max(0, first)
        late = plane[:, first:]
        late[late == grid_png.OUTSIDE] = grid_png.HELD
    return plane


def tile(
    run: Run, attempt: int, window: Window, *, width: int, height: int, theme: str, extent_: Extent
) -> bytes:
    """Return the window as a palette PNG of `width` × `height` pixels (both capped)."""
    width, height = max(1, min(width, MAX_TILE_PX)), max(1, min(height, MAX_TILE_PX))
    plane = states(run, attempt, window, width=width, height=height, held_after=extent_.held_after)
    borders = node_borders(run, attempt, window, height) if plane.shape[0] == window.ranks else []
    return grid_png.encode(grid_png.paint(plane, width, height, borders=borders), theme)


def nodes(run: Run, attempt: int) -> list[tuple[str, list[int], list[str]]]:
    """Return (node, ranks ascending, GPU uuids) of an attempt by lowest rank; empty when not reported."""
    row = Attempt.objects.filter(run=run, number=attempt).only("nodes").first()
    known = []
    for entry in row.nodes if row is not None else []:
        held = sorted(rank for rank in expand(entry.get("ranks")) if rank >= 0)
        if held:
            uuids = entry.get("gpu_uuids")
            known.append((str(entry.get("node", "")), held, uuids if isinstance(uuids, list) else []))
    return sorted(known, key=lambda node: node[1][0])


def expand(value: object) -> list[int]:
    """Return ranks from a list of integers or from ranges such as `0-3,6`; [] for anything else."""
    if isinstance(value, list):
        return [rank for rank in value if isinstance(rank, int)]
    found: list[int] = []
    for piece in str(value or "").split(","):
        low, dash, high = piece.strip().partition("-")
        if low.isdecimal() and (not dash or high.isdecimal()):
            found.extend(range(int(low), int(high if dash else low) + 1)[:1_000_000])
    return found


def node_borders(run: Run, attempt: int, window: Window, height: int) -> list[int]:
    """Return rows (from the window's first rank) where a node begins, if nodes are at least 12 px tall."""
    known = nodes(run, attempt)
    if not known or window.ranks * 12 > height * max(1, len(known[0][1])):
        return []
    return [held[0] - window.rank_first for _, held, _ in known]


def node_of(run: Run, attempt: int, rank: int) -> tuple[str, int] | None:
    """Return (node, GPU index on it) of a rank, None when the launch did not say."""
    for name, held, _ in nodes(run, attempt):
        if rank in held:
            return name, held.index(rank)
    return None


def exact_runs(plane: NDArray[np.uint8], window: Window) -> list[list[int]] | None:
    """Return not-healthy cells as rectangles [step, step, rank, rank, state], ends included.

    Runs along the steps of a rank, joined over neighbouring ranks with the same run.

    Args:
        plane: uint8[ranks, steps], one value per cell of `window`.

    Returns:
        None when there are more than `MAX_RUNS`.
    """
    shown = np.where(plane > grid_png.HEALTHY, plane, 0).astype(np.int16)
    padded = np.zeros((shown.shape[0], shown.shape[1] + 2), dtype=np.int16)
    padded[:, 1:-1] = shown
    edge = padded[:, 1:] != padded[:, :-1]
    begins = np.argwhere(edge & (padded[:, 1:] > 0))
    ends = np.argwhere(edge & (padded[:, :-1] > 0))
    boxes: list[list[int]] = []
    above: dict[tuple[int, int, int], list[int]] = {}
    row_now = -1
    current: dict[tuple[int, int, int], list[int]] = {}
    for (row, start), (_, stop) in zip(begins.tolist(), ends.tolist(), strict=True):
        if row != row_now:
            above = current if row == row_now + 1 else {}
            current, row_now = {}, row
        state = int(shown[row, start])
        key = (start, stop, state)
        box = above.get(key)
        if box is None:
            if len(boxes) >= MAX_RUNS:
                return None
            box = [window.step_first + start, window.step_first + stop - 1, 0, 0, state]
            box[2] = window.rank_first + row
            boxes.append(box)
        box[3] = window.rank_first + row
        current[key] = box
    return boxes


def exact(run: Run, attempt: int, window: Window, extent_: Extent) -> dict[str, object]:
    """Return exact cells of the window with counts per state, or the sentence that says to zoom in."""
    if window.steps * window.ranks > MAX_EXACT_CELLS:
        return {"runs": None, "counts": {}, "says": "zoom in for exact cells"}
    plane = states(
        run, attempt, window, width=window.steps, height=window.ranks, held_after=extent_.held_after
    )
    codes, numbers = np.unique(plane, return_counts=True)
    counts = {
        WORDS[code]: number for code, number in zip(codes.tolist(), numbers.tolist(), strict=True) if code
    }
    runs = exact_runs(plane, window)
    return {"runs": runs, "counts": counts, "says": "" if runs is not None else "zoom in for exact cells"}
