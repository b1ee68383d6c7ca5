"""Items from planned to sealed, as work: every step can be repeated, and taken over by another worker."""

import contextlib
import errno
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import datetime, timedelta
from typing import Any, NoReturn

from botocore.exceptions import BotoCoreError
from django.conf import settings
from django.db import connection, transaction
from django.utils import timezone

from andon import chain
from evidence import custody
from evidence.agents import node_trees, node_work
from evidence.agents.node_work import OnNode
from evidence.alarms import alarm
from evidence.collecting.gathering import (
    Piece,
    gather,
    held_pieces,
    is_held_first,
    manifest,
    newly_offered,
    wait_for_checkpoint,
)
from evidence.collecting.outcomes import DoesNotApply, Nothing, NotYet
from evidence.freezing.holds import hold_uris
from evidence.freezing.settling import settle_checkpoints
from evidence.hashing import digest_of
from evidence.holding import held_before
from evidence.holding.places import Held, changed_since, hold_tree
from evidence.kinds import CHECKPOINT_KINDS
from evidence.models import Dossier, Hold, Item, StoredObject
from evidence.plan import START
from evidence.proof import leftovers, seals
from evidence.retention import dates
from evidence.sources import NodeSource, SourceError, lies_on_a_node
from evidence.stores import spool
from evidence.stores.probe import ask_if_old, newest_result
from evidence.vault import BytesDiffer, Stored, VaultError, key_for, vault
from runs.locks import lock_run
from runs.models import Checkpoint
from runs.work import Lease, Payload, Retry, enqueue, handler

HOLD = "evidence.hold"
ITEM = "evidence.item"
SETTLE_WORK = "evidence.settle"
PROGRESS_EVERY_S = 1.0
# A checkpoint that nobody could verify by then no longer keeps an older, verified one from being used.
VERIFY_PATIENCE = timedelta(minutes=5)
_LONGEST_WAIT_S = 60.0
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # nothing that is only read fails by these
ASK_NODES_AGAIN_S = 5.0  # what agents did is looked at this often; the last file of an item rings at once


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
            _hold(item, dossier, lease)
        if copy:
            _copy(item, dossier, lease)
    except NotYet as wait:
        _wait(item, lease, wait.says, wait.after_s)
    except OnNode as wait:
        _on_node(item, lease, wait)
    except DoesNotApply as reason:
        _end(item, lease, Item.State.NOT_APPLICABLE, str(reason), reason.shown_by)
    except Nothing as reason:
        _end(item, lease, Item.State.MISSING, str(reason))
    except BytesDiffer as error:
        _lost(item, lease, f"its bytes are not those that were committed: {error.says}")
    except SourceError as error:
        if error.permanent:
            _lost(item, lease, error.says)
        else:
            _silent(item, lease, error.says)
    except (BotoCoreError, OSError) as error:  # a stream that broke while it was read
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            _ours(item, f"spool: no room below {settings.DATA_DIR}: {error.strerror}", 5)
        _silent(item, lease, str(error) or type(error).__name__)
    except VaultError as error:
        _ours(item, f"vault: {error.says}", 60 if error.permanent else 5)


def _ours(item: Item, why: str, after_s: float) -> NoReturn:
    """Our own trouble is not the source's: say it and try again; no deadline runs, nothing goes missing."""
    Item.objects.filter(pk=item.pk).exclude(state__in=seals.FINAL).update(why=why[:500])
    raise Retry(after_s, why)


# --- holding


def _hold(item: Item, dossier: Dossier, lease: Lease) -> None:
    checkpoint = Checkpoint.objects.get(pk=item.source["checkpoint"])
    if lies_on_a_node(checkpoint.uri):
        held = node_work.held_of(node_work.hold(item, checkpoint.uri))
    else:
        held = hold_tree(
            item,
            dossier,
            checkpoint.uri,
            manifest(checkpoint),
            keep=lambda seen: _note_before(item, lease, seen),
        )
    now = timezone.now()
    with _locked(item, lease) as fresh:
        # Holding and collecting are two works: the other one may have been first. Nor is what was held for
        # one checkpoint noted for another that the item came to name meanwhile.
        named = fresh.source.get("checkpoint") == checkpoint.pk
        if named and fresh.state == Item.State.PLANNED and not fresh.files:
            _note_held(fresh, dossier, held, now)
    # In either case: what is copied next is what was held, and by now it has files.
    item.refresh_from_db()
    if not named:
        raise NotYet("it came to name another checkpoint", after_s=0)


