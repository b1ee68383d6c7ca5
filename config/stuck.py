"""Ends a worker that no longer takes what waits for it, so that whoever watches it starts it again.

A worker whose broker dies between a task and its acknowledgement may count that task as still its own. With
as many of these as it has threads it fetches nothing more, so it does not even notice that the connection is
gone (Celery 5.7 with Redis: "Couldn't ack", then silence). From outside it looks well. Inside it is plain:
messages wait in the queue, none of its tasks runs, and none has begun for a while.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import redis
from celery import signals
from django.conf import settings

log = logging.getLogger(__name__)

DEAF_S = 15.0  # a worker with nothing to do takes a message in milliseconds
_LOOK_EVERY_S = 5.0
_GRACE_S = 5.0


class Watch:
    """Counts what runs. `waiting` returns how many messages wait, None when the broker does not say."""

    def __init__(
        self, waiting: Callable[[], int | None], deaf_s: float, every_s: float = _LOOK_EVERY_S
    ) -> None:
        self._waiting = waiting
        self._deaf_s = deaf_s
        self._every_s = every_s
        self._running = 0
        self._lock = threading.Lock()
        self._idle_since: float | None = None

    def began(self, **_: Any) -> None:
        """Note that a task runs."""
        with self._lock:
            self._running += 1
            self._idle_since = None

    def ended(self, **_: Any) -> None:
        """Note that a task has ended, however."""
        with self._lock:
            self._running = max(0, self._running - 1)
            self._idle_since = None

    def is_deaf(self, now: float) -> bool:
        """Return whether messages waited while nothing ran at every look of the last `deaf_s` seconds."""
        waiting = self._waiting()
        with self._lock:
            if self._running or not waiting:
                self._idle_since = None
                return False
            if self._idle_since is None:
                self._idle_since = now
            return now - self._idle_since >= self._deaf_s

    def run(self) -> None:
        """End this process once it is deaf."""
        while not self.is_deaf(time.monotonic()):
            time.sleep(self._every_s)
        log.error(
            "nothing was taken from the broker for %.0f s while messages waited: this worker ends, to be"
            " started again",
            self._deaf_s,
        )
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE_S)
        os._exit(70)  # its loop is what hangs: it may not hear the signal either


def _queued() -> int | None:
    client = redis.Redis.from_url(settings.BROKER_URL, socket_timeout=2.0, socket_connect_timeout=2.0)
    try:
        return int(client.llen(settings.CELERY_TASK_DEFAULT_QUEUE))
    except (redis.RedisError, OSError):
        return None
    finally:
        client.close()


def watch(**_: Any) -> None:
    """Start watching in this process: connected to `worker_ready`."""
    one = Watch(_queued, DEAF_S)
    signals.task_prerun.connect(one.began, weak=False)
    signals.task_postrun.connect(one.ended, weak=False)
    threading.Thread(target=one.run, name="stuck", daemon=True).start()
