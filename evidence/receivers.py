"""What evidence does when runs tell something, inside the transaction that stored it: rows only."""

from typing import Any

from django.dispatch import receiver

from evidence import verify_checkpoints
from evidence.collecting import SETTLE_WORK
from evidence.models import Dossier, Item
from runs.models import Checkpoint, Run
from runs.signals import checkpoint_changed
from runs.work import enqueue

# Items that a change of the run's checkpoints can settle.
_OPEN = (Item.State.PLANNED, Item.State.MISSING)


@receiver(checkpoint_changed, dispatch_uid="evidence.checkpoint_changed")
def on_checkpoint(sender: object, run: Run, checkpoint: Checkpoint, **_: Any) -> None:
    """Have a new checkpoint verified, and let open dossiers of its run follow the change."""
    if checkpoint.state == Checkpoint.State.COMMITTED and not checkpoint.verification:
        verify_checkpoints.ask(checkpoint)
    waiting = Dossier.objects.filter(
        run=run,
        closed_at=None,
        items__kind__in=("last_good_checkpoint", "first_bad_checkpoint"),
        items__state__in=_OPEN,
    ).distinct()
    for dossier_id in waiting.values_list("pk", flat=True):
        enqueue(kind=SETTLE_WORK, key=str(dossier_id), payload={"dossier": dossier_id})
