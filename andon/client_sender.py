"""How posts leave: a queue, the spool, and two threads that nobody waits for longer than agreed."""

import atexit
import hashlib
import logging
import os
import ssl
import threading
import time
import zlib
from collections import deque
from collections.abc import Collection
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import msgspec

from andon import keys
from andon.client_http import Answer, Backoff, Clock, Connection, Unreachable, new_id
from andon.directive import Follower
from andon.spool import Gap, Post, Spool
from andon.spool_slots import open_slot
from andon.wire import encode_events

logger = logging.getLogger("andon.client")

MAX_AGE_S = 14 * 86400.0  # the server keeps ids for 30 days; a repeat after that would count twice
GZIP_FROM_BYTES = 4096
KEYS_EVERY_S = 60.0  # at most; an unknown key is asked about again
QUEUE_BYTES = 64 * 1024 * 1024
OPEN_S = 5.0


class Ticket:
    """One post on its way, as its caller sees it."""

    def __init__(self, post: Post) -> None:
        self.post = post
        self.written = threading.Event()  # in the spool: a kill of this process does not lose it
        self.settled = threading.Event()  # answered, or in the spool and known to take longer
        self.answer: dict[str, Any] | None = None

    def settle(self, answer: dict[str, Any] | None = None) -> None:
        self.answer = answer
        self.settled.set()


