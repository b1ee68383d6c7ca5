"""Writes that people and commands make: runs, secrets, tokens."""

import re
import secrets as random_secrets
from dataclasses import dataclass
from datetime import timedelta

from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from andon.signing import new_secret
from runs.access import token_sha256
from runs.directives import set_directive
from runs.identity import forget
from runs.locks import lock_run
from runs.models import (
    Directive,
    Membership,
    Person,
    Project,
    Role,
    Run,
    RunProgress,
    RunSecret,
    Scope,
    Token,
)

SLUG = re.compile(r"^[A-Za-z0-9](?:[A-Za-z0-9_-]{0,98}[A-Za-z0-9])?$")
ROTATION = timedelta(days=1)  # how long the older secrets stay valid beside a new one
TOKEN_PREFIX = "andon_"  # noqa: S105  (a prefix, not a secret)


@dataclass(frozen=True, slots=True)
class MadeRun:
    """A run and the secret to sign with."""

    run: Run
    secret: str


def create_run(*, name: str, project: str = "default", rotate: bool = False) -> MadeRun:
    """Create a run, or find it; returns the secret to use from now on. Safe to repeat.

    Args:
        name: the run's slug: letters, digits, '-' and '_', at most 100.
        project: slug of its project.
        rotate: add a new secret; the older ones expire in a day.

    Raises:
        ValueError: the name is no slug, the project does not exist, or the run belongs to another.
    """
    if not SLUG.match(name):
        raise ValueError(f"run name {name!r}: expected letters, digits, '-' and '_', at most 100 characters")
    owner = Project.objects.filter(slug=project).first()
    if owner is None:
        raise ValueError(f"there is no project {project!r}")
    with transaction.atomic():
        run, _ = Run.objects.get_or_create(slug=name, defaults={"project": owner})
        if run.project_id != owner.pk:
            raise ValueError(f"run {name!r} belongs to project {run.project.slug!r}")
        run = lock_run(run.pk)
        RunProgress.objects.get_or_create(run=run)
        if not Directive.objects.filter(run=run).exists():
            set_directive(run=run, kind="continue", attempt=1, why="run created")
        now = timezone.now()
        valid = [
            s
            for s in run.secrets.order_by("-created_at", "-pk")
            if s.expires_at is None or s.expires_at > now
        ]
        if rotate or not valid:
            secret = rotate_secret(run, overlap=ROTATION).secret
        else:
            secret = next((s.secret for s in valid if s.expires_at is None), valid[0].secret)
        transaction.on_commit(forget, robust=True)
    return MadeRun(run, secret)


def rotate_secret(run: Run, *, overlap: timedelta) -> RunSecret:
    """Add a webhook secret; those in force sign beside it until `overlap` has passed."""
    with transaction.atomic():
        until = timezone.now() + overlap
        lock_run(run.pk)
        in_force = run.secrets.filter(Q(expires_at=None) | Q(expires_at__gt=until))
        in_force.update(expires_at=until)
        made = RunSecret.objects.create(run=run, secret=new_secret())
        transaction.on_commit(forget, robust=True)
    return made


def create_person(*, username: str, roles: list[str], project: str = "default") -> Person:
    """Create a person without a password, or find them, and add `roles` in a project.

    Raises:
        ValueError: an unknown role or project.
    """
    if unknown := [role for role in roles if role not in Role.values]:
        raise ValueError(f"role {unknown[0]!r}: expected one of {', '.join(Role.values)}")
    owner = Project.objects.filter(slug=project).first()
    if owner is None:
        raise ValueError(f"there is no project {project!r}")
    with transaction.atomic():
        person = Person.objects.filter(username=username).first()
        if person is None:
            person = Person.objects.create_user(username)
        membership, _ = Membership.objects.select_for_update().get_or_create(
            person=person, project=owner, defaults={"roles": roles or [Role.VIEWER]}
        )
        wanted = sorted({*membership.roles, *roles})
        if wanted != sorted(membership.roles):
            membership.roles = wanted
            membership.save(update_fields=["roles"])
    return person


def create_token(
    *,
    person: Person,
    name: str = "command line",
    expires_in: timedelta | None = None,
    scopes: list[str] | None = None,
) -> str:
    """Make a personal API token and return it; only its digest is kept.

    Args:
        scopes: what it may do, of `Scope`; None is all.

    Raises:
        ValueError: the person may not sign in.
    """
    if not person.is_active:
        raise ValueError(f"{person.username!r} is not active")
    token = TOKEN_PREFIX + random_secrets.token_urlsafe(32)
    Token.objects.create(
        person=person,
        name=name,
        sha256=token_sha256(token),
        scopes=list(Scope.values) if scopes is None else scopes,
        expires_at=None if expires_in is None else timezone.now() + expires_in,
    )
    return token
