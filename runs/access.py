"""Who may do what: people by membership, machines by signature."""

import hashlib
from datetime import timedelta

from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils import timezone
from ninja.security import HttpBearer

from runs.identity import verified_run
from runs.models import Membership, Person, Project, Run, Token
from runs.reading import kept

# A read API polled every second must not write a row every second.
TOKEN_USE_NOTED_EVERY = timedelta(minutes=1)


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
    """Ninja authentication by a personal API token; `request.auth` and `request.user` are the person."""

    def authenticate(self, request: HttpRequest, token: str) -> Person | None:
        """Return the person of a live token, None otherwise (the answer is 401)."""
        now = timezone.now()
        found = (
            Token.objects.select_related("person")
            .filter(Q(expires_at__isnull=True) | Q(expires_at__gt=now), sha256=token_sha256(token))
            .filter(person__is_active=True)
            .first()
        )
        if found is None:
            return None
        stale = Q(last_used_at__isnull=True) | Q(last_used_at__lt=now - TOKEN_USE_NOTED_EVERY)
        if found.last_used_at is None or found.last_used_at < now - TOKEN_USE_NOTED_EVERY:
            Token.objects.filter(stale, pk=found.pk).update(last_used_at=now)
        request.user = found.person
        return found.person


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
