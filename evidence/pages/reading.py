"""One dossier, item or object as its page shows it: what is kept, how it is protected, who touched it."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db.models import Count, Max, Q, QuerySet, Sum
from django.utils import timezone

from andon import chain
from evidence import custody
from evidence.models import CustodyRow, Dossier, Hold, Item, StoredObject
from evidence.pages.listing import names
from evidence.pages.overview import Cost, cost_of, prices
from evidence.queries import visible_dossiers
from evidence.retention import dates
from evidence.stores.probed import newest_result
from evidence.vault import vault
from runs import formatting
from runs.models import Person, Work

# What people took out or looked at, beside what was done to the evidence.
ACCESS = ("downloaded", "exported bag", "export failed", "excerpt read", "samples read", "checkpoint read")


@dataclass(frozen=True, slots=True)
class Keeping:
    """What a dossier costs and how long it is kept: now, and once everything known is stored."""

    bytes_now: int
    bytes_all: int
    objects: int
    cost_now: Cost
    cost_all: Cost
    kept_until: datetime | None  # the last date of its items


@dataclass(frozen=True, slots=True)
class Longer:
    """What a later date keeps longer, how many days at most, and what that costs a month."""

    until: datetime
    items: int
    days: int
    bytes_total: int
    cost: Cost


@dataclass(frozen=True, slots=True)
class CustodyLine:
    """One row of the chain with its own check, "" when it fits."""

    row: CustodyRow
    who: str
    wrong: str


def keeping(dossier: Dossier) -> Keeping:
    """Return bytes, objects, monthly cost and last date, before and after the rest is copied."""
    kept = StoredObject.objects.filter(item__dossier=dossier, deleted_at=None)
    now = kept.aggregate(n=Count("id"), total=Sum("bytes_total"))
    items = Item.objects.filter(dossier=dossier)
    planned = items.exclude(state__in=[Item.State.NOT_APPLICABLE, Item.State.MISSING])
    bytes_now = now["total"] or 0
    bytes_all = max(bytes_now, planned.aggregate(total=Sum("bytes_total"))["total"] or 0)
    priced = prices({dossier.run})[dossier.run_id]
    return Keeping(
        bytes_now=bytes_now,
        bytes_all=bytes_all,
        objects=now["n"],
        cost_now=cost_of(bytes_now, priced),
        cost_all=cost_of(bytes_all, priced),
        kept_until=items.aggregate(last=Max("retain_until"))["last"],
    )


def longer(dossier: Dossier, until: datetime) -> Longer:
    """Return what it costs to keep a dossier's items until `until`, at the prices of its policy."""
    items = list(dates.extended_by(dossier, until))
    kept = StoredObject.objects.filter(item__in=items, deleted_at=None)
    total = kept.aggregate(total=Sum("bytes_total"))["total"] or 0
    now = timezone.now()
    return Longer(
        until=until,
        items=len(items),
        days=max(((until - (item.retain_until or now)).days for item in items), default=0),
        bytes_total=total,
        cost=cost_of(total, prices({dossier.run})[dossier.run_id]),
    )


def custody_lines(
    dossier: Dossier, *, before: int | None = None, limit: int = 100, only: Q | None = None
) -> list[CustodyLine]:
    """Return custody rows newest first, each checked against its own digest and the row before it."""
    found = CustodyRow.objects.filter(dossier=dossier)
    if before is not None:
        found = found.filter(seq__lt=before)
    if only is not None:
        found = found.filter(only)
    rows = list(found.order_by("-seq")[:limit])
    earlier = {row.seq - 1 for row in rows}
    digests = dict(CustodyRow.objects.filter(dossier=dossier, seq__in=earlier).values_list("seq", "digest"))
    people = names([row.who for row in rows])
    return [
        CustodyLine(
            row,
            "Andon" if row.who == custody.ANDON else people.get(row.who, "somebody"),
            _wrong(row, dossier, digests.get(row.seq - 1, "")),
        )
        for row in rows
    ]


def _wrong(row: CustodyRow, dossier: Dossier, digest_before: str) -> str:
    try:
        fits = chain.row_digest(custody.document(row, dossier)) == row.digest
    except ValueError as error:  # somebody wrote what has no canonical form
        return f"changed after it was written: {error}"
    if not fits:
        return "changed after it was written"
    return "" if row.previous == digest_before else "does not follow the row before it"


