"""Items from planned to sealed, as work: every step can be repeated, and taken over by another worker."""

import errno

from botocore.exceptions import BotoCoreError
from django.conf import settings
from django.db import transaction

from evidence.agents.node_work import OnNode
from evidence.collecting import ends, to_held, to_sealed
from evidence.collecting.gathering import is_held_first, wait_for_checkpoint
from evidence.collecting.outcomes import DoesNotApply, Nothing, NotYet
from evidence.freezing.settling import settle_checkpoints
from evidence.kinds import CHECKPOINT_KINDS
from evidence.models import Dossier, Item
from evidence.plan import START
from evidence.proof import seals
from evidence.sources import SourceError
from evidence.stores.probed import ask_if_old
from evidence.vault import BytesDiffer, VaultError, vault
from runs.locks import lock_run
from runs.work import Lease, Payload, enqueue, handler

HOLD = "evidence.hold"
ITEM = "evidence.item"
SETTLE_WORK = "evidence.settle"
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # nothing that is only read fails by these


@handler(START)
def start(payload: Payload, lease: Lease) -> None:
    """Ring for every item that is not final: holds first, last good before all; then copies by volatility."""
    with transaction.atomic():
        ask_if_old(vault().name)
        items = list(Item.objects.filter(dossier=int(str(payload["dossier"]))).exclude(state__in=seals.FINAL))
        for item in sorted(items, key=lambda one: one.kind != "last_good_checkpoint"):
            if item.kind in CHECKPOINT_KINDS:
                enqueue(kind=HOLD, key=str(item.pk), payload={"item": item.pk})
        for item in items:
            enqueue(kind=ITEM, key=str(item.pk), payload={"item": item.pk})


@handler(SETTLE_WORK)
def settle(payload: Payload, lease: Lease) -> None:
    """Let a dossier's checkpoint items follow what is now known of the run's checkpoints."""
    with transaction.atomic():
        dossier = Dossier.objects.select_related("run").get(pk=int(str(payload["dossier"])))
        lock_run(dossier.run_id)
        dossier = (
            Dossier.objects.select_for_update(no_key=True, of=("self",))
            .select_related("run")
            .get(pk=dossier.pk)
        )
        settle_checkpoints(dossier)
        enqueue(kind=START, key=str(dossier.pk), payload={"dossier": dossier.pk})


@handler(HOLD)
def hold(payload: Payload, lease: Lease) -> None:
    """Hold one item where it lies; copying it is other work."""
    _advance(int(str(payload["item"])), lease, copy=False)


@handler(ITEM)
def collect(payload: Payload, lease: Lease) -> None:
    """Bring one item to its end: held, copied, sealed; or missing, or not applicable, with the reason."""
    _advance(int(str(payload["item"])), lease, copy=True)


def _advance(item_id: int, lease: Lease, *, copy: bool) -> None:
    item = Item.objects.select_related("dossier__run").get(pk=item_id)
    dossier = item.dossier
    if item.state in seals.FINAL:
        return
    try:
        if item.kind in CHECKPOINT_KINDS - {"halt_snapshot"} and not is_held_first(item):
            wait_for_checkpoint(item, dossier)
        if is_held_first(item) and item.held_at is None and not item.files:
            to_held.hold(item, dossier, lease)
        if copy:
            to_sealed.copy(item, dossier, lease)
    except NotYet as wait:
        ends.wait(item, lease, wait.says, wait.after_s)
    except OnNode as wait:
        ends.on_node(item, lease, wait)
    except DoesNotApply as reason:
        ends.end(item, lease, Item.State.NOT_APPLICABLE, str(reason), reason.shown_by)
    except Nothing as reason:
        ends.end(item, lease, Item.State.MISSING, str(reason))
    except BytesDiffer as error:
        ends.lost(item, lease, f"its bytes are not those that were committed: {error.says}")
    except SourceError as error:
        if error.permanent:
            ends.lost(item, lease, error.says)
        else:
            ends.silent(item, lease, error.says)
    except (BotoCoreError, OSError) as error:  # a stream that broke while it was read
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            ends.ours(item, f"spool: no room below {settings.DATA_DIR}: {error.strerror}")
        ends.silent(item, lease, str(error) or type(error).__name__)
    except VaultError as error:
        ends.ours(item, f"vault: {error.says}", permanent=error.permanent)
