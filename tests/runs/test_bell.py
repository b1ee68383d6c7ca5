"""The doorbell: rings once for a burst, once more for its end, and never makes anybody wait."""

import threading
import time
from typing import Any

import pytest

from runs import bell


class App:
    """Hears rings; `error` is raised while set."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int]] = []
        self.error: Exception | None = None
        self.delay_s = 0.0

    def send_task(self, task: str, args: list[int], **_: Any) -> None:
        time.sleep(self.delay_s)
        if self.error is not None:
            raise self.error
        self.heard.append((task, args[0]))


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> App:
    """A stand-in for the broker's client, which is not ours."""
    app = App()
    monkeypatch.setattr(bell, "current_app", app)
    monkeypatch.setattr(bell, "_bell", bell._Bell())
    return app


def test_a_burst_rings_first_and_last(app: App) -> None:
    for _ in range(500):
        bell.ring("look", 7)
    time.sleep(0.05)
    for _ in range(500):
        bell.ring("look", 7)
    time.sleep(3 * bell.SAME_S)
    assert app.heard == [("look", 7)] * 2


def test_other_keys_ring_at_once(app: App) -> None:
    for key in range(5):
        bell.ring("look", key)
    time.sleep(0.1)
    assert sorted(app.heard) == [("look", key) for key in range(5)]


def test_a_hanging_broker_makes_nobody_wait_and_is_left_alone_for_a_while(app: App) -> None:
    app.delay_s, app.error = 0.3, TimeoutError("no answer")
    before = time.monotonic()
    for key in range(100):
        bell.ring("look", key)
    assert time.monotonic() - before < 0.1
    time.sleep(0.5)
    app.error, app.delay_s = None, 0.0
    bell.ring("look", 1000)
    time.sleep(0.2)
    assert app.heard == []  # quiet: the sweep rings for all of these


def test_a_forked_childs_bell_works_too(app: App) -> None:
    bell.ring("look", 1)
    time.sleep(0.1)
    bell._bell._pid = -1  # as in a child, which has everything but the thread
    bell.ring("look", 2)
    time.sleep(0.1)
    assert ("look", 2) in app.heard
    assert sum(thread.name == "doorbell" for thread in threading.enumerate()) >= 2
