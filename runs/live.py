"""Fragments: parts of a page that are polled by ETag and swapped only when they changed.

A relative time or a running cost moves every second without anything having happened, and a form's
CSRF token is new in every answer; both are left out of the ETag. The page's script keeps times
current by itself.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from django.http import HttpRequest, HttpResponse
from django.template.loader import render_to_string
from django.utils.safestring import SafeString, mark_safe

_MOVING = re.compile(
    rb'(<(?:time|data)\b[^>]*\bdata-live="[^"]*"[^>]*>)[^<]*|(name="csrfmiddlewaretoken" value=")[^"]*'
)


@dataclass(frozen=True, slots=True)
class Fragment:
    """A rendered part and the ETag under which the browser holds it."""

    html: SafeString
    etag: str


def etag_of(body: bytes) -> str:
    """Return the ETag of a body without what moves by itself."""
    still = _MOVING.sub(rb"\1\2", body)
    return f'"{hashlib.sha256(still).hexdigest()[:32]}"'


def render(request: HttpRequest, template: str, context: Mapping[str, object]) -> Fragment:
    """Render a fragment for a whole page, which holds its ETag from the start."""
    html = render_to_string(template, dict(context), request=request)
    return Fragment(mark_safe(html), etag_of(html.encode()))  # noqa: S308 (made by a template)


def answer(request: HttpRequest, template: str, context: Mapping[str, object]) -> HttpResponse:
    """Answer a poll: 304 when the browser holds this already."""
    fragment = render(request, template, context)
    if request.headers.get("If-None-Match") == fragment.etag:
        response = HttpResponse(status=304)
    else:
        response = HttpResponse(fragment.html)
    response["ETag"] = fragment.etag
    # Stored, so that If-None-Match can be sent, but never used without asking.
    response["Cache-Control"] = "private, no-cache"
    return response
