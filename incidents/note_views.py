"""Notes: added, changed, previewed; and the images in them."""

import re

from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseNotAllowed, JsonResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from andon.images import MOST_BYTES
from evidence import attachments
from evidence.refused import Refused as EvidenceRefused
from evidence.vault import VaultError
from incidents import actions, notes
from incidents.decisions import act
from incidents.models import Incident, Note
from incidents.refused import Refused
from incidents.views import incident_or_404
from runs.models import Person
from runs.views import person_of

_YEAR_S = 365 * 86_400
_SHA256 = re.compile(r"[0-9a-f]{64}")


@require_http_methods(["GET", "HEAD", "POST"])
@login_required
def note(request: HttpRequest, incident_id: int) -> HttpResponse:
    """Add a note, or a new text of one's own; attached images go into the dossier first.

    `GET ?change=ID` is the form for a new text: what a note holds as typed stands on no other page.
    """
    if request.method != "POST":
        return _form(request, incident_id) if "change" in request.GET else HttpResponseNotAllowed(["POST"])

    def add(incident: Incident, person: Person) -> None:
        text = request.POST.get("text", "")
        for file in request.FILES.getlist("image"):
            body = file.read(MOST_BYTES + 1) or b""
            text = f"{text}\n\n{_kept(incident, person, body, str(file.name))}"
        actions.add_note(
            incident=incident,
            person=person,
            text=text,
            replaces=_replaced(incident, request.POST.get("replaces", "")),
        )

    return act(request, incident_id, add, anchor="notes")


def _form(request: HttpRequest, incident_id: int) -> HttpResponse:
    incident = incident_or_404(request, incident_id)
    mine = [one for one in notes.of_incident(incident) if one.person_id == person_of(request).pk]
    for one in mine:
        if one.key == request.GET.get("change"):
            return render(request, "incidents/change_note.html", {"i": incident, "note": one})
    raise Http404("You have no such note here.")


def _replaced(incident: Incident, text: str) -> Note | None:
    if not text:
        return None
    found = (
        Note.objects.filter(incident=incident, pk=int(text)) if text.isdecimal() and len(text) < 18 else None
    )
    note = found.first() if found is not None else None
    if note is None:
        raise Refused("no-such-note", "There is no such note.", status=422)
    return note


def _kept(incident: Incident, person: Person, body: bytes, name: str) -> str:
    """Keep an image as evidence, and return the Markdown that shows it."""
    one = attachments.keep_image(dossier=incident.dossier, person=person, body=body)
    called = " ".join(re.sub(r"[^\w.-]+", " ", name, flags=re.ASCII)[:60].split()) or "image"
    return f"![{called}](/incidents/{incident.pk}/images/{one.sha256})"


@require_POST
@login_required
def preview(request: HttpRequest, incident_id: int) -> HttpResponse:
    """Answer a note as it would be shown; nothing is kept."""
    incident_or_404(request, incident_id)
    html = notes.render(request.POST.get("text", ""))
    return render(request, "incidents/_note_preview.html", {"html": html})


@require_POST
@login_required
def image(request: HttpRequest, incident_id: int) -> HttpResponse:
    """Keep a pasted image, and answer the Markdown that shows it."""
    found = incident_or_404(request, incident_id)
    file = request.FILES.get("image")
    if file is None:
        return JsonResponse({"says": "Not attached: no image was sent."}, status=422)
    try:
        markdown = _kept(found, person_of(request), file.read(MOST_BYTES + 1) or b"", str(file.name))
    except EvidenceRefused as refused:
        return JsonResponse({"says": refused.says}, status=422)
    return JsonResponse({"markdown": markdown})


@require_GET
@login_required
def shown_image(request: HttpRequest, incident_id: int, sha256: str) -> HttpResponse:
    """Answer an image of a note: what it is is read from its bytes, and it can run nothing."""
    found = incident_or_404(request, incident_id)
    one = None
    if _SHA256.fullmatch(sha256):
        one = attachments.image_of([found.dossier_id, *found.earlier_dossiers], sha256)
    if one is None:
        raise Http404
    try:
        body, what = attachments.read_image(one)
    except (VaultError, ValueError):
        return HttpResponse("The vault does not give this image now.", status=503, content_type="text/plain")
    response = HttpResponse(body, content_type=what.media_type)
    response["Content-Security-Policy"] = "default-src 'none'; sandbox"
    response["X-Content-Type-Options"] = "nosniff"
    response["Content-Disposition"] = f'inline; filename="{sha256[:16]}{what.suffix}"'
    response["Cache-Control"] = f"private, max-age={_YEAR_S}, immutable"
    return response
