"""What lies in the vault and in no item's table: every stored version has a row that says why it is there.

A worker killed between storing and noting, a file gathered anew with other bytes, an upload that ended
after its item: the store then keeps, and locks, a version that nobody counts on. Listing the store under
the dossier's keys finds each, whatever left it. It is kept like its item, and goes with the dossier.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import Count, Sum
from django.utils import timezone

from evidence.models import AgentTask, Dossier, Item, Leftover, StoredObject
from evidence.proof.seals import FINAL
from evidence.stores.intake import intake
from evidence.vault import KEYS, Listed, VaultError, vault
from runs.work import Lease, Payload, Retry, enqueue, handler

log = logging.getLogger(__name__)

FIND = "evidence.leftovers"
# Several items of a dossier end close together: one listing serves them.
SOON = timedelta(seconds=60)


def ask(dossier: Dossier) -> None:
    """Have a dossier's keys compared with its rows soon, after the caller's transaction."""
    enqueue(kind=FIND, key=str(dossier.pk), payload={"dossier": dossier.pk}, not_before=timezone.now() + SOON)


@handler(FIND)
def find_work(payload: Payload, lease: Lease) -> None:
    """Find what is left over of a dossier's items that have ended."""
    dossier = Dossier.objects.get(pk=int(str(payload["dossier"])))
    try:
        find(dossier)
    except VaultError as error:
        raise Retry(None, error.says) from error


def find(dossier: Dossier) -> int:
    """Give every version that no row names a row of its own; returns how many are new.

    Only of items that have ended: what is stored for others may just not be noted yet. Safe to repeat.

    Raises:
        VaultError: the store did not answer.
    """
    new = take(dossier, vault().listed(f"{KEYS}{dossier.uid}/"))
    _forget_uploads(dossier)
    return new


def take(dossier: Dossier, listed: Iterable[Listed]) -> int:
    """Do the same with what a listing of the dossier's keys said; returns how many are new.

    Raises:
        VaultError: as `find`.
    """
    store = vault()
    items = {item.pk: item for item in _ended(dossier)}
    named = set(StoredObject.objects.filter(item__dossier=dossier).values_list("key", "version_id"))
    known = set(Leftover.objects.filter(item__dossier=dossier).values_list("key", "version_id"))
    found: list[Leftover] = []
    for one in listed:
        item = items.get(item_of(one))
        if item is None or (one.key, one.version_id) in named | known:
            continue
        found.append(
            Leftover(
                item=item,
                key=one.key,
                version_id=one.version_id,
                bytes_total=one.bytes_total,
                why=_why(item, one, named),
                protected_by=store.protection(one.key, one.version_id),
                stored_at=one.stored_at,
                found_at=timezone.now(),
            )
        )
    Leftover.objects.bulk_create(found, ignore_conflicts=True, batch_size=500)
    if found:
        log.warning("dossier %s: %d stored versions that no item counts on", dossier.pk, len(found))
    return len(found)


def _ended(dossier: Dossier) -> list[Item]:
    return list(Item.objects.filter(dossier=dossier, state__in=FINAL).defer("files", "source"))


def item_of(one: Listed) -> int:
    """Return the id of the item that a version was stored for, 0 where its key names none."""
    number = one.key.split("/")[2] if one.key.count("/") >= 2 else ""
    return int(number) if number.isascii() and number.isdecimal() else 0


def _why(item: Item, one: Listed, named: set[tuple[str, str]]) -> str:
    if any(key == one.key for key, _ in named):
        return "a second upload of bytes that the item has: an earlier or a later try made it"
    if item.state == Item.State.SEALED:
        return "of a try that was cut, or gathered anew with other bytes: the item is sealed without it"
    return f"stored before the item ended {item.get_state_display().lower()}"


def _forget_uploads(dossier: Dossier) -> None:
    """Drop the parts of uploads that were cut: their items have ended without them."""
    cut = AgentTask.objects.filter(
        item__dossier=dossier, act=AgentTask.Act.UPLOAD, item__state__in=FINAL, done_at=None, arrived_at=None
    ).exclude(store_upload="")
    for task in cut.select_related("item__dossier", "run"):
        intake().forget(task)
        with transaction.atomic():
            AgentTask.objects.filter(pk=task.pk, store_upload=task.store_upload).update(
                store_upload="", bytes_done=0
            )


# --- what pages say


@dataclass(frozen=True, slots=True)
class AlsoKept:
    """Objects that are kept beside what is sealed: of which item, why, and until when at least."""

    item: Item
    objects: int
    bytes_total: int
    why: str
    until: datetime | None


def also_kept(dossier: Dossier) -> list[AlsoKept]:
    """Return what lies in the vault for a dossier and is in no seal: of missing items, and left over."""
    items = {item.pk: item for item in _ended(dossier)}
    cut = StoredObject.objects.filter(item__in=items, deleted_at=None).exclude(item__state=Item.State.SEALED)
    left = Leftover.objects.filter(item__in=items, deleted_at=None)
    found = [
        (row["item"], row["n"], row["total"], f"the item is missing: {items[row['item']].why}")
        for row in cut.values("item").annotate(n=Count("id"), total=Sum("bytes_total")).order_by("item")
    ]
    found += [
        (row["item"], row["n"], row["total"], row["why"])
        for row in left.values("item", "why")
        .annotate(n=Count("id"), total=Sum("bytes_total"))
        .order_by("item", "why")
    ]
    return [
        AlsoKept(items[item_id], objects, total, why, items[item_id].retain_until)
        for item_id, objects, total, why in found
    ]
