"""After a restore from a backup: the vault and the rows compared, version by version.

The vault did not go back in time with the database. It has versions that were stored after the backup, of
items and whole dossiers that no row knows; it may lack what was deleted since; its dates may be later than
the rows remember, and a date that was promised stays. What a row claims and the store does not have is not
left standing. Each chain goes on from where the backup left it, and says so in its next row: whoever
holds a bag of the time between has later rows, and can see from both that a chain was cut, not forged.
"""

import uuid
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby, islice
from typing import Any

from django.db import connection
from django.utils import timezone

from evidence import custody
from evidence.models import (
    Dossier,
    Item,
    Leftover,
    Reconciliation,
    StoredObject,
    UnknownVersion,
    VaultRequest,
)
from evidence.plan import START
from evidence.proof import fixity, leftovers
from evidence.proof.seals import FINAL
from evidence.retention.two_people import locked
from evidence.vault import KEYS, Listed, Vault, VaultError, vault
from runs.work import enqueue

RESTORED = "restored from a backup"  # the custody row
WHY = "the database was restored from a backup: ask again"
_THREADS = 16
_AT_ONCE = 1000
_MOST_IDS = 1_000_000  # further apart than this, the ids in the vault are no ids of ours


@dataclass
class _Found:
    """What the listing said of one dossier."""

    versions: int = 0
    left_over: int = 0  # of items that have ended, and in no row: they have one now
    unknown: int = 0  # of items that no row knows
    lacking: int = 0  # sealed, by the rows, and not in the vault
    copied_again: int = 0  # noted as stored for an item that is not sealed, and not in the vault


def reconcile() -> Reconciliation:
    """Compare the vault with the rows, and make what each dossier's rows and chain say true again.

    Safe to run twice; what was cut is done by running it again.

    Raises:
        VaultError: the vault does not answer.
    """
    store = vault()
    store.check()
    made = Reconciliation.objects.create(store=store.name[:300], began_at=timezone.now())
    tally: Counter[str] = Counter()
    found: dict[int, _Found] = {}
    left = {str(uid): pk for uid, pk in Dossier.objects.values_list("uid", "pk")}
    highest = 0
    for uid, group in groupby(store.listed(KEYS), key=_dossier_of):
        versions = list(group)
        highest = max(highest, *(leftovers.item_of(one) for one in versions))
        pk = left.pop(uid, None) or _opened_meanwhile(uid)
        if pk is None:
            tally.update(unknown=_unknown(made, store, versions), versions=len(versions))
        else:
            found[pk] = _compare(made, store, Dossier.objects.get(pk=pk), versions)
    for pk in left.values():
        found[pk] = _compare(made, store, Dossier.objects.get(pk=pk), [])
    _pass_ids(highest)
    # What is gone, or less protected than its row says, is found, noted and told as the nightly sweep does.
    swept = fixity.Swept()
    fixity.look_at_locks(store, swept)
    for pk in sorted(found):
        tally.update(_go_on(Dossier.objects.get(pk=pk), found[pk]))
    tally.update(lost_locks=swept.lost, dossiers=len(found))
    made.done_at, made.result = timezone.now(), {name: tally[name] for name in _TOLD}
    made.save(update_fields=["done_at", "result"])
    return made


_TOLD = (
    *("dossiers", "versions", "unknown", "left_over", "lacking", "copied_again"),
    *("kept_longer", "lost_locks", "requests_declined"),
)


def _opened_meanwhile(uid: str) -> int | None:
    """Return a dossier that workers have opened since: they need not stand still."""
    try:
        return Dossier.objects.filter(uid=uuid.UUID(uid)).values_list("pk", flat=True).first()
    except ValueError:  # no name of ours
        return None


def _dossier_of(one: Listed) -> str:
    return one.key.removeprefix(KEYS).split("/", 1)[0]


# --- versions against rows


def _compare(made: Reconciliation, store: Vault, dossier: Dossier, versions: list[Listed]) -> _Found:
    there = {(one.key, one.version_id) for one in versions}
    items = set(Item.objects.filter(dossier=dossier).values_list("pk", flat=True))
    strange = [one for one in versions if leftovers.item_of(one) not in items]
    # What was stored since the listing began is not in it.
    rows = StoredObject.objects.filter(item__dossier=dossier, deleted_at=None, stored_at__lt=made.began_at)
    gone = [one for one in rows.select_related("item") if (one.key, one.version_id) not in there]
    again = [one.pk for one in gone if one.item.state != Item.State.SEALED]
    # A worker that found such a row would count on bytes that are not there.
    StoredObject.objects.filter(pk__in=again).delete()
    for one in Leftover.objects.filter(item__dossier=dossier, deleted_at=None):
        if (one.key, one.version_id) not in there:
            Leftover.objects.filter(pk=one.pk).update(deleted_at=timezone.now())
    return _Found(
        versions=len(versions),
        left_over=leftovers.take(dossier, versions),
        unknown=_unknown(made, store, strange),
        lacking=len(gone) - len(again),
        copied_again=len(again),
    )