def access_lines(dossier: Dossier, limit: int = 100) -> list[CustodyLine]:
    """Return who took what out of the dossier, newest first."""
    return custody_lines(dossier, limit=limit, only=Q(what__in=ACCESS))


def objects_of(item: Item, *, after: StoredObject | None = None, limit: int = 100) -> list[StoredObject]:
    """Return an item's objects by path, those behind the object `after`."""
    found = StoredObject.objects.filter(item=item)
    if after is not None:
        found = found.filter(path__gt=after.path)
    return as_enforced(list(found.order_by("path")[:limit]))


def as_enforced(objects: list[StoredObject]) -> list[StoredObject]:
    """Have objects say what protects them in truth, for a page; they are not to be saved.

    A store may go on telling of locks that the newest probe saw it ignore.
    """
    now = timezone.now()
    probed = str(newest_result(vault().name).get("says", ""))
    for one in objects:
        says = str(one.protected_by.get("says", ""))
        if probed.startswith("not locked") and not says.startswith("not "):
            says = probed
        if one.lock_lost_at is not None:
            says += f"; its lock is not what it was, found {formatting.clock(one.lock_lost_at, now)} UTC"
        one.protected_by = one.protected_by | {"says": says}
    return objects


def objects_with(sha256: str, person: Person) -> QuerySet[StoredObject]:
    """Return the stored objects of these bytes that a person may see."""
    return (
        StoredObject.objects.filter(sha256=sha256, item__dossier__in=visible_dossiers(person))
        .select_related("item__dossier__run__project")
        .order_by("item__dossier", "path")
    )


def others_holding(objects: list[StoredObject], dossier: Dossier, person: Person) -> dict[str, list[Dossier]]:
    """Return which other dossiers keep each of these bytes, by SHA-256: several may count on one object."""
    wanted = {one.sha256 for one in objects}
    rows = StoredObject.objects.filter(
        sha256__in=wanted, deleted_at=None, item__dossier__in=visible_dossiers(person).exclude(pk=dossier.pk)
    ).select_related("item__dossier")
    found: dict[str, dict[int, Dossier]] = {}
    for row in rows.order_by("item__dossier"):
        found.setdefault(row.sha256, {})[row.item.dossier_id] = row.item.dossier
    return {sha256: list(dossiers.values()) for sha256, dossiers in found.items()}


def holds_of(dossier: Dossier, limit: int = 100) -> list[tuple[Hold, list[Dossier]]]:
    """Return the holds on sources, each with the other dossiers that hold the same address."""
    rows = list(
        Hold.objects.filter(dossier=dossier).select_related("item").order_by("placed_at", "id")[:limit]
    )
    others: dict[str, list[Dossier]] = {}
    also = Hold.objects.filter(
        uri__in={row.uri for row in rows}, released_at=None, run__project=dossier.run.project_id
    ).exclude(dossier=dossier)
    for row in also.select_related("dossier").order_by("dossier"):
        others.setdefault(row.uri, []).append(row.dossier)
    return [(row, others.get(row.uri, [])) for row in rows]


def parts(item: Item) -> dict[str, Any]:
    """Return how far an item is, in bytes and parts: a part is what one checksum covers."""
    rows = StoredObject.objects.filter(item=item, deleted_at=None)
    stored = rows.aggregate(n=Count("id"), total=Sum("bytes_total"))
    listed = sum(max(1, len(sums)) for sums in rows.values_list("part_sha256", flat=True)[:10_000])
    return {
        "objects": stored["n"],
        "files": len(item.files),
        "bytes_stored": stored["total"] or 0,
        "parts": listed,
    }


def tries(item: Item) -> Work | None:
    """Return the unfinished work that collects this item's dossier, with its tries and last error."""
    unfinished = [Work.State.DUE, Work.State.CLAIMED, Work.State.FAILED]
    found = Work.objects.filter(state__in=unfinished, kind__startswith="evidence.")
    about = Q(payload__item=item.pk) | Q(payload__dossier=item.dossier_id)
    return found.filter(about, attempts__gt=0).order_by("-pk").first()
