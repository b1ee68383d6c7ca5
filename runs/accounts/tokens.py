"""Tokens of people and of hooks, as people make and revoke them. What is secret is shown once, never kept."""

from datetime import timedelta

from django.db import transaction
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils import timezone

from andon.readers.hooks import SOURCES
from runs import actions, hooks
from runs.accounts import audit, members
from runs.accounts.refused import Refused
from runs.models import AccountEvent, HookToken, Person, Project, Scope, Token

K = AccountEvent.Kind
MOST_DAYS = 366
SCOPES = {
    Scope.READ: "read runs, incidents, ledgers",
    Scope.RESPOND: "do what a responder does: ask to resume, acknowledge",
    Scope.APPROVE: "approve, with your password or a code in each call",
}


def mine(person: Person) -> QuerySet[Token]:
    """Return a person's tokens that are not revoked, newest first."""
    return Token.objects.filter(person=person, revoked_at=None).order_by("-pk")


def make(
    *, person: Person, name: str, scopes: list[str], days: str, request: HttpRequest | None = None
) -> str:
    """Make a personal token; returns it, to be shown this once.

    Raises:
        Refused: no-name, no-scope, bad-days.
    """
    wanted = [scope for scope in Scope.values if scope in scopes]
    if not wanted:
        raise Refused("no-scope", "Choose what the token may do.")
    name, lasts = _name(name), _days(days)
    with transaction.atomic():
        token = actions.create_token(person=person, name=name, expires_in=lasts, scopes=wanted)
        audit.note(K.TOKEN_MADE, request=request, by=person, name=name, scopes=wanted, days=lasts.days)
    return token


def revoke(*, person: Person, token_id: str, request: HttpRequest | None = None) -> None:
    """Make one of a person's own tokens worthless at once.

    Raises:
        Refused: no-token.
    """
    with transaction.atomic():
        token = mine(person).filter(pk=number(token_id)).first()
        if token is None or not mine(person).filter(pk=token.pk).update(revoked_at=timezone.now()):
            raise Refused("no-token", "This token is revoked already.")
        audit.note(K.TOKEN_REVOKED, request=request, by=person, name=token.name)


def of_hooks(project: Project) -> QuerySet[HookToken]:
    """Return a project's hook tokens that are not revoked, newest first."""
    return HookToken.objects.filter(project=project, revoked_at=None).order_by("-pk")


def make_hook(
    *,
    project: Project,
    person: Person,
    name: str,
    source: str,
    days: str,
    request: HttpRequest | None = None,
) -> str:
    """Make a hook token for one source; returns it, to be shown this once.

    Raises:
        Refused: not-allowed, no-name, no-source, bad-days.
    """
    members.need_admin(person, project, "make a hook token")
    if source not in SOURCES:
        raise Refused("no-source", "Choose what posts with it.")
    name, lasts = _name(name), _days(days)
    with transaction.atomic():
        _, token = hooks.create_token(
            project=project, source=source, name=name, person=person, expires_in=lasts
        )
        audit.note(
            K.HOOK_MADE,
            request=request,
            by=person,
            project=project,
            name=name,
            source=source,
            days=lasts.days,
        )
    return token


def revoke_hook(
    *, project: Project, person: Person, token_id: str, request: HttpRequest | None = None
) -> None:
    """Make a hook token worthless at once.

    Raises:
        Refused: not-allowed, no-token.
    """
    members.need_admin(person, project, "revoke a hook token")
    with transaction.atomic():
        token = of_hooks(project).filter(pk=number(token_id)).first()
        if token is None or not hooks.revoke(token):
            raise Refused("no-token", "This token is revoked already.")
        audit.note(K.HOOK_REVOKED, request=request, by=person, project=project, name=token.name)


def live(rows: QuerySet[Token]) -> QuerySet[Token]:
    """Narrow tokens to those that work now."""
    return rows.filter(Q(expires_at=None) | Q(expires_at__gt=timezone.now()), revoked_at=None)


def number(text: str) -> int:
    """Return an id from a form, 0 for what is none."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 18 else 0


def _name(name: str) -> str:
    if not name.strip():
        raise Refused("no-name", "Say what the token is for.")
    return name.strip()[:100]


def _days(days: str) -> timedelta:
    if not 1 <= number(days) <= MOST_DAYS:
        raise Refused("bad-days", f"Valid for 1 to {MOST_DAYS} days.")
    return timedelta(days=number(days))
