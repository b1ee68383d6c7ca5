"""Whether the run a dossier belongs to has stopped changing things, and what shows it."""

from dataclasses import dataclass, field
from typing import Any

from evidence import custody
from evidence.models import Dossier
from runs.directives import current, obedience
from runs.models import Attempt, DirectiveAck, Event

_SHOWN = 20  # acknowledgements and events named in a custody row; the rest is counted


@dataclass(frozen=True)
class Containment:
    """`says` is for people; `step` is the last one whose update can have been applied, None when nobody
    said; `shown_by` names the rows that prove it."""

    says: str
    step: int | None = None
    shown_by: dict[str, Any] = field(default_factory=dict)


def contained(dossier: Dossier) -> str | None:
    """Return in words how the dossier's attempt was contained, None while it may still write."""
    found = containment_of(dossier)
    return None if found is None else found.says


def containment_of(dossier: Dossier) -> Containment | None:
    """Return how the dossier's attempt was contained, None while it may still write.

    Contained: all ranks hold or left, the attempt exited, or another attempt took its place.
    """
    attempts = Attempt.objects.filter(run_id=dossier.run_id).order_by("-number")
    newest = attempts.first()
    if newest is None:
        return None
    if dossier.attempt is not None and newest.number > dossier.attempt:
        launched = {"attempt": newest.number, "launched_at": custody.stamp(newest.launched_at)}
        return Containment(f"attempt {newest.number} took its place", shown_by=launched)
    if newest.exited_at is not None:
        exited = {"attempt": newest.number, "exited_at": custody.stamp(newest.exited_at)}
        return Containment(f"attempt {newest.number} exited", shown_by=exited)
    directive = current(dossier.run_id)
    if directive is None or directive.kind != "hold":
        return None
    seen = obedience(dossier.run_id)
    if not seen["of"] or seen["obeyed"] < seen["of"]:
        return None
    step = "" if seen["step"] is None else f" after step {seen['step']}"
    acks = DirectiveAck.objects.filter(run_id=dossier.run_id, seq=directive.seq, state__in=("held", "exited"))
    shown: dict[str, Any] = {
        "directive": directive.seq,
        "acknowledged": [
            {
                "state": ack.state,
                "step": ack.step,
                "ranks": len(ack.ranks),
                "at": custody.stamp(ack.occurred_at),
            }
            for ack in acks.order_by("id")[:_SHOWN]
        ],
    }
    return Containment(f"all {seen['of']} ranks hold{step}", seen["step"], shown)


def skipped_update(dossier: Dossier) -> dict[str, Any] | None:
    """Return the posts in which the trainer says that the update of the first bad step was not applied.

    None when it says no such thing.
    """
    if dossier.first_bad_step is None:
        return None
    rows = Event.objects.filter(run_id=dossier.run_id, type__in=("step", "skip"), step=dossier.first_bad_step)
    if dossier.attempt is not None:
        rows = rows.filter(attempt=dossier.attempt)
    told = rows.order_by("id").values_list("type", "data", "webhook_id", "index")[:1000]
    posts = [
        {"type": kind, "post": post, "index": index}
        for kind, data, post, index in told
        if kind == "skip" or data.get("skipped") is True
    ]
    return {"step": dossier.first_bad_step, "skipped_in": posts[:_SHOWN]} if posts else None
