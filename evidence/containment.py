"""Whether the run a dossier belongs to has stopped changing things."""

from evidence.models import Dossier
from runs.directives import current, obedience
from runs.models import Attempt, Event


def contained(dossier: Dossier) -> str | None:
    """Return in words how the dossier's attempt was contained, None while it may still write.

    Contained: all ranks hold or left, the attempt exited, or another attempt took its place.
    """
    attempts = Attempt.objects.filter(run_id=dossier.run_id).order_by("-number")
    newest = attempts.first()
    if newest is None:
        return None
    if dossier.attempt is not None and newest.number > dossier.attempt:
        return f"attempt {newest.number} took its place"
    if newest.exited_at is not None:
        return f"attempt {newest.number} exited"
    directive = current(dossier.run_id)
    if directive is None or directive.kind != "hold":
        return None
    seen = obedience(dossier.run_id)
    if seen["of"] and seen["obeyed"] >= seen["of"]:
        step = "" if seen["step"] is None else f" after step {seen['step']}"
        return f"all {seen['of']} ranks hold{step}"
    return None


def update_was_skipped(dossier: Dossier) -> bool:
    """Return whether the trainer says that the update of the first bad step was not applied."""
    if dossier.first_bad_step is None:
        return False
    rows = Event.objects.filter(run_id=dossier.run_id, type__in=("step", "skip"), step=dossier.first_bad_step)
    if dossier.attempt is not None:
        rows = rows.filter(attempt=dossier.attempt)
    told = rows.values_list("type", "data")[:1000]
    return any(kind == "skip" or data.get("skipped") is True for kind, data in told)
