"""The nightly fixity sweep: are the stored bytes still those that were sealed, and still as protected?

First every object's protection is read back: a store may forget its locks in a restart, and nothing may
go on saying "locked" then. Then bytes are read by version, the longest unchecked first, until the night's
budget is spent. Each object's result is committed by itself, so a killed sweep goes on where it was.
"""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import groupby
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError
from django.conf import settings
from django.db import transaction
from django.db.models import F, Q, QuerySet, Sum
from django.utils import timezone

from evidence import custody
from evidence.alarms import alarm
from evidence.hashing import PartHasher, chunks, part_bytes_for
from evidence.models import Item, StoredObject, StoreProbe
from evidence.proof.lost_locks import keeps
from evidence.stores.probe import probe_and_record
from evidence.stores.s3_lock import error_code
from evidence.vault import Vault, VaultError, vault
from runs.models import Work
from runs.work import Lease, Payload, Retry, enqueue, handler

log = logging.getLogger(__name__)

SWEEP = "evidence.fixity"
PAGE = 200
LOCK_THREADS = 8
# After this many objects that could not be read the store is away, not the objects.
MOST_UNREADABLE = 20
RETRY_S = 600
# A sweep that could not read everything gives way to the next night's.
GIVE_WAY = timedelta(hours=20)
_GONE = {"NoSuchKey", "NoSuchVersion", "404"}
_NAMED = 20  # paths in a custody row; the rest is counted

Guard = Callable[[], None]


@dataclass
class Swept:
    """What one sweep did. `unreadable` objects are neither good nor bad: they are tried again."""

    locks: int = 0
    lost: int = 0
    objects: int = 0
    bytes_read: int = 0
    mismatches: int = 0
    unreadable: int = 0


def ask() -> None:
    """Have tonight's sweep done, once: safe to ask every hour and by two schedulers."""
    night = timezone.now().date().isoformat()
    with transaction.atomic():
        if not Work.objects.filter(kind=SWEEP, key=night).exists():
            enqueue(kind=SWEEP, key=night, payload={"began": timezone.now().isoformat()})


@handler(SWEEP)
def sweep_work(payload: Payload, lease: Lease) -> None:
    """Do a night's sweep, or what an earlier try left of it."""
    began = datetime.fromisoformat(str(payload["began"]))
    try:
        done = sweep(began, budget_bytes=settings.FIXITY_BYTES, guard=lease.guard)
    except VaultError as error:
        raise Retry(RETRY_S, error.says) from error
    if done.unreadable:
        says = f"{done.unreadable} objects could not be read"
        if timezone.now() < began + GIVE_WAY:
            raise Retry(RETRY_S, says)
        log.error("fixity: %s in the whole night", says)


def sweep(began: datetime, *, budget_bytes: int, guard: Guard = lambda: None) -> Swept:
    """Look at every lock, then read at most `budget_bytes` (and the rest of the object begun last).

    Args:
        began: objects checked since then count to the budget and are not read again.
        guard: called in each transaction; raises when another worker took the sweep over.

    Raises:
        VaultError: the store does not answer.
    """
    store = vault()
    store.check()
    if not StoreProbe.objects.filter(store=store.name[:300], probed_at__gte=began).exists():
        probe_and_record(store)
    done = Swept()
    look_at_locks(store, done, guard)
    read = _stored().filter(checked_at__gte=began).aggregate(total=Sum("bytes_total"))["total"] or 0
    _read_bytes(store, done, guard, began, budget_bytes - read)
    return done


def _stored() -> QuerySet[StoredObject]:
    sealed = StoredObject.objects.filter(item__state=Item.State.SEALED, deleted_at=None)
    return sealed.select_related("item__dossier")


# --- locks


