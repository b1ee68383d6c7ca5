"""The ingest transaction of frames: the body as posted, a summary beside it, and a look at every cell."""

import logging
from datetime import UTC, datetime
from functools import partial

import numpy as np
from django.db import transaction
from django.http import HttpResponse
from psycopg.types.json import Jsonb

from andon.detect.nonfinite import bad_cells, judge_frame, row_health, state_plane
from andon.policy import Policy
from andon.wire import Frame
from runs import answers, bell, judging, minima, planes, reports
from runs.attempts import Attempts
from runs.ingest import Duplicate, answer_repeat, retried
from runs.judging import Judged
from runs.progress import board
from runs.rows import Post, directive_text, insert_receipt, raw_cursor

log = logging.getLogger(__name__)

PLANE_CELLS = 8_000_000  # a sparse frame (two steps, lanes 0 and 2^31 − 1) must not allocate the rectangle

_ARGUMENTS = ", ".join(["%s"] * 14 + ["%b", "%b"])
_TAKE = f"SELECT taken, directive FROM andon_take_frame(%s, %s, %b, %s, %s, {_ARGUMENTS})"  # noqa: S608
_STORE = f"SELECT andon_store_frame(%s, %s, %s, %s, {_ARGUMENTS})"


def with_masks(frame: Frame) -> Frame:
    """Mask what was not measured, in place: detectors must not take a sentinel for a NaN."""
    for name, missing in frame.missing.items():
        frame.metrics[name] = np.ma.MaskedArray(frame.metrics[name], mask=missing)
    return frame


class _Looked:
    """What one look at a frame found; everything the row and the answer need."""

    def __init__(self, frame: Frame, policy: Policy, *, late: bool) -> None:
        self.health = row_health(frame)
        where = self.health.axes
        self.numbered = where.lanes.dtype.kind == "i"
        self.late = late
        self.cells = None if self.health.healthy else bad_cells(frame, self.health)
        self.plane: bytes | None = None
        if frame.stream != "node" and len(where.steps) * len(where.lanes) <= PLANE_CELLS:
            codes = state_plane(frame, self.health)
            lanes = where.lanes if self.numbered else np.arange(len(where.lanes), dtype=np.int32)
            self.plane = planes.pack(where.steps, lanes.astype(np.int32), codes)
        # Healthy columns hold nothing to judge, but a column no rule knows may be nonfinite.
        self.said = judge_frame(frame, policy, backfill=late, health=self.health)

    @property
    def needs_care(self) -> bool:
        return self.late or bool(self.said) or self.cells is not None


def take_frame(post: Post, body: bytes, frame: Frame, policy: Policy) -> HttpResponse:
    """Store one frame and return the answer.

    Args:
        body: decompressed, as decoded.

    Raises:
        Problem: 409, the id was accepted with another body.
        django.db.Error: nothing was stored.
    """
    occurred_at = post.received_at
    late = False
    if frame.time_ns is not None and frame.rows:
        newest_s = int(frame.time_ns.max()) / 1e9
        occurred_at = datetime.fromtimestamp(newest_s, UTC)
        lag_s = post.received_at.timestamp() - (newest_s + post.offset_s)
        late = lag_s > policy.nonfinite.backfill_after_s
    looked: _Looked | None
    try:
        looked = _Looked(with_masks(frame), policy, late=late)
    except Exception as error:
        log.exception("run %s: frame %s not judged", post.run_id, post.webhook_id)
        looked = None
        reports.not_watched(post.run_id, error)
    first = answers.counts(1, [])
    row = _row(post, body, frame, looked, late)
    answer = None
    if looked is None or not looked.needs_care:
        answer = _take_clean(post, first, row)
    if answer is None:
        take = partial(_take_with_care, post, frame, looked, policy, first, row, occurred_at)
        answer = retried(take) or answer_repeat(post)
    if answer is None:
        raise Duplicate
    step = int(frame.step.max()) if frame.stream == "rank" and not late else None
    nodes = {frame.node} if frame.node else set()
    board.note(post.run_id, at=post.received_at, attempt=frame.attempt, step=step, values={}, nodes=nodes)
    bell.ring("runs.tasks.look", post.run_id)
    return answer


def _row(post: Post, body: bytes, frame: Frame, looked: _Looked | None, late: bool) -> tuple[object, ...]:
    numbered = not isinstance(frame.lane, list)
    lane_first = int(np.min(frame.lane)) if numbered else None
    lane_last = int(np.max(frame.lane)) if numbered else None
    names = None if isinstance(frame.lane, np.ndarray) else list(dict.fromkeys(frame.lane))
    metrics = [
        {"name": name, "view": frame.view_of(name), "group": frame.groups.get(name)} for name in frame.metrics
    ]
    return (
        frame.attempt,
        frame.stream,
        frame.node or "",
        post.content_type,
        int(frame.step.min()),
        int(frame.step.max()),
        lane_first,
        lane_last,
        None if names is None else Jsonb(names),
        frame.rows,
        Jsonb(metrics),
        0 if looked is None or looked.cells is None else len(looked.cells),
        looked is None or bool(looked.health.skipped.any()),
        late,
        None if looked is None else looked.plane,
        body,
    )


def _take_clean(post: Post, first: dict[str, object], row: tuple[object, ...]) -> HttpResponse | None:
    with raw_cursor() as cursor:
        cursor.execute(
            _TAKE, (post.run_id, post.webhook_id, post.sha256, post.received_at, Jsonb(first), *row)
        )
        taken, directive = cursor.fetchone() or (False, None)
    return answers.accepted(post.run_id, first, directive, duplicate=False) if taken else None


def _take_with_care(
    post: Post,
    frame: Frame,
    looked: _Looked | None,
    policy: Policy,
    first: dict[str, object],
    row: tuple[object, ...],
    occurred_at: datetime,
) -> HttpResponse | None:
    with transaction.atomic():
        if not insert_receipt(post, first):
            return None
        attempts = Attempts(post.run_id, post.received_at)
        attempt = attempts.number_for(frame.attempt)
        backfill = attempt < attempts.current or (looked is not None and looked.late)
        with raw_cursor() as cursor:
            cursor.execute(_STORE, (post.run_id, post.webhook_id, post.received_at, attempts.current, *row))
        if looked is not None:
            if looked.cells is not None:
                minima.take(
                    run_id=post.run_id,
                    attempt=attempt,
                    stream=frame.stream,
                    received_at=post.received_at,
                    seen=[(looked.cells, occurred_at)],
                )
            said = looked.said
            if backfill and not looked.late:
                said = judge_frame(frame, policy, backfill=True, health=looked.health)
            judged = [Judged(finding, attempt, backfill, occurred_at) for finding in said]
            findings = judging.store(
                run_id=post.run_id, policy=policy, judged=judged, received_at=post.received_at
            )
            judging.act(run_id=post.run_id, policy=policy, findings=findings)
        directive = directive_text(post.run_id)
    return answers.accepted(post.run_id, first, directive, duplicate=False)
