"""What evidence does when runs tell something, inside the transaction that stored it: rows only."""

from typing import Any

from django.dispatch import receiver

from andon.wire import Event
from evidence import custody
from evidence.collecting.work import SETTLE_WORK
from evidence.freezing import late, verify_checkpoints
from evidence.models import Dossier, Item
from runs.models import Checkpoint, Directive, Run
from runs.signals import artifact_offered, checkpoint_changed, stop_requested
from runs.work import enqueue

STOPPED = "processes ended"
_NAMED = 100  # things that were not got that a row names; the rest is counted
# Items that a change of the run's checkpoints can settle.
_OPEN = (Item.State.PLANNED, Item.State.MISSING)


@receiver(checkpoint_changed, dispatch_uid="evidence.checkpoint_changed")
def on_checkpoint(sender: object, run: Run, checkpoint: Checkpoint, **_: Any) -> None:
    """Have a new checkpoint verified, and let open dossiers of its run follow the change."""
    if checkpoint.state == Checkpoint.State.COMMITTED and not checkpoint.verification:
        verify_checkpoints.ask(checkpoint)
    dossiers = Dossier.objects.filter(run=run, closed_at=None)
    waiting = dossiers.filter(
        items__kind__in=("last_good_checkpoint", "first_bad_checkpoint"), items__state__in=_OPEN
    )
    asked = set(waiting.values_list("pk", flat=True))
    if _still_held(run):
        # Committed before the failure and reported after it, out of a spool: a newer last good. Once
        # somebody approved, what they signed stays.
        late = dossiers.filter(first_bad_step__gt=checkpoint.step, attempt__gte=checkpoint.attempt)
        asked |= set(late.values_list("pk", flat=True))
    for dossier_id in sorted(asked):
        enqueue(kind=SETTLE_WORK, key=str(dossier_id), payload={"dossier": dossier_id})


@receiver(artifact_offered, dispatch_uid="evidence.artifact_offered")
def on_offer(sender: object, run: Run, attempt: int, kind: str, uri: str, **_: Any) -> None:
    """Collect what is offered only now."""
    late.offered(run, attempt, kind, uri)


@receiver(stop_requested, dispatch_uid="evidence.stop_requested")
def on_stop(sender: object, run: Run, event: Event, attempt: int, **_: Any) -> None:
    """Write into the custody of a run's open dossiers what went with the processes that were ended."""
    lost = event.data.get("not_got")
    if not isinstance(lost, list):
        return  # an announcement of a batch system, which waited for nothing
    told = [
        {"what": str(one.get("what", ""))[:200], "why": str(one.get("why", ""))[:200]}
        for one in lost[:_NAMED]
        if isinstance(one, dict)
    ]
    data = {
        "attempt": attempt,
        "reason": str(event.data.get("reason", ""))[:200],
        "by": str(event.data.get("by", ""))[:100],
        "waited_s": str(event.data.get("waited_s", ""))[:20],  # a chain holds no fractions
        "not_got": told,
        "not_named": max(0, len(lost) - len(told)),
    }
    for dossier in Dossier.objects.filter(run=run, closed_at=None, attempt=attempt).order_by("pk"):
        # Once for each attempt: whoever has the run's secret may post it a thousand times.
        if not dossier.custody.filter(what=STOPPED, data__attempt=attempt).exists():
            custody.append(dossier, STOPPED, data=data)


def _still_held(run: Run) -> bool:
    directive = Directive.objects.filter(run=run).order_by("-seq").values_list("kind", flat=True).first()
    return directive == Directive.Kind.HOLD