def look_at_locks(store: Vault, done: Swept, guard: Guard = lambda: None) -> None:
    """Read back what protects every object of a sealed item, and record what is gone or less than it was.

    Raises:
        VaultError: the store does not answer.
    """
    silent = 0
    for page in _pages():
        with ThreadPoolExecutor(LOCK_THREADS) as pool:
            answers = list(pool.map(lambda one: _protection(store, one), page))
        for item, group in groupby(zip(page, answers, strict=True), key=lambda pair: pair[0].item):
            changed = []
            for one, now in group:
                if isinstance(now, VaultError):
                    if _is_gone(now):
                        _record(one, "it is gone from the vault", "", done, guard)
                        continue
                    silent += 1
                    if silent >= MOST_UNREADABLE:
                        raise now
                    continue
                done.locks += 1
                if now != one.protected_by and not is_unknown(now):
                    changed.append((one, now))
            _refresh(item, changed, done, guard)


def _pages() -> Iterator[list[StoredObject]]:
    last = 0
    while page := list(_stored().filter(pk__gt=last).order_by("pk")[:PAGE]):
        yield sorted(page, key=lambda one: (one.item_id, one.pk))
        last = page[-1].pk


def _protection(store: Vault, one: StoredObject) -> dict[str, Any] | VaultError:
    try:
        now, over = store.protection(one.key, one.version_id), store.covered(one.key, one.version_id)
        return now | {"over": over} if over else now
    except VaultError as error:
        return error


def is_unknown(protection: dict[str, Any]) -> bool:
    """Return whether the store did not let us look: what was known before stays."""
    return str(protection.get("says", "")).startswith("unknown")


