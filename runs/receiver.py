"""The receiver: the order of checks, from the socket to the ingest transaction.

Content-Length against the cap, signature, rate, receipt, decompression under a cap, decode. Nothing
of a body is looked at before its signature is right, and no input ends in a 500: what cannot be read
is kept raw, and what the database cannot take now is answered 503 so that the sender's spool keeps it.
"""

import hashlib
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime

from django.db import Error, InterfaceError, OperationalError
from django.db.utils import DatabaseError
from django.http import HttpRequest, HttpResponse

from andon import wire
from runs.bodies import read_body
from runs.identity import KnownRun, known_run, verified_run
from runs.ingest import Duplicate, answer_repeat, take_events
from runs.ingest_frames import take_frame
from runs.limits import SMALL_BYTES, buckets, limits_of
from runs.problems import Problem
from runs.rows import Post
from runs.unread import keep_refused

log = logging.getLogger(__name__)

FRAME_BYTES_SENT = 32 << 20
RETRY_S = 5
OFFSET_LIMIT_MS = 10 * 365 * 86_400_000

Take = Callable[[Post, KnownRun], HttpResponse]


def post_events(request: HttpRequest, slug: str) -> HttpResponse:
    """Answer `POST /runs/{run}/events`."""
    return _answer(request, slug, wire.MAX_EVENTS_BYTES_SENT, _events)


def post_frames(request: HttpRequest, slug: str) -> HttpResponse:
    """Answer `POST /runs/{run}/frames`."""
    return _answer(request, slug, FRAME_BYTES_SENT, _frame)


def _events(post: Post, known: KnownRun) -> HttpResponse:
    body = wire.decompress(post.body, post.encoding, wire.MAX_EVENTS_BYTES)
    return take_events(post, wire.decode_events(body, post.content_type), known.policy)


def _frame(post: Post, known: KnownRun) -> HttpResponse:
    body = wire.decompress(post.body, post.encoding, wire.MAX_FRAME_BYTES)
    return take_frame(post, body, wire.decode_frame(body, post.content_type), known.policy)


def _answer(request: HttpRequest, slug: str, cap_bytes: int, take: Take) -> HttpResponse:
    try:
        return _checked(request, slug, cap_bytes, take)
    except Problem as problem:
        return problem.response()
    except (OperationalError, InterfaceError, Duplicate) as error:
        log.error("run %s: the database cannot take a post now: %s", slug, error)
        return _later().response()
    except Exception:
        log.exception("run %s: a post could not be answered", slug)
        return _later().response()


def _later() -> Problem:
    return Problem(
        503,
        "not-now",
        "The post was not stored: send it again with the same webhook-id.",
        headers={"Retry-After": str(RETRY_S)},
    )


def _checked(request: HttpRequest, slug: str, cap_bytes: int, take: Take) -> HttpResponse:
    body = read_body(request, cap_bytes)
    known = verified_run(request, slug, body)
    take_token(known, large=len(body) > SMALL_BYTES)
    meta = request.META
    received_at = datetime.fromtimestamp(time.time(), UTC)
    webhook_id = meta["HTTP_WEBHOOK_ID"]
    try:
        post = Post(
            run_id=known.run_id,
            webhook_id=webhook_id,
            sha256=hashlib.sha256(body).digest(),
            received_at=received_at,
            offset_s=_offset_s(meta.get("HTTP_ANDON_CLOCK_OFFSET_MS")),
            content_type=meta.get("CONTENT_TYPE", ""),
            encoding=meta.get("HTTP_CONTENT_ENCODING", ""),
            body=body,
        )
        return _taken(post, known, take)
    except Problem as problem:
        refused = problem
    except DatabaseError as error:
        if isinstance(error, OperationalError | InterfaceError):
            raise
        log.exception("run %s: the database refused what post %s holds", slug, webhook_id)
        refused = _not_understood()
    except (Duplicate, Error):
        raise
    except Exception:
        # Our own mistake about this body. Sent again it would fail again, so it is kept, not re-sent.
        log.exception("run %s: post %s could not be read", slug, webhook_id)
        refused = _not_understood()
    keep_refused(
        refused, run_id=known.run_id, webhook_id=webhook_id, received_at=received_at, meta=meta, body=body
    )
    raise refused


def _not_understood() -> Problem:
    return Problem(
        422,
        "not-understood",
        "Andon could not make sense of this body; it is kept as sent and shown on the run's page.",
        field="body",
    )


def _taken(post: Post, known: KnownRun, take: Take) -> HttpResponse:
    try:
        if not post.body:
            raise wire.WireError(400, "undecodable", "the post has no body", "body")
        return take(post, known)
    except wire.WireError as error:
        # The receipt comes before the body: a repeat is answered as such even if this copy cannot
        # be read, and an id that was accepted with another body is 409 whatever that body holds.
        # Looking it up only here saves every good post a round trip.
        repeat = answer_repeat(post)
        if repeat is not None:
            return repeat
        extra = {"refused": [{"index": r.index, "field": r.field, "detail": r.detail} for r in error.refused]}
        raise Problem(
            error.status,
            error.problem_type,
            error.detail,
            field=error.field or "body",
            extra=extra if error.refused else None,
        ) from error


def take_token(known: KnownRun, *, large: bool) -> None:
    """Count one post against the run's bucket.

    Raises:
        Problem: 429 with Retry-After.
    """
    rate = known.policy.rate
    per_s, burst = limits_of(
        large=large,
        policy_per_s=rate.large_per_s if large else rate.small_per_s,
        policy_burst=rate.large_burst if large else rate.small_burst,
    )
    wait_s = buckets().take(known.run_id, large=large, per_s=per_s, burst=burst)
    if wait_s:
        kind = "above 64 KiB" if large else "up to 64 KiB"
        raise Problem(
            429,
            "too-many-posts",
            f"This run posts more than {per_s:g} bodies {kind} a second: wait {wait_s} s, or join posts.",
            headers={"Retry-After": str(wait_s)},
        )


def _offset_s(header: str | None) -> float:
    if not header:
        return 0.0
    try:
        offset_ms = float(header)
    except ValueError:
        offset_ms = float("nan")
    if not -OFFSET_LIMIT_MS <= offset_ms <= OFFSET_LIMIT_MS:
        raise Problem(
            422,
            "unprocessable",
            "andon-clock-offset-ms must be the server's clock minus the sender's in milliseconds.",
            field="andon-clock-offset-ms",
        )
    return offset_ms / 1e3


__all__ = ["known_run", "post_events", "post_frames", "take_token"]
