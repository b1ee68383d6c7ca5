"""Machine endpoints of runs: what trainers post, what supervisors follow, what tools read."""

from datetime import UTC, datetime
from typing import Any, TypeVar

from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse, JsonResponse
from ninja import Router, Schema

from runs import keys, receiver, waiting
from runs.access import PersonalToken, visible_runs
from runs.directives import current, obedience
from runs.models import Attempt, Finding, Run
from runs.problems import Problem

router = Router(tags=["runs"])

PAGE = 50

Row = TypeVar("Row", Run, Finding)


class Refused(Schema):
    """One event that was not taken."""

    index: int
    field: str
    detail: str


class Accepted(Schema):
    """The answer to a post, sent once the data is durable."""

    accepted: int
    refused: list[Refused]
    duplicate: bool
    directive: dict[str, Any] | None
    wanted: int


class ProblemDocument(Schema):
    """An error (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    field: str | None = None


_SIGNED = [
    {"name": "webhook-id", "in": "header", "required": True, "schema": {"type": "string"}},
    {"name": "webhook-timestamp", "in": "header", "required": True, "schema": {"type": "string"}},
    {"name": "webhook-signature", "in": "header", "required": True, "schema": {"type": "string"}},
]
_OFFSET = {"name": "andon-clock-offset-ms", "in": "header", "schema": {"type": "number"}}
_ENCODING = {"name": "content-encoding", "in": "header", "schema": {"enum": ["gzip", "zstd"]}}
_ERRORS = dict.fromkeys([400, 401, 404, 409, 413, 415, 422, 429, 503], ProblemDocument)
_EVENT = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"type": "string"},
        "step": {"type": "integer", "minimum": 0},
        "rank": {"type": "integer", "minimum": 0},
        "ranks": {"description": 'ranks, or ranges such as "0-3,6"'},
        "node": {"type": "string"},
        "attempt": {"type": "integer", "minimum": 1},
        "time": {"description": "RFC 3339, or a number of seconds or nanoseconds"},
        "data": {"type": "object"},
    },
}
_EVENTS_BODY = {
    "required": True,
    "content": {
        "application/json": {"schema": {"oneOf": [_EVENT, {"type": "array", "items": _EVENT}]}},
        "application/x-ndjson": {"schema": {"type": "string"}},
        "application/cloudevents+json": {"schema": {"type": "object"}},
        "application/cloudevents-batch+json": {"schema": {"type": "array", "items": {"type": "object"}}},
    },
}
_FRAME_BODY = {
    "required": True,
    "content": {
        "application/vnd.apache.arrow.stream": {"schema": {"type": "string", "format": "binary"}},
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["stream", "attempt", "columns"],
                "properties": {
                    "stream": {"enum": ["rank", "layer", "node"]},
                    "attempt": {"type": "integer", "minimum": 1},
                    "columns": {"type": "object"},
                },
            }
        },
    },
}


@router.post(
    "/runs/{run}/events",
    response={202: Accepted, **_ERRORS},
    openapi_extra={"parameters": [*_SIGNED, _OFFSET, _ENCODING], "requestBody": _EVENTS_BODY},
)
def events(request: HttpRequest, run: str) -> HttpResponse:
    """Post one event, an array, NDJSON, or CloudEvents 1.0; signed with the run's secret."""
    return receiver.post_events(request, run)


@router.post(
    "/runs/{run}/frames",
    response={202: Accepted, **_ERRORS},
    openapi_extra={"parameters": [*_SIGNED, _OFFSET, _ENCODING], "requestBody": _FRAME_BODY},
)
def frames(request: HttpRequest, run: str) -> HttpResponse:
    """Post one frame: an Arrow IPC stream of one batch, or JSON columns; signed with the run's secret."""
    return receiver.post_frames(request, run)


@router.get(
    "/runs/{run}/directive",
    response={200: dict[str, Any], **_ERRORS},
    openapi_extra={
        "parameters": [
            *_SIGNED,
            {"name": "after", "in": "query", "schema": {"type": "integer"}},
            {"name": "wait", "in": "query", "schema": {"type": "number", "maximum": waiting.MAX_WAIT_S}},
        ]
    },
)
def directive(request: HttpRequest, run: str) -> HttpResponse:
    """Return the directive in force, after up to `wait` seconds while its seq is still `after`."""
    return waiting.get_directive(request, run)


def _time(moment: datetime | None) -> str | None:
    return None if moment is None else moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


def _summary(run: Run) -> dict[str, Any]:
    progress = getattr(run, "progress", None)
    now = current(run.pk)
    return {
        "id": str(run.pk),
        "run": run.slug,
        "project": run.project.slug,
        "created_at": _time(run.created_at),
        "finished_at": _time(run.finished_at),
        "attempt": None if progress is None else progress.attempt,
        "step": None if progress is None else progress.step,
        "step_at": _time(progress.step_at) if progress is not None else None,
        "last_post_at": _time(progress.last_post_at) if progress is not None else None,
        "last": {} if progress is None else progress.last,
        "not_watched_since": _time(progress.not_watched_since) if progress is not None else None,
        "directive": None
        if now is None
        else {"kind": now.kind, "seq": now.seq, "incident": now.incident or None, "since": _time(now.since)},
    }


