"""How a monitor's posts leave: stamped, in order, off the training thread."""

import time
from typing import Any

from andon.monitor_posts import Place
from andon.outbox import Outbox, Sender
from andon.wire import Frame


class Posting:
    """What a monitor needs to post. `sender` is None on ranks that lead no node."""

    def __init__(self, place: Place, sender: Sender | None, heartbeat_s: float, background: bool) -> None:
        self.place = place
        self.sender = sender
        self.heartbeat_s = heartbeat_s
        self.outbox = Outbox(sender) if sender is not None and background else None
        self._heartbeat_at = 0.0

    def post(self, events: list[dict[str, Any]], *, urgent: bool = False) -> None:
        """Post events of this attempt; nothing on ranks that lead no node. Healthy steps and heartbeats leave
        once a second, what is `urgent` or happens once at once, with all that was posted before it."""
        if self.sender is None or not events:
            return
        now_ns = time.time_ns()
        stamped = [
            {"attempt": self.place.attempt, "time": now_ns, "node": self.place.node, **e} for e in events
        ]
        if self.outbox is not None:
            self.outbox.events(stamped, urgent=urgent)
        else:
            self.sender.send_events(stamped)

    def _post_frame(self, frame: Frame) -> None:
        if self.outbox is not None:
            self.outbox.frame(frame)
        elif self.sender is not None:
            self.sender.send_frame(frame)

    def heartbeat(self, state: str, step: int) -> None:
        """Say that this node's ranks are alive, and whether they train or are held."""
        self._heartbeat_at = time.monotonic()
        self.post(
            [
                {
                    "type": "heartbeat",
                    "step": step,
                    "ranks": list(self.place.node_ranks),
                    "data": {"state": state},
                }
            ]
        )
