"""Release and deletion: two steps, each by two people, and neither before every date has passed.

Release lets go of what a dossier holds where others have their bytes: legal holds, hard-link trees, the
deletion gate. Deletion removes the vault's own objects, and needs a release that is done.
"""

from datetime import datetime
from typing import Any

from django.db import transaction
from django.db.models import Count, Sum
from django.utils import timezone

from evidence import custody
from evidence.agents import node_trees
from evidence.holding import letting_go
from evidence.models import Dossier, Hold, Item, Leftover, StoredObject, VaultRequest
from evidence.proof import leftovers
from evidence.proof.seals import FINAL, bag_path
from evidence.retention import two_people
from evidence.retention.two_people import Reason, live_request
from evidence.vault import VaultError, vault
from runs.models import Person
from runs.work import Lease, Payload, Retry, enqueue, handler

RELEASE = "evidence.release"
DELETE = "evidence.delete"
_K = VaultRequest.Kind
_DELETED_AT_ONCE = 200  # objects between two transactions: what a killed worker has to find gone again


def why_not_release(dossier: Dossier, now: datetime | None = None) -> Reason:
    """Return what stands in the way of releasing a dossier, None when nothing does."""
    now = now or timezone.now()
    if dossier.released_at is not None:
        return "released", f"It was released on {dossier.released_at:%d %b %Y}."
    if dossier.closed_at is None:
        return "open", "It is still open, so its dates are extended: it closes with its incident or by hand."
    items = Item.objects.filter(dossier=dossier).defer("files", "source")
    last = items.filter(retain_until__gt=now).order_by("-retain_until").first()
    if last is not None:
        return "too-early", f"{last.name} is kept until {last.retain_until:%d %b %Y %H:%M} UTC."
    unfinished = items.exclude(state__in=FINAL).first()
    if unfinished is not None:
        return "unfinished", f"{unfinished.name} is {unfinished.get_state_display().lower()}, not yet sealed."
    return None


def why_not_deletion(dossier: Dossier, now: datetime | None = None) -> Reason:
    """Return what stands in the way of deleting a dossier's stored objects, None when nothing does."""
    now = now or timezone.now()
    if dossier.deleted_at is not None:
        return "deleted", f"Its objects were deleted on {dossier.deleted_at:%d %b %Y}."
    released = VaultRequest.objects.filter(dossier=dossier, kind=_K.RELEASE, state=VaultRequest.State.DONE)
    if dossier.released_at is None or not released.exists():
        return "not-released", "It has to be released first, and the release has to be done."
    if Item.objects.filter(dossier=dossier, retain_until__gt=now).exists():
        return "too-early", "An item's date has not passed."
    return None


def request_release(*, dossier: Dossier, person: Person, why: str) -> VaultRequest:
    """Ask that a dossier lets go of its holds.

    Raises:
        Refused: not-allowed, reason-needed, asked-already, or a code of `why_not_release`.
    """
    return two_people.ask(
        dossier=dossier, kind=_K.RELEASE, person=person, why=why, judge=why_not_release, subject=held
    )


def approve_release(*, request: VaultRequest, person: Person) -> VaultRequest:
    """Agree to a release: from here on the dossier counts for nothing at the deletion gate.

    Raises:
        Refused: not-allowed, over, not-you, changed, or a code of `why_not_release`.
    """
    return two_people.agree(
        request=request,
        kind=_K.RELEASE,
        person=person,
        judge=why_not_release,
        subject=held,
        then=_begin_release,
    )


def request_deletion(*, dossier: Dossier, person: Person, why: str) -> VaultRequest:
    """Ask that a released dossier's stored objects be deleted.

    Raises:
        Refused: not-allowed, reason-needed, asked-already, or a code of `why_not_deletion`.
    """
    return two_people.ask(
        dossier=dossier, kind=_K.DELETION, person=person, why=why, judge=why_not_deletion, subject=stored
    )


def approve_deletion(*, request: VaultRequest, person: Person) -> VaultRequest:
    """Agree to a deletion. Rows, chain and seals stay; the bytes go, where no lock of the store holds.

    Raises:
        Refused: not-allowed, over, not-you, changed, or a code of `why_not_deletion`.
    """
    return two_people.agree(
        request=request,
        kind=_K.DELETION,
        person=person,
        judge=why_not_deletion,
        subject=stored,
        then=lambda dossier, row: _ring(DELETE, row),
    )


def decline(*, request: VaultRequest, person: Person, why: str) -> VaultRequest:
    """Decline or withdraw a request that nobody agreed to yet. See `two_people.decline`."""
    return two_people.decline(request=request, person=person, why=why)


