"""One thread of this process at a time opens the incident of a run; the others wait and then join.

When a NaN reaches a whole fleet, dozens of posts are in their transactions before the first of them has
opened the incident. Each would wait for the lock of the run and then join the long way, one behind the
other, while the fleet behind them waits for its directive. Here they give their transaction up, wait for
the one that opens, and go with all others (`runs.joining`).
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

WAIT_S = 2.0  # as long as an opening may wait for its locks

_opening: dict[int, threading.Event] = {}
_lock = threading.Lock()


class Elsewhere(Exception):
    """Another thread of this process is opening the incident of this run."""


class Turn:
    """The right of one post to open the incident of its run."""

    def __init__(self, run_id: int) -> None:
        """Nothing is claimed before `begin`."""
        self._run_id = run_id
        self._done: threading.Event | None = None

    def begin(self) -> None:
        """Claim the opening; what comes now from other threads waits until the turn is over.

        Raises:
            Elsewhere: it is claimed.
        """
        with _lock:
            if self._done is not None:
                return
            if self._run_id in _opening:
                raise Elsewhere
            _opening[self._run_id] = self._done = threading.Event()

    def end(self) -> None:
        """Let the others go on."""
        if self._done is not None:
            with _lock:
                del _opening[self._run_id]
            self._done.set()


@contextmanager
def turn(run_id: int) -> Iterator[Turn]:
    """Give a post its turn, which is over when its transaction is."""
    mine = Turn(run_id)
    try:
        yield mine
    finally:
        mine.end()


def wait(run_id: int) -> None:
    """Wait while another thread opens the incident of this run; holds no transaction meanwhile."""
    opening = _opening.get(run_id)
    if opening is not None:
        opening.wait(WAIT_S)
