"""Pages of incidents: list and triage."""

from collections.abc import Callable

from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from evidence.pages.listing import item_lines, ticks
from evidence.views import items_context
from incidents import fragments, queries, raw, roles, triage
from incidents.bad_cells import bad_text
from incidents.grid_views import view_of
from incidents.incident_page import IncidentPage
from incidents.layer_bars import layer_bars
from incidents.models import Incident
from runs import grid, live, reading
from runs.access import project_member
from runs.grid_rows import WORDS, kinds
from runs.models import Person
from runs.views import person_of

PAGE_ROWS = 50
STATES = ("open", "approved", "resuming", "watching", "resolved", "false_alarm")


def incident_or_404(request: HttpRequest, incident_id: int) -> Incident:
    """Return an incident the person may see, or answer 404."""
    try:
        return queries.incident_for(person_of(request), incident_id)
    except Incident.DoesNotExist:
        raise Http404 from None


def page_or_404(request: HttpRequest, incident_id: int) -> IncidentPage:
    """Return everything the incident page shows, or answer 404."""
    try:
        return queries.incident_page(person_of(request), incident_id)
    except Incident.DoesNotExist:
        raise Http404 from None


@require_GET
@login_required
def incidents(request: HttpRequest) -> HttpResponse:
    """List incidents newest first."""
    state, run = request.GET.get("state", ""), request.GET.get("run", "")
    before = triage.cursor(request.GET.get("before", ""))
    lines = queries.incident_list(
        person_of(request),
        run=run,
        state=state if state in STATES else "",
        before=before,
        limit=PAGE_ROWS + 1,
    )
    shown = lines[:PAGE_ROWS]
    older = triage.cursor_text(shown[-1]) if len(lines) > PAGE_ROWS else ""
    return render(
        request,
        "incidents/list.html",
        {"lines": shown, "older": older, "state": state, "run": run, "states": STATES},
    )


Context = dict[str, object]


def _buttons(page: IncidentPage, person: Person) -> Context:
    """Return every button by its code, and what else a responder may do."""
    incident = page.incident
    may_close = incident.state == Incident.State.OPEN and not incident.holds
    return {
        "page": page,
        "buttons": [page.next.main, *page.next.buttons],
        "may_resolve": may_close and project_member(person, page.run.project, *roles.RESPONDERS),
    }


def _answers(page: IncidentPage, person: Person) -> Context:
    """Return the four answers.

    `absent` counts optional items that are not there, `thin` are those that are safe and say nothing.
    """
    lines = item_lines(page.incident.dossier)
    return {
        **_buttons(page, person),
        "ticks": ticks(lines),
        "absent": sum(line.state == "missing" and not line.required for line in lines),
        "thin": [(line.name, line.thin.partition(":")[0]) for line in lines if line.thin and line.required],
        "may_waive": _may_waive(page, person),
    }


def _may_waive(page: IncidentPage, person: Person) -> bool:
    waits = page.incident.state == Incident.State.OPEN and page.incident.holds
    return waits and project_member(person, page.run.project, *roles.RESPONDERS)


def _evidence(page: IncidentPage, person: Person) -> Context:
    return {
        "page": page,
        "may_waive": _may_waive(page, person),
        **items_context(page.incident.dossier),
    }


def _plan(page: IncidentPage, person: Person) -> Context:
    return {**_buttons(page, person), **triage.plan_context(page)}


def _just_page(page: IncidentPage, person: Person) -> Context:
    return {"page": page}


FRAGMENTS: dict[str, Callable[[IncidentPage, Person], Context]] = {
    "answers": _answers,
    "evidence": _evidence,
    "plan": _plan,
    "timeline": _just_page,
    "ledger": _just_page,
    **fragments.WITH_PAGE,
}


def render_incident(
    request: HttpRequest, page: IncidentPage, *, says: str = "", status: int = 200
) -> HttpResponse:
    """Render the incident page, with a refusal in its words when an action was refused."""
    with reading.once():
        return _render_incident(request, page, says=says, status=status)


def _render_incident(request: HttpRequest, page: IncidentPage, *, says: str, status: int) -> HttpResponse:
    incident = page.incident
    view, opening = view_of(request, incident)
    page.version = view.extent.version
    policy = page.situation.policy
    good = (page.plan.checkpoint.get("step") if page.plan is not None else None) or None
    return render(
        request,
        "incidents/detail.html",
        {
            "page": page,
            "says": says,
            "own_incident": incident.pk,
            "fragments": {
                name: live.render(request, f"incidents/_{name}.html", context(page, person_of(request)))
                for name, context in FRAGMENTS.items()
            },
            "raw_names": raw.NAMES,
            "opening": opening,
            "view": view,
            "row_kinds": [(kind, WORDS[kind]) for kind in kinds(page.run, incident.attempt)],
            "bad": bad_text(incident, view.extent.version),
            "states": grid.SYMBOLS,
            "layers": layer_bars(incident, good, policy),
            "policy": policy,
            "findings": triage.numbers(page, policy),
        },
        status=status,
    )


@require_GET
@login_required
def incident(request: HttpRequest, incident_id: int) -> HttpResponse:
    """Show an incident: what broke first, is the evidence safe, what is the run doing, what may I press."""
    return render_incident(request, page_or_404(request, incident_id))


@require_GET
@login_required
def incident_fragment(request: HttpRequest, incident_id: int, name: str) -> HttpResponse:
    """Answer the poll of one part of the incident page."""
    known = FRAGMENTS | fragments.AFTER_PAGE
    if name not in known:
        raise Http404
    page = page_or_404(request, incident_id)
    with reading.once():
        return live.answer(request, f"incidents/_{name}.html", known[name](page, person_of(request)))
