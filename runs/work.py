"""Work: the row is the work, Celery is a doorbell.

A row is claimed by compare-and-set and kept by a lease; whoever claims it finishes it only with
its own token. The doorbell may be lost at any time (broker down, worker killed): `sweep` rings
again for whatever is due, so losing the broker loses nothing but time.
"""

import json
import logging
import random
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime, timedelta
from functools import partial

from django.db import connection, transaction
from django.db.models import F, Q, QuerySet
from django.utils import timezone

from runs import bell
from runs.models import Pending, Work
from runs.rows import raw_cursor

log = logging.getLogger(__name__)

LEASE_S = 90.0  # three renewals may be missed before another worker takes over
RENEW_EVERY_S = 30.0
RETRY_FIRST_S = 2.0
RETRY_LAST_S = 300.0
SWEEP_LIMIT = 500


class Retry(Exception):
    """Raised by a handler: not now, again after `after_s` seconds, for the reason given.

    Without a time (None) it backs off with every try, as after an exception.
    """

    def __init__(self, after_s: float | None, why: str) -> None:
        super().__init__(why)
        self.after_s = after_s
        self.why = why


class GiveUp(Exception):
    """Raised by a handler: this will never succeed; the row keeps the reason."""


class LeaseLost(Exception):
    """Another worker took the row over; nothing more may be written for it."""


class Lease:
    """The right to do one unit of work. Renewed in the background while the handler runs."""

    def __init__(self, work_id: int, token: uuid.UUID) -> None:
        self.work_id = work_id
        self.token = token
        self._done = threading.Event()

    def renew(self) -> None:
        """Extend the lease.

        Raises:
            LeaseLost: it ran out and another worker claimed the row.
        """
        until = timezone.now() + timedelta(seconds=LEASE_S)
        if not self._mine().update(lease_until=until):
            raise LeaseLost(f"work {self.work_id} was taken over")

    def guard(self) -> None:
        """Inside a transaction: lock the row, so that what follows commits only under this lease.

        Raises:
            LeaseLost: it ran out and another worker claimed the row.
        """
        if not self._mine().select_for_update().exists():
            raise LeaseLost(f"work {self.work_id} was taken over")

    def _mine(self) -> QuerySet[Work]:
        return Work.objects.filter(pk=self.work_id, lease_token=self.token, state=Work.State.CLAIMED)

    def _keep(self) -> None:
        while not self._done.wait(RENEW_EVERY_S):
            try:
                self.renew()
            except LeaseLost:
                log.warning("lease of work %s lost while its handler ran", self.work_id)
                return
            except Exception:
                # A database that restarts is back by the next turn; the lease outlives two of them.
                log.exception("lease of work %s could not be renewed", self.work_id)
            finally:
                connection.close()


def backoff_s(lasting_s: float, last_s: float = RETRY_LAST_S) -> float:
    """Return how long to wait after trouble that has lasted so long: about as long again, within bounds.

    Up to a fifth less, at random: what failed together must not come back together.
    """
    share = random.uniform(0.8, 1.0)  # noqa: S311  (spreads work, guards nothing)
    return min(last_s, max(RETRY_FIRST_S, lasting_s)) * share


Payload = dict[str, object]
Handler = Callable[[Payload, Lease], None]
_handlers: dict[str, Handler] = {}


def handler(kind: str) -> Callable[[Handler], Handler]:
    """Register a function as the handler of work of `kind`. It must be safe to run twice."""

    def register(function: Handler) -> Handler:
        _handlers[kind] = function
        return function

    return register


def enqueue(
    *, kind: str, key: str, payload: Payload | None = None, not_before: datetime | None = None
) -> None:
    """Make sure that work of `kind` about `key` will be done after this transaction commits.

    Unfinished work of the same kind and key is not doubled: due work becomes due no later than
    asked, and work that runs right now will run once more, since it may have read too early.
    """
    asked: _Asked = {(kind, key): (payload or {}, not_before or timezone.now())}
    together = _together.get()
    if together is None:
        _write(asked)
        return
    for about, (what, due) in asked.items():
        known = together.get(about)
        together[about] = what, min(due, known[1]) if known else due


@contextmanager
def enqueued_together() -> Iterator[None]:
    """Ask with one statement, at its end, for all that is asked for in this block: a post waits for each."""
    asked: _Asked = {}
    outer = _together.set(asked)
    try:
        yield
    finally:
        _together.reset(outer)
    _write(asked)


_Asked = dict[tuple[str, str], tuple[Payload, datetime]]
_together: ContextVar[_Asked | None] = ContextVar("together", default=None)
# In one order, so that two who ask for the same at once cannot deadlock.
_ENQUEUE = """
INSERT INTO runs_work (kind, key, payload, state, not_before, attempts, again, error, created_at)
SELECT kind, key, payload, 'due', due, 0, false, '', now()
FROM unnest(%s::text[], %s::text[], %s::jsonb[], %s::timestamptz[]) AS asked (kind, key, payload, due)
ORDER BY kind, key
ON CONFLICT (kind, key) WHERE state IN ('due', 'claimed') DO UPDATE SET
    not_before = LEAST(runs_work.not_before, EXCLUDED.not_before), payload = EXCLUDED.payload,
    again = runs_work.state = 'claimed' RETURNING id, not_before
"""


