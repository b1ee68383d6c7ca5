"""The vault from afar: which dossiers keep what, until when, at what cost, in which store."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Count, F, Max, Min, Q, QuerySet, Sum
from django.utils import timezone

from andon import policy as rules
from andon.policy import CostRules
from evidence.models import Dossier, Hold, Item, Leftover, Reconciliation, StoredObject, StoreProbe
from evidence.proof import fixity, lost_locks
from evidence.queries import visible_dossiers
from evidence.stores.probed import OLD_AFTER, PROBE
from evidence.vault import KEYS, vault
from runs import formatting
from runs.models import Person, PolicyVersion, Run, Work

GB = 10**9
_MOST_UNKNOWN, _MOST_STRANGE = 20_000, 200
EXPIRES_SOON = timedelta(days=7)
FILTERS = ("not sealed", "expires soon", "damaged", "lock lost", "released")


@dataclass(frozen=True, slots=True)
class Cost:
    """What keeping bytes costs a month, at the price of the policy in force."""

    amount: float
    currency: str

    def __str__(self) -> str:
        if 0 < self.amount < 0.01:
            return f"under 0.01{formatting.NBSP}{self.currency} a month"
        if self.currency == "USD":
            return f"{formatting.money(self.amount)} a month"
        return f"{self.amount:,.2f}{formatting.NBSP}{self.currency} a month"


@dataclass(frozen=True, slots=True)
class DossierLine:
    """One dossier in the list. Counts are of required items that apply."""

    dossier: Dossier
    required: int
    sealed: int
    missing: int
    bytes_stored: int
    objects: int
    left_over: int  # of the objects: in no seal, and gone with the dossier's release
    damaged: int
    holds: int
    kept_until: datetime | None  # when the first of its items may go
    modes: str  # "governance, none": how its items are locked
    cost: Cost


@dataclass(frozen=True, slots=True)
class Store:
    """What the store enforces. `known` is false when nobody could ask it lately: then nothing is claimed."""

    name: str
    says: str
    known: bool
    locks: bool
    probe: StoreProbe | None


@dataclass(frozen=True, slots=True)
class Totals:
    """Everything a person may see, together."""

    dossiers: int
    objects: int
    bytes_stored: int
    damaged: int
    costs: list[Cost]  # one per currency
    next_to_expire: Item | None
    swept_at: datetime | None  # when the last nightly fixity sweep ended
    read_at: datetime | None  # when an object was last read back
    unread: int  # objects never read back since they were stored


def lines(
    person: Person, *, text: str = "", only: str = "", before: int | None = None, limit: int = 50
) -> list[DossierLine]:
    """Return dossiers newest first.

    Args:
        text: part of a label or of a run's name.
        only: one of `FILTERS`.
        before: id of the last dossier of the page before.
    """
    found = visible_dossiers(person).select_related("run")
    if text:
        found = found.filter(Q(label__icontains=text) | Q(run__slug__icontains=text))
    if before is not None:
        found = found.filter(pk__lt=before)
    found = _filtered(found, only)
    listed = list(found.order_by("-pk")[:limit])
    applies = Q(required=True) & ~Q(state=Item.State.NOT_APPLICABLE)
    now = timezone.now()
    items = _by_dossier(
        Item.objects.filter(dossier__in=listed)
        .values("dossier")
        .annotate(
            required_n=Count("id", filter=applies),
            sealed_n=Count("id", filter=applies & Q(state=Item.State.SEALED)),
            missing_n=Count("id", filter=applies & Q(state=Item.State.MISSING)),
            until=Min("retain_until", filter=Q(retain_until__gt=now)),
        )
    )
    stored = _by_dossier(
        StoredObject.objects.filter(item__dossier__in=listed, deleted_at=None)
        .values(dossier=F("item__dossier"))
        .annotate(n=Count("id"), total=Sum("bytes_total"), damaged_n=Count("id", filter=~Q(mismatch="")))
    )
    also = _by_dossier(
        Leftover.objects.filter(item__dossier__in=listed, deleted_at=None)
        .values(dossier=F("item__dossier"))
        .annotate(n=Count("id"), total=Sum("bytes_total"))
    )
    holds = _by_dossier(
        Hold.objects.filter(dossier__in=listed, released_at=None).values("dossier").annotate(n=Count("id"))
    )
    modes: dict[int, set[str]] = {}
    for dossier, mode in Item.objects.filter(dossier__in=listed).values_list("dossier", "lock").distinct():
        modes.setdefault(dossier, set()).add(mode)
    priced = prices({one.run for one in listed})
    made = []
    for one in listed:
        seen, kept = items.get(one.pk, {}), stored.get(one.pk, {})
        left = also.get(one.pk, {})
        size = (kept.get("total") or 0) + (left.get("total") or 0)
        made.append(
            DossierLine(
                dossier=one,
                required=seen.get("required_n", 0),
                sealed=seen.get("sealed_n", 0),
                missing=seen.get("missing_n", 0),
                bytes_stored=size,
                objects=kept.get("n", 0) + left.get("n", 0),
                left_over=left.get("n", 0),
                damaged=kept.get("damaged_n", 0),
                holds=holds.get(one.pk, {}).get("n", 0),
                kept_until=seen.get("until"),
                modes=", ".join(sorted(modes.get(one.pk, ()))),
                cost=cost_of(size, priced[one.run_id]),
            )
        )
    return made


def _filtered(found: QuerySet[Dossier], only: str) -> QuerySet[Dossier]:
    now = timezone.now()
    if only == "not sealed":
        # A subquery, not a join: a dossier stands once in the list however many items wait.
        final = [Item.State.SEALED, Item.State.NOT_APPLICABLE]
        waiting = Item.objects.filter(required=True, waived_at=None).exclude(state__in=final)
        return found.filter(pk__in=waiting.values("dossier"))
    if only == "expires soon":
        soon = Item.objects.filter(retain_until__range=(now, now + EXPIRES_SOON))
        return found.filter(pk__in=soon.values("dossier"))
    if only == "damaged":
        return found.filter(pk__in=StoredObject.objects.exclude(mismatch="").values("item__dossier"))
    if only == "lock lost":
        return found.filter(pk__in=lost_locks.found().values("item__dossier"))
    if only == "released":
        return found.exclude(released_at=None)
    return found


def _by_dossier(rows: Iterable[Any]) -> dict[int, dict[str, Any]]:
    return {row["dossier"]: row for row in rows}


def totals(person: Person) -> Totals:
    """Return what all dossiers of a person's projects keep together."""
    dossiers = visible_dossiers(person)
    kept = StoredObject.objects.filter(item__dossier__in=dossiers, deleted_at=None)
    summed = kept.aggregate(
        n=Count("id"),
        damaged=Count("id", filter=~Q(mismatch="")),
        read=Max("checked_at"),
        unread=Count("id", filter=Q(checked_at=None)),
    )
    left = Leftover.objects.filter(item__dossier__in=dossiers, deleted_at=None)
    by_run: dict[int, int] = {}
    for rows in (kept, left):
        for run_id, total in rows.values_list("item__dossier__run").annotate(total=Sum("bytes_total")):
            by_run[run_id] = by_run.get(run_id, 0) + total
    priced = prices(set(Run.objects.filter(pk__in=by_run)))
    amounts: dict[str, float] = {}
    for run_id, size in by_run.items():
        one = cost_of(size, priced[run_id])
        amounts[one.currency] = amounts.get(one.currency, 0.0) + one.amount
    expiring = Item.objects.filter(dossier__in=dossiers, retain_until__gt=timezone.now())
    return Totals(
        dossiers=dossiers.filter(deleted_at=None).count(),
        objects=summed["n"] + left.count(),
        bytes_stored=sum(by_run.values()),
        damaged=summed["damaged"],
        costs=[Cost(amount, currency) for currency, amount in sorted(amounts.items())],
        next_to_expire=expiring.select_related("dossier").order_by("retain_until", "pk").first(),
        swept_at=fixity.health().swept_at,
        read_at=summed["read"],
        unread=summed["unread"],
    )


