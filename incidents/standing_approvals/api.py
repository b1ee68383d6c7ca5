"""Standing approvals for people's tools: the same functions as the pages."""

from datetime import datetime
from typing import Any

from django.http import HttpRequest
from django.utils import timezone
from ninja import Router, Schema

from incidents.refused import Refused
from incidents.standing_approvals import actions
from incidents.standing_approvals.models import StandingApproval
from incidents.standing_approvals.views import visible
from runs.access import PersonalToken, visible_runs
from runs.models import Person, Scope
from runs.problems import Problem
from runs.proof import NotAgain, prove_by_words

router = Router(tags=["standing approvals"])


class New(Schema):
    """What to write down; times RFC 3339 with an offset."""

    project: str = "default"
    run: str = ""
    kinds: list[str] = []
    per_day: int = 0
    furthest_steps: int = 0
    widest_skip: int = 0
    expires_at: datetime | None = None
    why: str = ""


class Sign(Schema):
    """Sign what was read. Password or code say that it is this person now: a token alone may leak."""

    digest: str
    password: str = ""
    code: str = ""


class Why(Schema):
    """A reason."""

    why: str = ""


@router.get("/standing-approvals", auth=PersonalToken())
def list_standing(request: HttpRequest) -> dict[str, Any]:
    """List the standing approvals of one's projects, newest first."""
    found = StandingApproval.objects.filter(project__in=visible(_person(request)))
    rows = found.select_related("project", "run", "made_by", "signed_by")[:200]
    return {"items": [actions.document(row) for row in rows], "next": None}


@router.post("/standing-approvals", auth=PersonalToken())
def create(request: HttpRequest, new: New) -> dict[str, Any]:
    """Write one down; another person signs it."""
    person = _person(request)
    project = next((one for one in visible(person) if one.slug == new.project), None)
    if project is None:
        raise Problem(404, "unknown-project", "There is no such project that you may see.", field="project")
    run = visible_runs(person).filter(slug=new.run, project=project).first() if new.run else None
    if new.run and run is None:
        raise Problem(422, "bad-field", "run: there is none in that project.", field="run")
    expires_at = new.expires_at or timezone.now()  # none given ends at once, which is refused in its words
    if expires_at.tzinfo is None:
        raise Problem(422, "bad-field", "expires_at: must carry an offset.", field="expires_at")
    try:
        made = actions.create(
            project=project,
            person=person,
            run=run,
            kinds=new.kinds,
            per_day=new.per_day,
            furthest_steps=new.furthest_steps,
            widest_skip=new.widest_skip,
            expires_at=expires_at,
            why=new.why,
        )
    except Refused as refused:
        raise _problem(refused) from refused
    return actions.document(made)


@router.post("/standing-approvals/{standing_id}/sign", auth=PersonalToken(Scope.APPROVE))
def sign(request: HttpRequest, standing_id: int, given: Sign) -> dict[str, Any]:
    """Sign exactly what was read."""
    person, row = _person(request), _one(request, standing_id)
    try:
        prove_by_words(request, person, password=given.password, code=given.code)
        return actions.document(actions.sign(standing=row, person=person, digest=given.digest))
    except NotAgain as refused:
        raise Problem(refused.status, "password", refused.says, field="password") from refused
    except Refused as refused:
        raise _problem(refused) from refused


@router.post("/standing-approvals/{standing_id}/revoke", auth=PersonalToken())
def revoke(request: HttpRequest, standing_id: int, given: Why) -> dict[str, Any]:
    """End one at once."""
    row = _one(request, standing_id)
    try:
        return actions.document(actions.revoke(standing=row, person=_person(request), why=given.why))
    except Refused as refused:
        raise _problem(refused) from refused


def _person(request: HttpRequest) -> Person:
    person = request.user
    assert isinstance(person, Person)
    return person


def _one(request: HttpRequest, standing_id: int) -> StandingApproval:
    found = StandingApproval.objects.filter(pk=standing_id, project__in=visible(_person(request))).first()
    if found is None:
        raise Problem(404, "unknown-standing", f"There is no standing approval {standing_id}.", field="id")
    return found


def _problem(refused: Refused) -> Problem:
    return Problem(refused.status, refused.code, refused.says)