def held(dossier: Dossier) -> dict[str, Any]:
    """Return what a release lets go of: holds on sources, and the stored objects that stay."""
    holds = Hold.objects.filter(dossier=dossier, released_at=None).count()
    return {"holds": holds, "trees": node_trees.count(dossier)} | stored(dossier)


def stored(dossier: Dossier) -> dict[str, Any]:
    """Return what a deletion deletes: stored objects and their bytes."""
    total = {"objects": 0, "bytes": 0}
    for kind in (StoredObject, Leftover):
        rows = kind.objects.filter(item__dossier=dossier, deleted_at=None)
        found = rows.aggregate(n=Count("id"), total=Sum("bytes_total"))
        total["objects"] += found["n"]
        total["bytes"] += found["total"] or 0
    return total


def _begin_release(dossier: Dossier, request: VaultRequest) -> None:
    dossier.released_at = timezone.now()
    dossier.save(update_fields=["released_at"])
    Hold.objects.filter(dossier=dossier, released_at=None).update(released_at=dossier.released_at)
    _ring(RELEASE, request)


def _ring(kind: str, request: VaultRequest) -> None:
    enqueue(kind=kind, key=str(request.pk), payload={"request": request.pk})


def _agreed(payload: Payload) -> VaultRequest | None:
    return (
        VaultRequest.objects.select_related("dossier__run")
        .filter(pk=int(str(payload["request"])), state=VaultRequest.State.APPROVED)
        .first()
    )


def _finish(request: VaultRequest, lease: Lease, what: str, data: dict[str, Any], **fields: Any) -> None:
    with transaction.atomic():
        lease.guard()
        Dossier.objects.select_for_update(no_key=True).get(pk=request.dossier_id)
        done = VaultRequest.objects.filter(pk=request.pk, state=VaultRequest.State.APPROVED)
        if done.update(state=VaultRequest.State.DONE, done_at=timezone.now()):
            Dossier.objects.filter(pk=request.dossier_id).update(**fields)
            custody.append(request.dossier, what, data=data)


@handler(RELEASE)
def release(payload: Payload, lease: Lease) -> None:
    """Let go of what a released dossier held, except what another dossier still counts on."""
    request = _agreed(payload)
    if request is None:
        return
    _find_leftovers(request.dossier)
    seen = letting_go.sources(request.dossier)
    seen |= letting_go.stored(request.dossier)
    _finish(request, lease, "released", seen, released_at=request.dossier.released_at)


def _find_leftovers(dossier: Dossier) -> None:
    """Give what lies in the store and in no row its row first: it goes with the rest."""
    try:
        leftovers.find(dossier)
    except VaultError as error:
        raise Retry(None, error.says) from error


@handler(DELETE)
def delete(payload: Payload, lease: Lease) -> None:
    """Delete a released dossier's stored objects; the store's own lock has the last word."""
    request = _agreed(payload)
    if request is None:
        return
    dossier, store = request.dossier, vault()
    _find_leftovers(dossier)
    for item in Item.objects.filter(dossier=dossier).defer("files", "source"):
        left: list[StoredObject | Leftover] = [
            *StoredObject.objects.filter(item=item, deleted_at=None).order_by("path"),
            *Leftover.objects.filter(item=item, deleted_at=None),
        ]
        for start in range(0, len(left), _DELETED_AT_ONCE):
            some = left[start : start + _DELETED_AT_ONCE]
            try:
                for one in some:
                    store.delete(one.key, one.version_id)
            except VaultError as error:
                # A date the store keeps is not ours to judge: try again until it lets go.
                raise Retry(3600 if error.permanent else None, error.says) from error
            with transaction.atomic():
                lease.guard()
                Dossier.objects.select_for_update(no_key=True).get(pk=dossier.pk)
                for kind in (StoredObject, Leftover):
                    mine = [one.pk for one in some if isinstance(one, kind)]
                    kind.objects.filter(pk__in=mine).update(deleted_at=timezone.now())
                custody.append(
                    dossier,
                    "objects deleted",
                    item_name=item.name,
                    object_sha256=item.digest,
                    # By their names in a bag: whoever reads one later sees that these were let go, not lost.
                    data={
                        "objects": len(some),
                        "bytes": sum(one.bytes_total for one in some),
                        "names": [bag_path(item, one.path) for one in some if isinstance(one, StoredObject)],
                    },
                )
    _finish(
        request, lease, "deleted", {"by": request.decided_by, "why": request.why}, deleted_at=timezone.now()
    )


__all__ = [
    "approve_deletion",
    "approve_release",
    "decline",
    "held",
    "live_request",
    "request_deletion",
    "request_release",
    "stored",
    "why_not_deletion",
    "why_not_release",
]
