"""What a person presses on the diagnosis board: each view calls one action and goes back to the board."""

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_POST

from incidents import diagnosing
from incidents.decisions import act
from incidents.models import Incident
from runs.models import Person

ANCHOR = "diagnosis"


def _number(request: HttpRequest, name: str) -> int | None:
    text = request.POST.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 9 else None


@require_POST
@login_required
def take(request: HttpRequest, incident_id: int) -> HttpResponse:
    """Take a family."""

    def do(incident: Incident, person: Person) -> None:
        diagnosing.take(incident=incident, person=person, family=request.POST.get("family", ""))

    return act(request, incident_id, do, anchor=ANCHOR)


@require_POST
@login_required
def release(request: HttpRequest, incident_id: int) -> HttpResponse:
    """Give a family back."""

    def do(incident: Incident, person: Person) -> None:
        diagnosing.release(incident=incident, person=person, family=request.POST.get("family", ""))

    return act(request, incident_id, do, anchor=ANCHOR)


@require_POST
@login_required
def start(request: HttpRequest, incident_id: int) -> HttpResponse:
    """Start a probe, instead of the one the page named where it says so."""

    def do(incident: Incident, person: Person) -> None:
        diagnosing.start(
            incident=incident,
            person=person,
            family=request.POST.get("family", ""),
            key=request.POST.get("probe", ""),
            name=request.POST.get("name", ""),
            condition=request.POST.get("condition", ""),
            instead_of=_number(request, "instead_of"),
        )

    return act(request, incident_id, do, anchor=ANCHOR)


@require_POST
@login_required
def stop(request: HttpRequest, incident_id: int) -> HttpResponse:
    """Stop the running probe."""

    def do(incident: Incident, person: Person) -> None:
        diagnosing.stop(
            incident=incident,
            person=person,
            number=_number(request, "number") or 0,
            why=request.POST.get("why", ""),
        )

    return act(request, incident_id, do, anchor=ANCHOR)


@require_POST
@login_required
def result(request: HttpRequest, incident_id: int) -> HttpResponse:
    """Record how the running probe came out."""

    def do(incident: Incident, person: Person) -> None:
        diagnosing.record(
            incident=incident,
            person=person,
            number=_number(request, "number") or 0,
            result=request.POST.get("result", ""),
            note=request.POST.get("note", ""),
        )

    return act(request, incident_id, do, anchor=ANCHOR)


@require_POST
@login_required
def cause(request: HttpRequest, incident_id: int) -> HttpResponse:
    """Close the cause, or open it again."""

    def do(incident: Incident, person: Person) -> None:
        diagnosing.close_cause(
            incident=incident,
            person=person,
            certainty=request.POST.get("certainty", ""),
            family=request.POST.get("family", ""),
            ids=request.POST.getlist("ids"),
            why=request.POST.get("why", ""),
        )

    return act(request, incident_id, do, anchor=ANCHOR)