def _write(asked: _Asked) -> None:
    if not asked:
        return
    kinds, keys = map(list, zip(*asked, strict=True))
    payloads = [json.dumps(what) for what, _ in asked.values()]
    with raw_cursor() as cursor:
        cursor.execute(_ENQUEUE, (kinds, keys, payloads, [due for _, due in asked.values()]))
        found = cursor.fetchall()
    now = timezone.now()
    for work_id, due in found:
        if due <= now:
            transaction.on_commit(partial(bell.ring, "runs.tasks.run_work", work_id), robust=True)


def run_one(work_id: int) -> bool:
    """Claim and do one unit of work. Returns False when there was nothing to claim.

    A handler that raises is tried again later, after 2 s at first and 5 minutes at most; only
    `GiveUp` ends the work undone.
    """
    now = timezone.now()
    token = uuid.uuid4()
    free = Q(state=Work.State.DUE, not_before__lte=now) | Q(state=Work.State.CLAIMED, lease_until__lt=now)
    claimed = Work.objects.filter(free, pk=work_id).update(
        state=Work.State.CLAIMED,
        lease_token=token,
        lease_until=now + timedelta(seconds=LEASE_S),
        attempts=F("attempts") + 1,
        again=False,
    )
    if not claimed:
        return False
    work = Work.objects.get(pk=work_id)
    lease = Lease(work_id, token)
    keeper = threading.Thread(target=lease._keep, name=f"lease-{work_id}", daemon=True)
    keeper.start()
    try:
        do = _handlers.get(work.kind)
        if do is None:
            raise Retry(60, f"no handler for {work.kind!r} is installed here")
        do(work.payload, lease)
    except Retry as retry:
        _again(lease, _after_tries(work) if retry.after_s is None else retry.after_s, retry.why)
    except GiveUp as reason:
        log.error("work %s given up: %s", work, reason)
        lease._mine().update(
            state=Work.State.FAILED, error=str(reason), finished_at=timezone.now(), lease_token=None
        )
    except LeaseLost:
        log.warning("work %s was taken over by another worker", work)
    except Exception:
        log.exception("work %s failed, will be tried again", work)
        _again(lease, _after_tries(work), traceback.format_exc()[-2000:])
    else:
        _finish(lease)
    finally:
        lease._done.set()
        keeper.join(timeout=5)
    return True


def _after_tries(work: Work) -> float:
    return backoff_s(RETRY_FIRST_S * 2 ** min(work.attempts - 1, 10))


def _again(lease: Lease, after_s: float, why: str) -> None:
    # Two statements, as in `_finish`: what was asked for while it ran must not wait for the later time.
    later = timezone.now() + timedelta(seconds=after_s)
    free = {"state": Work.State.DUE, "error": why, "lease_token": None, "lease_until": None}
    if lease._mine().filter(again=False).update(not_before=later, **free):
        return
    if lease._mine().update(not_before=timezone.now(), **free):
        bell.ring("runs.tasks.run_work", lease.work_id)


def _finish(lease: Lease) -> None:
    # Two statements, each a compare-and-set: someone may ask for another round between them.
    now = timezone.now()
    done = (
        lease._mine()
        .filter(again=False)
        .update(state=Work.State.DONE, finished_at=now, lease_token=None, lease_until=None, error="")
    )
    if not done and lease._mine().update(
        state=Work.State.DUE, not_before=now, lease_token=None, lease_until=None, error=""
    ):
        bell.ring("runs.tasks.run_work", lease.work_id)


def take_over() -> int:
    """Free what is claimed, and ring for it; for a worker that knows every other to be dead.

    The only worker of a machine need not wait for the leases of the one that was killed before it.
    """
    freed = Work.objects.filter(state=Work.State.CLAIMED).update(lease_until=timezone.now())
    sweep()
    return freed


def _due(now: datetime) -> list[int]:
    free = Q(state=Work.State.DUE, not_before__lte=now) | Q(state=Work.State.CLAIMED, lease_until__lt=now)
    return list(Work.objects.filter(free).order_by("not_before").values_list("pk", flat=True)[:SWEEP_LIMIT])


def sweep() -> int:
    """Ring again for all that is due: work, and runs with something nobody looked at.

    Safe to run twice and in two places at once: ringing is only a hint, claiming decides.
    """
    work_ids = _due(timezone.now())
    run_ids = list(Pending.objects.order_by().values_list("run_id", flat=True).distinct()[:SWEEP_LIMIT])
    for work_id in work_ids:
        bell.ring("runs.tasks.run_work", work_id)
    for run_id in run_ids:
        bell.ring("runs.tasks.look", run_id)
    return len(work_ids) + len(run_ids)


def run_due(limit: int = 1000) -> int:
    """Do all work that is due right here, one after the other; returns how many units were done.

    For a machine without a broker, and for commands that want to see the end of what they began.
    """
    done = 0
    while done < limit:
        todo = _due(timezone.now())
        if not any(run_one(work_id) for work_id in todo):
            return done
        done += len(todo)
    return done
