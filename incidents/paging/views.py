"""The on-call page: who has the pager, what is up, how the channels do; and the buttons of it."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from django.contrib.auth.decorators import login_required
from django.db.models import Q, QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from incidents import duties, roles
from incidents.models import Incident
from incidents.paging import health, on_call, raising
from incidents.paging.ladder import paging
from incidents.paging.models import Page
from incidents.refused import Refused
from incidents.views import page_or_404
from runs.models import FleetReport, Membership, Person, Project
from runs.views import person_of

HOURS = (1, 2, 4, 8, 12, 24, 72)
_SHOWN = 50
REPORTS = 20


@dataclass(frozen=True, slots=True)
class Pager:
    """One project's pager as the page shows it."""

    project: Project
    holder: on_call.Holder | None
    people: list[str]  # who may take it, [] when this person may not give it


def visible_pages(person: Person) -> QuerySet[Page]:
    """Return the pages a person may see: of their projects, and of Andon itself for any member."""
    mine = Membership.objects.filter(person=person)
    if not mine.exists():
        return Page.objects.none()
    return Page.objects.filter(Q(project__in=mine.values("project")) | Q(project=None))


@require_GET
@login_required
def show(request: HttpRequest) -> HttpResponse:
    """Show who is on call, which pages are up, and how each channel does."""
    return _render(request)


def _render(request: HttpRequest, *, says: str = "", status: int = 200) -> HttpResponse:
    person, now = person_of(request), timezone.now()
    projects = [one.project for one in _memberships(person)]
    known = paging()
    pages = visible_pages(person).select_related("project", "incident")
    context = {
        "says": says,
        "pagers": [_pager(one, person, now) for one in projects],
        "hours": HOURS,
        "me": person.username,
        "up": pages.filter(ended_at=None).order_by("-raised_at")[:_SHOWN],
        "over": pages.exclude(ended_at=None).order_by("-ended_at")[:10],
        "channels": health.channels() if projects else [],
        "reports": FleetReport.objects.filter(project__in=projects)
        .select_related("run")
        .order_by("-last_at")[:REPORTS],
        "ladders": [(one, known.ladder(one.slug)) for one in projects],
        "problem": known.why if projects else "",
        "external": health.external(now) if projects else "",
    }
    return render(request, "incidents/on_call.html", context, status=status)


def _memberships(person: Person) -> QuerySet[Membership]:
    return Membership.objects.filter(person=person).select_related("project").order_by("project__slug")


def _pager(project: Project, person: Person, now: datetime) -> Pager:
    rows = Membership.objects.filter(
        project=project, roles__overlap=list(roles.RESPONDERS), person__is_active=True
    ).select_related("person")
    names = sorted(row.person.username for row in rows)
    return Pager(project, on_call.of_project(project, now), names if person.username in names else [])


@require_POST
@login_required
def take(request: HttpRequest) -> HttpResponse:
    """Take the pager of a project, or give it to somebody, for some hours from now."""
    person = person_of(request)
    slug, name, hours = (request.POST.get(one, "") for one in ("project", "to", "hours"))
    row = _memberships(person).filter(project__slug=slug).first()
    if row is None:
        raise Http404
    who = Person.objects.filter(username=name, is_active=True).first()
    try:
        if who is None:
            raise Refused("no-such-person", "Choose a responder, approver or admin.", status=422)
        if hours not in {str(one) for one in HOURS}:
            raise Refused("bad-time", f"Choose one of {', '.join(map(str, HOURS))} hours.", status=422)
        until = timezone.now() + timedelta(hours=int(hours))
        on_call.take(project=row.project, person=person, who=who, until=until)
    except Refused as refused:
        return _render(request, says=refused.says, status=refused.status)
    return redirect("on_call")


@require_POST
@login_required
def acknowledge(request: HttpRequest, page_id: int) -> HttpResponse:
    """Take a page that is of no incident of its own."""
    page = visible_pages(person_of(request)).filter(pk=page_id).first()
    if page is None:
        raise Http404
    try:
        raising.acknowledge(page=page, person=person_of(request))
    except Refused as refused:
        return _render(request, says=refused.says, status=refused.status)
    return redirect("on_call")


@require_http_methods(["GET", "POST"])
@login_required
def page_someone(request: HttpRequest, incident_id: int) -> HttpResponse:
    """Show whom of the project to page about an incident; on POST page them."""
    page = page_or_404(request, incident_id)
    says, status = "", 200
    if request.method == "POST":
        try:
            raising.page_person(
                incident=page.incident,
                person=person_of(request),
                who=request.POST.get("to", ""),
                why=request.POST.get("why", "").strip(),
            )
        except Refused as refused:
            says, status = refused.says, refused.status
        else:
            return redirect("incident", incident_id)
    context = {"page": page, "people": _reachable(page.incident), "says": says}
    return render(request, "incidents/page_someone.html", context, status=status)


def _reachable(incident: Incident) -> list[tuple[str, bool]]:
    known = paging()
    return [(one.username, bool(known.of_person(one.username))) for one in duties.holders(incident)]
