"""Steps that need two people: one asks, another agrees, and every turn is a custody row.

Both turns judge afresh, under the lock of the run and of the dossier: what was true when one person
asked need not be true when the other agrees.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.db import transaction
from django.utils import timezone

from evidence import custody
from evidence.models import Dossier, Item, VaultRequest
from evidence.refused import Refused
from runs.access import project_member
from runs.locks import lock_run
from runs.models import Person, Role

ASKERS = (Role.RESPONDER, Role.APPROVER, Role.VAULT_OFFICER, Role.ADMIN)
DECIDERS = (Role.VAULT_OFFICER, Role.APPROVER)
LIVE = (VaultRequest.State.OPEN, VaultRequest.State.APPROVED)
_WORDS = {
    VaultRequest.Kind.RELEASE: "releasing it",
    VaultRequest.Kind.DELETION: "deleting what it stores",
    VaultRequest.Kind.COMPLIANCE: "locking it so that nobody can undo it",
    VaultRequest.Kind.ERASURE: "erasing its raw samples",
    VaultRequest.Kind.READING: "reading this checkpoint",
}
# What stands in the way, as (code, sentence); None when nothing does.
Reason = tuple[str, str] | None


def live_request(dossier: Dossier, kind: str, item: Item | None = None) -> VaultRequest | None:
    """Return the request of `kind` (about one item, where it is) that is open, or agreed and under way."""
    return VaultRequest.objects.filter(dossier=dossier, kind=kind, item=item, state__in=LIVE).first()


@contextmanager
def locked(dossier: Dossier) -> Iterator[Dossier]:
    """Lock a dossier's run and then the dossier, for one transaction; gives it fresh."""
    with transaction.atomic():
        lock_run(dossier.run_id)
        yield (
            Dossier.objects.select_for_update(no_key=True, of=("self",))
            .select_related("run__project")
            .get(pk=dossier.pk)
        )


def need_role(dossier: Dossier, person: Person, to_do: str, *roles: Role) -> None:
    """Let a member of the dossier's project with one of `roles` through.

    Raises:
        Refused: not-allowed.
    """
    if not project_member(person, dossier.run.project, *roles):
        named = ", ".join(str(role.label).lower() for role in roles)
        raise Refused("not-allowed", f"Only a member of the project who is {named} may {to_do}.")


def ask(
    *,
    dossier: Dossier,
    kind: VaultRequest.Kind,
    person: Person,
    why: str,
    judge: Callable[[Dossier], Reason],
    subject: Callable[[Dossier], dict[str, Any]],
    item: Item | None = None,
    askers: tuple[Role, ...] = ASKERS,
) -> VaultRequest:
    """Write the request of one person.

    Args:
        item: the one that it is about, None for the whole dossier.
        judge: what stands in its way now.
        subject: what is asked for, as the other person will read it.

    Raises:
        Refused: not-allowed, reason-needed, asked-already, or what `judge` says.
    """
    with locked(dossier) as fresh:
        need_role(fresh, person, f"ask for {_WORDS[kind]}", *askers)
        if not why.strip():
            raise Refused("reason-needed", f"Say why you ask for {_WORDS[kind]}.")
        if live_request(fresh, kind, item) is not None:
            raise Refused("asked-already", f"Somebody asked for {_WORDS[kind]} already.")
        _refuse(judge(fresh))
        made = VaultRequest.objects.create(
            dossier=fresh,
            kind=kind,
            item=item,
            why=why.strip(),
            subject=subject(fresh),
            requested_by=str(person.opaque_id),
            requested_at=timezone.now(),
        )
        custody.append(
            fresh,
            f"{kind} requested",
            who=str(person.opaque_id),
            item_name=_name(item),
            data={"why": made.why, "subject": made.subject},
        )
    return made


def agree(
    *,
    request: VaultRequest,
    kind: VaultRequest.Kind,
    person: Person,
    judge: Callable[[Dossier], Reason],
    subject: Callable[[Dossier], dict[str, Any]],
    then: Callable[[Dossier, VaultRequest], None],
) -> VaultRequest:
    """Let a second person agree, and do `then` in the same transaction.

    Raises:
        Refused: not-allowed, over, not-you, changed, or what `judge` says.
    """
    with locked(request.dossier) as fresh:
        need_role(fresh, person, f"agree to {_WORDS[kind]}", *DECIDERS)
        row = _open(request, kind)
        if row.requested_by == str(person.opaque_id):
            raise Refused("not-you", "You asked for it: another person has to agree.")
        _refuse(judge(fresh))
        if subject(fresh) != row.subject:
            raise Refused("changed", "What was asked for has changed since: decline it and ask again.")
        row.state, row.decided_by, row.decided_at = (
            VaultRequest.State.APPROVED,
            str(person.opaque_id),
            timezone.now(),
        )
        row.save(update_fields=["state", "decided_by", "decided_at"])
        custody.append(
            fresh,
            f"{kind} agreed",
            who=row.decided_by,
            item_name=_name(row.item),
            data={"requested_by": row.requested_by, "why": row.why, "subject": row.subject},
        )
        then(fresh, row)
    return row


def decline(*, request: VaultRequest, person: Person, why: str) -> VaultRequest:
    """End an open request: by anybody who could have agreed, or by who asked.

    Raises:
        Refused: not-allowed, reason-needed, over.
    """
    with locked(request.dossier) as fresh:
        row = _open(request, None)
        if row.requested_by != str(person.opaque_id):
            need_role(fresh, person, "decline it", *DECIDERS)
        if not why.strip():
            raise Refused("reason-needed", "Say why it is declined.")
        row.state, row.decided_by, row.decided_at = (
            VaultRequest.State.DECLINED,
            str(person.opaque_id),
            timezone.now(),
        )
        row.decided_why = why.strip()
        row.save(update_fields=["state", "decided_by", "decided_at", "decided_why"])
        custody.append(
            fresh,
            f"{row.kind} declined",
            who=row.decided_by,
            item_name=_name(row.item),
            data={"why": row.decided_why},
        )
    return row


def _name(item: Item | None) -> str:
    return "" if item is None else item.name


def _open(request: VaultRequest, kind: str | None) -> VaultRequest:
    row = VaultRequest.objects.select_for_update(no_key=True).get(pk=request.pk)
    if row.state != VaultRequest.State.OPEN:
        raise Refused("over", f"This request is {row.get_state_display().lower()} already.")
    if kind is not None and row.kind != kind:
        raise Refused("other-kind", f"This request is about {_WORDS[VaultRequest.Kind(row.kind)]}.")
    return row


def _refuse(reason: Reason) -> None:
    if reason is not None:
        raise Refused(*reason)
