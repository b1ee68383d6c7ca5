"""Standing approvals for people: list, write, sign, revoke."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_POST

from incidents import roles
from incidents.refused import Refused
from incidents.standing_approvals import actions, granting
from incidents.standing_approvals.models import StandingApproval
from runs.access import project_member, visible_runs
from runs.models import Person, Project, Run
from runs.proof import NotAgain, prove_again
from runs.views import person_of

ROWS = 50


@dataclass(frozen=True, slots=True)
class Line:
    """One standing approval with what has become of it."""

    row: StandingApproval
    state: str  # waits for a signature | in force | revoked | expired
    used: int
    kinds: list[str]


def visible(person: Person) -> list[Project]:
    """Return the projects a person belongs to."""
    return list(Project.objects.filter(memberships__person=person).order_by("slug"))


def line(row: StandingApproval) -> Line:
    """Return one with its state and today's count."""
    kinds = [one.replace("_", " ") for one in row.kinds]
    return Line(row, actions.state(row), granting.used_today(row), kinds)


def lines(person: Person) -> list[Line]:
    """Return those of a person's projects, newest first."""
    found = StandingApproval.objects.filter(project__in=visible(person)).select_related(
        "project", "run", "made_by", "signed_by", "revoked_by"
    )
    return [line(row) for row in found[:ROWS]]


def _list(
    request: HttpRequest, *, says: str = "", status: int = 200, typed: dict[str, object] | None = None
) -> HttpResponse:
    person = person_of(request)
    projects = [one for one in visible(person) if project_member(person, one, *roles.RESPONDERS)]
    return render(
        request,
        "incidents/standing.html",
        {
            "lines": lines(person),
            "says": says,
            "typed": typed or {},
            "projects": projects,
            "runs": visible_runs(person).filter(project__in=projects).order_by("slug")[:200],
            "kinds": [(one, one.replace("_", " ")) for one in granting.kinds()],
        },
        status=status,
    )


@never_cache
@require_GET
@login_required
def show(request: HttpRequest) -> HttpResponse:
    """List standing approvals, and offer to write one."""
    return _list(request)


def _one(request: HttpRequest, standing_id: int) -> StandingApproval:
    found = (
        StandingApproval.objects.filter(pk=standing_id, project__in=visible(person_of(request)))
        .select_related("project", "run", "made_by", "signed_by", "revoked_by")
        .first()
    )
    if found is None:
        raise Http404
    return found


def _detail(
    request: HttpRequest, row: StandingApproval, *, says: str = "", status: int = 200
) -> HttpResponse:
    person = person_of(request)
    shown = line(row)
    approver = project_member(person, row.project, *roles.APPROVERS)
    others = [one for one in roles.approvers(row.project) if one.pk != row.made_by_id]
    return render(
        request,
        "incidents/standing_one.html",
        {
            "line": shown,
            "row": row,
            "says": says,
            "may_sign": approver and row.made_by_id != person.pk and shown.state == "waits for a signature",
            "who_signs": roles.names_of(others) or "nobody yet: an admin can add an approver",
            "may_revoke": row.revoked_at is None and project_member(person, row.project, *roles.RESPONDERS),
            "used": row.requests.select_related("incident__run", "permit").order_by("-id")[:ROWS],
        },
        status=status,
    )


@never_cache
@require_GET
@login_required
def one(request: HttpRequest, standing_id: int) -> HttpResponse:
    """Show one: what is signed, by whom, what ran under it."""
    return _detail(request, _one(request, standing_id))


@require_POST
@login_required
def create(request: HttpRequest) -> HttpResponse:
    """Write one from the form."""
    person, given = person_of(request), request.POST
    project = next((each for each in visible(person) if each.slug == given.get("project", "")), None)
    if project is None:
        raise Http404
    run: Run | None = None
    try:
        if given.get("run"):
            run = visible_runs(person).filter(slug=given["run"], project=project).first()
            if run is None:
                raise Refused("bad-standing", "That run is not one of the project.", status=422)
        made = actions.create(
            project=project,
            person=person,
            run=run,
            kinds=given.getlist("kinds"),
            per_day=_number(given.get("per_day", "")),
            furthest_steps=_number(given.get("furthest_steps", "")),
            widest_skip=_number(given.get("widest_skip", "")),
            expires_at=timezone.now() + timedelta(days=min(_number(given.get("days", "")), 3650)),
            why=given.get("why", ""),
        )
    except Refused as refused:
        typed: dict[str, object] = {**given.dict(), "chosen": given.getlist("kinds")}
        return _list(request, says=refused.says, status=refused.status, typed=typed)
    return redirect("standing_one", made.pk)


def _act(
    request: HttpRequest, standing_id: int, do: Callable[[StandingApproval, Person], object]
) -> HttpResponse:
    row = _one(request, standing_id)
    try:
        do(row, person_of(request))
    except (Refused, NotAgain) as refused:
        return _detail(request, _one(request, standing_id), says=refused.says, status=refused.status)
    return redirect("standing_one", standing_id)


@require_POST
@login_required
def sign(request: HttpRequest, standing_id: int) -> HttpResponse:
    """Sign exactly what was shown, with the person proven again."""

    def do(row: StandingApproval, person: Person) -> None:
        prove_again(request, person)
        actions.sign(standing=row, person=person, digest=request.POST.get("digest", ""))

    return _act(request, standing_id, do)


@require_POST
@login_required
def revoke(request: HttpRequest, standing_id: int) -> HttpResponse:
    """End one at once."""
    return _act(
        request,
        standing_id,
        lambda row, person: actions.revoke(standing=row, person=person, why=request.POST.get("why", "")),
    )


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 16 else -1