def _note_before(item: Item, lease: Lease, seen: dict[str, Any]) -> dict[str, Any]:
    """Write down which versions had a legal hold before ours, unless another try did; returns what counts."""
    with _locked(item, lease) as fresh:
        noted = held_before.note_of(fresh, seen["uri"])
        if noted is None:
            noted = held_before.without_ours(fresh, seen)
            fresh.protected_by = fresh.protected_by | {"held_before": noted}
            fresh.save(update_fields=["protected_by"])
    return noted


def _note_held(fresh: Item, dossier: Dossier, held: Held, now: datetime) -> None:
    fresh.files, fresh.protected_by = held.files, held.by
    fresh.bytes_total = sum(entry["bytes"] for entry in held.files)
    known = all(entry["sha256"] for entry in held.files)
    fresh.digest = chain.file_table_digest(held.files) if known else ""
    fresh.silent_since, fresh.why = None, ""
    if held.is_safe:
        fresh.state, fresh.held_at = Item.State.HELD, now
    fresh.save()
    Hold.objects.filter(dossier=dossier, item=fresh).update(enforced_by=held.by)
    custody.append(
        dossier,
        "held" if held.is_safe else "not safe until copied",
        item_name=fresh.name,
        object_sha256=fresh.digest,
        data={"files": len(held.files), "bytes": fresh.bytes_total, "by": held.by["says"]},
    )


# --- copying


def _copy(item: Item, dossier: Dossier, lease: Lease) -> None:
    if is_held_first(item):
        _note_changes(item, dossier, lease)
    if is_held_first(item) or not newly_offered(item, dossier):
        node_work.still_waiting(item)
    spool.sweep()
    with spool.directory(f"item-{item.pk}") as place:
        pieces = held_pieces(item) if is_held_first(item) else gather(item, dossier, place)
        _protect_offers(item, dossier)
        first = _begin(item, lease, pieces)
        _store_all(item, dossier, lease, pieces, first)
        _finish(item, lease, pieces)


def _note_changes(item: Item, dossier: Dossier, lease: Lease) -> None:
    """Record that held files were changed in place; their save-time digests decide whether it matters.

    Raises:
        BytesDiffer: a changed file has no digest from before, so nothing can vouch for its bytes.
    """
    changed = changed_since(item) or node_work.changed_since(item)
    if not changed:
        return
    with _locked(item, lease) as fresh:
        if not dossier.custody.filter(what="changed in place", item_name=fresh.name).exists():
            custody.append(dossier, "changed in place", item_name=fresh.name, data={"files": changed[:100]})
    if not all(entry["sha256"] for entry in item.files):
        raise BytesDiffer(changed[0])


def _protect_offers(item: Item, dossier: Dossier) -> None:
    """Hold the URIs of files that were offered after the plan was made."""
    if item.source.get("artifacts"):
        with transaction.atomic():
            lock_run(dossier.run_id)
            hold_uris(dossier, item)


def _begin(item: Item, lease: Lease, pieces: list[Piece]) -> bool:
    """Note that copying begins; returns whether it is the first try, before which nothing can be stored."""
    with _locked(item, lease) as fresh:
        if fresh.state in seals.FINAL:
            return False
        first = bool(fresh.state != Item.State.COLLECTING)
        fresh.state = Item.State.COLLECTING
        fresh.bytes_total = sum(piece.source.bytes_total for piece in pieces)
        fresh.bytes_done = 0
        fresh.silent_since, fresh.why = None, ""
        fresh.save()
    return first


