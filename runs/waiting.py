"""`GET /runs/{run}/directive`: at once, or when it changes, without keeping a database connection.

A waiting thread asks the database a few times a second and holds no connection in between. At most a
quarter of the threads of a process wait; the rest is told to come back in two seconds.
"""

import threading
import time

from django.conf import settings
from django.db import connection
from django.http import HttpRequest, HttpResponse

from runs.identity import verified_run
from runs.problems import Problem
from runs.receiver import take_token
from runs.rows import raw_cursor

MAX_WAIT_S = 30.0
ASK_EVERY_S = 0.25
BUSY_RETRY_S = 2

_waiting = threading.BoundedSemaphore(max(1, getattr(settings, "WEB_THREADS", 4) // 4))


def get_directive(request: HttpRequest, slug: str) -> HttpResponse:
    """Answer with the directive in force, waiting up to `wait` seconds while its seq is `after`."""
    try:
        known = verified_run(request, slug, None)
        take_token(known, large=False)
        after = _number(request, "after", whole=True)
        wait_s = _number(request, "wait", whole=False) or 0.0
        return _directive(known.run_id, after, min(wait_s, MAX_WAIT_S))
    except Problem as problem:
        return problem.response()


def _directive(run_id: int, after: float | None, wait_s: float) -> HttpResponse:
    until = time.monotonic() + wait_s
    seq, document = _read(run_id)
    if seq != after or wait_s <= 0:
        return _answer(document)
    if not _waiting.acquire(blocking=False):
        answer = _answer(document)
        answer["Retry-After"] = str(BUSY_RETRY_S)
        return answer
    try:
        while seq == after and (left_s := until - time.monotonic()) > 0:
            if not connection.in_atomic_block:
                connection.close()  # back to the pool for as long as this thread sleeps
            time.sleep(min(ASK_EVERY_S, left_s))
            seq, document = _read(run_id)
    finally:
        _waiting.release()
    return _answer(document)


def _read(run_id: int) -> tuple[int | None, str]:
    with raw_cursor() as cursor:
        cursor.execute(
            "SELECT seq, document::text FROM runs_directive WHERE run_id = %s ORDER BY seq DESC LIMIT 1",
            (run_id,),
        )
        row = cursor.fetchone()
    return (None, "null") if row is None else (int(str(row[0])), str(row[1]))


def _answer(document: str) -> HttpResponse:
    return HttpResponse(
        document,
        content_type="application/json",
        headers={"Cache-Control": "no-store"},
    )


def _number(request: HttpRequest, name: str, *, whole: bool) -> float | None:
    text = request.GET.get(name)
    if text is None or text == "":
        return None
    digits = text.removeprefix("-") if whole else text.replace(".", "", 1)
    if not (digits.isascii() and digits.isdigit() and len(text) <= 18):
        kind = "a whole number" if whole else "seconds, 0 or more"
        raise Problem(422, "unprocessable", f"{name}={text[:40]!r}: expected {kind}.", field=name)
    return int(text) if whole else float(text)
