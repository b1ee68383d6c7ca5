"""COMPLIANCE: a lock that nobody can take off again, not even the store's owner.

So the policy only asks for it. Until two people have confirmed it for the very bytes and dates they
were shown, within a budget of bytes times days, the objects are under a legal hold, which has no date.
That happens once the dossier is closed, when the dates are final.
"""

from typing import Any

from django.db.models import Sum
from django.utils import timezone

from andon.policy import NEVER_COMPLIANCE, Policy
from evidence import custody
from evidence.models import Dossier, Item, StoredObject, VaultRequest
from evidence.retention import dates, two_people
from evidence.retention.two_people import Reason
from runs.models import Person
from runs.policies import policy_for

GB = 10**9
_KIND = VaultRequest.Kind.COMPLIANCE


def wanted(dossier: Dossier) -> list[Item]:
    """Return the sealed items whose policy asks for COMPLIANCE and that are not confirmed yet."""
    asked = set(dossier.plan.get("compliance_asked", [])) - NEVER_COMPLIANCE
    return list(
        Item.objects.filter(dossier=dossier, kind__in=asked, state=Item.State.SEALED, lock="legal_hold")
        .defer("files", "source")
        .order_by("order", "id")
    )


def why_not(dossier: Dossier) -> Reason:
    """Return what stands in the way of locking a dossier's items for good, None when nothing does."""
    if dossier.released_at is not None:
        return "released", "It was released."
    if dossier.closed_at is None:
        return "open", "It is still open, so its dates are not final."
    if not wanted(dossier):
        return "nothing", "No sealed item's policy asks for COMPLIANCE, or all have it."
    budget = policy_for(dossier.run_id).vault.compliance_gb_days
    used, more = gb_days_used(dossier), int(subject(dossier)["gb_days"])
    if used + more > budget:
        return (
            "over-budget",
            f"It needs {more:,} GB × days; {used:,} of the run's {budget:,} are used. A policy can raise it.",
        )
    return None


def budget(dossier: Dossier) -> dict[str, str]:
    """Return what of its run's budget is used, as its page says it."""
    most = policy_for(dossier.run_id).vault.compliance_gb_days
    return {"Budget": f"{gb_days_used(dossier):,} of the run's {most:,} GB × days are used, by policy"}


def gb_days_used(dossier: Dossier) -> int:
    """Return what two people have confirmed so far for the dossier's run, in GB × days."""
    agreed = VaultRequest.objects.filter(
        dossier__run_id=dossier.run_id,
        kind=_KIND,
        state__in=[VaultRequest.State.APPROVED, VaultRequest.State.DONE],
    )
    return sum(int(one.get("gb_days", 0)) for one in agreed.values_list("subject", flat=True))


def request_compliance(*, dossier: Dossier, person: Person, why: str) -> VaultRequest:
    """Confirm, as the first of two, that these bytes may be locked for good until their dates.

    Raises:
        Refused: not-allowed, reason-needed, asked-already, or a code of `why_not`.
    """
    return two_people.ask(dossier=dossier, kind=_KIND, person=person, why=why, judge=why_not, subject=subject)


def confirm_compliance(*, request: VaultRequest, person: Person) -> VaultRequest:
    """Confirm as the second: the items' objects get the lock, each until the date that was shown.

    Raises:
        Refused: not-allowed, over, not-you, changed, or a code of `why_not`.
    """
    return two_people.agree(
        request=request, kind=_KIND, person=person, judge=why_not, subject=subject, then=_lock
    )


def subject(dossier: Dossier) -> dict[str, Any]:
    """Return what is confirmed: items with bytes and dates, GB × days rounded up, and the monthly cost."""
    items = wanted(dossier)
    policy: Policy = policy_for(dossier.run_id)
    sizes = dict(
        StoredObject.objects.filter(item__in=items).values_list("item").annotate(total=Sum("bytes_total"))
    )
    total = sum(sizes.values())
    # Counted from when it was sealed: the number does not change while the second person reads.
    byte_days = sum(
        sizes.get(item.pk, 0) * max(1, (item.retain_until - item.sealed_at).days + 1)
        for item in items
        if item.retain_until is not None and item.sealed_at is not None
    )
    return {
        "items": [
            {
                "item": item.name,
                "bytes": sizes.get(item.pk, 0),
                "until": custody.stamp(item.retain_until) if item.retain_until else "",
            }
            for item in items
        ],
        "bytes": total,
        "gb_days": -(-byte_days // GB),
        "cost_per_month": f"{total / GB * policy.cost.storage_gb_month_price:.2f} {policy.cost.currency}",
    }


def _lock(dossier: Dossier, request: VaultRequest) -> None:
    for item in wanted(dossier):
        item.lock = "compliance"
        item.save(update_fields=["lock"])
        dates.ask(item)
    # The store follows by work of each item, and says in `protected_by` what it took.
    request.state, request.done_at = VaultRequest.State.DONE, timezone.now()
    request.save(update_fields=["state", "done_at"])
