"""The API of incidents: machines take permits, people's tools read, ask and approve."""

import json
from datetime import datetime
from typing import Any

from django.http import HttpRequest
from django.utils.dateparse import parse_datetime
from ninja import Router, Schema

from incidents import approval, deciding_api, permits, queries, subjects
from incidents.models import Incident
from incidents.page import IncidentLine
from incidents.refused import Refused
from incidents.standing_approvals import api as standing_api
from runs.access import PersonalToken, signed_run
from runs.models import Person, Scope
from runs.problems import Problem
from runs.proof import NotAgain, prove_by_words

router = Router(tags=["incidents"])
router.add_router("", deciding_api.router)
router.add_router("", standing_api.router)
PAGE = 50
MAX_BODY_BYTES = 64 * 1024


class Ask(Schema):
    """Ask to resume by what was read: `digest` of `approval.digest`."""

    digest: str
    note: str = ""


class Approve(Schema):
    """Approve what was read. Password or code say that it is this person now: a token alone may leak."""

    digest: str
    password: str = ""
    code: str = ""


@router.post("/runs/{run}/resume")
def resume(request: HttpRequest, run: str) -> dict[str, Any]:
    """Exchange an approval for its permit; signed by the run. The webhook-id makes it idempotent."""
    if int(request.headers.get("content-length") or 0) > MAX_BODY_BYTES:
        raise Problem(413, "too-large", f"a resume body has at most {MAX_BODY_BYTES} bytes")
    signed = signed_run(request, run, request.body)
    incident, attempt, supervisor = _resume_body(request.body)
    try:
        permit = approval.exchange(
            run=signed,
            incident_id=incident,
            attempt=attempt,
            webhook_id=request.headers["webhook-id"],
            supervisor=supervisor,
        )
    except Refused as refused:
        raise _problem(refused) from refused
    return {"permit": permit}


@router.get("/incidents", auth=PersonalToken())
def list_incidents(request: HttpRequest, run: str = "", state: str = "", cursor: str = "") -> dict[str, Any]:
    """List incidents newest first; `cursor` is the `next` of the page before."""
    lines = queries.incident_list(
        _person(request), run=run, state=state, before=_cursor(cursor), limit=PAGE + 1
    )
    shown = lines[:PAGE]
    more = f"{permits.rfc3339(shown[-1].opened_at)}~{shown[-1].id}" if len(lines) > PAGE else None
    return {"items": [_item(line) for line in shown], "next": more}


@router.get("/incidents/{incident_id}", auth=PersonalToken())
def one_incident(request: HttpRequest, incident_id: int) -> dict[str, Any]:
    """Return one incident: the list's fields, plan, gate, requests, and what an approver signs."""
    person = _person(request)
    incident = _incident(person, incident_id)
    page = queries.incident_page(person, incident.pk)
    line = {
        "id": str(incident.pk),
        "run": page.run.slug,
        "attempt": incident.attempt,
        "state": page.state,
        "opened_at": permits.rfc3339(page.opened_at),
        "first_bad": _first_bad(page.subject["first_bad"]),
        "symptom": incident.symptom,
        "evidence": {
            "required": page.evidence.required,
            "held": page.evidence.held,
            "sealed": page.evidence.sealed,
            "missing": page.evidence.missing,
        },
        "directive": {
            "kind": page.running.kind,
            "seq": page.running.seq,
            "obeyed": page.running.obeyed,
            "of": page.running.of,
        },
    }
    return line | {
        "title": page.title,
        "family": incident.family,
        "family_why": incident.family_why,
        "gate": [{"line": line.code, "done": line.glyph == "done", "says": line.says} for line in page.gate],
        "plan": page.subject["plan"],
        "plan_why": page.plan.why if page.plan else "",
        "approval": {
            "subject": page.subject,
            "digest": page.digest,
            # What one person alone would sign.
            "alone": {
                kind: subjects.subject(incident, kind=kind, first_bad=page.first_bad_document)[1]
                for kind in ("break_glass", "solo")
            },
        },
        "requests": [
            {
                "id": str(one.id),
                "state": one.state,
                "by": one.by,
                "at": permits.rfc3339(one.at),
                "digest": one.digest,
                "approved_by": [name for name, _ in one.approvals],
                "needed": one.needed,
                "ended_why": one.ended_why,
                "permit": one.permit or None,
            }
            for one in page.requests
        ],
        "next": {"code": page.next.main.code, "says": page.next.says},
        "watch": page.watch_says,
    }


