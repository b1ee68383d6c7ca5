"""What people decide about evidence: open a dossier by hand, close it, keep it longer, let it go."""

from datetime import UTC, date, datetime, time
from typing import Any

from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods

from evidence import actions
from evidence.checkpoint_bytes import allowing
from evidence.models import Dossier, Item, VaultRequest
from evidence.pages import listing, reading, steps
from evidence.pages.steps import CLOSE, EXTEND, TWO_PEOPLE, Step, TwoPeople, subject_lines
from evidence.refused import Refused
from evidence.retention import dates, two_people
from evidence.views import dossier_or_404
from runs.access import project_member, visible_runs
from runs.models import Attempt, Membership, Person, Project, Role, Run
from runs.proof import NotAgain, prove_again
from runs.views import person_of

MAY_OPEN = (Role.RESPONDER, Role.APPROVER, Role.ADMIN)
ATTEMPTS = 50


@never_cache
@require_http_methods(["GET", "POST"])
@login_required
def open_dossier(request: HttpRequest) -> HttpResponse:
    """Freeze the evidence of a run without an incident: choose the run, then say what and why."""
    person = person_of(request)
    runs = visible_runs(person).filter(project__in=_projects(person, MAY_OPEN)).order_by("slug")
    slug = request.POST.get("run") or request.GET.get("run", "")
    if request.method != "POST":
        run = runs.filter(slug=slug).select_related("project").first() if slug else None
        return _open_page(request, runs=list(runs), run=run)
    run = visible_runs(person).filter(slug=slug).select_related("project").first()
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
        return _open_page(request, runs=list(runs), run=run, says=refused.says, status=refused.status)
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
    """Show a step that two people take; on POST ask for it, agree to it, or decline it."""
    return _turn(request, dossier_or_404(request, dossier_id), TWO_PEOPLE[name])


@never_cache
@require_http_methods(["GET", "POST"])
@login_required
def read_checkpoint(request: HttpRequest, dossier_id: int, item_id: int) -> HttpResponse:
    """Show what reading a checkpoint takes, and how; on POST ask for it, agree to it, or decline it."""
    found = dossier_or_404(request, dossier_id)
    item = Item.objects.filter(dossier=found, pk=item_id).first()
    if item is None:
        raise Http404
    item.dossier = found
    return _turn(request, found, steps.read_checkpoint(item), reading_of=item)


def _turn(
    request: HttpRequest, found: Dossier, step: TwoPeople, *, reading_of: Item | None = None
) -> HttpResponse:
    person = person_of(request)
    if request.method != "POST":
        return _two_page(request, found, step, reading_of=reading_of)
    live = two_people.live_request(found, step.kind, step.item)
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
            two_people.decline(request=live, person=person, why=why)
        else:
            raise Refused("over", "Nothing was chosen.")
    except NotAgain as refused:
        return _two_page(
            request, found, step, says=refused.says, status=refused.status, reading_of=reading_of
        )
    except Refused as refused:
        found = dossier_or_404(request, found.pk)
        return _two_page(
            request, found, step, says=refused.says, status=refused.status, reading_of=reading_of
        )
    return redirect(request.path)


@never_cache
@require_http_methods(["GET", "POST"])
@login_required
def close(request: HttpRequest, dossier_id: int) -> HttpResponse:
    """Show the close-out of a dossier opened by hand; on POST close it."""
    found = dossier_or_404(request, dossier_id)
    if request.method != "POST":
        return _page(request, found, CLOSE)
    try:
        dates.close_dossier(dossier=found, person=person_of(request), why=request.POST.get("why", ""))
    except Refused as refused:
        return _page(request, found, CLOSE, says=refused.says, status=refused.status)
    return redirect("dossier", dossier_id)


