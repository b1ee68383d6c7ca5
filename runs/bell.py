"""Rings Celery from a thread of its own, so that nobody ever waits for a broker.

A broker that is down, or that accepts and never answers, costs the ringing thread its socket
timeout and then silence for five seconds; the request or worker that asked to ring never notices.
What was not rung is found by `runs.work.sweep`.
"""

import logging
import os
import threading
import time

from celery import current_app
from django.conf import settings

log = logging.getLogger(__name__)

QUIET_S = 5.0  # after a failure: no ringing at all, the sweep will do it
SAME_S = 0.2  # a burst about the same thing rings at once and then once per so long, and once at its end
CALM_S = 2.0  # the same for what nobody waits for, such as more bad values of a run that is held
WAITING = 1000  # more waiting rings than this are dropped: the sweep rings for them


class _Bell:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._pid = 0
        self._due: dict[tuple[str, int], float] = {}
        self._rung: dict[tuple[str, int], float] = {}

    def ring(self, task: str, key: int, again_s: float) -> None:
        about = (task, key)
        if about in self._due and self._pid == os.getpid():
            return  # one ring that is still to come answers this call as well
        with self._lock:
            if self._pid != os.getpid():  # a forked child has the dictionaries but not the thread
                self._due.clear()
                threading.Thread(target=self._work, name="doorbell", daemon=True).start()
                self._pid = os.getpid()
            if len(self._due) >= WAITING:
                log.warning("doorbell is backed up: left %s to the sweep", task)
                return
            self._due[about] = max(time.monotonic(), self._rung.get(about, 0.0) + again_s)
        self._wake.set()

    def _work(self) -> None:
        quiet_until = 0.0
        while True:
            about, wait_s = self._next()
            if about is None:
                self._wake.wait(wait_s)
                self._wake.clear()
                continue
            if time.monotonic() < quiet_until:
                continue
            try:
                current_app.send_task(about[0], args=[about[1]], ignore_result=True, retry=False)
            except Exception as error:
                quiet_until = time.monotonic() + QUIET_S
                log.warning("broker did not take %s (%s): quiet for %s s", about[0], error, QUIET_S)

    def _next(self) -> tuple[tuple[str, int] | None, float | None]:
        """Take what is due now, else say how long to sleep (None: until someone rings)."""
        with self._lock:
            if not self._due:
                return None, None
            now = time.monotonic()
            about = min(self._due, key=self._due.__getitem__)
            if self._due[about] > now:
                return None, self._due[about] - now
            del self._due[about]
            if len(self._rung) > 10 * WAITING:
                self._rung.clear()
            self._rung[about] = now
            return about, 0.0


_bell = _Bell()


def ring(task: str, key: int, *, calm: bool = False) -> None:
    """Ask for `task(key)` to be run soon. Never waits, never raises, may be lost.

    Args:
        calm: nobody waits for it: a burst rings less often.
    """
    if getattr(settings, "BROKER_URL", ""):
        _bell.ring(task, key, CALM_S if calm else SAME_S)
