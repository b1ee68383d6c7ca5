"""Sends in order from one thread, so that a slow server never slows a training step."""

import sys
import threading
from collections import deque
from typing import Any, Protocol

from andon.spool_records import must_arrive

CLOSING_S = 10.0
COLLECT_S = 1.0
EVENTS_PER_POST = 1024


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
    """A queue before a `Sender`. Queueing takes a microsecond, whatever the sender does.

    Healthy steps are collected and leave as one post a second: one waking, one write to the disk and one
    round trip, however short a step is. What happens once (an action, a verdict, …) and what is said to
    be urgent leaves at once, and all that was queued before goes with it.

    Full means the sender has been stuck for `capacity` calls. The oldest telemetry then goes, counted and
    told in one `gap` event as soon as there is room; what happens once stays.

    Arguments:
        capacity: calls held; 4,096 is over half an hour at two a second.
        collect_s: the longest that anything waits for company.
    """

    def __init__(self, sender: Sender, *, capacity: int = 4096, collect_s: float = COLLECT_S) -> None:
        self.sender = sender
        self.lost = 0  # calls given up and not told yet
        self._capacity = capacity
        self._collect_s = collect_s
        self._queue: deque[tuple[bool, Any]] = deque()  # (kept, list of events or a frame)
        self._changed = threading.Condition()
        self._urgent = False
        self._sending = False
        self._ends = False
        self._thread = threading.Thread(target=self._run, name="andon-outbox", daemon=True)
        self._thread.start()

    def events(self, events: list[dict[str, Any]], *, urgent: bool = False) -> None:
        """Queue events. They leave in order, those of several calls perhaps in one post."""
        kept = must_arrive(events)
        self._put(kept, events, urgent=urgent or kept)

    def frame(self, frame: Any) -> None:
        """Queue one frame, which leaves at once."""
        self._put(False, frame, urgent=True)

    def _put(self, kept: bool, what: Any, *, urgent: bool) -> None:
        with self._changed:
            self._queue.append((kept, what))
            if len(self._queue) > self._capacity:
                oldest = next((one for one in self._queue if not one[0]), None)
                if oldest is not None:
                    self._queue.remove(oldest)
                    self.lost += 1
            if urgent:
                self._hurry()

    def _hurry(self) -> None:
        """Let nothing wait for company any more. Under the lock."""
        self._urgent = True
        self._changed.notify_all()

    def _run(self) -> None:
        while (what := self._next()) is not None:
            try:
                if isinstance(what, list):
                    self.sender.send_events(what)
                else:
                    self.sender.send_frame(what)
            except Exception as error:  # a post must never end the thread, nor the training
                print(f"andon: a post failed: {error}", file=sys.stderr)  # noqa: T201

    def _next(self) -> Any:
        """Return the next list of events or frame when it is due, None at the end."""
        with self._changed:
            self._sending = False
            while True:
                if not self._queue and not self.lost:
                    self._urgent = self._ends
                    self._changed.notify_all()  # somebody may wait for it to be empty
                    if self._ends:
                        return None
                self._changed.wait_for(lambda: self._urgent, self._collect_s)
                if self._queue or self.lost:
                    break
            self._sending = True
            if self.lost:
                lost, self.lost = self.lost, 0
                return [{"type": "gap", "data": {"posts_lost": lost, "reason": "outbox full"}}]
            _, what = self._queue.popleft()
            if isinstance(what, list):
                what = list(what)
                while self._queue and isinstance(self._queue[0][1], list) and len(what) < EVENTS_PER_POST:
                    what += self._queue.popleft()[1]
            return what

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything queued was sent or spooled; False when time ran out."""
        with self._changed:
            self._hurry()
            return self._changed.wait_for(
                lambda: not (self._queue or self.lost or self._sending), max(0.0, timeout_s)
            )

    def close(self, timeout_s: float = CLOSING_S) -> None:
        """Send what is queued, then stop the thread."""
        self.drain(timeout_s)
        with self._changed:
            self._ends = True
            self._hurry()
        self._thread.join(timeout_s)
