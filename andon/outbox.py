"""Sends in order from one thread, so that a slow server never slows a training step."""

import queue
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol


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
    """A queue before a `Sender`.

    Full means the sender has been stuck for `capacity` posts: what no longer fits is counted in
    `lost` and told in one `gap` event as soon as there is room, never dropped silently.

    Arguments:
        capacity: posts held; 4,096 is over half an hour at two posts a second.
    """

    def __init__(self, sender: Sender, *, capacity: int = 4096) -> None:
        self.sender = sender
        self.lost = 0
        self._queue: queue.Queue[Callable[[], object] | None] = queue.Queue(capacity)
        self._thread = threading.Thread(target=self._run, name="andon-outbox", daemon=True)
        self._thread.start()

    def events(self, events: list[dict[str, Any]]) -> None:
        """Queue events for one post."""
        if self.lost and not self._queue.full():
            events = [{"type": "gap", "data": {"posts_lost": self.lost, "reason": "outbox full"}}, *events]
            self.lost = 0
        self._put(lambda: self.sender.send_events(events))

    def frame(self, frame: Any) -> None:
        """Queue one frame."""
        self._put(lambda: self.sender.send_frame(frame))

    def _put(self, post: Callable[[], object]) -> None:
        try:
            self._queue.put_nowait(post)
        except queue.Full:
            self.lost += 1

    def _run(self) -> None:
        while (post := self._queue.get()) is not None:
            try:
                post()
            except Exception as error:  # a post must never end the thread, nor the training
                print(f"andon: a post failed: {error}", file=sys.stderr)  # noqa: T201
            finally:
                self._queue.task_done()
        self._queue.task_done()

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything queued was sent or spooled; False when time ran out."""
        done = threading.Event()
        self._put(done.set)
        return done.wait(timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """Send what is queued, then stop the thread."""
        self.drain(timeout_s)
        self._queue.put(None)
        self._thread.join(timeout_s)
