"""The ingest transaction of events: store, look at it, hold if it must, answer with what is in force.

Most posts hold nothing that anyone must act on and cost one statement (`runs.sql`). A post that opens
an attempt, acknowledges, commits a checkpoint, is late or shows something nonfinite takes the long
way: one transaction with the same outcome for the data.
"""

import logging
import time
from collections.abc import Callable, Sequence

import msgspec
from django.db import OperationalError, transaction
from django.http import HttpResponse
from psycopg import errors
from psycopg.types.json import Jsonb

from andon.detect.nonfinite import event_cells, judge_event
from andon.policy import Policy
from andon.wire import DecodedEvents
from runs import answers, bell, joining, judging, minima, reports, turns
from runs.attempts import Attempts
from runs.clocks import late_events, skew_finding
from runs.judging import Judged
from runs.node_events import NODE_EVENTS
from runs.problems import Problem
from runs.progress import board, shown_values
from runs.rows import Post, directive_text, find_receipt, insert_receipt, raw_cursor
from runs.taken import Taken
from runs.unread import keep_unread

log = logging.getLogger(__name__)

TRIES = 3  # of a transaction that lost a deadlock or was told to retry
_WATCHED = frozenset({"step", "skip", *NODE_EVENTS})


class Duplicate(Exception):
    """The id of this post was taken before."""


def answer_repeat(post: Post) -> HttpResponse | None:
    """Return the answer to a repeat of an accepted post, None when its id was never accepted.

    Raises:
        Problem: 409, the id was accepted with another body.
    """
    receipt = find_receipt(post.run_id, post.webhook_id)
    if receipt is None:
        return None
    if receipt.sha256 != post.sha256:
        raise Problem(
            409,
            "id-reused",
            f"webhook-id {post.webhook_id!r} was accepted with another body: every post needs its own id.",
            field="webhook-id",
        )
    return answers.accepted(post.run_id, receipt.answer, directive_text(post.run_id), duplicate=True)


def take_events(post: Post, decoded: DecodedEvents, policy: Policy) -> HttpResponse:
    """Store the events of one post and return the answer.

    Raises:
        Problem: 409, the id was accepted with another body.
        django.db.Error: nothing was stored.
    """
    first = answers.counts(len(decoded.events), decoded.refused)
    events = [Taken.of(index, event, post) for index, event in decoded.events]
    answer = None
    if not decoded.refused and not any(one.needs_care(policy) for one in events):
        if any(one.needs_look for one in events):
            answer = _take_bad(post, events, policy, first)
        else:
            answer = _take_clean(post, events, first)
    if answer is None:
        answer = retried(lambda: _take_with_care(post, decoded, events, policy, first)) or answer_repeat(post)
    if answer is None:
        raise Duplicate  # refused by a transaction that then rolled back: the sender tries again
    _after(post, events)
    return answer


_TAKE = "SELECT taken, directive, current_attempt FROM andon_take_events(%s, %s, %b, %s, %s, %s, %s)"
_STORE = "SELECT andon_store_events(%s, %s, %s, %s, %s)"


def _take(
    post: Post, events: Sequence[Taken], first: dict[str, object]
) -> tuple[bool, str | None, int | None]:
    """Store events in one statement: whether it did, the directive in force, the current attempt."""
    with raw_cursor() as cursor:
        cursor.execute(
            _TAKE,
            (
                post.run_id,
                post.webhook_id,
                post.sha256,
                post.received_at,
                Jsonb(first),
                max((one.attempt or 0 for one in events), default=0),
                msgspec.json.encode([one.row() for one in events]).decode(),
            ),
        )
        return cursor.fetchone() or (False, None, None)


def _take_clean(post: Post, events: Sequence[Taken], first: dict[str, object]) -> HttpResponse | None:
    """Store events nobody must act on; None when a repeat or an unopened attempt stands in the way."""
    taken, directive, _ = _take(post, events, first)
    return answers.accepted(post.run_id, first, directive, duplicate=False) if taken else None


def _take_bad(
    post: Post, events: Sequence[Taken], policy: Policy, first: dict[str, object]
) -> HttpResponse | None:
    """Store events of which some show a nonfinite value; None as `_take_clean`.

    With the others of a run that is held already, else alone; never while another thread opens the run's
    incident.
    """
    for _ in range(TRIES):
        turns.wait(post.run_id)
        answer = retried(lambda: joining.take(post, events, policy, first))
        if answer is not None:
            return answer
        try:
            with turns.turn(post.run_id) as turn:
                return retried(lambda: _take_and_look(post, events, policy, first, turn))
        except turns.Elsewhere:
            continue
    return retried(lambda: _take_and_look(post, events, policy, first, None))