def cost_of(bytes_total: int, prices_: CostRules) -> Cost:
    """Return what keeping so many bytes costs a month."""
    return Cost(bytes_total / GB * prices_.storage_gb_month_price, prices_.currency)


def prices(runs: set[Run]) -> dict[int, CostRules]:
    """Return the prices of the policy in force for each run, in two queries for however many."""
    own = PolicyVersion.objects.filter(run__in=runs).order_by("run_id", "-number").distinct("run_id")
    shared = PolicyVersion.objects.filter(run=None, project__in={run.project_id for run in runs})
    by_run = {row.run_id: row for row in own}
    by_project = {
        row.project_id: row for row in shared.order_by("project_id", "-number").distinct("project_id")
    }
    found = {}
    for run in runs:
        version = by_run.get(run.pk) or by_project.get(run.project_id)
        found[run.pk] = CostRules() if version is None else rules.decode(version.document).cost
    return found


@dataclass(slots=True)
class Strange:
    """Stored versions of one item that no row knows: by its key the dossier's name and the item's number."""

    dossier: str
    item: str
    objects: int
    bytes_total: int
    first: datetime
    last: datetime
    protected: str  # as the store said of the first


@dataclass(frozen=True, slots=True)
class Restore:
    """What the newest comparison of vault and rows after a restore found."""

    at: datetime
    result: dict[str, int]
    strange: list[Strange]
    calm: bool  # nothing in it needs anybody


