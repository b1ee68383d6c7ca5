"""The postmortem's pages: read, edit, make final, download."""

from collections.abc import Callable

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils.safestring import mark_safe
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from andon.postmortem import html
from andon.postmortem.document import PARTS
from incidents import roles
from incidents.models import Incident
from incidents.postmortem import build, edits
from incidents.postmortem import render as forms
from incidents.refused import Refused
from incidents.views import incident_or_404
from runs.access import project_member
from runs.models import Person
from runs.views import person_of

WORDS = {
    "summary": ("Summary", "One paragraph for the reader who was not there."),
    "impact": ("Impact", "What the table of numbers does not say."),
    "cause": ("Cause", "How it came about, in your own words. The board says how sure it is."),
    "learned": ("What we learned", "What went well, what did not, where luck helped."),
}
BLANK_ACTIONS = 3


def _context(request: HttpRequest, incident: Incident) -> dict[str, object]:
    may = project_member(person_of(request), incident.run.project, *roles.RESPONDERS)
    return {"incident": incident, "run": incident.run, "may_write": may, "own_incident": incident.pk}


def _page(request: HttpRequest, incident: Incident, *, says: str = "", status: int = 200) -> HttpResponse:
    document = build.of(incident)
    draft = document.version.status == "draft"
    context = _context(request, incident) | {
        "says": says,
        "digest": document.digest,
        "draft": draft,
        "lacks": build.lacks(incident) if draft else [],
        "versions": incident.postmortem_versions.select_related("person").order_by("-number"),
        "history": edits.history(incident),
        # Escaped by the renderer, which is what the exported file is made with, too.
        "body": mark_safe(html.body(build.named(document))),  # noqa: S308
    }
    return render(request, "incidents/postmortem.html", context, status=status)


@require_GET
@login_required
def postmortem(request: HttpRequest, incident_id: int) -> HttpResponse:
    """Show the postmortem to the reader who was not there."""
    return _page(request, incident_or_404(request, incident_id))


@require_GET
@login_required
def download(request: HttpRequest, incident_id: int, form: str) -> HttpResponse:
    """Answer the postmortem as a file."""
    incident = incident_or_404(request, incident_id)
    body = forms.render(build.named(build.of(incident)), form)
    response = HttpResponse(body, content_type=forms.TYPES[form])
    response["Content-Disposition"] = f'attachment; filename="postmortem-{incident.pk}.{form}"'
    response["Cache-Control"] = "private, no-cache"
    return response


def _edit_page(
    request: HttpRequest,
    incident: Incident,
    *,
    says: str = "",
    unsaved: dict[str, str] | None = None,
    unsaved_rows: list[dict[str, str]] | None = None,
    status: int = 200,
) -> HttpResponse:
    current, kept = edits.current(incident), unsaved or {}
    parts = []
    for part in PARTS:
        edit = current.get(part)
        title, hint = WORDS[part]
        parts.append(
            {
                "part": part,
                "title": title,
                "hint": hint,
                "base": edit.pk if edit else "",
                "text": kept.get(part, edit.text if edit else ""),
                "theirs": edit.text if edit and part in kept and kept[part] != edit.text else "",
                "edit": edit,
            }
        )
    listed = current.get("actions")
    rows = unsaved_rows if unsaved_rows is not None else list(listed.data if listed else [])
    context = _context(request, incident) | {
        "says": says,
        "parts": parts,
        "rows": rows + [{} for _ in range(BLANK_ACTIONS)],
        "actions_base": listed.pk if listed else "",
        "actions_edit": listed,
        "final": edits.final(incident),
    }
    return render(request, "incidents/postmortem_edit.html", context, status=status)


@require_http_methods(["GET", "POST"])
@login_required
def edit(request: HttpRequest, incident_id: int) -> HttpResponse:
    """Show what people write; on POST save one part, or hand it back with what somebody else wrote."""
    incident = incident_or_404(request, incident_id)
    if request.method != "POST":
        return _edit_page(request, incident)
    person, part = person_of(request), request.POST.get("part", "")
    base = _number(request.POST.get("base", ""))
    rows = _rows(request) if part == "actions" else None
    try:
        if rows is not None:
            edits.list_actions(incident=incident, person=person, rows=rows, base=base)
        else:
            text = request.POST.get("text", "")
            edits.write(incident=incident, person=person, part=part, text=text, base=base)
    except Refused as refused:
        unsaved = {part: request.POST.get("text", "")} if part in PARTS else {}
        return _edit_page(
            request,
            incident,
            says=refused.says,
            unsaved=unsaved,
            unsaved_rows=rows,
            status=refused.status,
        )
    answer = redirect("postmortem_edit", incident.pk)
    answer["Location"] += f"#{part}"
    return answer


def _rows(request: HttpRequest) -> list[dict[str, str]]:
    """Return the rows of actions as posted: columns of equal length, a missing cell is empty."""
    columns = {name: request.POST.getlist(name)[: 2 * edits.MOST_ACTIONS] for name in edits.FIELDS}
    length = max(map(len, columns.values()), default=0)
    return [
        {name: cells[index] if index < len(cells) else "" for name, cells in columns.items()}
        for index in range(length)
    ]


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) < 18 else None


def _decide(request: HttpRequest, incident_id: int, do: Callable[[Incident, Person], object]) -> HttpResponse:
    incident = incident_or_404(request, incident_id)
    try:
        do(incident, person_of(request))
    except Refused as refused:
        return _page(request, incident, says=refused.says, status=refused.status)
    return redirect("postmortem", incident.pk)


@require_POST
@login_required
def finalise(request: HttpRequest, incident_id: int) -> HttpResponse:
    """Make it final, as it was shown."""

    def do(incident: Incident, person: Person) -> None:
        edits.finalise(
            incident=incident,
            person=person,
            document=build.draft(incident),
            digest=request.POST.get("digest", ""),
            lacks=build.lacks(incident),
        )

    return _decide(request, incident_id, do)


@require_POST
@login_required
def reopen(request: HttpRequest, incident_id: int) -> HttpResponse:
    """Make a draft of it again, with a reason."""

    def do(incident: Incident, person: Person) -> None:
        edits.reopen(incident=incident, person=person, why=request.POST.get("why", ""))

    return _decide(request, incident_id, do)


@require_POST
@login_required
def review(request: HttpRequest, incident_id: int) -> HttpResponse:
    """Say that one has read the final version."""

    def do(incident: Incident, person: Person) -> None:
        edits.review(incident=incident, person=person, digest=request.POST.get("digest", ""))

    return _decide(request, incident_id, do)
