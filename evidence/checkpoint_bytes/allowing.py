"""Reading a checkpoint: a vault officer alone up to a size, and above it only once another person agreed.

Weights are the most valuable thing in the vault. What two people agreed to is one checkpoint, one reader and
one day; the size counts for the whole checkpoint, so that nobody reads a large one file by file.
"""

from datetime import datetime, timedelta
from typing import Any

from django.db.models import Q, Sum
from django.utils import timezone

from evidence.collecting.gathering import is_held_first
from evidence.kinds import CHECKPOINT_KINDS
from evidence.models import Dossier, Item, StoredObject, VaultRequest
from evidence.refused import Refused
from evidence.retention import two_people
from evidence.retention.two_people import Reason
from runs.models import Person, Role
from runs.policies import policy_for

GB = 10**9
READERS = (Role.VAULT_OFFICER,)
HOURS = 24
VALID_FOR = timedelta(hours=HOURS)
_KIND = VaultRequest.Kind.READING


def size_of(item: Item) -> tuple[int, int | None]:
    """Return how many files a checkpoint has and their bytes; None while a file's size is not known."""
    if item.state == Item.State.SEALED:
        stored = StoredObject.objects.filter(item=item)
        return stored.count(), stored.aggregate(total=Sum("bytes_total"))["total"] or 0
    sizes = [entry.get("bytes") for entry in item.files]
    return len(sizes), None if None in sizes else sum(int(str(size)) for size in sizes)


def needs_two(item: Item) -> bool:
    """Return whether the checkpoint is above the size that one person may read."""
    _, total = size_of(item)
    return total is None or total > policy_for(item.dossier.run_id).vault.read_alone_gb * GB


def why_not(item: Item) -> Reason:
    """Return why nobody can read an item's bytes here, None when a reader can."""
    if item.kind not in CHECKPOINT_KINDS:
        return "no-checkpoint", f"{item.name} is no checkpoint: its page offers its objects."
    if item.dossier.deleted_at is not None:
        return "deleted", f"Its bytes were deleted on {item.dossier.deleted_at:%d %b %Y}."
    if item.state == Item.State.SEALED:
        bad = StoredObject.objects.filter(~Q(mismatch=""), item=item).order_by("path").first()
        return None if bad is None else ("damaged", f"{bad.path} is not what was sealed: {bad.mismatch}.")
    if (
        item.state not in {Item.State.HELD, Item.State.COLLECTING}
        or not is_held_first(item)
        or not item.files
    ):
        return "nothing", f"{item.name} is {item.get_state_display().lower()}: no bytes can be read yet."
    return None


def grant_of(item: Item, person: Person, now: datetime | None = None) -> VaultRequest | None:
    """Return what two people agreed to for this reader and checkpoint, None where that is over or was not."""
    since = (now or timezone.now()) - VALID_FOR
    agreed = VaultRequest.objects.filter(
        kind=_KIND,
        item=item,
        state=VaultRequest.State.DONE,
        requested_by=str(person.opaque_id),
        decided_at__gt=since,
    )
    # A checkpoint that came to be another one, or larger, is not what they agreed to.
    return next((one for one in agreed.order_by("-pk") if one.subject == subject(item)), None)


def until(grant: VaultRequest) -> datetime:
    """Return when a grant ends."""
    assert grant.decided_at is not None
    return grant.decided_at + VALID_FOR


def permit(item: Item, person: Person, why: str) -> VaultRequest | None:
    """Let a reader through; returns what two people agreed to, None where one is enough.

    Raises:
        Refused: not-allowed, reason-needed, two-people, or a code of `why_not`.
    """
    two_people.need_role(item.dossier, person, "read checkpoint bytes", *READERS)
    if not why.strip():
        raise Refused("reason-needed", "Say why it is read.")
    if reason := why_not(item):
        raise Refused(*reason)
    if not needs_two(item):
        return None
    grant = grant_of(item, person)
    if grant is None:
        raise Refused(
            "two-people",
            f"Above {limit_words(item)} another person has to agree first: ask on the item's page. "
            f"What was agreed to lasts {HOURS} h.",
        )
    return grant


def limit_words(item: Item) -> str:
    """Return the size up to which one person is enough, as policy says it."""
    return f"{policy_for(item.dossier.run_id).vault.read_alone_gb:g} GB"


def subject(item: Item) -> dict[str, Any]:
    """Return what is agreed to: one checkpoint, by name, number of files, bytes, and for how long."""
    files, total = size_of(item)
    said: dict[str, Any] = {"checkpoint": item.name, "objects": files, "hours": HOURS}
    return said if total is None else said | {"bytes": total}


def why_not_ask(item: Item) -> Reason:
    """Return what stands in the way of asking another person, None when nothing does."""
    if reason := why_not(item):
        return reason
    if not needs_two(item):
        return "alone", f"Up to {limit_words(item)} a vault officer reads it alone: nobody has to agree."
    return None


def request_reading(*, item: Item, person: Person, why: str) -> VaultRequest:
    """Ask that another person agrees to one's reading a large checkpoint.

    Raises:
        Refused: not-allowed, reason-needed, asked-already, or a code of `why_not_ask`.
    """
    return two_people.ask(
        dossier=item.dossier,
        kind=_KIND,
        person=person,
        why=why,
        judge=lambda _: why_not_ask(item),
        subject=lambda _: subject(item),
        item=item,
        askers=READERS,
    )


def approve_reading(*, request: VaultRequest, person: Person) -> VaultRequest:
    """Agree that who asked reads it from now on, for as long as was shown.

    Raises:
        Refused: not-allowed, over, not-you, changed, or a code of `why_not_ask`.
    """
    item = Item.objects.select_related("dossier__run__project").get(vault_requests=request)
    return two_people.agree(
        request=request,
        kind=_KIND,
        person=person,
        judge=lambda _: why_not_ask(item),
        subject=lambda _: subject(item),
        then=_grant,
    )


def _grant(dossier: Dossier, request: VaultRequest) -> None:
    # Agreed to is done: what follows is the reader's, and each reading is a row of its own.
    request.state, request.done_at = VaultRequest.State.DONE, request.decided_at
    request.save(update_fields=["state", "done_at"])
