"""Progress of runs: newest step, newest values, which nodes were heard.

Posts note it in memory; a run's row is written at most once a second by a process, the first note
after a quiet second at once and the last of a burst by a timer, so that no value stays unwritten.
"""

import logging
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.db import connection
from psycopg.types.json import Jsonb

from runs.rows import raw_cursor

log = logging.getLogger(__name__)

EVERY_S = 1.0
SHOWN = (
    "loss",
    "grad_norm",
    "lr",
    "loss_scale",
    "tokens",
    "consumed_samples",
    "step_time_s",
    "loader_position",
)

# The commit waits for no disk: a post waits for this row, and what a crash takes of it the next post writes.
_WRITE = """
WITH quick AS (SELECT set_config('synchronous_commit', 'off', true))
INSERT INTO runs_runprogress (run_id, attempt, step, step_at, last_post_at, last, nodes, not_watched_why,
                              unread_bodies, unread_bytes)
SELECT %(run)s, %(attempt)s::int, %(step)s::bigint, %(step_at)s::timestamptz, %(post_at)s::timestamptz,
       %(last)s, %(nodes)s, '', 0, 0 FROM quick
ON CONFLICT (run_id) DO UPDATE SET
    step_at = CASE WHEN EXCLUDED.step IS NOT NULL AND (runs_runprogress.step IS NULL
                   OR EXCLUDED.attempt > coalesce(runs_runprogress.attempt, 0)
                   OR EXCLUDED.step > runs_runprogress.step) THEN EXCLUDED.step_at
              ELSE runs_runprogress.step_at END,
    step = CASE WHEN EXCLUDED.attempt > coalesce(runs_runprogress.attempt, 0) THEN EXCLUDED.step
                ELSE greatest(runs_runprogress.step, EXCLUDED.step) END,
    attempt = greatest(runs_runprogress.attempt, EXCLUDED.attempt),
    last_post_at = greatest(runs_runprogress.last_post_at, EXCLUDED.last_post_at),
    last = runs_runprogress.last || EXCLUDED.last,
    nodes = runs_runprogress.nodes || EXCLUDED.nodes
"""


@dataclass(slots=True)
class _News:
    attempt: int | None = None
    step: int | None = None
    step_at: datetime | None = None
    post_at: datetime | None = None
    last: dict[str, object] = field(default_factory=dict)
    nodes: dict[str, str] = field(default_factory=dict)


class Board:
    """What one process has heard and not yet written."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._news: dict[int, _News] = {}
        self._written: dict[int, float] = {}
        self._timer: threading.Timer | None = None

    def note(
        self,
        run_id: int,
        *,
        at: datetime,
        attempt: int | None,
        step: int | None,
        values: Mapping[str, object],
        nodes: Collection[str],
    ) -> None:
        """Note one post and the nodes it is from; writes at once when the run's row is a second old."""
        with self._lock:
            news = self._news.setdefault(run_id, _News())
            if attempt is not None and (news.attempt is None or attempt > news.attempt):
                news.attempt, news.step, news.step_at = attempt, None, None
            current = attempt is None or news.attempt is None or attempt >= news.attempt
            if current and step is not None and (news.step is None or step > news.step):
                news.step, news.step_at = step, at
            # A frame and an event of one step are two posts: the second one's values count as well.
            if current and step is not None and step == news.step:
                news.last.update(values)
            news.post_at = at
            news.nodes.update(dict.fromkeys(nodes, at.isoformat().replace("+00:00", "Z")))
            due = time.monotonic() - self._written.get(run_id, -EVERY_S) >= EVERY_S
            if due:
                self._written[run_id] = time.monotonic()
                taken: _News | None = self._news.pop(run_id)
            else:
                taken = None
                if self._timer is None:
                    self._timer = threading.Timer(EVERY_S, self._rest)
                    self._timer.daemon = True
                    self._timer.start()
        if taken is not None:
            _write(run_id, taken)

    def _rest(self) -> None:
        try:
            self.flush()
        finally:
            connection.close()

    def flush(self) -> None:
        """Write all that was noted."""
        with self._lock:
            self._timer = None
            waiting, self._news = self._news, {}
            now = time.monotonic()
            self._written.update(dict.fromkeys(waiting, now))
        for run_id, news in waiting.items():
            _write(run_id, news)


def _write(run_id: int, news: _News) -> None:
    try:
        with raw_cursor() as cursor:
            cursor.execute(
                _WRITE,
                {
                    "run": run_id,
                    "attempt": news.attempt,
                    "step": news.step,
                    "step_at": news.step_at,
                    "post_at": news.post_at,
                    "last": Jsonb(news.last),
                    "nodes": Jsonb(news.nodes),
                },
            )
    except Exception:
        # The data is stored; the next post writes the progress again.
        log.exception("run %s: progress not written", run_id)


board = Board()


def shown_values(step: int, data: Mapping[str, Any], flags: Mapping[str, str]) -> dict[str, object]:
    """Return the newest values as kept for the list of runs: name → {"step", "value", "flag"}."""
    values: dict[str, object] = {}
    for name in SHOWN:
        if name in data:
            values[name] = {"step": step, "value": data[name], "flag": flags.get(f"data.{name}", "")}
    return values
