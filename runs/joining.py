"""Bad posts of a run that is held already, several to a transaction.

Thousands arrive within a second of the first. `andon_take_joined` takes them only if the run still stands
where this process last saw it. While one such transaction is under way the posts that come in wait, and the
next takes them together: each table is written once for all of them, in one round trip and one commit.
"""

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from django.http import HttpResponse

from andon.detect.nonfinite import cells_in_event, judge_event
from andon.policy import Policy
from runs import answers, judging, minima
from runs.judging import Judged, Standing
from runs.rows import Post, raw_cursor
from runs.taken import Taken

_TAKE = "SELECT taken, directive FROM andon_take_joined(%s, %s, %s, %s, %s, %s, %s)"
MOST = 64  # posts of one transaction


class Call(NamedTuple):
    """One post on its way: where its run must stand, and its rows."""

    where: tuple[int, int, int]  # run, attempt, seq of the directive
    post: dict[str, Any]
    events: list[dict[str, Any]]
    cells: list[dict[str, Any]]
    findings: list[dict[str, Any]]


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
    of_post = {"post": post.webhook_id, "received": post.received_at}
    cells: list[dict[str, Any]] = []
    judged: list[Judged] = []
    for one in events:
        if one.needs_look:
            try:
                found, said = cells_in_event(one.event), judge_event(one.event, policy)
            except Exception:
                return None  # the long way says so on the run
            if found is not None:
                cells += [row | of_post for row in minima.rows_of_event(found, one.occurred_at)]
            judged += [Judged(finding, attempt, False, one.occurred_at) for finding in said]
    findings = judging.rows_of(policy=policy, judged=judged, standing=standing)
    return Call(
        (post.run_id, attempt, standing.seq),
        of_post | {"sha256": post.sha256.hex(), "answer": first},
        [one.row() | of_post for one in events],
        cells,
        [row | of_post for row in judging.with_joined(findings.values(), standing)],
    )


def _run(calls: Sequence[Call]) -> list[Outcome]:
    """Take calls that expect their run to stand at the same place, each of another post."""
    posts = [call.post for call in calls]
    rows = ([row for call in calls for row in call[part]] for part in (2, 3, 4))
    texts = [msgspec.json.encode(part).decode() for part in (posts, *rows)]
    with raw_cursor() as cursor:
        # One statement, so that it is one transaction without a round trip to begin and to commit.
        cursor.execute(_TAKE, (*calls[0].where, *texts))
        taken, directive = cursor.fetchone() or (None, None)
    return [(post["post"] in (taken or ()), directive) for post in posts]


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
        batch = [mine, *self._beside(mine.call)]
        try:
            for one, outcome in zip(batch, _run([one.call for one in batch]), strict=True):
                one.outcome = outcome
        except Exception:
            if len(batch) == 1:
                raise
        finally:
            self._hand_on()
            for one in batch[1:]:
                one.go.set()

    def _beside(self, call: Call) -> list[_Waiting]:
        """Take out of the line what goes with `call`: the same place, and no post twice."""
        ids = {call.post["post"]}
        taken: list[_Waiting] = []
        left: deque[_Waiting] = deque()
        with self._lock:
            for one in self._waiting:
                new = one.call.post["post"] not in ids
                if one.call.where == call.where and new and len(taken) < MOST - 1:
                    ids.add(one.call.post["post"])
                    taken.append(one)
                else:
                    left.append(one)
            self._waiting = left
        return taken

    def _hand_on(self) -> None:
        with self._lock:
            if self._waiting:
                following = self._waiting.popleft()
                following.leads = True
                following.go.set()
            else:
                self._busy = False


_queue = _Queue()
