"""Sends in order from one thread, so that a slow server never slows a training step."""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from andon.spool_records import must_arrive

CLOSING_S = 10.0


class Sender(Protocol):
    """What carries posts: `andon.client.Client`, or the recorder of a recording."""

    @property
    def directive(self) -> dict[str, Any] | None:
        """The newest directive seen, or None."""
        ...

    def send_events(self, events: list[dict[str, Any]], /) -> dict[str, Any] | None:
        """Post events; None when they were spooled."""
        ...

    def send_frame(self, frame: Any, /) -> dict[str, Any] | None:
        """Post one frame; None when it was spooled."""
        ...


class Outbox:
    """A queue before a `Sender`. Queueing takes microseconds, whatever the sender does.

    Full means the sender has been stuck for `capacity` posts. The oldest telemetry then goes, counted and
    told in one `gap` event as soon as there is room; what happens once (an action, a verdict, …) stays.

    Arguments:
        capacity: posts held; 4,096 is over half an hour at two posts a second.
    """

    def __init__(self, sender: Sender, *, capacity: int = 4096) -> None:
        self.sender = sender
        self.lost = 0  # posts given up and not told yet
        self._capacity = capacity
        self._queue: deque[tuple[bool, Callable[[], object]]] = deque()
        self._changed = threading.Condition()
        self._sending = False
        self._ends = False
        self._thread = threading.Thread(target=self._run, name="andon-outbox", daemon=True)
        self._thread.start()

    def events(self, events: list[dict[str, Any]]) -> None:
        """Queue events for one post."""
        self._put(must_arrive(events), lambda: self.sender.send_events(events))

    def frame(self, frame: Any) -> None:
        """Queue one frame."""
        self._put(False, lambda: self.sender.send_frame(frame))

    def _put(self, kept: bool, post: Callable[[], object]) -> None:
        with self._changed:
            self._queue.append((kept, post))
            if len(self._queue) > self._capacity:
                oldest = next((one for one in self._queue if not one[0]), None)
                if oldest is not None:
                    self._queue.remove(oldest)
                    self.lost += 1
            self._changed.notify_all()

    def _run(self) -> None:
        while (post := self._next()) is not None:
            try:
                post()
            except Exception as error:  # a post must never end the thread, nor the training
                print(f"andon: a post failed: {error}", file=sys.stderr)  # noqa: T201

    def _next(self) -> Callable[[], object] | None:
        with self._changed:
            self._sending = False
            self._changed.notify_all()
            while not self._queue and not self.lost:
                if self._ends:
                    return None
                self._changed.wait()
            self._sending = True
            if self.lost:
                lost, self.lost = self.lost, 0
                gap = {"type": "gap", "data": {"posts_lost": lost, "reason": "outbox full"}}
                return lambda: self.sender.send_events([gap])
            return self._queue.popleft()[1]

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything queued was sent or spooled; False when time ran out."""
        end_s = time.monotonic() + timeout_s
        with self._changed:
            while self._queue or self.lost or self._sending:
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    return False
                self._changed.wait(left_s)
        return True

    def close(self, timeout_s: float = CLOSING_S) -> None:
        """Send what is queued, then stop the thread."""
        self.drain(timeout_s)
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
