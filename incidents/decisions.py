"""What a person presses: each view calls one action and shows a refusal in its own words, in the page."""

from collections.abc import Callable

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from evidence import actions as evidence_actions
from evidence.models import Item
from incidents import actions, approval, plan_form, plans
from incidents.incident_page import IncidentPage
from incidents.models import Incident
from incidents.refused import Refused
from incidents.views import page_or_404, render_incident
from runs.models import Person
from runs.proof import NotAgain, prove_again
from runs.views import person_of, visible_run_or_404


def act(
    request: HttpRequest, incident_id: int, do: Callable[[Incident, Person], object], *, anchor: str = ""
) -> HttpResponse:
    """Call an action, then show the incident again: at `anchor`, or with the refusal."""
    page = page_or_404(request, incident_id)
    try:
        do(page.incident, person_of(request))
    except (Refused, evidence_actions.Refused) as refused:
        changes = getattr(refused, "changes", [])
        says = " ".join([refused.says, *changes])
        again = page_or_404(request, incident_id)
        return render_incident(request, again, says=says, status=refused.status)
    except NotAgain as refused:
        return render_incident(request, page, says=refused.says, status=refused.status)
    address = redirect("incident", incident_id)
    address["Location"] += f"#{anchor}" if anchor else ""
    return address


@require_POST
@login_required
def acknowledge(request: HttpRequest, incident_id: int) -> HttpResponse:
    """Say that somebody has it."""
    return act(
        request, incident_id, lambda incident, person: actions.acknowledge(incident=incident, person=person)
    )


@require_POST
@login_required
def change_plan(request: HttpRequest, incident_id: int) -> HttpResponse:
    """Make a new version of the plan from the form."""

    def do(incident: Incident, person: Person) -> None:
        known = plans.newest(incident)
        given = plan_form.read(request.POST, known.exclusions if known else {})
        actions.change_plan(incident=incident, person=person, **given)

    return act(request, incident_id, do, anchor="plan")


@require_POST
@login_required
def request_resume(request: HttpRequest, incident_id: int) -> HttpResponse:
    """Ask to resume by exactly what the page showed."""
    return act(
        request,
        incident_id,
        lambda incident, person: approval.request_resume(
            incident=incident,
            person=person,
            digest=request.POST.get("digest", ""),
            note=request.POST.get("note", "").strip(),
        ),
        anchor="plan",
    )


@require_POST
@login_required
def false_alarm(request: HttpRequest, incident_id: int) -> HttpResponse:
    """Declare that nothing was wrong."""

    def do(incident: Incident, person: Person) -> None:
        prove_again(request, person)
        approval.false_alarm(incident=incident, person=person, why=request.POST.get("why", "").strip())

    return act(request, incident_id, do)


@require_POST
@login_required
def break_glass(request: HttpRequest, incident_id: int) -> HttpResponse:
    """Resume alone and now: the named role, a reason, the run's name typed, the person proven again."""

    def do(incident: Incident, person: Person) -> None:
        prove_again(request, person)
        approval.break_glass(
            incident=incident,
            person=person,
            why=request.POST.get("why", ""),
            run_name=request.POST.get("run_name", ""),
            digest=request.POST.get("digest", ""),
        )

    return act(request, incident_id, do, anchor="approval")


@require_POST
@login_required
def solo(request: HttpRequest, incident_id: int) -> HttpResponse:
    """Resume as the sole approver on duty, after the delay in which any approver may reject it."""

    def do(incident: Incident, person: Person) -> None:
        prove_again(request, person)
        approval.solo(
            incident=incident,
            person=person,
            digest=request.POST.get("digest", ""),
            why=request.POST.get("note", ""),
        )

    return act(request, incident_id, do, anchor="approval")


@require_POST
@login_required
def withdraw(request: HttpRequest, incident_id: int) -> HttpResponse:
    """Take back one's own request."""
    return act(
        request,
        incident_id,
        lambda incident, person: approval.withdraw(
            incident=incident, person=person, why=request.POST.get("why", "")
        ),
        anchor="approval",
    )


@require_POST
@login_required
def waive(request: HttpRequest, incident_id: int) -> HttpResponse:
    """Let the gate open without one item, by name and reason."""
    wanted = request.POST.get("item", "")

    def do(incident: Incident, person: Person) -> None:
        item = Item.objects.filter(
            dossier_id=incident.dossier_id, pk=int(wanted) if wanted.isdecimal() and len(wanted) < 18 else 0
        ).first()
        if item is None:
            raise Refused("no-item", "Choose which item is waived.")
        evidence_actions.waive(item=item, person=person, why=request.POST.get("why", "").strip())

    return act(request, incident_id, do, anchor="evidence")


@require_POST
@login_required
def resolve(request: HttpRequest, incident_id: int) -> HttpResponse:
    """Close an incident that does not hold its run."""
    return act(
        request,
        incident_id,
        lambda incident, person: actions.resolve(
            incident=incident, person=person, why=request.POST.get("why", "").strip()
        ),
    )


@require_POST
@login_required
def hold(request: HttpRequest, slug: str) -> HttpResponse:
    """Hold a run because a person says so, and show the incident that opens."""
    run = visible_run_or_404(request, slug)
    try:
        incident = actions.hold_by_hand(
            run=run, person=person_of(request), why=request.POST.get("why", "").strip()
        )
    except Refused as refused:
        return render(
            request, "incidents/not_held.html", {"run": run, "says": refused.says}, status=refused.status
        )
    return redirect("incident", incident.pk)


# Approve: a page of its own, phone first


def _approve_page(
    request: HttpRequest,
    page: IncidentPage,
    *,
    says: str = "",
    changes: list[str] | None = None,
    status: int = 200,
) -> HttpResponse:
    return render(
        request,
        "incidents/approve.html",
        {
            "page": page,
            "buttons": [page.next.main, *page.next.buttons],
            "says": says,
            "changes": changes or [],
            "done": request.GET.get("done", ""),
        },
        status=status,
    )


@never_cache
@require_http_methods(["GET", "POST"])
@login_required
def approve(request: HttpRequest, incident_id: int) -> HttpResponse:
    """Show what is signed; on POST approve exactly what was shown, with the password given again."""
    page = page_or_404(request, incident_id)
    if request.method != "POST":
        return _approve_page(request, page)
    person = person_of(request)
    try:
        prove_again(request, person)
        approval.approve(incident=page.incident, person=person, digest=request.POST.get("digest", ""))
    except NotAgain as refused:
        return _approve_page(request, page, says=refused.says, status=refused.status)
    except Refused as refused:
        again = page_or_404(request, incident_id)
        return _approve_page(
            request, again, says=refused.says, changes=refused.changes, status=refused.status
        )
    address = redirect("approve", incident_id)
    address["Location"] += "?done=approved"
    return address


@require_POST
@login_required
def reject(request: HttpRequest, incident_id: int) -> HttpResponse:
    """Reject the live request with a reason."""
    page = page_or_404(request, incident_id)
    try:
        approval.reject(
            incident=page.incident, person=person_of(request), why=request.POST.get("why", "").strip()
        )
    except Refused as refused:
        again = page_or_404(request, incident_id)
        return _approve_page(
            request, again, says=refused.says, changes=refused.changes, status=refused.status
        )
    address = redirect("approve", incident_id)
    address["Location"] += "?done=rejected"
    return address
