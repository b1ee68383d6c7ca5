"""The first-failure grid: what an attempt has, which part of it is in view, and in which words."""

import hashlib
from dataclasses import dataclass, field, replace

from django.db.models import Max

from runs import grid_findings, grid_png, grid_progress
from runs.attempts import launch, named_nodes
from runs.cellmap import Bins
from runs.grid_clock import Clock, clock
from runs.grid_progress import InProgress
from runs.grid_rows import Rows, rows_of
from runs.models import DirectiveAck, Grid, Run, RunProgress
from runs.reading import kept
from runs.uncompacted import Uncompacted, uncompacted

BEFORE_STEPS, AFTER_STEPS = 128, 11  # the window an incident opens on, around the first bad step
HELD_STEPS = 10  # shown of a hold, wide enough for its word
NEWEST_STEPS = 140
MAX_STEP = 2**63 - 1
MAX_REORDERED_CELLS = 16_000_000

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
SYMBOLS = {word: word.split()[0] for word in WORDS.values()} | {"no progress": "noprogress"}


@dataclass(frozen=True, slots=True)
class Window:
    """What is in view: steps and rows, both ends included."""

    step_first: int
    step_last: int
    row_first: int
    row_last: int

    @property
    def steps(self) -> int:
        """How many steps are in view."""
        return self.step_last - self.step_first + 1

    @property
    def rows(self) -> int:
        """How many rows are in view."""
        return self.row_last - self.row_first + 1

    def snapped(self, width: int, height: int, ranks: int) -> "Window":
        """Return the window widened to whole bins of a tile, so that each pixel stands for whole bins."""
        steps = Bins.over(self.step_first, self.step_last, width).snapped()
        first, last = Bins.over(self.row_first, self.row_last, height).snapped()
        return Window(*steps, first, min(last, ranks - 1))


@dataclass(frozen=True, slots=True)
class Extent:
    """What an attempt has: its steps, its ranks, and after which step it was held.

    `version` changes whenever a cell may have changed. A tile asked for by its version never changes.
    """

    step_first: int
    step_last: int
    ranks: int
    held_after: int | None
    version: str
    waiting: Uncompacted = field(default_factory=lambda: Uncompacted(0), compare=False)
    progress: InProgress | None = field(default=None, compare=False)


def extent(run: Run, attempt: int) -> Extent:
    """Return the steps and ranks of an attempt as known from launch, posts, events and progress."""
    row = launch(run.pk, attempt)
    first_step, world_size = (row.first_step, row.world_size) if row else (None, None)
    exited_at, named = row.exited_at if row else None, named_nodes(row)
    # What waits is read before the blocks' row: see runs.uncompacted.
    waiting = uncompacted(run.pk, attempt)
    known = Grid.objects.filter(run=run, attempt=attempt).first()
    progress = kept(("progress", run.pk), RunProgress.objects.filter(run=run).first)
    held = DirectiveAck.objects.filter(run=run, attempt=attempt, state__in=["held", "exited"]).aggregate(
        step=Max("step")
    )["step"]
    steps = [waiting.step_last, None if known is None or known.step_last < 0 else known.step_last]
    if progress is not None and progress.attempt == attempt:
        steps.append(progress.step)
    last = max((step for step in steps if step is not None), default=0)
    firsts = [first_step, waiting.step_first if known is None else min(known.step_first, last)]
    first = min((step for step in firsts if step is not None), default=0)
    ranks = world_size or max(waiting.rank_last + 1, 0 if known is None else known.ranks, 1)
    hung = None
    if held is None and exited_at is None and not waiting.key:
        hung = grid_progress.in_progress(run, attempt, known, progress)
    parts = (
        known.version if known is not None else 0,
        waiting.key,
        held,
        last,
        (world_size, named, exited_at),
        grid_findings.newest(run.pk, attempt),
        hung.step if hung else None,
    )
    return Extent(
        step_first=min(first, last),
        step_last=last if hung is None else max(last, hung.step),
        ranks=ranks,
        held_after=held if held is not None and held >= last else None,
        version=hashlib.sha256(repr(parts).encode()).hexdigest()[:16],
        waiting=waiting,
        progress=hung,
    )


@dataclass(frozen=True, slots=True)
class View:
    """One look at a grid: the window, the rows it is of, what the attempt has, by step or by time."""

    run: Run
    attempt: int
    window: Window
    rows: Rows
    extent: Extent
    by_time: bool = False

    def steps(self, width: int) -> Bins:
        """Return the bins of steps of a tile of `width` pixels."""
        steps = Bins.over(self.window.step_first, self.window.step_last, width)
        if self.rows.order is not None:
            # Every rank is read and put in its row, so very many ranks get fewer and wider columns.
            while steps.shift and steps.count * self.window.rows > MAX_REORDERED_CELLS:
                steps = replace(steps, shift=steps.shift + 1)
        return steps

    def clock(self, width: int) -> Clock | None:
        """Return the columns of time of a tile of `width` pixels; None by step, and without known times."""
        if not self.by_time:
            return None
        return clock(self.run.pk, self.attempt, self.steps(width), self.extent.waiting)

    def over(self, window: Window) -> "View":
        """Return the same look at another window."""
        return replace(self, window=window)


def rows(run: Run, attempt: int, extent_: Extent, kind: str = "", sort: str = "") -> Rows:
    """Return the rows asked for: by node where the launch named nodes, and in the order of the ranks."""
    return rows_of(run, attempt, extent_.ranks, kind, sort, extent_.version)


def opening_window(extent_: Extent, first_bad_step: int | None) -> Window:
    """Return the window a page opens on: around the first bad step, else the newest steps."""
    if first_bad_step is None:
        first = max(extent_.step_first, extent_.step_last - NEWEST_STEPS + 1)
        last = extent_.step_last
        if extent_.held_after is not None:
            last = max(last, extent_.held_after + HELD_STEPS)
        return Window(first, max(first, last), 0, extent_.ranks - 1)
    first = max(min(extent_.step_first, first_bad_step), first_bad_step - BEFORE_STEPS)
    last = first_bad_step + AFTER_STEPS
    if extent_.held_after is not None:
        # A spike is halted some steps after it began: where the run stopped belongs to the picture.
        last = max(last, min(extent_.held_after + HELD_STEPS, first_bad_step + BEFORE_STEPS))
    return Window(first, last, 0, extent_.ranks - 1)


def read_window(steps: str, ranks: str, opening: Window, extent_: Extent) -> Window:
    """Return the window asked for by `steps=17875-18014&ranks=0-63`; a bad or empty part keeps `opening`."""
    step_first, step_last = _pair(steps, opening.step_first, opening.step_last, MAX_STEP)
    row_first, row_last = _pair(ranks, opening.row_first, opening.row_last, extent_.ranks - 1)
    return Window(step_first, step_last, row_first, row_last)


def read_steps(text: str) -> tuple[int, int] | None:
    """Return the first and last step of `17875-18014`; None for anything else."""
    found = _pair(text, -1, -1, MAX_STEP)
    return None if found == (-1, -1) else found


def _pair(text: str, first: int, last: int, most: int) -> tuple[int, int]:
    low, dash, high = text.partition("-")
    if not (dash and low.isdecimal() and high.isdecimal() and len(low) < 20 and len(high) < 20):
        return first, last
    low_n, high_n = int(low), int(high)
    return (low_n, high_n) if low_n <= high_n <= most else (first, last)