@router.post("/incidents/{incident_id}/request", auth=PersonalToken(Scope.RESPOND))
def ask_to_resume(request: HttpRequest, incident_id: int, ask: Ask) -> dict[str, Any]:
    """Request a resume: the same function as the button's."""
    person = _person(request)
    try:
        made = approval.request_resume(
            incident=_incident(person, incident_id), person=person, digest=ask.digest, note=ask.note
        )
    except Refused as refused:
        raise _problem(refused) from refused
    return {"request": str(made.pk), "digest": made.digest, "expires_at": permits.rfc3339(made.expires_at)}


@router.post("/incidents/{incident_id}/approve", auth=PersonalToken(Scope.APPROVE))
def approve(request: HttpRequest, incident_id: int, given: Approve) -> dict[str, Any]:
    """Approve the live request: the same function as the button's."""
    person = _person(request)
    incident = _incident(person, incident_id)
    try:
        prove_by_words(request, person, password=given.password, code=given.code)
        made = approval.approve(incident=incident, person=person, digest=given.digest)
    except NotAgain as refused:
        raise Problem(refused.status, "password", refused.says, field="password") from refused
    except Refused as refused:
        raise _problem(refused) from refused
    incident.refresh_from_db()
    return {"approval": str(made.pk), "digest": made.digest, "state": incident.state}


def _item(line: IncidentLine) -> dict[str, Any]:
    return {
        "id": str(line.id),
        "run": line.run,
        "attempt": line.attempt,
        "state": line.state,
        "title": line.title,
        "opened_at": permits.rfc3339(line.opened_at),
        "first_bad": _first_bad(line.first_bad_document),
        "symptom": line.symptom_key,
        "evidence": line.evidence,
        "directive": line.directive,
    }


def _first_bad(document: dict[str, Any]) -> dict[str, Any]:
    return {
        "step": document["step"],
        "ranks": list(document["ranks"]),
        "phase": document["phase"],
        "layer": document["layer"],
        "tie": document["tie"],
        "certainty": document["certainty"],
    }


def _resume_body(body: bytes) -> tuple[int, int, str]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Problem(400, "undecodable", f"The body is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise Problem(422, "bad-body", "The body must be an object with incident and attempt.")
    supervisor = document.get("supervisor", "")
    if not isinstance(supervisor, str) or len(supervisor) > 100 or not supervisor.isprintable():
        raise Problem(422, "bad-field", "supervisor: at most 100 characters.", field="supervisor")
    return (
        _whole(document.get("incident"), "incident"),
        _whole(document.get("attempt"), "attempt"),
        supervisor,
    )


def _whole(value: Any, field: str) -> int:
    """Return an id or a number; ids are strings on the wire."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 19:
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31:
        return value
    raise Problem(422, "bad-field", f"{field}: must be a whole number.", field=field)


def _cursor(cursor: str) -> tuple[datetime, int] | None:
    if not cursor:
        return None
    at, _, pk = cursor.partition("~")
    try:
        moment = parse_datetime(at)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise Problem(422, "bad-field", "cursor: take it from `next` of the page before.", field="cursor")
    return moment, _whole(pk, "cursor")


def _person(request: HttpRequest) -> Person:
    person = request.user
    assert isinstance(person, Person)
    return person


def _incident(person: Person, incident_id: int) -> Incident:
    try:
        return queries.incident_for(person, incident_id)
    except Incident.DoesNotExist as error:
        raise Problem(
            404, "unknown-incident", f"There is no incident {incident_id} that you may see.", field="incident"
        ) from error


def _problem(refused: Refused) -> Problem:
    extra = {"changes": refused.changes} if refused.changes else None
    return Problem(refused.status, refused.code, refused.says, extra=extra)