def last_restore() -> Restore | None:
    """Return what was found when the database last came back from a backup, None when it never did."""
    made = Reconciliation.objects.exclude(done_at=None).order_by("-done_at").first()
    if made is None or made.done_at is None:
        return None
    groups: dict[tuple[str, str], Strange] = {}
    for one in made.unknown.all()[:_MOST_UNKNOWN]:
        dossier, _, rest = one.key.removeprefix(KEYS).partition("/")
        item = rest.partition("/")[0]
        says = str(one.protected_by.get("says", ""))
        at = one.stored_at
        seen = groups.setdefault((dossier, item), Strange(dossier, item, 0, 0, at, at, says))
        seen.objects += 1
        seen.bytes_total += one.bytes_total
        seen.first, seen.last = min(seen.first, at), max(seen.last, at)
    needs = ("unknown", "lacking", "lost_locks")
    calm = not any(made.result.get(name) for name in needs)
    return Restore(made.done_at, made.result, list(groups.values())[:_MOST_STRANGE], calm)


def store() -> Store:
    """Return what the vault's newest probe saw, or since when nobody knows."""
    name = vault().name
    probe = StoreProbe.objects.filter(store=name[:300]).order_by("-probed_at").first()
    if probe is None:
        return Store(name, "Not tested yet: what this store enforces is not known", False, False, None)
    failing = Work.objects.filter(
        kind=PROBE, state__in=[Work.State.DUE, Work.State.CLAIMED, Work.State.FAILED]
    ).exclude(error="")
    now = timezone.now()
    since = f"{formatting.clock(probe.probed_at, now)} UTC"
    trouble = failing.filter(created_at__gt=probe.probed_at).order_by("-pk").first()
    if trouble is not None:
        return Store(
            name, f"Unknown since {since}: the probe fails, {trouble.error[:160]}", False, False, probe
        )
    # The probe runs daily; an answer much older than that is a memory, not a fact.
    if now - probe.probed_at > OLD_AFTER * 1.5:
        return Store(name, f"Unknown since {since}: nobody has tested the store since", False, False, probe)
    says = str(probe.result.get("says", "")).rstrip(".") or "the probe says nothing"
    return Store(name, says[:1].upper() + says[1:], True, not says.startswith("not locked"), probe)
