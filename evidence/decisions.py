"""What people decide about evidence: open a dossier by hand, release one, delete what it stores."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods

from evidence import actions, listing, reading, release, two_people
from evidence.models import Dossier, VaultRequest
from evidence.refused import Refused
from evidence.two_people import Reason
from evidence.views import dossier_or_404
from runs.access import project_member, visible_runs
from runs.models import Attempt, Membership, Person, Project, Role, Run
from runs.proof import NotAgain, prove_again
from runs.views import person_of

MAY_OPEN = (Role.RESPONDER, Role.APPROVER, Role.ADMIN)
ATTEMPTS = 50


@dataclass(frozen=True, slots=True)
class Step:
    """A step that two people take: its words, what stands in its way, and what carries each turn out."""

    kind: VaultRequest.Kind
    name: str
    says: str
    why_not: Callable[[Dossier, datetime | None], Reason]
    ask: Callable[..., VaultRequest]
    agree: Callable[..., VaultRequest]


STEPS = {
    "release": Step(
        VaultRequest.Kind.RELEASE,
        "Release",
        "Lets go of what this dossier holds: legal holds, hard links, the deletion gate. What another "
        "dossier counts on stays held. What the vault stores stays stored.",
        release.why_not_release,
        release.request_release,
        release.approve_release,
    ),
    "deletion": Step(
        VaultRequest.Kind.DELETION,
        "Delete",
        "Deletes the objects the vault stores for this dossier. The custody chain, the seals and the list "
        "of what was there stay. This cannot be undone.",
        release.why_not_deletion,
        release.request_deletion,
        release.approve_deletion,
    ),
}


@never_cache
@require_http_methods(["GET", "POST"])
@login_required
def open_dossier(request: HttpRequest) -> HttpResponse:
    """Freeze the evidence of a run without an incident: choose the run, then say what and why."""
    person = person_of(request)
    runs = visible_runs(person).filter(project__in=_projects(person, MAY_OPEN)).order_by("slug")
    slug = request.POST.get("run") or request.GET.get("run", "")
    run = runs.filter(slug=slug).select_related("project").first() if slug else None
    if request.method != "POST":
        return _open_page(request, runs=list(runs), run=run)
    if run is None:
        # A run of a stranger's project is answered like one that does not exist.
        raise Http404
    try:
        made = actions.open_dossier(
            run=run,
            person=person,
            why=request.POST.get("why", ""),
            attempt=_whole(request.POST.get("attempt", ""), "attempt"),
            first_bad_step=_whole(request.POST.get("step", ""), "first bad step"),
            margin_steps=_whole(request.POST.get("margin", ""), "margin") or 0,
        )
    except Refused as refused:
        status = 403 if refused.code == "not-allowed" else 409
        return _open_page(request, runs=list(runs), run=run, says=refused.says, status=status)
    return redirect("dossier", made.pk)


def _open_page(
    request: HttpRequest, *, runs: list[Run], run: Run | None, says: str = "", status: int = 200
) -> HttpResponse:
    attempts = Attempt.objects.filter(run=run).order_by("-number").values_list("number", flat=True)
    return render(
        request,
        "evidence/open.html",
        {
            "runs": runs,
            "run": run,
            "attempts": list(attempts[:ATTEMPTS]) if run else [],
            "says": says,
            "given": request.POST,
        },
        status=status,
    )


def _projects(person: Person, roles: tuple[Role, ...]) -> list[int]:
    mine = Membership.objects.filter(person=person, roles__overlap=list(roles))
    return list(mine.values_list("project", flat=True))


def _whole(text: str, name: str) -> int | None:
    """Read a number of the form, None when the field was left empty.

    Raises:
        Refused: no-such-step, it is no whole number.
    """
    text = text.strip().replace(",", "")
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise Refused("no-such-step", f"The {name} must be a whole number from 0.")
    return int(text)


@never_cache
@require_http_methods(["GET", "POST"])
@login_required
def two_person_step(request: HttpRequest, dossier_id: int, name: str) -> HttpResponse:
    """Show a release or a deletion; on POST ask for it, agree to it, or decline it."""
    step, person = STEPS[name], person_of(request)
    found = dossier_or_404(request, dossier_id)
    if request.method != "POST":
        return _step_page(request, found, step)
    live = two_people.live_request(found, step.kind)
    why, turn = request.POST.get("why", ""), request.POST.get("turn", "")
    try:
        if turn == "ask":
            step.ask(dossier=found, person=person, why=why)
        elif live is None or str(live.pk) != request.POST.get("request", ""):
            raise Refused("over", "What you saw is not open any more: read what is asked for now.")
        elif turn == "agree":
            prove_again(request, person)
            step.agree(request=live, person=person)
        elif turn == "decline":
            release.decline(request=live, person=person, why=why)
        else:
            raise Refused("over", "Nothing was chosen.")
    except NotAgain as refused:
        return _step_page(request, found, step, says=refused.says, status=refused.status)
    except Refused as refused:
        status = 403 if refused.code in {"not-allowed", "not-you"} else 409
        return _step_page(
            request, dossier_or_404(request, dossier_id), step, says=refused.says, status=status
        )
    return redirect(name, dossier_id)


def _step_page(
    request: HttpRequest, found: Dossier, step: Step, *, says: str = "", status: int = 200
) -> HttpResponse:
    person = person_of(request)
    project: Project = found.run.project
    live = two_people.live_request(found, step.kind)
    everyone = list(VaultRequest.objects.filter(dossier=found, kind=step.kind).order_by("-pk"))
    people = listing.names([one.requested_by for one in everyone] + [one.decided_by for one in everyone])
    reason = step.why_not(found, None)
    mine = live is not None and live.requested_by == str(person.opaque_id)
    decides = project_member(person, project, *two_people.DECIDERS)
    return render(
        request,
        "evidence/step.html",
        {
            "dossier": found,
            "step": step,
            "says": says,
            "why_not": reason[1] if reason else "",
            "live": live,
            "asked_by": people.get(live.requested_by, "somebody") if live else "",
            "mine": mine,
            "may_ask": project_member(person, project, *two_people.ASKERS),
            "may_agree": live is not None and live.state == VaultRequest.State.OPEN and decides and not mine,
            "may_decline": live is not None and live.state == VaultRequest.State.OPEN and (decides or mine),
            "deciders": _deciders(project, live),
            "keeping": reading.keeping(found),
            "past": [
                (one, people.get(one.requested_by, "somebody"), people.get(one.decided_by, "somebody"))
                for one in everyone
                if live is None or one.pk != live.pk
            ],
        },
        status=status,
    )


def _deciders(project: Project, live: VaultRequest | None) -> str:
    """Return who may agree, the one who asked left out: "jonas.w or priya.n"."""
    rows = Membership.objects.filter(
        project=project, roles__overlap=list(two_people.DECIDERS), person__is_active=True
    ).select_related("person")
    names = sorted(
        row.person.username for row in rows if live is None or str(row.person.opaque_id) != live.requested_by
    )
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