class Sender:
    """One run's posts on their way. One thread writes them to the spool, one sends them in order.

    Args:
        url: the server, e.g. "https://andon.example.org".
        run: the run's name.
        secret: the run's `whsec_…`.
        spool_dir: where posts wait on disk; ranks of a node share it. Default: `ANDON_SPOOL_DIR`,
            else `andon/spool` under `XDG_STATE_HOME` or `~/.local/state`. Where that cannot be
            written, posts wait in memory and `status()["disk_error"]` says so.
        node: put into events and frames that name none.
        attempt: put into events that name none; directives of another attempt are then ignored.
        trusted: fingerprints of the server's keys; with them an unsigned directive is ignored. When the
            server signs with another key, its key document is asked whether a pinned one handed over
            to it (andon/keys.py).
        max_wait_s: the longest that sending may keep its caller, to get the answer (and with it
            the directive) of the same step.
        spool_bytes: above this the oldest telemetry is given up and counted in a `gap` event.
        tls: for a private certificate authority.
    """

    def __init__(
        self,
        url: str,
        run: str,
        secret: str,
        *,
        spool_dir: str | os.PathLike[str] | None = None,
        node: str | None = None,
        attempt: int | None = None,
        trusted: Collection[str] | None = None,
        max_wait_s: float = 0.5,
        timeout_s: float = 15.0,
        spool_bytes: int = 1024**3,
        max_age_s: float = MAX_AGE_S,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.run, self.node = run, node
        self.clock = Clock()
        self._base = f"/api/v1/runs/{quote(run, safe='')}"
        self._address = (url, secret, timeout_s, tls)
        self._connection = self._open()
        self._max_wait_s, self._max_age_s = max_wait_s, max_age_s
        self._follower = Follower(run, attempt=attempt, trusted=trusted)
        self._keys_asked_s = -KEYS_EVERY_S
        self._backoff = Backoff()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._queue: deque[Ticket] = deque()
        self._queue_bytes = 0
        self._in_hand = 0  # posts that the writer has taken out of the queue and not yet written
        self._queue_gap = Gap()  # given up before they reached the spool
        self._tickets: dict[str, Ticket] = {}
        self._busy_since_s: float | None = None  # the sender has waited for an answer since
        self._writing_since_s: float | None = None  # the writer has waited for the disk since
        self._written = 0  # grows with every append, so that the sender misses none between look and wait
        self._closing = False
        self._closed = False
        self.counts = {"sent": 0, "duplicates": 0, "rejected": 0, "failures": 0, "refused_events": 0}
        self.last_error: str | None = None
        self._spool_lock = threading.Lock()
        self._spool = Spool(None)
        self._opened = threading.Event()
        self._writer = threading.Thread(
            target=self._write, args=(spool_dir, url, spool_bytes), name="andon-writer", daemon=True
        )
        self._sender = threading.Thread(target=self._send, name="andon-sender", daemon=True)
        self._writer.start()
        self._sender.start()
        self._opened.wait(OPEN_S)  # a disk that hangs keeps no trainer from starting
        atexit.register(self.close)

    def _open(self) -> Connection:
        url, secret, timeout_s, tls = self._address
        return Connection(url, secret, self.clock, timeout_s=timeout_s, tls=tls)

    def enqueue(
        self,
        path: str,
        body: bytes,
        content_type: str,
        *,
        events: int = 0,
        kept: bool = False,
        id_: str | None = None,
    ) -> Ticket:
        """Hand one post over; `path` is below the run's. Raises RuntimeError once closed.

        `id_` is for a post that may have been handed over before: the same bytes under one id count once.
        """
        post = Post(
            id=id_ or new_id(),
            path=self._base + path,
            content_type=content_type,
            body=body,
            created_s=time.time(),
            events=events,
            kept=kept,
        )
        ticket = Ticket(post)
        with self._changed:
            if self._closed or self._closing:
                raise RuntimeError("the client is closed")
            # The disk hangs and takes nothing: memory is not filled without end, and it is counted.
            while self._queue_bytes + len(body) > QUEUE_BYTES:
                lost = next((one for one in self._queue if not one.post.kept), None)
                if lost is None:
                    break
                self._queue.remove(lost)
                self._queue_bytes -= len(lost.post.body)
                self._tickets.pop(lost.post.id, None)
                self._queue_gap.add(lost.post, "memory full")
                lost.settle()
            self._queue.append(ticket)
            self._queue_bytes += len(body)
            self._tickets[post.id] = ticket
            self._changed.notify_all()
        return ticket

    def wait_for(self, tickets: list[Ticket]) -> list[tuple[int, dict[str, Any]]] | None:
        """Return (events, answer) of each post, None when one takes longer than `max_wait_s`."""
        deadline_s = time.monotonic() + self._max_wait_s
        for ticket in tickets:
            # A server or a disk that has kept us waiting longer than one whole wait keeps nobody else.
            for since_s in (self._busy_since_s, self._writing_since_s):
                if since_s is not None and time.monotonic() - since_s > self._max_wait_s:
                    deadline_s = min(deadline_s, time.monotonic() + 0.01)
            ticket.settled.wait(max(0.0, deadline_s - time.monotonic()))
        with self._lock:
            for ticket in tickets:
                self._tickets.pop(ticket.post.id, None)
        answers = [(ticket.post.events, ticket.answer) for ticket in tickets if ticket.answer is not None]
        return answers if len(answers) == len(tickets) else None

    # --- the two threads --------------------------------------------------------------------------

    def _write(self, spool_dir: str | os.PathLike[str] | None, url: str, spool_bytes: int) -> None:
        """Move posts from memory to the spool: all that wait, then one sync for them."""
        self._spool = _open_spool(spool_dir, url, self.run, spool_bytes)
        self._opened.set()
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait()
                if not self._queue:
                    return
                tickets = list(self._queue)
                self._queue.clear()
                self._queue_bytes = 0
                self._in_hand = len(tickets)
                self._writing_since_s = time.monotonic()
            posts = [_compressed(ticket.post) for ticket in tickets]
            with self._spool_lock:
                for post in posts:
                    self._spool.append(post)
            with self._changed:
                self._in_hand = 0
                self._written += 1
                for ticket in tickets:
                    ticket.written.set()
                self._changed.notify_all()
            self._sync()
            with self._changed:
                self._writing_since_s = None
                if self._backoff.waiting:
                    for ticket in tickets:
                        ticket.settle()

    def _sync(self) -> None:
        """Make what was appended survive a power cut. Not under the lock: a disk may take its time."""
        with self._spool_lock:
            descriptor = self._spool.to_sync()
        if descriptor is None:
            return
        try:
            os.fsync(descriptor)
        except OSError as error:
            self._spool.disk_error = str(error)
        finally:
            os.close(descriptor)

    def _send(self) -> None:
        """Send what is in the spool, in order, until closed and empty."""
        self._opened.wait()
        while not self._closed:
            written = self._written
            try:
                if not self._send_one():
                    with self._changed:
                        if self._written == written and not self._closed:
                            self._changed.wait(0.5)
            except Exception:  # a bug here must not silence the run for good
                logger.exception("sending failed unexpectedly; trying again")
                self._backoff.failed(None)
                time.sleep(0.5)
        self._connection.close()

    def _send_one(self) -> bool:
        """Send one post; return False when there is nothing to do now."""
        pause_s = self._backoff.until_s - time.monotonic()
        if pause_s > 0:
            with self._changed:
                self._changed.wait(min(pause_s, 0.5))
            return not self._closing
        with self._spool_lock:
            found = self._spool.peek()
            if found is not None and time.time() - found[0].created_s > self._max_age_s:
                self._spool.gap.add(
                    found[0], "older than 14 days" if self._max_age_s == MAX_AGE_S else "too old"
                )
                self._spool.done(found[1])
                return True
        if found is None:
            return self._tell_gap()
        post, token = found
        self._busy_since_s = time.monotonic()
        try:
            answer = self._connection.post(
                post.path, post.body, post.content_type, post.id, encoding=post.encoding
            )
        except Unreachable as error:
            self._failed(f"no answer: {error}", None)
            return True
        finally:
            self._busy_since_s = None
        if not answer.ok and not answer.permanent:
            self._failed(f"{answer.status}: {answer.problem()['detail']}", answer.retry_after_s)
            return True
        with self._spool_lock:
            self._spool.done(token)
        self._backoff.worked()
        self._answered(post, answer)
        self._tell_gap()
        return True

    def _failed(self, reason: str, retry_after_s: float | None) -> None:
        self._backoff.failed(retry_after_s)
        with self._changed:
            self.counts["failures"] += 1
            if self.last_error != reason:
                logger.warning("%s: %s; posts wait in the spool", self.run, reason)
            self.last_error = reason
            for ticket in self._tickets.values():
                if ticket.written.is_set():  # else the writer will
                    ticket.settle()

    def _answered(self, post: Post, answer: Answer) -> None:
        document = answer.document if answer.ok else answer.problem()
        self._learn_keys(self._connection, document.get("directive"))
        with self._changed:
            if answer.ok:
                self.counts["sent"] += 1
                self.counts["duplicates"] += document.get("duplicate") is True
                refused = document.get("refused")
                self.counts["refused_events"] += len(refused) if isinstance(refused, list) else 0
                self.last_error = None
            else:
                self.counts["rejected"] += 1
                self.last_error = f"{answer.status}: {document['detail']}"
                logger.error("%s: a post was refused: %s", self.run, document)
            if document.get("directive") is not None:
                self._follower.offer(document["directive"])
            ticket = self._tickets.pop(post.id, None)
            if ticket is not None:
                ticket.settle(document)
            self._changed.notify_all()

    def _learn_keys(self, connection: Connection, directive: object) -> None:
        """Ask for the key document when a directive is signed by a key that is not trusted."""
        if directive is None or self._follower.knows_key_of(directive):
            return
        if time.monotonic() - self._keys_asked_s < KEYS_EVERY_S:
            return
        self._keys_asked_s = time.monotonic()
        try:
            answer = connection.get(keys.PATH)
        except Unreachable as error:
            logger.warning("%s: signed by a key that is not known, and no key document: %s", self.run, error)
            return
        with self._lock:
            self._follower.learn(answer.document)
        if not self._follower.knows_key_of(directive):
            logger.error("%s: a directive is signed by a key that no pinned key handed over to", self.run)

    def _tell_gap(self) -> bool:
        """Turn what was given up into a `gap` event; return whether there was any."""
        with self._spool_lock:
            with self._lock:
                if self._queue_gap.posts:
                    self._spool.take_in_gap(self._queue_gap)
                    self._queue_gap = Gap()
            if not self._spool.gap.posts:
                return False
            gap = self._spool.take_gap()
            event = {
                "type": "gap",
                "time": time.time_ns(),
                "data": {
                    "posts": gap.posts,
                    "events": gap.events,
                    "from": int(gap.from_s * 1e9),
                    "to": int(gap.to_s * 1e9),
                    "reasons": gap.reasons,
                },
            }
            if self.node is not None:
                event["node"] = self.node
            self._spool.append(
                Post(
                    id=new_id(),
                    path=f"{self._base}/events",
                    content_type="application/json",
                    body=encode_events([event]),
                    created_s=time.time(),
                    events=1,
                    kept=True,
                )
            )
        self._sync()
        return True

    @property
    def trusted(self) -> Collection[str] | None:
        """The keys that count now: the pinned ones and those they handed over to. None: none was pinned."""
        return self._follower.trusted

    @property
    def attempt(self) -> int | None:
        """The attempt that events without one belong to, and the only one whose directives count."""
        return self._follower.attempt

    @attempt.setter
    def attempt(self, attempt: int | None) -> None:
        self._follower.attempt = attempt

    # --- ending -----------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Return what a person asks: posts waiting, counts, the last error, the clock's offset."""
        with self._lock:
            return {
                **self.counts,
                "pending": self._spool.pending + len(self._queue) + self._in_hand,
                "gap_posts": self._spool.gap.posts + self._queue_gap.posts,
                "last_error": self.last_error,
                "disk_error": self._spool.disk_error,
                "clock_offset_s": self.clock.offset_s,
                "directives_ignored": self._follower.ignored,
            }

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until nothing waits; return whether that is so."""
        end_s = time.monotonic() + timeout_s
        while self._something_waits():
            left_s = end_s - time.monotonic()
            if left_s <= 0 or self._closed:
                return False
            with self._changed:
                self._changed.wait(min(left_s, 0.05))
        return True

    def _something_waits(self) -> bool:
        # Under the spool's lock: between taking a gap and spooling its event, neither shows. A lock
        # that is not to be had means a disk that is busy with what waits.
        if self._queue or self._in_hand or not self._spool_lock.acquire(timeout=0.2):
            return True
        try:
            gaps = self._spool.gap.posts or self._queue_gap.posts
            return bool(self._queue or self._in_hand or self._spool.pending or gaps)
        finally:
            self._spool_lock.release()

    def close(self, timeout_s: float = 5.0) -> None:
        """Send what can be sent within `timeout_s`, leave the rest in the spool for the next client."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        atexit.unregister(self.close)
        end_s = time.monotonic() + timeout_s
        self._writer.join(timeout_s)
        while not self._backoff.waiting and self._spool.pending and time.monotonic() < end_s:
            with self._changed:
                self._changed.wait(0.05)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._connection.interrupt()
        self._sender.join(2.0)
        if self._spool_lock.acquire(timeout=1.0):  # a disk that hangs must not keep the trainer from leaving
            try:
                self._spool.close()
            finally:
                self._spool_lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open_spool(spool_dir: str | os.PathLike[str] | None, url: str, run: str, cap_bytes: int) -> Spool:
    """Open a slot below the spool directory; posts of another server or run never mix with ours."""
    if spool_dir is None:
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        spool_dir = os.environ.get("ANDON_SPOOL_DIR") or Path(state) / "andon" / "spool"
    name = "".join(c if c.isalnum() or c in "-_" else "_" for c in run)[:80]
    digest = hashlib.sha256(f"{url.rstrip('/')} {run}".encode()).hexdigest()[:12]
    try:
        return open_slot(Path(spool_dir) / f"{name}-{digest}", cap_bytes=cap_bytes)
    except OSError as error:
        logger.warning("spool %s cannot be used (%s): posts wait in memory only", spool_dir, error)
        spool = Spool(None)
        spool.disk_error = str(error)
        return spool


def _compressed(post: Post) -> Post:
    if len(post.body) < GZIP_FROM_BYTES or post.encoding:
        return post
    squeezer = zlib.compressobj(1, wbits=31)
    body = squeezer.compress(post.body) + squeezer.flush()
    if len(body) > 0.9 * len(post.body):
        return post  # floats of a noisy series: not worth the server's time
    return msgspec.structs.replace(post, body=body, encoding="gzip")