def _take_and_look(
    post: Post, events: Sequence[Taken], policy: Policy, first: dict[str, object], turn: turns.Turn | None
) -> HttpResponse | None:
    """Store events of which some show a nonfinite value, and act on it; None as `_take_clean`.

    Raises:
        turns.Elsewhere: it would open an incident that another thread is opening; nothing was stored.
    """
    with transaction.atomic():
        taken, directive, current = _take(post, events, first)
        if not taken or current is None:
            return None
        for one in events:
            one.attempt = one.attempt or current
            one.backfill = one.attempt < current
        if _judge(post, events, policy, [], judging.Standing.of(directive), turn):
            directive = directive_text(post.run_id)
        known = judging.Standing.of(directive)
    joining.note(post.run_id, known, current)
    return answers.accepted(post.run_id, first, directive, duplicate=False)


def _take_with_care(
    post: Post, decoded: DecodedEvents, events: Sequence[Taken], policy: Policy, first: dict[str, object]
) -> HttpResponse | None:
    with transaction.atomic():
        if not insert_receipt(post, first):
            return None
        judged: list[Judged] = []
        late = late_events(
            post, [(one.late_s, one.occurred_at) for one in events], policy.nonfinite.backfill_after_s
        )
        attempts = Attempts(post.run_id, post.received_at)
        for one, is_late in zip(events, late.backfill, strict=True):
            one.attempt = reports.attempt_of(one.event, attempts, one.occurred_at)
            one.backfill = is_late
        for one in events:
            # Only now: an attempt opened by the last event of a post makes its first events backfill.
            one.backfill = one.backfill or (one.attempt or 0) < attempts.current
        if late.skew_s is not None:
            judged.append(skew_finding(late.skew_s, attempts.current, post.received_at))
        with raw_cursor() as cursor:
            rows = msgspec.json.encode([one.row() for one in events]).decode()
            cursor.execute(_STORE, (post.run_id, post.webhook_id, post.received_at, attempts.current, rows))
        for one in events:
            assert one.attempt is not None
            reports.take(
                run_id=post.run_id,
                event=one.event,
                attempt=one.attempt,
                attempts=attempts,
                occurred_at=one.occurred_at,
                received_at=post.received_at,
            )
        _judge(post, events, policy, judged, None)
        directive = directive_text(post.run_id)
        if decoded.refused:
            keep_unread(
                run_id=post.run_id,
                webhook_id=post.webhook_id,
                received_at=post.received_at,
                content_type=post.content_type,
                encoding=post.encoding,
                status=202,
                problem=first,
                body=post.body,
            )
    return answers.accepted(post.run_id, first, directive, duplicate=False)


def _judge(
    post: Post,
    events: Sequence[Taken],
    policy: Policy,
    judged: list[Judged],
    standing: judging.Standing | None,
    turn: turns.Turn | None = None,
) -> bool:
    """Judge what must be decided within the step; True when the directive may be another one now."""
    bad: dict[int, list[minima.Seen]] = {}
    for one in events:
        if not one.needs_look:
            continue
        assert one.attempt is not None
        try:
            cells = event_cells(one.event)
            said = judge_event(one.event, policy, backfill=one.backfill)
        except Exception as error:
            # Data is stored whatever a detector thinks of it; the run is shown as not watched.
            log.exception("run %s: event %s of %s not judged", post.run_id, one.index, post.webhook_id)
            reports.not_watched(post.run_id, error)
            continue
        if len(cells):
            bad.setdefault(one.attempt, []).append((cells, one.occurred_at))
        judged += [Judged(finding, one.attempt, one.backfill, one.occurred_at) for finding in said]
    # Cells before findings: an incident that opens reads where it began. Always in the same order.
    for attempt, seen in sorted(bad.items()):
        minima.take(
            run_id=post.run_id, attempt=attempt, stream="rank", received_at=post.received_at, seen=seen
        )
    findings = judging.store(
        run_id=post.run_id, policy=policy, judged=judged, received_at=post.received_at, standing=standing
    )
    return judging.act(run_id=post.run_id, policy=policy, findings=findings, standing=standing, turn=turn)


def retried(take: Callable[[], HttpResponse | None]) -> HttpResponse | None:
    """Run a whole ingest transaction, again when it lost a deadlock: nothing of it is stored then."""
    for tries in range(1, TRIES + 1):
        try:
            return take()
        except OperationalError as error:
            lost = isinstance(error.__cause__, errors.DeadlockDetected | errors.SerializationFailure)
            if not lost or tries == TRIES:
                raise
            time.sleep(0.01 * tries)
    raise AssertionError("unreachable")


def _after(post: Post, events: Sequence[Taken]) -> None:
    """What follows the commit: note progress, ring for the worker. None of it may cost the answer."""
    newest: Taken | None = None
    watched = False
    for one in events:
        watched = watched or one.event.type in _WATCHED
        is_step = one.event.type == "step" and not one.backfill
        if is_step and (newest is None or (one.event.step or 0) >= (newest.event.step or 0)):
            newest = one
    board.note(
        post.run_id,
        at=post.received_at,
        attempt=None if newest is None else newest.attempt,
        step=None if newest is None else newest.event.step,
        values={}
        if newest is None
        else shown_values(newest.event.step or 0, newest.event.data, newest.event.flags),
        nodes={one.event.node for one in events if one.event.node},
    )
    if watched or any(one.event.flags for one in events):
        bell.ring("runs.tasks.look", post.run_id, calm=joining.is_held(post.run_id))