def _store_all(item: Item, dossier: Dossier, lease: Lease, pieces: list[Piece], first: bool) -> None:
    progress = _Progress(item)
    have = {one.path: one for one in StoredObject.objects.filter(item=item)}
    store = vault()
    newest_result(store.name)  # read here, so that the copying threads need no database

    def one(piece: Piece) -> tuple[Piece, Stored]:
        try:
            return piece, put(piece)
        except BytesDiffer:
            # One bit damaged on the way looks like a source that changed. What changed does so again.
            return piece, put(piece)
        finally:
            connection.close()  # of this thread, should the store have asked the database

    def put(piece: Piece) -> Stored:
        sha256 = piece.sha256 or digest_of(piece.source).sha256
        return store.store(
            key_for(dossier.uid, item.pk, sha256),
            piece.source,
            sha256=sha256,
            lock=item.lock,
            until=item.retain_until,
            progress=progress.add,
            first=first,
        )

    todo, elsewhere = [], []
    for piece in pieces:
        known = have.get(piece.path)
        if known is not None and (
            known.sha256 == piece.sha256 if piece.sha256 else isinstance(piece.source, NodeSource)
        ):
            progress.add(known.bytes_total)
        elif isinstance(piece.source, NodeSource):
            elsewhere.append((piece.path, piece.source, piece.sha256))
        else:
            todo.append(piece)
    node_work.ask(item, elsewhere)
    with ThreadPoolExecutor(store.at_once) as pool:
        futures = [pool.submit(one, piece) for piece in todo]
        try:
            for future in as_completed(futures):
                piece, stored = future.result()
                _record(item, lease, piece, stored)
                progress.show()
        except BaseException:
            for future in futures:
                future.cancel()
            progress.stop()
            raise
    progress.show(now=True)
    if elsewhere:
        node_work.still_waiting(item)


def _record(item: Item, lease: Lease, piece: Piece, stored: Stored) -> None:
    with transaction.atomic():
        lease.guard()
        StoredObject.objects.update_or_create(
            item=item,
            path=piece.path,
            defaults=stored.row(timezone.now()),
        )


def _finish(item: Item, lease: Lease, pieces: list[Piece]) -> None:
    """Seal the item: its objects are in the vault, verified, and in a signed manifest from here on."""
    with _locked(item, lease) as fresh:
        if fresh.state in seals.FINAL:
            return
        wanted = {piece.path for piece in pieces}
        # A retry may have found fewer or other files than the try before it; those are not evidence.
        StoredObject.objects.filter(item=item).exclude(path__in=wanted).delete()
        table = [
            {"path": one.path, "bytes": one.bytes_total, "sha256": one.sha256}
            for one in StoredObject.objects.filter(item=item).order_by("path")
        ]
        assert {row["path"] for row in table} == wanted
        # Never with less than was held, nor with nothing: whoever began from an older row begins again.
        assert wanted
        assert not is_held_first(fresh) or len(wanted) == len(fresh.files)
        now = timezone.now()
        fresh.digest = chain.file_table_digest(table)
        if not fresh.files:
            fresh.files = table
        fresh.bytes_total = fresh.bytes_done = sum(int(str(row["bytes"])) for row in table)
        fresh.state, fresh.sealed_at, fresh.held_at = Item.State.SEALED, now, fresh.held_at or now
        fresh.why = ""
        fresh.save()
        custody.append(
            fresh.dossier,
            "sealed",
            item_name=fresh.name,
            object_sha256=fresh.digest,
            data={
                "kind": fresh.kind,
                "objects": len(table),
                "bytes": fresh.bytes_total,
                "vault": vault().name,
            },
        )
        seals.seal(fresh.dossier, [fresh])
        node_trees.let_go_sealed(fresh)
        leftovers.ask(fresh.dossier)
        if dates.falls_short(fresh):
            dates.ask(fresh)  # a later date was promised while its bytes were copied under the earlier


# --- ends and waits


def _too_late(item: Item, lease: Lease, why: str) -> None:
    """Give an item up at its deadline; for a required one people are told, since its gate stays shut."""
    if _end(item, lease, Item.State.MISSING, why) and item.required and item.waived_at is None:
        alarm(item.dossier, "deadline passed", f"{item.name} is missing: {why}")


def _end(item: Item, lease: Lease, state: str, why: str, shown_by: dict[str, object] | None = None) -> bool:
    """End an item without bytes; returns False when it had ended before."""
    with _locked(item, lease) as fresh:
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


