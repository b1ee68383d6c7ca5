"""Invitations: a link, shown once, by which one person sets how they sign in.

An admin makes one for somebody new. For somebody who lost their password or passkey only the operator does
(`manage.py invite NAME`): an admin who could would be able to approve in another's name.
"""

import secrets as random_secrets
from collections.abc import Iterable
from datetime import datetime

from allauth.mfa.models import Authenticator
from django.conf import settings
from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError
from django.core.validators import validate_slug
from django.db import transaction
from django.http import HttpRequest
from django.utils import timezone

from runs.access import token_sha256
from runs.accounts import audit, members
from runs.accounts.refused import Refused
from runs.models import AccountEvent, Invitation, Membership, Person, Project

K = AccountEvent.Kind
MOST_NAME = 64


def invite(
    *, project: Project, by: Person, username: str, roles: Iterable[str], request: HttpRequest | None = None
) -> tuple[Invitation, str]:
    """Make a new person, a member with `roles`, and the link by which they come in.

    Returns the invitation and the whole address, which is shown this once.

    Raises:
        Refused: not-allowed, bad-name, name-taken, no-role.
    """
    name = username.strip()
    members.need_admin(by, project, "invite people")
    _need_name(name)
    wanted = members.known(roles)
    with transaction.atomic():
        if Person.objects.filter(username__iexact=name).exists():
            raise Refused("name-taken", f"Somebody here is called “{name}” already: add them instead.")
        person = Person.objects.create_user(name)
        Membership.objects.create(project=project, person=person, roles=wanted)
        made = _make(person, project=project, by=by)
        members.note(project, by, person, [], wanted, request)
        audit.note(K.INVITED, request=request, by=by, about=person, project=project)
    return made


def reset(*, person: Person, factors: bool = False) -> tuple[Invitation, str]:
    """Make a link for somebody who cannot sign in any more; for the operator's command.

    Args:
        factors: take their passkeys, codes and password away at once: whoever has those is not them.
    """
    with transaction.atomic():
        fresh = Person.objects.select_for_update(no_key=True).get(pk=person.pk)
        if factors:
            Authenticator.objects.filter(user=fresh).delete()
            fresh.set_unusable_password()  # ends their sessions, too
            fresh.save(update_fields=["password"])
        made = _make(fresh, project=None, by=None)
        audit.note(K.RESET, about=fresh, factors=factors)
    return made


def live(token: str) -> Invitation | None:
    """Return the invitation of a link that can still be used."""
    return (
        Invitation.objects.select_related("person", "made_by", "project")
        .filter(sha256=token_sha256(token), ended_at=None, expires_at__gt=timezone.now())
        .filter(person__is_active=True)
        .first()
    )


def waiting(project: Project) -> list[Invitation]:
    """Return the invitations of a project that nobody used yet, expired ones too."""
    rows = Invitation.objects.filter(project=project, ended_at=None)
    return list(rows.select_related("person", "made_by").order_by("-made_at", "-pk"))


def accept(*, token: str, password: str, request: HttpRequest | None = None) -> Person:
    """Set the password of the invited person and use the link up.

    Raises:
        Refused: over, weak-password.
    """
    with transaction.atomic():
        found = live(token)
        if found is None or not _end(found):
            raise Refused("over", "This link was used already, or its time is over.", status=404)
        person = Person.objects.select_for_update(no_key=True).get(pk=found.person_id)
        set_password(person, password)
        audit.note(K.INVITATION_USED, request=request, by=person, project=found.project)
    return person


def withdraw(*, invitation: Invitation, by: Person, request: HttpRequest | None = None) -> None:
    """End an invitation that nobody used; a person who never came in leaves the project again.

    Raises:
        Refused: not-allowed, over.
    """
    project = invitation.project
    if project is None:
        raise Refused("not-allowed", "Only the operator ends this link.", status=403)
    with transaction.atomic():
        members.need_admin(by, project, "withdraw an invitation")
        if not _end(invitation):
            raise Refused("over", "This invitation is over already.")
        person = invitation.person
        audit.note(K.INVITATION_ENDED, request=request, by=by, about=person, project=project)
        if member := Membership.objects.filter(project=project, person=person).first():
            before = list(member.roles)
            member.delete()
            members.note(project, by, person, before, [], request)


def set_password(person: Person, password: str) -> None:
    """Give a person a password that Django's validators take.

    Raises:
        Refused: weak-password, in the validators' words.
    """
    try:
        validate_password(password, person)
    except ValidationError as error:
        raise Refused("weak-password", " ".join(error.messages), status=400) from error
    person.set_password(password)
    person.save(update_fields=["password"])


def _make(person: Person, *, project: Project | None, by: Person | None) -> tuple[Invitation, str]:
    now: datetime = timezone.now()
    Invitation.objects.filter(person=person, ended_at=None).update(ended_at=now)
    token = random_secrets.token_urlsafe(32)
    made = Invitation.objects.create(
        person=person,
        project=project,
        sha256=token_sha256(token),
        made_by=by,
        made_at=now,
        expires_at=now + settings.INVITATION_LASTS,
    )
    return made, f"{settings.PUBLIC_URL}/invitations/{token}"


def _end(invitation: Invitation) -> bool:
    """Compare and set: of two people who use a link at once, one wins."""
    mine = Invitation.objects.filter(pk=invitation.pk, ended_at=None)
    return bool(mine.update(ended_at=timezone.now()))


def _need_name(name: str) -> None:
    try:
        # Names stand in pages, digests' neighbours and logs: one plain word that no other looks like.
        validate_slug(name.replace(".", "-").replace("@", "-"))
    except ValidationError as error:
        raise Refused(
            "bad-name", "A name is letters, digits, dot, dash and underscore, as in mira.k."
        ) from error
    if len(name) > MOST_NAME:
        raise Refused("bad-name", f"A name has at most {MOST_NAME} characters.")
