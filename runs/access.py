"""Who may do what: people by membership, machines by signature."""

import hashlib
import zlib
from datetime import timedelta

from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils import timezone
from ninja.security import HttpBearer

from runs.accounts.address import client_address
from runs.identity import verified_run
from runs.limits import buckets
from runs.models import Membership, Person, Project, Run, Scope, Token
from runs.problems import Problem
from runs.reading import kept

# A read API polled every second must not write a row every second.
TOKEN_USE_NOTED_EVERY = timedelta(minutes=1)
# One limiter serves all: runs count upwards from 1, hook tokens downwards, personal tokens from here.
TOKENS_FROM = -(1 << 48)
CALLS_PER_S, CALLS_BURST = 50.0, 500  # a dashboard that asks every second asks for a few things
WRONG_PER_S, WRONG_BURST = 1.0, 60


def project_member(person: Person, project: Project, *roles: str) -> bool:
    """Return whether `person` belongs to `project`, with at least one of `roles` when any are given."""
    if not person.is_authenticated or not person.is_active:
        return False
    mine = kept(("roles", person.pk, project.pk), lambda: _roles(person, project))
    return mine is not None and (not roles or not set(roles).isdisjoint(mine))


def _roles(person: Person, project: Project) -> list[str] | None:
    """Return a member's roles in a project, None for somebody who does not belong to it."""
    found = Membership.objects.filter(person=person, project=project).values_list("roles", flat=True).first()
    return found


def memberships(person: Person) -> list[Membership]:
    """Return a person's memberships with their projects, the oldest project first."""
    rows = Membership.objects.filter(person=person).select_related("project").order_by("project_id")
    return kept(("memberships", person.pk), lambda: list(rows))


def members(project: Project, *roles: str) -> list[Person]:
    """Return the active members of a project with at least one of `roles`, by name."""
    rows = kept(("members", project.pk), lambda: _members(project))
    return [person for mine, person in rows if not set(roles).isdisjoint(mine)]


def _members(project: Project) -> list[tuple[list[str], Person]]:
    found = Membership.objects.filter(project=project, person__is_active=True).select_related("person")
    return [(row.roles, row.person) for row in found.order_by("person__username")]


def visible_runs(person: Person) -> QuerySet[Run]:
    """Return the runs a person may see: those of the projects they belong to."""
    if not person.is_authenticated or not person.is_active:
        return Run.objects.none()
    return Run.objects.filter(project__memberships__person=person)


def token_sha256(token: str) -> str:
    """Return what is stored of a personal token."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


class PersonalToken(HttpBearer):
    """Ninja authentication by a personal API token; `request.auth` and `request.user` are the person.

    Args:
        scope: what the token must allow. Left out, reading wants `read` and anything else `respond`.
    """

    def __init__(self, scope: Scope | None = None) -> None:
        super().__init__()
        self.scope = scope

    def authenticate(self, request: HttpRequest, token: str) -> Person | None:
        """Return the person of a live token, None otherwise (the answer is 401).

        Raises:
            Problem: 403 the token may not do this, 429 too many calls, or too many wrong tokens.
        """
        now = timezone.now()
        found = (
            Token.objects.select_related("person")
            .filter(Q(expires_at__isnull=True) | Q(expires_at__gt=now), sha256=token_sha256(token))
            .filter(person__is_active=True, revoked_at=None)
            .first()
        )
        if found is None:
            # Counted only after the look: behind one address a wrong token keeps no right one out.
            _brake(wrong_tokens(client_address(request)), WRONG_PER_S, WRONG_BURST, "wrong tokens")
            return None
        _brake(TOKENS_FROM - found.pk, CALLS_PER_S, CALLS_BURST, "calls with this token")
        wanted = self.scope or (Scope.READ if request.method in {"GET", "HEAD"} else Scope.RESPOND)
        if wanted not in found.scopes:
            raise Problem(
                403, "scope", f"This token may not {wanted}: make one that may.", field="authorization"
            )
        stale = Q(last_used_at__isnull=True) | Q(last_used_at__lt=now - TOKEN_USE_NOTED_EVERY)
        if found.last_used_at is None or found.last_used_at < now - TOKEN_USE_NOTED_EVERY:
            Token.objects.filter(stale, pk=found.pk).update(last_used_at=now)
        request.user = found.person
        return found.person


def wrong_tokens(address: str | None) -> int:
    """Return the bucket of an address, far below those of tokens; few, so that nobody fills our memory."""
    return -(1 << 62) + zlib.crc32((address or "").encode()) % 4096


def _brake(bucket: int, per_s: float, burst: int, what: str) -> None:
    if wait_s := buckets().take(bucket, large=False, per_s=per_s, burst=burst):
        raise Problem(
            429,
            "too-many-calls",
            f"Too many {what}: wait {wait_s} s.",
            headers={"Retry-After": str(wait_s)},
        )


def signed_run(request: HttpRequest, slug: str, body: bytes | None) -> Run:
    """Return the run that signed this request, for machine endpoints of other apps.

    Args:
        slug: the run named in the path.
        body: the bytes as received; None for a request without a body (GET), whose method and
            path with query are what is signed.

    Raises:
        Problem: 404 unknown run, 401 bad signature or a clock too far off.
    """
    known = verified_run(request, slug, body)
    return Run.objects.select_related("project").get(pk=known.run_id)
