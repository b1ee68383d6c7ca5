"""How long evidence is kept: a short first date, a later one at close-out and while a dossier is open.

The promise is an item's `retain_until`, written first; the store follows by work, and what it answered
is read back into `protected_by`. No date moves earlier: not here, not in the database (a trigger), and
not in the store, which is never sent one.
"""

import logging
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta

from django.db import connection, transaction
from django.db.models import Q, QuerySet
from django.utils import timezone

from evidence import custody
from evidence.models import Dossier, Item, StoredObject
from evidence.proof.lost_locks import keeps
from evidence.refused import Refused
from evidence.retention.two_people import ASKERS, Reason, locked, need_role
from evidence.vault import VaultError, vault
from runs.locks import lock_run
from runs.models import Person, Role
from runs.work import Lease, Payload, Retry, enqueue, handler

log = logging.getLogger(__name__)

# The first date is short on purpose: a lock can always be extended at close-out, never shortened.
FIRST_RETENTION = timedelta(days=14)
# An open dossier's locks are extended this long before they end: a store that is away over a long
# weekend costs nothing.
RENEW_BEFORE = timedelta(days=4)
EXTEND = "evidence.extend"  # kind of the work that tells the store a later date
_THREADS = 16
CLOSERS = ASKERS
EXTENDERS = (Role.APPROVER, Role.VAULT_OFFICER, Role.ADMIN)
_DECADE = timedelta(days=3660)  # further than this is a typing mistake, and a lock cannot be taken back


def first_date(retain_days: int, now: datetime) -> datetime:
    """Return until when an item is kept at first."""
    return now + min(FIRST_RETENTION, timedelta(days=retain_days))


def close_out(dossier: Dossier, *, why: str, who: str = custody.ANDON) -> None:
    """Close a dossier and keep each item for its policy's days from now; the run lock is held.

    Does nothing to one that is closed already.

    Args:
        who: opaque id of a person; Andon itself when its incident ended.
    """
    fresh = Dossier.objects.select_for_update(no_key=True, of=("self",)).get(pk=dossier.pk)
    if fresh.closed_at is not None:
        return
    now = timezone.now()
    fresh.closed_at = dossier.closed_at = now
    fresh.save(update_fields=["closed_at"])
    items = list(_items(fresh))
    dates = {item.pk: now + timedelta(days=item.retain_days) for item in items}
    _promise(fresh, items, dates, what="closed", who=who, why=why)


def why_not_close(dossier: Dossier) -> Reason:
    """Return what stands in the way of closing a dossier by hand, None when nothing does."""
    if dossier.closed_at is not None:
        return "closed-already", f"It was closed on {dossier.closed_at:%d %b %Y}."
    if dossier.url:
        return "belongs", f"It belongs to {dossier.label} and closes when that is resolved."
    return None


def if_closed(dossier: Dossier) -> dict[str, str]:
    """Return until when an open dossier's items are kept if it is closed now, as its page says it."""
    now = timezone.now()
    items = Item.objects.filter(dossier=dossier).values_list("retain_days", "retain_until")
    dates = [max(now + timedelta(days=days), until or now) for days, until in items]
    if dossier.closed_at is not None or not dates:
        return {}
    return {"If closed now": f"the last of its items is kept until {max(dates):%d %b %Y}"}


def close_dossier(*, dossier: Dossier, person: Person, why: str) -> Dossier:
    """Close a dossier that was opened by hand; one of an incident closes with its incident.

    Raises:
        Refused: not-allowed, reason-needed, or a code of `why_not_close`.
    """
    with locked(dossier) as fresh:
        need_role(fresh, person, "close it", *CLOSERS)
        if not why.strip():
            raise Refused("reason-needed", "Say why nothing more will be collected.")
        if reason := why_not_close(fresh):
            raise Refused(*reason)
        close_out(fresh, why=why.strip(), who=str(person.opaque_id))
    dossier.refresh_from_db()
    return dossier


def why_not_extend(dossier: Dossier) -> Reason:
    """Return what stands in the way of any later date, None when nothing does."""
    if dossier.released_at is not None:
        return "released", f"It was released on {dossier.released_at:%d %b %Y}."
    if not _extendable(dossier).exists():
        return "nothing", "It has no item whose date can move: under COMPLIANCE a date is final."
    return None


def why_not_until(dossier: Dossier, until: datetime) -> Reason:
    """Return why a dossier cannot be kept until `until`, None when it can."""
    if reason := why_not_extend(dossier):
        return reason
    if until > timezone.now() + _DECADE:
        return "too-far", "More than ten years ahead: a lock cannot be taken back."
    if not extended_by(dossier, until).exists():
        return "not-later", "Every item is kept that long already; no date moves earlier."
    return None


def extended_by(dossier: Dossier, until: datetime) -> QuerySet[Item]:
    """Return the items that `until` keeps longer."""
    return _extendable(dossier).filter(Q(retain_until=None) | Q(retain_until__lt=until))


def _extendable(dossier: Dossier) -> QuerySet[Item]:
    # What is under COMPLIANCE has the date two people confirmed; a legal hold keeps it beyond.
    return Item.objects.filter(dossier=dossier).exclude(lock="compliance").defer("files", "source")


