"""What evidence does when runs tell something, inside the transaction that stored it: rows only."""

from typing import Any

from django.dispatch import receiver

from evidence.collecting.work import SETTLE_WORK
from evidence.freezing import verify_checkpoints
from evidence.models import Dossier, Item
from runs.models import Checkpoint, Directive, Run
from runs.signals import checkpoint_changed
from runs.work import enqueue

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


def _still_held(run: Run) -> bool:
    directive = Directive.objects.filter(run=run).order_by("-seq").values_list("kind", flat=True).first()
    return directive == Directive.Kind.HOLD
