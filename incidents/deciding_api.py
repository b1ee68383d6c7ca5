"""What people decide about a resume beside asking and approving, for their tools: the buttons' functions."""

from collections.abc import Callable
from typing import Any

from django.http import HttpRequest
from ninja import Router, Schema

from incidents import approval, queries
from incidents.models import Incident
from incidents.refused import Refused
from runs.access import PersonalToken
from runs.models import Person, Scope
from runs.problems import Problem
from runs.proof import NotAgain, prove_by_words

router = Router(tags=["incidents"])


class Why(Schema):
    """A reason."""

    why: str = ""


class Proven(Why):
    """A reason, and the password or a code: it is this person, now."""

    password: str = ""
    code: str = ""


class Signed(Proven):
    """The same for exactly what was read."""

    digest: str


class BreakGlass(Signed):
    """The same with the run's name as the person typed it."""

    run_name: str = ""


def _decide(
    request: HttpRequest,
    incident_id: int,
    do: Callable[[Incident, Person], object],
    proof: Proven | None = None,
) -> dict[str, Any]:
    person = request.user
    assert isinstance(person, Person)
    try:
        incident = queries.incident_for(person, incident_id)
    except Incident.DoesNotExist as error:
        raise Problem(
            404, "unknown-incident", f"There is no incident {incident_id} that you may see.", field="incident"
        ) from error
    try:
        if proof is not None:
            prove_by_words(request, person, password=proof.password, code=proof.code)
        do(incident, person)
    except NotAgain as refused:
        raise Problem(refused.status, "password", refused.says, field="password") from refused
    except Refused as refused:
        extra = {"changes": refused.changes} if refused.changes else None
        raise Problem(refused.status, refused.code, refused.says, extra=extra) from refused
    incident.refresh_from_db()
    last = incident.requests.order_by("-id").first()
    return {
        "incident": str(incident.pk),
        "state": incident.state,
        "request": None if last is None else {"id": str(last.pk), "kind": last.kind, "state": last.state},
    }


@router.post("/incidents/{incident_id}/reject", auth=PersonalToken(Scope.APPROVE))
def reject(request: HttpRequest, incident_id: int, given: Why) -> dict[str, Any]:
    """Reject the live request with a reason."""
    return _decide(
        request,
        incident_id,
        lambda incident, person: approval.reject(incident=incident, person=person, why=given.why),
    )


@router.post("/incidents/{incident_id}/withdraw", auth=PersonalToken())
def withdraw(request: HttpRequest, incident_id: int, given: Why) -> dict[str, Any]:
    """Take back one's own request."""
    return _decide(
        request,
        incident_id,
        lambda incident, person: approval.withdraw(incident=incident, person=person, why=given.why),
    )


@router.post("/incidents/{incident_id}/false-alarm", auth=PersonalToken(Scope.APPROVE))
def false_alarm(request: HttpRequest, incident_id: int, given: Proven) -> dict[str, Any]:
    """Declare that nothing was wrong."""
    return _decide(
        request,
        incident_id,
        lambda incident, person: approval.false_alarm(incident=incident, person=person, why=given.why),
        given,
    )


@router.post("/incidents/{incident_id}/break-glass", auth=PersonalToken(Scope.APPROVE))
def break_glass(request: HttpRequest, incident_id: int, given: BreakGlass) -> dict[str, Any]:
    """Resume alone and now; everybody is told."""
    return _decide(
        request,
        incident_id,
        lambda incident, person: approval.break_glass(
            incident=incident, person=person, why=given.why, run_name=given.run_name, digest=given.digest
        ),
        given,
    )


@router.post("/incidents/{incident_id}/solo", auth=PersonalToken(Scope.APPROVE))
def solo(request: HttpRequest, incident_id: int, given: Signed) -> dict[str, Any]:
    """Resume as the sole approver on duty, after the delay in which any approver may reject it."""
    return _decide(
        request,
        incident_id,
        lambda incident, person: approval.solo(
            incident=incident, person=person, digest=given.digest, why=given.why
        ),
        given,
    )