def _unknown(made: Reconciliation, store: Vault, versions: Iterable[Listed]) -> int:
    """List versions that no row knows, with what protects each; returns how many there are."""

    def listed(one: Listed) -> UnknownVersion:
        try:
            protected_by = store.protection(one.key, one.version_id)
        except VaultError as error:
            protected_by = {"says": f"unknown: {error.says}"}
        finally:
            connection.close()  # of this thread, should the store have asked the database
        return UnknownVersion(
            reconciliation=made,
            key=one.key,
            version_id=one.version_id,
            bytes_total=one.bytes_total,
            stored_at=one.stored_at,
            protected_by=protected_by,
        )

    count, rest = 0, iter(versions)
    while some := list(islice(rest, _AT_ONCE)):
        with ThreadPoolExecutor(_THREADS) as pool:
            UnknownVersion.objects.bulk_create(list(pool.map(listed, some)))
        count += len(some)
    return count


def _pass_ids(used: int) -> None:
    """Give no new item an id that a key in the vault names already: its versions would seem to be its own."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT nextval(pg_get_serial_sequence('evidence_item', 'id'))")
        gap = used - int(cursor.fetchone()[0])
        if 0 < gap < _MOST_IDS:  # whoever may not set a sequence may still count it up
            cursor.execute(
                "SELECT count(nextval(pg_get_serial_sequence('evidence_item', 'id')))"
                " FROM generate_series(1, %s)",
                [gap],
            )


# --- each dossier goes on


def _go_on(dossier: Dossier, found: _Found) -> dict[str, int]:
    """Keep the store's later dates, void what waits for a second person, say so, and collect the rest."""
    with locked(dossier) as fresh:
        later = _keep_later(fresh)
        declined = _decline(fresh)
        last = fresh.custody.order_by("-seq").first()
        seal = fresh.seals.order_by("-number").first()
        data: dict[str, Any] = {
            "says": "rows and seals written after the backup are not in this chain; it goes on from here",
            "last_seal": "" if seal is None else seal.digest,
            "versions": found.versions,
            "left_over": found.left_over,
            "unknown": found.unknown,
            "lacking": found.lacking,
            "copied_again": found.copied_again,
            "kept_until": later,
            "requests_declined": declined,
        }
        # Run twice with nothing between, it says nothing new.
        if last is None or last.what != RESTORED or _changes(last.data, data):
            custody.append(fresh, RESTORED, data=data)
        open_items = Item.objects.filter(dossier=fresh).exclude(state__in=FINAL)
        if fresh.released_at is None and open_items.exists():
            enqueue(kind=START, key=str(fresh.pk), payload={"dossier": fresh.pk})
    return {
        "versions": found.versions,
        "left_over": found.left_over,
        "unknown": found.unknown,
        "lacking": found.lacking,
        "copied_again": found.copied_again,
        "kept_longer": len(later),
        "requests_declined": len(declined),
    }


def _changes(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Return whether a second run found something new; what the first one mended is no news."""
    same = ("versions", "unknown", "lacking")
    news = ("left_over", "copied_again", "kept_until", "requests_declined")
    return any(before.get(name) != now[name] for name in same) or any(now[name] for name in news)


def _keep_later(dossier: Dossier) -> list[dict[str, str]]:
    """Take over dates, and a COMPLIANCE, that the store has and the rows have forgotten."""
    told = []
    items = Item.objects.select_for_update(no_key=True).filter(dossier=dossier, state=Item.State.SEALED)
    for item in items.defer("files", "source").order_by("pk"):
        kept = StoredObject.objects.filter(item=item, deleted_at=None).values_list("protected_by", flat=True)
        by = [one for one in kept if one.get("until")]
        until = max((datetime.fromisoformat(one["until"]) for one in by), default=None)
        if any(one.get("mode") == "COMPLIANCE" for one in by):
            item.lock = "compliance"
        if until is not None and (item.retain_until is None or until > item.retain_until):
            item.retain_until = until
            told.append({"item": item.name, "until": custody.stamp(until)})
        item.save(update_fields=["lock", "retain_until"])
    return told


def _decline(dossier: Dossier) -> list[str]:
    """End what one person asked and nobody agreed to: whoever agrees must have read what is true now."""
    waiting = VaultRequest.objects.filter(dossier=dossier, state=VaultRequest.State.OPEN)
    kinds = [str(kind) for kind in waiting.order_by("pk").values_list("kind", flat=True)]
    waiting.update(state=VaultRequest.State.DECLINED, decided_at=timezone.now(), decided_why=WHY)
    return kinds