@never_cache
@require_http_methods(["GET", "POST"])
@login_required
def extend(request: HttpRequest, dossier_id: int) -> HttpResponse:
    """Choose a later day, read what it costs, and on POST keep the dossier until then."""
    found = dossier_or_404(request, dossier_id)
    given = request.POST if request.method == "POST" else request.GET
    longer = None
    try:
        if request.method == "POST" and not project_member(
            person_of(request), found.run.project, *EXTEND.may
        ):
            raise Refused("not-allowed", EXTEND.who)
        if "until" in given:
            until = _end_of(given["until"])
            if reason := dates.why_not_until(found, until):
                raise Refused(*reason)
            longer = reading.longer(found, until)
        if request.method != "POST":
            return _page(request, found, EXTEND, longer=longer, dated=True)
        if longer is None:
            raise Refused("no-such-day", "Choose until which day it is kept.")
        dates.extend_retention(
            dossier=found, person=person_of(request), until=longer.until, why=given.get("why", "")
        )
    except Refused as refused:
        return _page(
            request, found, EXTEND, says=refused.says, status=refused.status, longer=longer, dated=True
        )
    return redirect("dossier", dossier_id)


def _end_of(text: str) -> datetime:
    """Return the last second of a day of the form, in UTC.

    Raises:
        Refused: no-such-day.
    """
    try:
        return datetime.combine(date.fromisoformat(text), time(23, 59, 59), UTC)
    except ValueError as error:
        raise Refused("no-such-day", "The day must be a date like 2027-03-01.") from error


def _two_page(
    request: HttpRequest,
    found: Dossier,
    step: TwoPeople,
    *,
    says: str = "",
    status: int = 200,
    reading_of: Item | None = None,
) -> HttpResponse:
    person = person_of(request)
    live = two_people.live_request(found, step.kind, step.item)
    everyone = list(
        VaultRequest.objects.filter(dossier=found, kind=step.kind, item=step.item).order_by("-pk")
    )
    people = listing.names([one.requested_by for one in everyone] + [one.decided_by for one in everyone])
    mine = live is not None and live.requested_by == str(person.opaque_id)
    decides = project_member(person, found.run.project, *two_people.DECIDERS)
    is_open = live is not None and live.state == VaultRequest.State.OPEN
    return _page(
        request,
        found,
        step,
        says=says,
        status=status,
        live=live,
        subject=subject_lines(live.subject if live else step.subject(found)),
        asked_by=people.get(live.requested_by, "somebody") if live else "",
        mine=mine,
        may_agree=is_open and decides and not mine,
        may_decline=is_open and (decides or mine),
        deciders=_deciders(found.run.project, live.requested_by if live else str(person.opaque_id)),
        past=[
            (one, people.get(one.requested_by, "somebody"), people.get(one.decided_by, "somebody"))
            for one in everyone
            if live is None or one.pk != live.pk
        ],
        **(_how_to_read(request, reading_of, person) if reading_of is not None else {}),
    )


def _how_to_read(request: HttpRequest, item: Item, person: Person) -> dict[str, Any]:
    """Return what the page of a reading says beside the turns: whether this person may read now, and how."""
    grant = allowing.grant_of(item, person)
    alone = not allowing.needs_two(item)
    reads = project_member(person, item.dossier.run.project, *allowing.READERS)
    return {
        "item": item,
        "item_bytes": allowing.size_of(item)[1],
        "reads_now": reads and allowing.why_not(item) is None and (alone or grant is not None),
        "reads_until": allowing.until(grant) if grant else None,
        "address": request.build_absolute_uri(f"/api/v1/dossiers/{item.dossier_id}/items/{item.pk}"),
    }


def _page(
    request: HttpRequest, found: Dossier, step: Step, *, says: str = "", status: int = 200, **more: Any
) -> HttpResponse:
    reason = step.why_not(found)
    return render(
        request,
        "evidence/step.html",
        {
            "dossier": found,
            "step": step,
            "says": says,
            "why_not": reason[1] if reason else "",
            "alone": reason is not None
            and reason[0] == "alone",  # nothing stands in the way: nobody has to agree
            "may": project_member(person_of(request), found.run.project, *step.may),
            "keeping": reading.keeping(found),
            "notes": step.notes(found),
            "given": request.POST,
        }
        | more,
        status=status,
    )


def _deciders(project: Project, asker: str) -> str:
    """Return who may agree, the one who asks left out: "jonas.w or priya.n"."""
    rows = Membership.objects.filter(
        project=project, roles__overlap=list(two_people.DECIDERS), person__is_active=True
    ).select_related("person")
    names = sorted(row.person.username for row in rows if str(row.person.opaque_id) != asker)
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