@router.get("/runs", auth=PersonalToken(), response=dict[str, Any])
def runs(request: HttpRequest, cursor: str = "", limit: int = PAGE) -> Any:
    """List the runs you may see, newest first, by cursor on (created, id)."""
    person = request.auth  # type: ignore[attr-defined]
    page, following = _newest(visible_runs(person).select_related("project", "progress"), cursor, limit)
    return {"items": [_summary(run) for run in page], "next": following}


@router.get("/runs/{run}", auth=PersonalToken(), response={200: dict[str, Any], 404: ProblemDocument})
def run(request: HttpRequest, run: str) -> Any:
    """Return one run with its attempts, and who obeys the directive in force."""
    person = request.auth  # type: ignore[attr-defined]
    found = visible_runs(person).select_related("project", "progress").filter(slug=run).first()
    if found is None:
        raise Problem(404, "unknown-run", f"There is no run {run!r} you may see.", field="run")
    summary = _summary(found)
    if summary["directive"] is not None:
        obeyed = obedience(found.pk)
        summary["directive"] |= {"obeyed": obeyed["obeyed"], "of": obeyed["of"]}
    summary["attempts"] = [
        {
            "number": attempt.number,
            "launched_at": _time(attempt.launched_at),
            "launch_reported": attempt.launch_reported,
            "world_size": attempt.world_size,
            "exited_at": _time(attempt.exited_at),
        }
        for attempt in Attempt.objects.filter(run=found).order_by("-number")[:100]
    ]
    return summary


@router.get(
    "/runs/{run}/findings", auth=PersonalToken(), response={200: dict[str, Any], 404: ProblemDocument}
)
def findings(request: HttpRequest, run: str, cursor: str = "", limit: int = PAGE) -> Any:
    """List what detectors said of one run, newest first, by cursor on (created, id)."""
    person = request.auth  # type: ignore[attr-defined]
    found = visible_runs(person).filter(slug=run).first()
    if found is None:
        raise Problem(404, "unknown-run", f"There is no run {run!r} you may see.", field="run")
    page, following = _newest(Finding.objects.filter(run=found), cursor, limit)
    return {
        "items": [
            {
                "id": str(row.pk),
                "attempt": row.attempt,
                "kind": row.kind,
                "rule": row.rule,
                "mode": row.mode,
                "severity": row.severity,
                "step": row.step,
                "lanes": row.lanes,
                "series": row.series,
                "view": row.view,
                "score": row.score,
                "numbers": row.numbers,
                "detail": row.detail,
                "detector": row.detector,
                "detector_version": row.detector_version,
                "policy": row.policy_digest,
                "backfill": row.backfill,
                "occurred_at": _time(row.occurred_at),
                "received_at": _time(row.received_at),
                "incident": row.incident or None,
            }
            for row in page
        ],
        "next": following,
    }


def _newest(rows: QuerySet[Row], cursor: str, limit: int) -> tuple[list[Row], str | None]:
    """Return one page of `rows`, newest created first, and the cursor of the page behind it."""
    rows = rows.order_by("-created_at", "-pk")
    if cursor:
        at, number = read_cursor(cursor)
        rows = rows.filter(Q(created_at__lt=at) | Q(created_at=at, pk__lt=number))
    limit = max(1, min(limit, 500))
    found = list(rows[: limit + 1])
    page = found[:limit]
    return page, make_cursor(page[-1].created_at, page[-1].pk) if len(found) > limit else None


def make_cursor(at: datetime, number: int) -> str:
    """Return the cursor behind one row of a list ordered by (time, id)."""
    return f"{at.timestamp():.6f}_{number}"


def read_cursor(text: str) -> tuple[datetime, int]:
    """Return the (time, id) a cursor stands for.

    Raises:
        Problem: 422, the text is no cursor.
    """
    at, _, number = text.partition("_")
    try:
        moment = datetime.fromtimestamp(float(at), UTC)
        if not (number.isascii() and number.isdigit() and len(number) < 19):
            raise ValueError(number)
        return moment, int(number)
    except (ValueError, OverflowError, OSError) as error:
        raise Problem(
            422, "unprocessable", f"cursor {text[:40]!r}: not one of ours", field="cursor"
        ) from error


def well_known_keys(request: HttpRequest) -> HttpResponse:
    """Answer `/.well-known/andon-keys.json`: the public keys that sign directives and permits."""
    return JsonResponse(keys.published(), headers={"Cache-Control": "no-cache"})
