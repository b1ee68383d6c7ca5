"""The demo's own server, run and people, for tests that break into it."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from config.embedded.valkey import free_port
from demo.__main__ import Demo
from demo.check import Checker
from tests.config.up import Up, prepare, processes_with
from tests.faults.house import House

SPEED = 4.0


@contextlib.contextmanager
def started(directory: Path, *, speed: float = SPEED, **more: str) -> Iterator[Demo]:
    """Start a demo in `directory`, its database made before; whatever is left of it is stopped at the end."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("ANDON_", "DJANGO_", "TEST_SESSION_")):
                patch.delenv(name)
        patch.setenv("ANDON_PORT", str(free_port()))
        patch.setenv("ANDON_DATA_DIR", str(directory))
        for name, value in more.items():
            patch.setenv(name, value)
        demo = Demo(live=False, speed=speed)
        try:
            prepare(demo.data_dir)
            demo.start()
            yield demo
        finally:
            demo.close()
            for pid in processes_with(f"ANDON_DATA_DIR={demo.data_dir}"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def eventually(what: str, probe: Callable[[], Any], timeout_s: float = 90.0) -> Any:
    """Return the first truthy answer; a server that is just away counts as not yet."""
    deadline = time.monotonic() + timeout_s
    seen: object = None
    while time.monotonic() < deadline:
        try:
            seen = probe()
        except OSError as error:
            seen = error
        else:
            if seen:
                return seen
        time.sleep(0.2)
    raise AssertionError(f"not within {timeout_s:g} s: {what}; last seen: {seen!r}")


def inside(demo: Demo) -> House:
    """Look into the demo's database."""
    up = Up(demo.data_dir)
    up.port = int(demo.server.url.rpartition(":")[2])
    return House(up)


def sealed(evidence: dict[str, int]) -> bool:
    """Whether all required evidence is sealed; what is missing never will be."""
    assert not evidence["missing"], evidence
    return evidence["sealed"] >= evidence["required"] > 0


def all_obey(checker: Checker) -> bool:
    """Whether every rank acknowledged the hold."""
    directive = checker.incident()["directive"]
    return directive["kind"] == "hold" and directive["obeyed"] == directive["of"] > 0
