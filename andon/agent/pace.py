"""A cap on bytes per second, shared by all threads of an agent."""

import threading
import time

_BURST_S = 0.25


class Pace:
    """Spreads bytes over time; a rate of 0 does not."""

    def __init__(self, mb_per_s: float = 0.0) -> None:
        self._lock = threading.Lock()
        self._free_at_s = 0.0
        self.mb_per_s = mb_per_s

    def take(self, count: int) -> None:
        """Wait until `count` more bytes may go out."""
        if self.mb_per_s <= 0:
            return
        with self._lock:
            now_s = time.monotonic()
            self._free_at_s = max(self._free_at_s, now_s - _BURST_S) + count / (self.mb_per_s * 1e6)
            wait_s = self._free_at_s - now_s
        if wait_s > 0:
            time.sleep(wait_s)
