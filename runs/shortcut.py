"""Answers the posts of trainers before sessions, cookies and page headers are thought of.

A fleet's posts are nearly all that a server gets, and none of what the middleware stack does for people
(sessions, CSRF, messages, CSP) concerns them: they are signed, carry no cookie and are read by no
browser. The same views stand in the API for its documentation and answer there in the same way.
"""

import re
from collections.abc import Callable

from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase

from runs import receiver

_POST = re.compile(r"/api/v1/runs/([^/]+)/(events|frames)")
_VIEWS = {"events": receiver.post_events, "frames": receiver.post_frames}


def answer_posts(
    get_response: Callable[[HttpRequest], HttpResponseBase],
) -> Callable[[HttpRequest], HttpResponseBase]:
    """Middleware, to stand before all that is for people."""

    def middleware(request: HttpRequest) -> HttpResponseBase:
        found = _POST.fullmatch(request.path_info) if request.method == "POST" else None
        if found is None:
            return get_response(request)
        answer: HttpResponse = _VIEWS[found[2]](request, found[1])
        answer["Content-Length"] = str(len(answer.content))
        return answer

    return middleware
