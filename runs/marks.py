"""Marks over the curves of a run: checkpoints, boundaries, launches, and what apps above add."""

from collections.abc import Sequence
from typing import Any

from runs import formatting
from runs.models import Attempt, Checkpoint, Event, Run
from runs.signals import marks_wanted

Mark = tuple[int, str, bool]  # step, words, whether it stands by itself
MOST = 2_000  # of one kind in view; where they would touch they are merged with a count
STRONG = 12  # more than these would hide each other

_CHECKPOINT = {
    Checkpoint.State.VERIFIED: "◆ checkpoint {}, verified",
    Checkpoint.State.COMMITTED: "◇ checkpoint {}, not verified",
    Checkpoint.State.BAD: "✕ checkpoint {}, bad",
    Checkpoint.State.DELETED: "checkpoint {}, deleted",
}


def of_checkpoints(run: Run, attempts: Sequence[int], first: int, last: int) -> list[Mark]:
    """Return the marks of checkpoints in view: the word says verified, not verified or bad."""
    rows = Checkpoint.objects.filter(run=run, attempt__in=attempts, step__gte=first, step__lte=last)
    found = rows.order_by("-step").values_list("step", "state")[:MOST]
    return [
        (
            step,
            _CHECKPOINT[Checkpoint.State(state)].format(formatting.count(step)),
            state == Checkpoint.State.BAD,
        )
        for step, state in found
    ]


def of_run(run: Run, attempts: Sequence[int], first: int, last: int) -> list[Mark]:
    """Return every mark of a window over some attempts; those that stand by themselves are few."""
    found = of_checkpoints(run, attempts, first, last)
    boundaries = Event.objects.filter(
        run_id=run.pk, attempt__in=attempts, type="schedule.boundary", step__gte=first, step__lte=last
    )
    for step, data in boundaries.order_by("step").values_list("step", "data")[:MOST]:
        name = data.get("name") or data.get("phase") or data.get("kind") or ""
        assert step is not None
        found.append((step, f"| boundary {formatting.figure_text(name)}".rstrip(), False))
    if len(attempts) > 1:
        launches = Attempt.objects.filter(
            run=run, number__in=attempts, first_step__gte=first, first_step__lte=last
        )
        for number, step in launches.values_list("number", "first_step"):
            found.append((step or 0, f"attempt {number}", False))
    answers: Any = marks_wanted.send(sender=Run, run=run, attempts=attempts, first=first, last=last)
    for _, more in answers:
        found += more
    if sum(strong for _, _, strong in found) > STRONG:
        found = [(step, words, False) for step, words, _ in found]
    return found