def _wait(item: Item, lease: Lease, says: str, after_s: float) -> None:
    now = timezone.now()
    undecided = item.source.get("undecided")
    if undecided and now > item.dossier.opened_at + VERIFY_PATIENCE:
        _stop_waiting_for(item, undecided)
    elif item.deadline is not None and now > item.deadline:
        _too_late(item, lease, f"{says}; waited until {item.deadline:%H:%M:%S} UTC")
        return
    raise Retry(after_s + min(8.0, _age_s(item.dossier.opened_at) / 30), says)


def _stop_waiting_for(item: Item, undecided: list[int]) -> None:
    with transaction.atomic():
        lock_run(item.dossier.run_id)
        for checkpoint in Checkpoint.objects.filter(pk__in=undecided, state=Checkpoint.State.COMMITTED):
            checkpoint.verification = checkpoint.verification | {"cannot": "it could not be verified in time"}
            checkpoint.save(update_fields=["verification"])
        settle_checkpoints(Dossier.objects.select_related("run").get(pk=item.dossier_id))


def _silent(item: Item, lease: Lease, says: str) -> None:
    """The source does not answer: say since when, try again with back-off, give up at the deadline."""
    now = timezone.now()
    since = item.silent_since or now
    if item.deadline is not None and now > item.deadline:
        _too_late(item, lease, f"its source did not answer since {since:%H:%M:%S} UTC: {says}")
        return
    Item.objects.filter(pk=item.pk).exclude(state__in=seals.FINAL).update(silent_since=since, why=says[:500])
    raise Retry(max(2.0, min(_LONGEST_WAIT_S, _age_s(since) / 2)), says)


def _on_node(item: Item, lease: Lease, wait: OnNode) -> None:
    """Nodes are bringing it. Only silence runs against the deadline: a slow upload is not given up."""
    now = timezone.now()
    if wait.since is not None and item.deadline is not None and now > item.deadline:
        _too_late(item, lease, f"silent since {wait.since:%H:%M:%S} UTC: {wait.says}"[:2000])
        return
    rows = Item.objects.filter(pk=item.pk).exclude(state__in=seals.FINAL)
    rows.update(silent_since=wait.since, why=wait.says[:500])
    if wait.bytes_done:
        rows.filter(state=Item.State.COLLECTING).update(bytes_done=wait.bytes_done)
    raise Retry(ASK_NODES_AGAIN_S, wait.says)


def _lost(item: Item, lease: Lease, why: str) -> None:
    """The source's bytes are gone or damaged. A last good checkpoint gives way to the one before it."""
    _end(item, lease, Item.State.MISSING, why)
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


@contextlib.contextmanager
def _locked(item: Item, lease: Lease) -> Iterator[Item]:
    """Lock dossier and item, in that order, under this worker's lease, for one transaction."""
    with transaction.atomic():
        lease.guard()
        dossier = (
            Dossier.objects.select_for_update(no_key=True, of=("self",))
            .select_related("run")
            .get(pk=item.dossier_id)
        )
        fresh = Item.objects.select_for_update(no_key=True).get(pk=item.pk)
        fresh.dossier = dossier
        yield fresh


class _Progress:
    """Bytes stored so far. Threads add, the worker's own thread writes, at most once a second."""

    def __init__(self, item: Item) -> None:
        self.item_id = item.pk
        self.bytes_done = 0
        self._shown_at = time.monotonic()
        self._stopped = False

    def add(self, count: int) -> None:
        if self._stopped:
            raise VaultError("stopped: another file of the item failed")
        # Not atomic between threads; the last value is set from the rows in the end.
        self.bytes_done += count

    def show(self, *, now: bool = False) -> None:
        if now or time.monotonic() - self._shown_at >= PROGRESS_EVERY_S:
            Item.objects.filter(pk=self.item_id, state=Item.State.COLLECTING).update(
                bytes_done=self.bytes_done
            )
            self._shown_at = time.monotonic()

    def stop(self) -> None:
        self._stopped = True


def _age_s(since: datetime) -> float:
    return (timezone.now() - since).total_seconds()
