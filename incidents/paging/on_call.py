"""Who has the pager: who took it by hand, else the file's list; or an external address instead of both.

The external address is asked by a worker once a minute and its answer kept as a row, so that a slow or
wrong one never makes a page wait.
"""

import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import transaction
from django.utils import timezone
from django.utils.dateparse import parse_datetime

from incidents import roles
from incidents.paging.ladder import Rotation, paging, utc
from incidents.paging.models import OnCallAnswer, OnCallTurn
from incidents.refused import Refused
from runs import formatting as words
from runs import outgoing
from runs.access import memberships
from runs.models import Membership, Person, Project

ASK_EVERY = timedelta(seconds=60)
OLD_AFTER = timedelta(minutes=5)  # an answer this old is shown with its age: five questions went unanswered
LONGEST = timedelta(days=14)
_TIMEOUT_S = 5.0
_NAME_CHARS = 150


@dataclass(frozen=True, slots=True)
class Holder:
    """Who has the pager until when ("" until = not said), who follows, and how it is known."""

    name: str
    until: datetime | None = None
    following: str = ""
    by: str = ""  # "took it", "list", "external"
    warn: str = ""  # "no answer since 03:10 UTC": the name may be out of date


def of_project(project: Project, now: datetime | None = None) -> Holder | None:
    """Return who is on call for a project, None when nobody is or it is not known."""
    now = now or timezone.now()
    taken = (
        OnCallTurn.objects.filter(project=project, starts_at__lte=now, ends_at__gt=now)
        .select_related("person")
        .order_by("-id")
        .first()
    )
    regular = _external(now) if settings.ONCALL_URL else of_list(paging().ladder(project.slug).on_call, now)
    if taken is not None and taken.person.is_active:
        following = regular.name if regular is not None else ""
        return Holder(taken.person.username, taken.ends_at, following, "took it")
    return regular


def of_person(person: Person, now: datetime) -> Holder | None:
    """Return who is on call as the frame shows it: of the person's first project that has somebody."""
    for row in memberships(person):
        holder = of_project(row.project, now)
        if holder is not None:
            return holder
    return None


def of_list(rotation: Rotation | None, now: datetime) -> Holder | None:
    """Return whose turn of the file's list it is; needs no database."""
    if rotation is None:
        return None
    start, every = utc(rotation.starts), timedelta(days=rotation.every_days)
    number = (now - start) // every
    if number < 0:
        return None
    people = rotation.people
    following = people[(number + 1) % len(people)] if len(people) > 1 else ""
    return Holder(people[number % len(people)], start + (number + 1) * every, following, "list")


# --- the external address


def _external(now: datetime) -> Holder | None:
    row = OnCallAnswer.objects.order_by("id").first()
    if row is None or row.answered_at is None:
        return None
    old = now - row.answered_at > OLD_AFTER
    warn = f"no answer since {words.clock(row.answered_at, now)} UTC" if old else ""
    return Holder(row.name, row.until, row.following, "external", warn) if row.name else None


def ask_external() -> None:
    """Ask the external address, when there is one and its turn has come, and keep what it says."""
    now = timezone.now()
    if not settings.ONCALL_URL:
        OnCallAnswer.objects.all().delete()
        return
    row, made = OnCallAnswer.objects.get_or_create(pk=1, defaults={"asked_at": now})
    # Compare-and-set: of two sweeps at once one asks.
    due = OnCallAnswer.objects.filter(pk=1, asked_at=row.asked_at, asked_at__lte=now - ASK_EVERY)
    if not made and not due.update(asked_at=now):
        return
    try:
        answer = outgoing.send("GET", settings.ONCALL_URL, timeout_s=_TIMEOUT_S)
        if answer.status != 200:
            raise outgoing.NotSent(f"answered {answer.status}")
        said = read_answer(answer.body)
    except (outgoing.NotSent, ValueError) as error:
        # What was known before stays, with its age.
        OnCallAnswer.objects.filter(pk=1).update(error=words.inert(error, 300))
        return
    OnCallAnswer.objects.filter(pk=1).update(
        name=said.name, following=said.following, until=said.until, answered_at=timezone.now(), error=""
    )


def read_answer(body: bytes) -> Holder:
    """Read what an external address says: `{"name", "until", "next"}`, or one line with a name.

    Raises:
        ValueError: it is neither.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError("the answer is not UTF-8") from error
    try:
        document: Any = json.loads(text)
    except (ValueError, RecursionError):
        document = text.strip()
    if isinstance(document, str):
        if not document or len(document) > _NAME_CHARS or any(not one.isprintable() for one in document):
            raise ValueError("the answer is neither JSON nor one line with a name")
        if document.startswith("<"):
            raise ValueError("the answer is a web page, not a name")
        return Holder(document)
    if not isinstance(document, dict):
        raise ValueError('the answer is no object: expected {"name": …}')
    name, following, until = document.get("name"), document.get("next"), document.get("until")
    if name is None:
        name = ""
    if not isinstance(name, str) or len(name) > _NAME_CHARS or any(not one.isprintable() for one in name):
        raise ValueError("name: expected a user name")
    kept = following if isinstance(following, str) and following.isprintable() else ""
    return Holder(name, _moment(until), kept[:_NAME_CHARS])


def _moment(value: object) -> datetime | None:
    try:
        found = parse_datetime(value) if isinstance(value, str) else None
    except ValueError:
        return None
    return utc(found) if found is not None else None


# --- taking it by hand


def take(*, project: Project, person: Person, who: Person, until: datetime) -> OnCallTurn:
    """Give the pager to `who` from now until a time; the newest word counts.

    Raises:
        Refused: not-allowed, no-such-person, bad-time.
    """
    roles.need_responder(person, project, "take the pager or give it on")
    now = timezone.now()
    if not Membership.objects.filter(
        person=who, project=project, person__is_active=True, roles__overlap=list(roles.RESPONDERS)
    ).exists():
        raise Refused("no-such-person", "Choose a responder, approver or admin of the project.", status=422)
    if not now < until <= now + LONGEST:
        raise Refused("bad-time", "The end must lie between now and 14 days from now.", status=422)
    with transaction.atomic():
        return OnCallTurn.objects.create(
            project=project, person=who, starts_at=now, ends_at=until, made_by=person, made_at=now
        )
