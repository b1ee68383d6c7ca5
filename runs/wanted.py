"""How many things the node agents of a run are asked for; every answer to a post says so.

The app above counts (`count_by`); a process remembers the count for a moment, so that a fleet's posts
do not ask the database each.
"""

import logging
import time
from collections.abc import Callable

from django.db import Error

log = logging.getLogger(__name__)

REMEMBER_S = 2.0
CACHED_RUNS = 10_000

_counters: list[Callable[[int], int]] = []
_known: dict[int, tuple[float, int]] = {}


def count_by(counter: Callable[[int], int]) -> None:
    """Register what counts for a run id; called once, when the app above is ready."""
    _counters[:] = [counter]


def wanted_of(run_id: int) -> int:
    """Return how many things are wanted of a run's nodes; a database in trouble never costs a post."""
    now = time.monotonic()
    known = _known.get(run_id)
    if known is not None and now - known[0] < REMEMBER_S:
        return known[1]
    try:
        count = sum(counter(run_id) for counter in _counters)
    except Error:
        log.exception("run %s: what is wanted could not be counted", run_id)
        return 0 if known is None else known[1]
    if len(_known) >= CACHED_RUNS:
        _known.clear()
    _known[run_id] = (now, count)
    return count


def forget() -> None:
    """Empty the memory of this process (between tests)."""
    _known.clear()
