"""What was seen of a run, holding or not: findings, and updates the trainer skipped.

What holds nothing is shown all the same: somebody who asks "did it see that NaN?" finds it here.
"""

from dataclasses import dataclass

from runs.models import Event, Finding, Frame, Run

SHOWN = 30
STEP_REPORTS = 5_000  # as many of the newest are counted; a page must not read a whole run


@dataclass(frozen=True, slots=True)
class Skipped:
    """Updates of an attempt that were not applied.

    `steps` of the newest `of` reported steps say so, from `first` to `last`; and so do `frames` of the
    newest rank frames, each for some of its steps, all of them between `frames_first` and `frames_last`.
    """

    steps: int
    of: int
    first: int | None
    last: int | None
    frames: int
    frames_first: int | None
    frames_last: int | None


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
        assert step is not None
        seen.add(step)
        if said is True or (type(bits) is int and bits & 64):
            found.add(step)
    frames = Frame.objects.filter(run_id=run.pk, attempt=attempt, stream="rank", skips=True)
    spans = list(frames.order_by("-step_first").values_list("step_first", "step_last")[:SHOWN])
    if not found and not spans:
        return None
    return Skipped(
        steps=len(found),
        of=len(seen),
        first=min(found, default=None),
        last=max(found, default=None),
        frames=len(spans),
        frames_first=min((first for first, _ in spans), default=None),
        frames_last=max((last for _, last in spans), default=None),
    )
