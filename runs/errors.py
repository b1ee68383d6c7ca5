"""Error pages inside the frame, so that the alarm line stays: what, where, what to do."""

import logging
import uuid

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.template.loader import render_to_string
from django.utils import timezone

logger = logging.getLogger(__name__)


def bad_request(request: HttpRequest, exception: Exception | None = None) -> HttpResponse:
    """Answer 400: the request could not be read."""
    try:
        return render(request, "400.html", status=400)
    except Exception:
        # The middleware that the frame needs may not have run: a wrong Host header is refused before it.
        return HttpResponse("This request could not be read.\n", content_type="text/plain", status=400)


def forbidden(request: HttpRequest, exception: Exception | None = None) -> HttpResponse:
    """Answer 403: who may, and how to ask."""
    says = str(exception) if exception is not None and exception.args else ""
    return render(request, "403.html", {"says": says}, status=403)


def csrf_failure(request: HttpRequest, reason: str = "") -> HttpResponse:
    """Answer 403 for a form whose token does not fit, usually because the person signed in again."""
    says = "This form is older than your sign-in. Open the page again; nothing was changed."
    return render(request, "403.html", {"says": says}, status=403)


def not_found(request: HttpRequest, exception: Exception | None = None) -> HttpResponse:
    """Answer 404 with a search for what the address named."""
    named = request.path.rstrip("/").rsplit("/", 1)[-1][:100]
    return render(request, "404.html", {"named": named}, status=404)


def server_error(request: HttpRequest) -> HttpResponse:
    """Answer 500 with an id that also stands in the log; never fails itself."""
    reference = uuid.uuid4().hex[:12]
    logger.error("500 on %s %s, reference %s", request.method, request.path, reference)
    context = {"reference": reference, "at": timezone.now(), "posted": request.method == "POST"}
    try:
        return render(request, "500.html", context, status=500)
    except Exception:
        # The frame asks the database, which may be what failed.
        return HttpResponse(render_to_string("500_bare.html", context), status=500)
