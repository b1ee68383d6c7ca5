"""What was seen of a run, holding or not: findings, and updates the trainer skipped.

What holds nothing is shown all the same: somebody who asks "did it see that NaN?" finds it here.
"""

from dataclasses import dataclass

from runs.models import Event, Finding, Frame, Run

SHOWN = 30
STEP_REPORTS = 5_000  # as many of the newest are counted; a page must not read a whole run


@dataclass(frozen=True, slots=True)
class Skipped:
    """Steps of an attempt whose update was not applied, among the newest that were reported."""

    steps: int
    first: int
    last: int
    of: int


def findings(run: Run) -> tuple[list[Finding], int]:
    """Return the newest findings of a run, and how many more there are."""
    rows = Finding.objects.filter(run=run).order_by("-created_at", "-pk")
    return list(rows[:SHOWN]), max(0, rows.count() - SHOWN)


def skipped(run: Run, attempt: int) -> Skipped | None:
    """Return what is known of skipped updates of one attempt; None when there were none."""
    rows = (
        Event.objects.filter(run_id=run.pk, attempt=attempt, type="step", step__isnull=False)
        .order_by("-step")
        .values_list("step", "data__skipped", "data__nonfinite")[:STEP_REPORTS]
    )
    seen: set[int] = set()
    found: set[int] = set()
    for step, said, bits in rows:
        seen.add(step)
        if said is True or (type(bits) is int and bits & 64):
            found.add(step)
    frames = Frame.objects.filter(run_id=run.pk, attempt=attempt, stream="rank", skips=True)
    for first, last in frames.order_by("-step_first").values_list("step_first", "step_last")[:SHOWN]:
        # A frame of one step says which; of a longer one only that some step was skipped.
        found.update({first, last} if last - first < 2 else {first})
    if not found:
        return None
    return Skipped(len(found), min(found), max(found), max(len(seen), len(found)))
