"""Which checkpoints are the last good one, the first bad one, and the ladder below."""

from collections.abc import Sequence
from dataclasses import dataclass

from evidence.models import Dossier
from evidence.uris import UnusableUri, covers, normalise
from runs.formatting import count, plural
from runs.models import Attempt, Checkpoint, Run

LADDER_BELOW = 2  # pinned besides last good: the two before it ...
LADDER_FAR_MARGINS = 10  # ... and the newest older than ten margins


@dataclass(frozen=True)
class Choice:
    """What the freeze plan keeps. `undecided` are newer than `last_good` and not yet verified."""

    last_good: Checkpoint | None
    undecided: tuple[Checkpoint, ...]
    ladder: tuple[Checkpoint, ...]
    first_bad: Checkpoint | None
    gone: tuple[Checkpoint, ...]  # would have been chosen, but a deletion was allowed
    limit_step: int | None  # last good is at or before it; None: anything will do


def lineage(run: Run, attempt: int | None) -> dict[int, int | None]:
    """Return attempt number → highest step of it that led to `attempt` (None: every step).

    An attempt that began from step 900 of another shares that one's history only up to 900: what the
    other wrote beyond it belongs to a trajectory that was given up.
    """
    reach: dict[int, int | None] = {}
    bound: int | None = None
    rows = Attempt.objects.filter(run=run).order_by("-number")
    if attempt is not None:
        rows = rows.filter(number__lte=attempt)
    for number, began_from in rows.values_list("number", "began_from"):
        reach[number] = bound
        began = began_from.get("step") if isinstance(began_from, dict) else None
        if isinstance(began, int) and not isinstance(began, bool):
            bound = began if bound is None else min(bound, began)
    return reach


def choose(
    *, run: Run, attempt: int | None, first_bad_step: int | None, margin_steps: int, gone: Sequence[str]
) -> Choice:
    """Choose the checkpoints of a freeze plan.

    Last good is the newest *verified* one with step <= b - max(1, margin); without a known b the
    newest verified one.

    Args:
        gone: normalised URIs whose deletion was allowed within the last 10 minutes.
    """
    reach = lineage(run, attempt)
    limit = None if first_bad_step is None else first_bad_step - max(1, margin_steps)
    kept: list[Checkpoint] = []
    lost: list[Checkpoint] = []
    rows = (
        Checkpoint.objects.filter(run=run)
        .exclude(state=Checkpoint.State.DELETED)
        .order_by("-step", "-attempt", "-id")
        .defer("files")
    )
    for checkpoint in rows:
        if reach and not _on_path(checkpoint, reach):
            continue
        (lost if _is_gone(checkpoint, gone) else kept).append(checkpoint)
    within = [one for one in kept if limit is None or one.step <= limit]
    verified = [one for one in within if one.state == Checkpoint.State.VERIFIED]
    best = verified[0] if verified else None
    undecided = [
        one
        for one in within
        if one.state == Checkpoint.State.COMMITTED
        and "cannot" not in one.verification
        and (best is None or _newer(one, best))
    ]
    first_bad = None
    if first_bad_step is not None:
        beyond = [
            one for one in kept if one.step >= first_bad_step and one.attempt == (attempt or one.attempt)
        ]
        first_bad = beyond[-1] if beyond else None
    return Choice(
        last_good=best,
        undecided=tuple(undecided),
        ladder=tuple(_ladder(verified, best, margin_steps)),
        first_bad=first_bad,
        gone=tuple(one for one in lost if limit is None or one.step <= limit),
        limit_step=limit,
    )


def passed_over(dossier: Dossier) -> list[int]:
    """Return steps of verified checkpoints that lie before b but inside the margin, oldest first.

    They look like a nearer last good: whoever reads the dossier is told why they are not.
    """
    bad, margin = dossier.first_bad_step, dossier.margin_steps
    if bad is None or margin <= 1:
        return []
    reach = lineage(dossier.run, dossier.attempt)
    rows = Checkpoint.objects.filter(
        run=dossier.run, state=Checkpoint.State.VERIFIED, step__gt=bad - margin, step__lt=bad
    )
    return sorted({one.step for one in rows.defer("files") if not reach or _on_path(one, reach)})


def passed_over_words(dossier: Dossier) -> str:
    """Return "steps 160, 200 are verified but within 100 steps of step 225, …"; "" where there are none."""
    steps = passed_over(dossier)
    if not steps or dossier.first_bad_step is None:
        return ""
    which = "step" if len(steps) == 1 else "steps"
    shown = ", ".join(count(step) for step in steps[-3:])
    return (
        f"passed over: {which} {shown}, verified, but within {plural(dossier.margin_steps, 'step')} of"
        f" the first bad step {count(dossier.first_bad_step)}, when it may have begun unseen"
    )


def _newer(one: Checkpoint, other: Checkpoint) -> bool:
    return (one.step, one.attempt, one.pk) > (other.step, other.attempt, other.pk)


def _on_path(checkpoint: Checkpoint, reach: dict[int, int | None]) -> bool:
    if checkpoint.attempt not in reach:
        return False
    bound = reach[checkpoint.attempt]
    return bound is None or checkpoint.step <= bound


def _is_gone(checkpoint: Checkpoint, gone: Sequence[str]) -> bool:
    if not gone:
        return False
    try:
        uri = normalise(checkpoint.uri)
    except UnusableUri:
        return False
    return any(covers(one, uri) for one in gone)


def _ladder(verified: list[Checkpoint], best: Checkpoint | None, margin_steps: int) -> list[Checkpoint]:
    if best is None:
        return []
    below = [one for one in verified if _newer(best, one)]
    far = best.step - LADDER_FAR_MARGINS * max(1, margin_steps)
    rungs = below[:LADDER_BELOW]
    rungs += [one for one in below[LADDER_BELOW:] if one.step < far][:1]
    return rungs
