"""From held to sealed: the bytes are stored, verified, and in a signed manifest."""

import contextlib
import time
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any

from django.db import connection, transaction
from django.utils import timezone

from andon import chain
from evidence import custody
from evidence.agents import node_trees, node_work
from evidence.collecting.gathering import Piece, gather, held_pieces, is_held_first, newly_offered
from evidence.collecting.turn import locked
from evidence.freezing.holds import hold_uris
from evidence.hashing import digest_of
from evidence.holding.places import changed_since
from evidence.models import Dossier, Item, Reconciliation, StoredObject
from evidence.proof import leftovers, seals
from evidence.retention import dates
from evidence.sources import NodeSource
from evidence.stores import spool
from evidence.stores.probed import newest_result
from evidence.vault import BytesDiffer, Stored, VaultError, key_for, vault
from runs.locks import lock_run
from runs.work import Lease

PROGRESS_EVERY_S = 1.0


def copy(item: Item, dossier: Dossier, lease: Lease) -> None:
    """Store what the item is made of and seal it.

    Raises:
        NotYet, Nothing, DoesNotApply, OnNode: see `gather`.
        BytesDiffer, SourceError, VaultError: see `Vault.store`.
    """
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
    with locked(item, lease) as fresh:
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
    with locked(item, lease) as fresh:
        if fresh.state in seals.FINAL:
            return False
        # After a restore the vault may have what no row remembers: then it is looked for, and taken up.
        restored = Reconciliation.objects.filter(began_at__gte=fresh.dossier.opened_at).exists()
        first = bool(fresh.state != Item.State.COLLECTING and not restored)
        fresh.state = Item.State.COLLECTING
        fresh.bytes_total = sum(piece.source.bytes_total for piece in pieces)
        fresh.bytes_done = 0
        if fresh.silent_since is None and fresh.trouble_since is None:
            fresh.why = ""  # else what is said of earlier tries stands until bytes move (see `_Progress`)
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
            progress.begin_at(known.bytes_total)
        elif isinstance(piece.source, NodeSource):
            elsewhere.append((piece.path, piece.source, piece.sha256))
        else:
            todo.append(piece)
    node_work.ask(item, elsewhere)
    with ThreadPoolExecutor(store.at_once) as pool:
        futures = [pool.submit(one, piece) for piece in todo]
        ended: SimpleQueue[Future[tuple[Piece, Stored]]] = SimpleQueue()
        for future in futures:
            future.add_done_callback(ended.put)
        left = len(futures)
        try:
            while left:
                # Not only when a file ends: one file can be all there is, and take hours.
                with contextlib.suppress(Empty):
                    piece, stored = ended.get(timeout=PROGRESS_EVERY_S).result()
                    left -= 1
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
    with locked(item, lease) as fresh:
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
        fresh.silent_since, fresh.trouble_since, fresh.why = None, None, ""
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


class _Progress:
    """Bytes stored so far. Threads add, the worker's own thread writes, at most once a second."""

    def __init__(self, item: Item) -> None:
        self.item = item
        self.bytes_done = 0
        self._has_moved = False
        self._shown_at = time.monotonic()
        self._stopped = False

    def begin_at(self, count: int) -> None:
        """Count what an earlier try has stored."""
        self.bytes_done += count

    def add(self, count: int) -> None:
        if self._stopped:
            raise VaultError("stopped: another file of the item failed")
        # Not atomic between threads; the last value is set from the rows in the end.
        self.bytes_done += count
        self._has_moved = self._has_moved or count > 0

    def show(self, *, now: bool = False) -> None:
        if now or time.monotonic() - self._shown_at >= PROGRESS_EVERY_S:
            fresh: dict[str, Any] = {"bytes_done": self.bytes_done}
            if self._has_moved:  # source and vault both did their part
                self.item.silent_since = self.item.trouble_since = None
                fresh |= {"silent_since": None, "trouble_since": None, "why": ""}
            Item.objects.filter(pk=self.item.pk, state=Item.State.COLLECTING).update(**fresh)
            self._shown_at = time.monotonic()

    def stop(self) -> None:
        self._stopped = True
