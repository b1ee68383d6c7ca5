"""Reads for other apps and for pages."""

from typing import Any, TypedDict

from django.db.models import QuerySet

from evidence.gates import held_is_enough, required_items
from evidence.models import Dossier, Item
from runs.access import visible_runs
from runs.models import Checkpoint, Person, Run


class Counts(TypedDict):
    """Required items that apply; `held` counts those at least held, sealed ones included."""

    required: int
    held: int
    sealed: int
    missing: int


def evidence_counts(dossier: Dossier) -> Counts:
    """Return how many required items there are, and how many are held, sealed and missing.

    An item that does not apply is not counted: there is nothing to hold.
    """
    counts: Counts = {"required": 0, "held": 0, "sealed": 0, "missing": 0}
    for item in required_items(dossier):
        if item.state == Item.State.NOT_APPLICABLE:
            continue
        counts["required"] += 1
        counts["sealed"] += item.state == Item.State.SEALED
        counts["held"] += item.state == Item.State.SEALED or item.held_at is not None
        counts["missing"] += item.state == Item.State.MISSING
    return counts


def signed_facts(dossier: Dossier) -> list[dict[str, Any]]:
    """Return what an approver signs about the evidence: per required item one fact and its digest.

    The fact is `sealed`, `held`, `not applicable`, `waived`, or the state as it is (then the gate is
    shut). Nothing that changes by itself once the gate is open is in it: a very large checkpoint stays
    `held` when it is sealed later, and a waived item stays waived when it turns up after all.
    """
    facts: list[dict[str, Any]] = []
    for item in required_items(dossier):
        fact: dict[str, Any] = {"kind": item.kind, "name": item.name, "digest": item.digest}
        if item.waived_at is not None:
            fact |= {"fact": "waived", "digest": "", "why": item.waived_why, "by": item.waived_by}
        elif item.state == Item.State.NOT_APPLICABLE:
            fact |= {"fact": "not applicable", "why": item.why}
        elif held_is_enough(item):
            fact["fact"] = "held"
        elif item.state == Item.State.SEALED:
            fact["fact"] = "sealed"
        elif item.held_at is not None and item.state in {Item.State.HELD, Item.State.COLLECTING}:
            fact["fact"] = "held"
        else:
            fact |= {"fact": str(item.state), "why": item.why}
        facts.append(fact)
    return sorted(facts, key=lambda one: (one["kind"], one["name"]))


# In the processes, and on the nodes (`evidence.kinds`).
VOLATILE_ORDERS = (1, 2)


def volatile_items(run: Run) -> list[dict[str, str]]:
    """Return what vanishes first of a run's open dossiers and is not safe yet, in order of volatility.

    What is sealed, given up or waived is not waited for.
    """
    waiting = (Item.State.PLANNED, Item.State.HELD, Item.State.COLLECTING)
    vanishing = Item.objects.filter(order__in=VOLATILE_ORDERS, state__in=waiting, waived_at=None)
    found = vanishing.filter(dossier__run=run, dossier__closed_at=None)
    return [
        {"kind": one.kind, "name": one.name, "state": str(one.state), "says": one.why or str(one.state)}
        for one in found.defer("files", "source").order_by("order", "id")
    ]


def last_good_item(dossier: Dossier) -> Item | None:
    """Return the item of the last good checkpoint as it is chosen now."""
    return Item.objects.filter(dossier=dossier, kind="last_good_checkpoint").order_by("-id").first()


def last_good(dossier: Dossier) -> Checkpoint | None:
    """Return the checkpoint chosen as last good, None while none is chosen."""
    item = last_good_item(dossier)
    if item is None or "checkpoint" not in item.source:
        return None
    return Checkpoint.objects.filter(pk=item.source["checkpoint"]).first()


def visible_dossiers(person: Person) -> QuerySet[Dossier]:
    """Return the dossiers a person may see: those of the runs they may see."""
    return Dossier.objects.filter(run__in=visible_runs(person))
