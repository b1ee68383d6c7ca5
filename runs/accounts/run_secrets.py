"""Webhook secrets of runs: rotated by a person, the old one valid beside the new until a time."""

from datetime import timedelta

from django.db import transaction
from django.http import HttpRequest
from django.utils import timezone

from runs import actions, identity
from runs.accounts import audit, members
from runs.accounts.refused import Refused
from runs.accounts.tokens import number
from runs.models import AccountEvent, Person, Project, Run, RunSecret

K = AccountEvent.Kind
# A queue can be long; a secret that leaked should not live for weeks.
OVERLAPS = {"1": "1 hour", "24": "a day", "72": "3 days", "168": "a week"}


def of(run: Run) -> list[RunSecret]:
    """Return the secrets of a run that still sign, newest first."""
    now = timezone.now()
    rows = run.secrets.order_by("-created_at", "-pk")
    return [one for one in rows if one.expires_at is None or one.expires_at > now]


def of_project(project: Project) -> list[tuple[Run, list[RunSecret]]]:
    """Return the runs of a project that are not finished, with their secrets."""
    runs = Run.objects.filter(project=project, finished_at=None).order_by("slug")
    now = timezone.now()
    by_run: dict[int, list[RunSecret]] = {}
    for one in RunSecret.objects.filter(run__in=runs).order_by("-created_at", "-pk"):
        if one.expires_at is None or one.expires_at > now:
            by_run.setdefault(one.run_id, []).append(one)
    return [(run, by_run.get(run.pk, [])) for run in runs]


def rotate(*, run: Run, person: Person, hours: str, request: HttpRequest | None = None) -> str:
    """Add a secret; the older ones sign until the overlap ends. Returns it, to be shown this once.

    Raises:
        Refused: not-allowed, bad-overlap.
    """
    members.need_admin(person, run.project, "rotate a webhook secret")
    if hours not in OVERLAPS:
        raise Refused("bad-overlap", "Choose how long the old secret stays valid.")
    with transaction.atomic():
        made = actions.rotate_secret(run, overlap=timedelta(hours=int(hours)))
        audit.note(
            K.SECRET_ROTATED,
            request=request,
            by=person,
            project=run.project,
            run=run.slug,
            secret=made.pk,
            overlap_hours=int(hours),
        )
    return made.secret


def withdraw(*, run: Run, person: Person, secret_id: str, request: HttpRequest | None = None) -> None:
    """Let an older secret sign no more; web processes forget it within seconds.

    Raises:
        Refused: not-allowed, no-secret, last-secret.
    """
    members.need_admin(person, run.project, "withdraw a webhook secret")
    with transaction.atomic():
        Run.objects.select_for_update(no_key=True).get(pk=run.pk)
        live = of(run)
        one = next((secret for secret in live if secret.pk == number(secret_id)), None)
        if one is None:
            raise Refused("no-secret", "This secret signs nothing any more.")
        if one == live[0]:
            raise Refused("last-secret", "This is the newest secret: rotate first, then withdraw it.")
        RunSecret.objects.filter(pk=one.pk).update(expires_at=timezone.now())
        audit.note(
            K.SECRET_ENDED, request=request, by=person, project=run.project, run=run.slug, secret=one.pk
        )
        transaction.on_commit(identity.forget, robust=True)
