"""The log of accounts: sign-ins, proofs, passkeys, roles, tokens. Rows are only ever added.

People stand in it by `opaque_id`; pages put names to them as long as the person was not erased.
"""

import uuid
from typing import Any

from allauth.account.internal.flows.login import get_authentication_records
from allauth.mfa import signals as factors
from allauth.mfa.models import Authenticator
from allauth.socialaccount import signals as social
from django.contrib.auth import signals as django_auth
from django.db.models import Q, QuerySet
from django.dispatch import receiver
from django.http import HttpRequest
from django.utils import timezone

from runs.accounts.address import client_address
from runs.formatting import inert
from runs.models import AccountEvent, Membership, Person, Project, Role

K = AccountEvent.Kind


def note(
    kind: AccountEvent.Kind,
    *,
    request: HttpRequest | None = None,
    by: Person | None = None,
    about: Person | None = None,
    project: Project | None = None,
    address: str | None = None,
    **data: Any,
) -> AccountEvent:
    """Add one row.

    Args:
        request: where from; None for a command on the server.
        by: who did it.
        about: whose account it is; `by` when left out.
        address: where from, for a worker that does what somebody asked for.
        data: what the page shows beside it, JSON-ready; never a secret.
    """
    about = about or by
    return AccountEvent.objects.create(
        at=timezone.now(),
        kind=kind,
        by=None if by is None else by.opaque_id,
        about=None if about is None else about.opaque_id,
        project=project,
        address=address if request is None else client_address(request),
        agent="" if request is None else inert(request.META.get("HTTP_USER_AGENT", ""), 200),
        data=data,
    )


def of_project(project: Project) -> QuerySet[AccountEvent]:
    """Return what an admin of `project` may read: its own rows, and its members' rows that name no project.

    Tries on names that nobody has are everybody's business and name nobody.
    """
    members = Membership.objects.filter(project=project).values("person__opaque_id")
    return AccountEvent.objects.filter(
        Q(project=project) | Q(project=None, about__in=members) | Q(project=None, about=None)
    ).order_by("-id")


def of_person(person: Person) -> QuerySet[AccountEvent]:
    """Return what happened to one person's own account."""
    return AccountEvent.objects.filter(about=person.opaque_id).order_by("-id")


def names(events: list[AccountEvent]) -> dict[uuid.UUID, str]:
    """Return the names of the people in some rows, as they are called now."""
    ids = {one for event in events for one in (event.by, event.about) if one is not None}
    return dict(Person.objects.filter(opaque_id__in=ids).values_list("opaque_id", "username"))


def may_read(person: Person, project: Project) -> bool:
    """Return whether a person is an admin of a project."""
    return Membership.objects.filter(
        person=person, project=project, roles__contains=[Role.ADMIN], person__is_active=True
    ).exists()


# What Django and allauth tell of


def _method(request: HttpRequest, person: Person) -> str:
    """Return by what a person signed in: "password", "password and totp", "passkey", "socialaccount"."""
    words = [
        "passkey" if record.get("passwordless") else str(record.get("type") or record.get("method"))
        for record in get_authentication_records(request, person)
    ]
    return " and ".join(dict.fromkeys(words)) or "unknown"


@receiver(django_auth.user_logged_in)
def _signed_in(request: HttpRequest, user: Person, **_: Any) -> None:
    note(K.SIGN_IN, request=request, by=user, method=_method(request, user))


@receiver(django_auth.user_logged_out)
def _signed_out(request: HttpRequest, user: Person | None, **_: Any) -> None:
    if user is not None:
        note(K.SIGN_OUT, request=request, by=user)


_ADDED = {
    Authenticator.Type.WEBAUTHN: K.PASSKEY_ADDED,
    Authenticator.Type.TOTP: K.CODES_ON,
    Authenticator.Type.RECOVERY_CODES: K.RECOVERY_MADE,
}
_REMOVED = {Authenticator.Type.WEBAUTHN: K.PASSKEY_REMOVED, Authenticator.Type.TOTP: K.CODES_OFF}


def _called(authenticator: Authenticator) -> dict[str, Any]:
    named = authenticator.type == Authenticator.Type.WEBAUTHN
    return {"name": inert(str(authenticator.wrap().name), 100)} if named else {}


@receiver(factors.authenticator_added)
@receiver(factors.authenticator_reset)
def _factor_added(request: HttpRequest, user: Person, authenticator: Authenticator, **_: Any) -> None:
    kind = _ADDED[Authenticator.Type(authenticator.type)]
    note(kind, request=request, by=user, **_called(authenticator))


@receiver(factors.authenticator_removed)
def _factor_removed(request: HttpRequest, user: Person, authenticator: Authenticator, **_: Any) -> None:
    kind = _REMOVED.get(Authenticator.Type(authenticator.type))
    if kind is not None:
        note(kind, request=request, by=user, **_called(authenticator))


@receiver(factors.authenticator_used)
def _factor_used(request: HttpRequest, user: Person, authenticator: Authenticator, **_: Any) -> None:
    if authenticator.type == Authenticator.Type.RECOVERY_CODES:
        authenticator.refresh_from_db(fields=["data"])
        note(K.RECOVERY_USED, request=request, by=user, left=len(authenticator.wrap().get_unused_codes()))


@receiver(factors.authentication_failed)
def _factor_failed(request: HttpRequest, user: Person, reauthentication: bool = False, **_: Any) -> None:
    if not reauthentication:  # `runs.proof` notes its own
        note(K.SIGN_IN_FAILED, request=request, about=user, method="code")


@receiver(social.social_account_added)
def _sso_linked(request: HttpRequest, sociallogin: Any, **_: Any) -> None:
    note(K.SSO_LINKED, request=request, by=sociallogin.user)


@receiver(social.social_account_removed)
def _sso_unlinked(request: HttpRequest, socialaccount: Any, **_: Any) -> None:
    note(K.SSO_UNLINKED, request=request, by=socialaccount.user)
