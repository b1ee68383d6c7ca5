"""Answers that carry evidence out: a dossier's bag, one object. Posts, because each writes a custody row."""

import logging
from collections.abc import Iterator
from typing import IO

from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.utils import timezone
from django.utils.http import content_disposition_header
from django.views.decorators.http import require_POST

from andon.bag_zip import ZipLimit
from evidence.hashing import chunks
from evidence.models import Dossier
from evidence.pages import downloads, listing
from evidence.refused import Refused
from evidence.vault import VaultError
from evidence.views import dossier_or_404
from runs.views import person_of

logger = logging.getLogger(__name__)


@require_POST
@login_required
def bag(request: HttpRequest, dossier_id: int) -> HttpResponseBase:
    """Send a dossier's bag as an archive that `andon verify` checks."""
    found = dossier_or_404(request, dossier_id)
    try:
        wrong = listing.chain_of(found).wrong
        file = downloads.take_bag(dossier=found, person=person_of(request), wrong=wrong)
    except Refused as refused:
        return _refused(request, found, refused)
    except (VaultError, ValueError, OSError, ZipLimit) as error:
        return _not_given(request, found, "Its bag", error)
    size = file.seek(0, 2)
    file.seek(0)
    return _attachment(_all_of(file), downloads.bag_name(found), size, "application/zip")


@require_POST
@login_required
def stored_object(request: HttpRequest, dossier_id: int, object_id: int) -> HttpResponseBase:
    """Send one object as it is stored."""
    found = dossier_or_404(request, dossier_id)
    one = downloads.object_of(found, object_id)
    if one is None:
        raise Http404
    try:
        data = downloads.take_object(one=one, dossier=found, person=person_of(request))
    except Refused as refused:
        return _refused(request, found, refused)
    except VaultError as error:
        return _not_given(request, found, "The object", error)
    name = downloads.file_name(one.path)
    return _attachment(data, name, one.bytes_total, "application/octet-stream")


def _all_of(file: IO[bytes]) -> Iterator[bytes]:
    with file:
        yield from chunks(file)


def _attachment(data: Iterator[bytes], name: str, bytes_total: int, content_type: str) -> HttpResponseBase:
    """Return bytes that a browser saves and never shows, runs, guesses the type of, or keeps."""
    response = StreamingHttpResponse(data, content_type=content_type)
    response["Content-Length"] = str(bytes_total)
    response["Content-Disposition"] = content_disposition_header(True, name) or "attachment"
    response["X-Content-Type-Options"] = "nosniff"
    response["Content-Security-Policy"] = "default-src 'none'; sandbox"
    response["Cross-Origin-Resource-Policy"] = "same-origin"
    response["Cache-Control"] = "private, no-store"
    return response


def _refused(request: HttpRequest, found: Dossier, refused: Refused) -> HttpResponse:
    status = 403 if refused.code == "not-allowed" else 409
    return _page(request, found, status, heading="Not given", says=refused.says)


def _not_given(request: HttpRequest, found: Dossier, what: str, error: Exception) -> HttpResponse:
    says = f"{what} was not given: {getattr(error, 'says', '') or error}"
    logger.warning("dossier %s: %s", found.pk, says)
    heading = "The vault did not give it" if isinstance(error, VaultError) else "The bag was not made"
    return _page(request, found, 503, heading=heading, says=says, failed=True)


def _page(
    request: HttpRequest, found: Dossier, status: int, *, heading: str, says: str, failed: bool = False
) -> HttpResponse:
    context = {"dossier": found, "heading": heading, "says": says, "failed": failed, "at": timezone.now()}
    return render(request, "evidence/not_given.html", context, status=status)