def extend_retention(*, dossier: Dossier, person: Person, until: datetime, why: str) -> Dossier:
    """Keep the items of a dossier until `until` at least; what is kept longer stays so.

    Raises:
        Refused: not-allowed, reason-needed, or a code of `why_not_until`.
    """
    with locked(dossier) as fresh:
        need_role(fresh, person, "keep it longer", *EXTENDERS)
        if not why.strip():
            raise Refused("reason-needed", "Say why it is kept longer.")
        if reason := why_not_until(fresh, until):
            raise Refused(*reason)
        items = [item for item in _items(fresh) if item.lock != "compliance"]
        dates = {item.pk: until for item in items}
        _promise(fresh, items, dates, what="extended", who=str(person.opaque_id), why=why.strip())
    return dossier


def renew_open(now: datetime | None = None) -> int:
    """Extend what would expire soon although its dossier is open; returns how many dossiers were.

    Safe to run twice and in two places at once.
    """
    now = now or timezone.now()
    soon = Dossier.objects.filter(
        closed_at=None, released_at=None, items__retain_until__lt=now + RENEW_BEFORE
    ).distinct()
    renewed = 0
    for dossier_id, run_id in soon.values_list("pk", "run_id"):
        with transaction.atomic():
            lock_run(run_id)
            dossier = Dossier.objects.select_for_update(no_key=True).get(pk=dossier_id)
            if dossier.closed_at is not None:
                continue
            items = [item for item in _items(dossier) if _ends_before(item, now + RENEW_BEFORE)]
            dates = {item.pk: now + FIRST_RETENTION for item in items}
            _promise(dossier, items, dates, what="extended", why="its dossier is still open")
            renewed += bool(items)
    return renewed


def ask(item: Item) -> None:
    """Have the store told the item's date and lock, after the caller's transaction."""
    enqueue(kind=EXTEND, key=str(item.pk), payload={"item": item.pk})


def falls_short(item: Item) -> bool:
    """Return whether the store locks any of the item's objects for less long, or less hard, than promised.

    One without a date lies in a store that locks nothing: asking again would not change that.
    """
    until = item.retain_until
    if item.lock in {"none", "legal_hold"} or until is None:
        return False
    objects = StoredObject.objects.filter(item=item, deleted_at=None)
    dated = [one for one in objects if one.protected_by.get("until")]
    if item.lock == "compliance" and any(one.protected_by.get("mode") != "COMPLIANCE" for one in dated):
        return True
    return any(not _reaches(one, until) for one in dated)


def _items(dossier: Dossier) -> Iterable[Item]:
    return (
        Item.objects.select_for_update(no_key=True)
        .filter(dossier=dossier)
        .defer("files", "source")
        .order_by("order", "id")
    )


def _is_later(until: datetime, item: Item) -> bool:
    return item.retain_until is None or item.retain_until < until


def _ends_before(item: Item, moment: datetime) -> bool:
    return item.retain_until is not None and item.retain_until < moment


def _promise(
    dossier: Dossier,
    items: Iterable[Item],
    dates: dict[int, datetime],
    *,
    what: str,
    why: str,
    who: str = custody.ANDON,
) -> None:
    """Write later dates where they are later, one custody row about all, and the work for the store."""
    changed = [item for item in items if _is_later(dates[item.pk], item)]
    for item in changed:
        item.retain_until = dates[item.pk]
        ask(item)
    Item.objects.bulk_update(changed, ["retain_until"])
    until = [{"item": item.name, "until": custody.stamp(dates[item.pk])} for item in changed]
    custody.append(dossier, what, who=who, data={"why": why, "kept_until": until})


@handler(EXTEND)
def follow(payload: Payload, lease: Lease) -> None:
    """Lock an item's stored objects until its date, and record what the store answers afterwards."""
    item = Item.objects.select_related("dossier").defer("files", "source").get(pk=int(str(payload["item"])))
    objects = list(StoredObject.objects.filter(item=item, deleted_at=None).order_by("path"))
    until = item.retain_until
    if item.lock == "none" or until is None or not objects or item.dossier.released_at is not None:
        return
    store = vault()

    def extend(one: StoredObject) -> StoredObject:
        try:
            one.protected_by = store.extend(one.key, one.version_id, item.lock, until)
            if keeps(one.protected_by, item.lock):
                one.lock_lost_at = None
        finally:
            connection.close()  # of this thread, should the store have asked the database
        return one

    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            extended = list(pool.map(extend, objects))
    except VaultError as error:
        raise Retry(None, error.says) from error
    says = Counter(str(one.protected_by.get("says", "")) for one in extended)
    with transaction.atomic():
        lease.guard()
        Dossier.objects.select_for_update(no_key=True).get(pk=item.dossier_id)
        StoredObject.objects.bulk_update(extended, ["protected_by", "lock_lost_at"], batch_size=500)
        custody.append(
            item.dossier,
            "lock extended",
            item_name=item.name,
            data={
                "asked_until": custody.stamp(until),
                "lock": item.lock,
                "objects": len(extended),
                "store_says": dict(says.most_common(5)),
            },
        )
    if item.lock != "legal_hold" and any(not _reaches(one, until) for one in extended):
        log.warning("item %s: not everything is locked until %s: %s", item.pk, until.date(), dict(says))


def _reaches(one: StoredObject, until: datetime) -> bool:
    locked_until = one.protected_by.get("until")
    # Stores keep whole seconds.
    return bool(locked_until) and datetime.fromisoformat(locked_until) >= until.replace(microsecond=0)