def is_less(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Return whether something that protected an object no longer does. A date that passed is no loss."""
    if before.get("legal_hold") and not now.get("legal_hold"):
        return True
    if before.get("mode") == "read-only" and now.get("mode") != "read-only":
        return True
    had, has = (datetime.fromisoformat(one["until"]) if one.get("until") else None for one in (before, now))
    return had is not None and had > timezone.now() and (has is None or has < had)


def _refresh(
    item: Item, changed: list[tuple[StoredObject, dict[str, Any]]], done: Swept, guard: Guard
) -> None:
    if not changed:
        return
    # After two people released it, locks go because they should.
    released = item.dossier.released_at is not None
    lost = [] if released else [(one, now) for one, now in changed if is_less(one.protected_by, now)]
    covered = [
        (one, now) for one, now in changed if now.get("over") and one.protected_by.get("over") != now["over"]
    ]
    with transaction.atomic():
        guard()
        less = {one.pk for one, _ in lost}
        for one, now in changed:
            fields: dict[str, Any] = {"protected_by": now}
            if one.pk in less:
                fields["lock_lost_at"] = one.lock_lost_at or timezone.now()
            elif keeps(now, item.lock):
                fields["lock_lost_at"] = None
            StoredObject.objects.filter(pk=one.pk).update(**fields)
        _tell(item, "protection lost", [(one, _before(one), str(now.get("says"))) for one, now in lost])
        _tell(item, "covered", [(one, "", f"{now['over']} lies over it") for one, now in covered])
    done.lost += len(lost)


def _before(one: StoredObject) -> str:
    return str(one.protected_by.get("says", ""))


def _tell(item: Item, what: str, found: list[tuple[StoredObject, str, str]]) -> None:
    """Write one custody row for all objects of an item, and raise one alarm."""
    if not found:
        return
    _, before, now = found[0]
    custody.append(
        item.dossier,
        what,
        item_name=item.name,
        data={
            "objects": len(found),
            "paths": [one.path for one, _, _ in found[:_NAMED]],
            "before": before,
            "now": now,
        },
    )
    change = f"were {before}, now {now}" if before else f"are no longer the newest: {now}"
    says = f"{item.name}: {len(found)} objects {change}"
    transaction.on_commit(lambda: alarm(item.dossier, what, says), robust=True)


# --- bytes


def _read_bytes(store: Vault, done: Swept, guard: Guard, began: datetime, left: int) -> None:
    unreadable: set[int] = set()
    while left > 0:
        one = (
            _stored()
            .filter(Q(checked_at=None) | Q(checked_at__lt=began))
            .exclude(pk__in=unreadable)
            .order_by(F("checked_at").asc(nulls_first=True), "id")
            .first()
        )
        if one is None:
            return
        left -= one.bytes_total
        try:
            hasher = read_back(store, one)
        except (VaultError, BotoCoreError, OSError) as error:
            if isinstance(error, VaultError) and _is_gone(error):
                _record(one, "it is gone from the vault", "", done, guard)
                continue
            log.warning("fixity: %s could not be read: %s", one.key, error)
            unreadable.add(one.pk)
            done.unreadable += 1
            if done.unreadable >= MOST_UNREADABLE:
                return
            continue
        done.bytes_read += hasher.bytes_total
        _record(one, difference(one, hasher), hasher.sha256, done, guard)


def read_back(store: Vault, one: StoredObject) -> PartHasher:
    """Return the digests of a stored object as it is now; one that grew is read a little beyond its end."""
    hasher = PartHasher(one.part_bytes or part_bytes_for(one.bytes_total))
    with store.open(one.key, one.version_id) as file:
        for data in chunks(file, one.bytes_total + 1):
            hasher.update(data)
    return hasher


def difference(one: StoredObject, read: PartHasher) -> str:
    """Return in words how the bytes read differ from those stored, "" when they do not."""
    if read.bytes_total != one.bytes_total:
        more = "more than " if read.bytes_total > one.bytes_total else f"{read.bytes_total} of "
        return f"it has {more}{one.bytes_total} bytes"
    wrong = [
        number
        for number, (was, now) in enumerate(zip(one.part_sha256, read.parts, strict=False))
        if was != now
    ]
    if wrong:
        ends = ((number * read.part_bytes, (number + 1) * read.part_bytes) for number in wrong[:_NAMED])
        ranges = ", ".join(f"{start}–{min(end, one.bytes_total) - 1}" for start, end in ends)
        more = f" and {len(wrong) - _NAMED} more parts" if len(wrong) > _NAMED else ""
        return f"bytes {ranges}{more} are not those that were stored"
    if read.sha256 != one.sha256 or (one.part_sha256 and len(one.part_sha256) != len(read.parts)):
        return "its bytes do not have the digest they were stored with"
    return ""


def _record(one: StoredObject, says: str, sha256: str, done: Swept, guard: Guard) -> None:
    """Commit what was found of one object; a mismatch is a custody row and an alarm, once."""
    dossier, name = one.item.dossier, one.item.name
    done.objects += 1
    done.mismatches += bool(says)
    with transaction.atomic():
        guard()
        StoredObject.objects.filter(pk=one.pk).update(checked_at=timezone.now(), mismatch=says)
        if bool(says) == bool(one.mismatch):
            return
        custody.append(
            dossier,
            "fixity mismatch" if says else "fixity restored",
            item_name=name,
            object_sha256=one.sha256,
            data={
                "path": one.path,
                "key": one.key,
                "version_id": one.version_id,
                "read": sha256,
                "says": says,
            },
        )
        if says:
            told = f"{name}, {one.path}: {says}"
            transaction.on_commit(lambda: alarm(dossier, "fixity mismatch", told), robust=True)


def _is_gone(error: VaultError) -> bool:
    cause = error.__cause__
    return isinstance(cause, FileNotFoundError) or (
        isinstance(cause, ClientError) and error_code(cause) in _GONE
    )


# --- what pages say


@dataclass(frozen=True, slots=True)
class Health:
    """The state of all stored objects: how many, how many never checked, how many wrong, and since when."""

    objects: int
    unchecked: int
    mismatches: int
    oldest: datetime | None
    swept_at: datetime | None


def health() -> Health:
    """Return what the sweeps know by now."""
    stored = _stored()
    last = Work.objects.filter(kind=SWEEP, state=Work.State.DONE).order_by("-finished_at").first()
    checked = stored.exclude(checked_at=None)
    oldest = checked.order_by("checked_at").values_list("checked_at", flat=True).first()
    return Health(
        objects=stored.count(),
        unchecked=stored.filter(checked_at=None).count(),
        mismatches=stored.exclude(mismatch="").count(),
        oldest=oldest,
        swept_at=last.finished_at if last is not None else None,
    )
