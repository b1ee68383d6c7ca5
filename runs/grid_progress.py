"""A run that stands: the step that no rank finishes, and the ranks that are not there yet.

Ranks without the newest step never entered its collective: *no progress*. Those that have it wait for them
in the next one: *spread*.
"""

from dataclasses import dataclass
from datetime import datetime

import numpy as np
from django.utils import timezone

from andon.detect.planes import NO_PROGRESS, SPREAD
from runs.blocks import NEVER
from runs.models import Attempt, Grid, Run, RunProgress
from runs.points import Points
from runs.seen import Seen

QUIET_S = 60.0  # shorter than any collective's timeout, longer than most evaluations and checkpoints
STEPS_OF_QUIET = 3  # ... and than so many of the run's own steps
LAG_STEPS = 50  # a rank further behind does not hold anyone up: its cells are missing


@dataclass(frozen=True, slots=True)
class InProgress:
    """The step in progress, since when, its cells, and the ranks that it waits for."""

    step: int
    since: datetime
    cells: Points
    waiting_for: list[int]


def in_progress(run: Run, attempt: int, grid: Grid | None, progress: RunProgress | None) -> InProgress | None:
    """Return the step that a standing run does not finish; None while it steps, or is over."""
    if grid is None or grid.step_last < 0 or run.finished_at is not None:
        return None
    if progress is None or progress.step_at is None or progress.attempt != attempt:
        return None
    if Attempt.objects.filter(run=run, number__gt=attempt).exists():
        return None
    step_s = progress.last.get("step_time_s")
    value = step_s.get("value") if isinstance(step_s, dict) else step_s
    usual_s = float(value) if isinstance(value, int | float) else 0.0
    if (timezone.now() - progress.step_at).total_seconds() < max(QUIET_S, STEPS_OF_QUIET * usual_s):
        return None
    seen = Seen(bytes(grid.seen))
    if not len(seen.last):
        return None
    newest = int(seen.last.max())
    if progress.step is not None and progress.step > newest + 1:
        # The run stepped on in reduced values: ranks that posted some cells are not what it waits for.
        return None
    joined = seen.first < NEVER
    behind = np.flatnonzero(joined & (seen.last < newest) & (seen.last >= newest - LAG_STEPS))
    cells: list[tuple[int, int, int, int]] = []
    for rank in behind.tolist():
        cells += [(step, rank, NO_PROGRESS, 0) for step in range(int(seen.last[rank]) + 1, newest + 2)]
    if len(behind):
        there = np.flatnonzero(joined & (seen.last == newest)).tolist()
        cells += [(newest + 1, rank, SPREAD, 0) for rank in there]
    return InProgress(newest + 1, progress.step_at, Points.of(cells), behind.tolist())
