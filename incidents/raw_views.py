"""Raw evidence, one click: as a part of the incident page, or as a page of its own."""

from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET

from incidents import raw
from incidents.views import page_or_404
from runs.views import person_of


@never_cache
@require_GET
@login_required
def read(request: HttpRequest, incident_id: int, name: str) -> HttpResponse:
    """Answer a log, the node's kernel log, the batch or a stack; who reads is a row of the custody."""
    page = page_or_404(request, incident_id)
    if name not in raw.NAMES:
        raise Http404
    found = raw.read(page.incident, person_of(request), name)
    template = "_raw_excerpt" if request.headers.get("HX-Request") else "raw"
    return render(request, f"incidents/{template}.html", {"page": page, "raw": found, "names": raw.NAMES})
