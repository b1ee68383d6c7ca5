"""How an item ends without bytes, and what it waits for until then."""

from datetime import datetime, timedelta
from typing import NoReturn

from django.db import transaction
from django.utils import timezone

from evidence import custody
from evidence.agents import node_trees
from evidence.agents.node_work import OnNode
from evidence.alarms import alarm
from evidence.collecting.turn import locked
from evidence.freezing.settling import settle_checkpoints
from evidence.models import Dossier, Item
from evidence.plan import START
from evidence.proof import leftovers, seals
from runs.locks import lock_run
from runs.models import Checkpoint
from runs.work import RETRY_LAST_S, Lease, Retry, backoff_s, enqueue

# A checkpoint that nobody could verify by then no longer keeps an older, verified one from being used.
VERIFY_PATIENCE = timedelta(minutes=5)
ASK_NODES_AGAIN_S = 5.0  # what agents did is looked at this often; the last file of an item rings at once
_LONGEST_WAIT_S = 60.0


def too_late(item: Item, lease: Lease, why: str) -> None:
    """Give an item up at its deadline; for a required one people are told, since its gate stays shut."""
    if end(item, lease, Item.State.MISSING, why) and item.required and item.waived_at is None:
        alarm(item.dossier, "deadline passed", f"{item.name} is missing: {why}")


def end(item: Item, lease: Lease, state: str, why: str, shown_by: dict[str, object] | None = None) -> bool:
    """End an item without bytes; returns False when it had ended before."""
    with locked(item, lease) as fresh:
        if fresh.state in seals.FINAL:
            return False
        proof = {"shown_by": shown_by} if shown_by else {}
        what = str(state).replace("_", " ")
        row = custody.append(fresh.dossier, what, item_name=fresh.name, data={"why": why} | proof)
        fresh.state, fresh.why = state, f"{why} (custody row {row.seq})" if proof else why
        fresh.save()
        seals.seal(fresh.dossier)
        leftovers.ask(fresh.dossier)
    return True


def wait(item: Item, lease: Lease, says: str, after_s: float) -> None:
    """Look again later; what was not there by the deadline is missing."""
    now = timezone.now()
    undecided = item.source.get("undecided")
    if undecided and now > item.dossier.opened_at + VERIFY_PATIENCE:
        _stop_waiting_for(item, undecided)
    elif item.deadline is not None and now > item.deadline:
        too_late(item, lease, f"{says}; waited until {item.deadline:%H:%M:%S} UTC")
        return
    raise Retry(after_s + min(8.0, _age_s(item.dossier.opened_at) / 30), says)


def _stop_waiting_for(item: Item, undecided: list[int]) -> None:
    with transaction.atomic():
        lock_run(item.dossier.run_id)
        for checkpoint in Checkpoint.objects.filter(pk__in=undecided, state=Checkpoint.State.COMMITTED):
            checkpoint.verification = checkpoint.verification | {"cannot": "it could not be verified in time"}
            checkpoint.save(update_fields=["verification"])
        settle_checkpoints(Dossier.objects.select_related("run").get(pk=item.dossier_id))


def silent(item: Item, lease: Lease, says: str) -> None:
    """The source does not answer: say since when, try again with back-off, give up at the deadline."""
    now = timezone.now()
    since = item.silent_since or now
    if item.deadline is not None and now > item.deadline:
        too_late(item, lease, f"its source did not answer since {since:%H:%M:%S} UTC: {says}")
        return
    Item.objects.filter(pk=item.pk).exclude(state__in=seals.FINAL).update(
        silent_since=since, trouble_since=None, why=says[:500]
    )
    raise Retry(backoff_s(_age_s(since) / 2, _LONGEST_WAIT_S), says)


def on_node(item: Item, lease: Lease, wait: OnNode) -> None:
    """Nodes are bringing it. Only silence runs against the deadline: a slow upload is not given up."""
    now = timezone.now()
    if wait.since is not None and item.deadline is not None and now > item.deadline:
        too_late(item, lease, f"silent since {wait.since:%H:%M:%S} UTC: {wait.says}"[:2000])
        return
    rows = Item.objects.filter(pk=item.pk).exclude(state__in=seals.FINAL)
    rows.update(silent_since=wait.since, why=wait.says[:500])
    if wait.bytes_done:
        rows.filter(state=Item.State.COLLECTING).update(bytes_done=wait.bytes_done)
    raise Retry(ASK_NODES_AGAIN_S, wait.says)


def lost(item: Item, lease: Lease, why: str) -> None:
    """The source's bytes are gone or damaged. A last good checkpoint gives way to the one before it."""
    end(item, lease, Item.State.MISSING, why)
    if item.kind != "last_good_checkpoint" or "checkpoint" not in item.source:
        return
    with transaction.atomic():
        lock_run(item.dossier.run_id)
        for checkpoint in Checkpoint.objects.filter(pk=item.source["checkpoint"]).exclude(
            state=Checkpoint.State.DELETED
        ):
            checkpoint.state = Checkpoint.State.BAD
            checkpoint.verification = checkpoint.verification | {"failed": why}
            checkpoint.save(update_fields=["state", "verification"])
        settle_checkpoints(Dossier.objects.select_related("run").get(pk=item.dossier_id))
        fresh = Item.objects.get(pk=item.pk)
        if fresh.kind != item.kind or fresh.source.get("checkpoint", 0) not in (0, item.source["checkpoint"]):
            node_trees.let_go(item, node_trees.GAVE_WAY)  # where none took its place, two people release it
        enqueue(kind=START, key=str(item.dossier_id), payload={"dossier": item.dossier_id})


def ours(item: Item, why: str, *, permanent: bool = False) -> NoReturn:
    """Our own trouble is not the source's: say it, since when, and try again with back-off.

    No deadline runs and nothing goes missing.
    """
    since = item.trouble_since or timezone.now()
    Item.objects.filter(pk=item.pk).exclude(state__in=seals.FINAL).update(
        trouble_since=since, silent_since=None, why=why[:500]
    )
    raise Retry(backoff_s(_age_s(since) / 2, RETRY_LAST_S if permanent else _LONGEST_WAIT_S), why)


def _age_s(since: datetime) -> float:
    return (timezone.now() - since).total_seconds()
