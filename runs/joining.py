"""Bad posts of a run that is held already, several to a transaction.

Thousands arrive within a second of the first. Each is one call of `andon_take_joined`, which takes it only
if the run still stands where this process last saw it. While one such transaction is under way the posts
that come in wait, and the next takes them together: one round trip and one commit instead of one each.
"""

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
from django.http import HttpResponse
from psycopg.types.json import Jsonb

from andon.detect.nonfinite import event_cells, judge_event
from andon.policy import Policy
from runs import answers, judging, minima
from runs.judging import Judged, Standing
from runs.rows import Post, raw_cursor
from runs.taken import Taken

_CALL = f"SELECT taken, directive FROM andon_take_joined(%s, %s, %b, {', '.join(['%s'] * 18)})"  # noqa: S608
MOST = 32  # posts of one transaction

Call = tuple[Any, ...]  # the arguments of one call
Outcome = tuple[bool, str | None]  # whether it was taken, and the directive in force

# Where this process last saw a run held, and in which attempt: a guess, checked by the statement.
_held: dict[int, tuple[Standing, int]] = {}


def note(run_id: int, standing: Standing, attempt: int) -> None:
    """Note where a run stands and which attempt is its newest."""
    if standing.holding and standing.incident:
        _held[run_id] = standing, attempt
    else:
        _held.pop(run_id, None)


def is_held(run_id: int) -> bool:
    """Return whether this process last saw the run held."""
    return run_id in _held


def take(
    post: Post, events: Sequence[Taken], policy: Policy, first: dict[str, object]
) -> HttpResponse | None:
    """Store a bad post of a run that is held by an incident; None when it is not, and nothing was stored.

    Raises:
        django.db.Error: nothing was stored.
    """
    held = _held.get(post.run_id)
    if held is None:
        return None
    standing, attempt = held
    if any(one.attempt not in (None, attempt) for one in events):
        return None
    call = _call(post, events, policy, first, standing, attempt)
    if call is None:
        return None
    taken, directive = _queue.run(call)
    if not taken:
        _held.pop(post.run_id, None)
        return None
    for one in events:
        one.attempt = attempt
    return answers.accepted(post.run_id, first, directive, duplicate=False)


def _call(
    post: Post,
    events: Sequence[Taken],
    policy: Policy,
    first: dict[str, object],
    standing: Standing,
    attempt: int,
) -> Call | None:
    seen: list[minima.Seen] = []
    judged: list[Judged] = []
    for one in events:
        if one.needs_look:
            try:
                cells, said = event_cells(one.event), judge_event(one.event, policy)
            except Exception:
                return None  # the long way says so on the run
            seen += [(cells, one.occurred_at)] if len(cells) else []
            judged += [Judged(finding, attempt, False, one.occurred_at) for finding in said]
    rows = judging.rows_of(policy=policy, judged=judged, standing=standing)
    return (
        post.run_id,
        post.webhook_id,
        post.sha256,
        post.received_at,
        Jsonb(first),
        msgspec.json.encode([one.row() for one in events]).decode(),
        attempt,
        standing.seq,
        judging.encoded(rows.values(), standing),
        "rank",
        *minima.columns_of(seen),
    )


def _run(calls: Sequence[Call]) -> list[Outcome]:
    with raw_cursor() as cursor:
        # One statement, so that it is one transaction without a round trip to begin and to commit.
        cursor.execute(" UNION ALL ".join([_CALL] * len(calls)), [value for call in calls for value in call])
        return cursor.fetchall()


class _Waiting:
    """One call that waits for its outcome."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.go = threading.Event()
        self.outcome: Outcome | None = None  # None once `go` is set: it must run itself
        self.leads = False


class _Queue:
    """Lets one thread at a time run what has come in meanwhile; then the next in line leads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[_Waiting] = deque()
        self._busy = False

    def run(self, call: Call) -> Outcome:
        """Run one call, together with others where any wait.

        Raises:
            django.db.Error: this call failed, by itself.
        """
        mine = _Waiting(call)
        with self._lock:
            mine.leads = not self._busy
            self._busy = True
            if not mine.leads:
                self._waiting.append(mine)
        if not mine.leads:
            mine.go.wait()
        if mine.leads:
            self._lead(mine)
        # Where several failed together, each tries alone: one bad post must not take others with it.
        return mine.outcome or _run([call])[0]

    def _lead(self, mine: _Waiting) -> None:
        with self._lock:
            others = [self._waiting.popleft() for _ in range(min(MOST - 1, len(self._waiting)))]
        batch = [mine, *others]
        try:
            for one, outcome in zip(batch, _run([one.call for one in batch]), strict=True):
                one.outcome = outcome
        except Exception:
            if not others:
                raise
        finally:
            self._hand_on()
            for one in others:
                one.go.set()

    def _hand_on(self) -> None:
        with self._lock:
            if self._waiting:
                following = self._waiting.popleft()
                following.leads = True
                following.go.set()
            else:
                self._busy = False


_queue = _Queue()
