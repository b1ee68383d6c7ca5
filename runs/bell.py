"""Rings Celery from a thread of its own, so that nobody ever waits for a broker.

A broker that is down, or that accepts and never answers, costs the ringing thread its socket
timeout and then silence for five seconds; the request or worker that asked to ring never notices.
What was not rung is found by `runs.work.sweep`.
"""

import logging
import os
import queue
import threading
import time

from celery import current_app
from django.conf import settings

log = logging.getLogger(__name__)

QUIET_S = 5.0  # after a failure: no ringing at all, the sweep will do it
SAME_S = 0.2  # one ring answers a burst about the same thing; the sweep catches a lost last one
WAITING = 1000  # more waiting rings than this are dropped: the sweep rings for them


class _Bell:
    def __init__(self) -> None:
        self._waiting: queue.Queue[tuple[str, int]] = queue.Queue(WAITING)
        self._lock = threading.Lock()
        self._pid = 0
        self._rung: dict[tuple[str, int], float] = {}

    def ring(self, task: str, key: int) -> None:
        now = time.monotonic()
        if now - self._rung.get((task, key), -SAME_S) < SAME_S:
            return
        if len(self._rung) > 10 * WAITING:
            self._rung.clear()
        self._rung[task, key] = now
        self._start()
        try:
            self._waiting.put_nowait((task, key))
        except queue.Full:
            log.warning("doorbell is backed up: left %s to the sweep", task)

    def _start(self) -> None:
        # A forked child has the queue but not the thread.
        if self._pid != os.getpid():
            with self._lock:
                if self._pid != os.getpid():
                    threading.Thread(target=self._work, name="doorbell", daemon=True).start()
                    self._pid = os.getpid()

    def _work(self) -> None:
        quiet_until = 0.0
        while True:
            task, key = self._waiting.get()
            if time.monotonic() < quiet_until:
                continue
            try:
                current_app.send_task(task, args=[key], ignore_result=True, retry=False)
            except Exception as error:
                quiet_until = time.monotonic() + QUIET_S
                log.warning("broker did not take %s (%s): quiet for %s s", task, error, QUIET_S)


_bell = _Bell()


def ring(task: str, key: int) -> None:
    """Ask for `task(key)` to be run soon. Never waits, never raises, may be lost."""
    if getattr(settings, "BROKER_URL", ""):
        _bell.ring(task, key)
