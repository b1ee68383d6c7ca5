"""Stored objects that were found without the lock they had, until they have one again."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db.models import Count, Min, Q, QuerySet
from django.utils import timezone

from evidence.models import Dossier, StoredObject

WHAT_TO_DO = (
    "Find out who lifted it, or whether the store forgets (vault_probe); “Keep it longer” on the dossier's "
    "page locks them again"
)


@dataclass(frozen=True, slots=True)
class LostLocks:
    """How many objects of how many dossiers have less of a lock than they had, and since when."""

    objects: int
    dossiers: int
    since: datetime | None  # when the first of them was found


def keeps(protected_by: dict[str, Any], lock: str) -> bool:
    """Return whether what a store says protects an object is what its item's lock asks for."""
    if lock == "none" or protected_by.get("mode") == "read-only":
        return True
    until = datetime.fromisoformat(protected_by["until"]) if protected_by.get("until") else None
    dated = lock == "legal_hold" or (until is not None and until > timezone.now())
    return dated and bool(protected_by.get("legal_hold"))


def found() -> QuerySet[StoredObject]:
    """Return the objects themselves. Of a released dossier locks go because they should."""
    return StoredObject.objects.filter(
        lock_lost_at__isnull=False, deleted_at=None, item__dossier__released_at=None
    )


def found_in(dossiers: QuerySet[Dossier]) -> QuerySet[StoredObject]:
    """Return those of some dossiers, the earliest found first."""
    return found().filter(item__dossier__in=dossiers).select_related("item").order_by("lock_lost_at", "pk")


def said_to_be_locked() -> int:
    """Return how many objects the store said are locked when it was asked last."""
    kept = StoredObject.objects.filter(deleted_at=None, item__dossier__released_at=None)
    return kept.filter(Q(protected_by__legal_hold=True) | Q(protected_by__until__isnull=False)).count()


def summary() -> LostLocks:
    """Return them in numbers."""
    counted = found().aggregate(
        objects=Count("id"), dossiers=Count("item__dossier", distinct=True), since=Min("lock_lost_at")
    )
    return LostLocks(**counted)
