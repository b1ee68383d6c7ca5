"""A worker that hears nothing any more ends, and one that is only busy or has nothing to do does not."""

import subprocess
import sys
from pathlib import Path

import pytest
import redis

from config.stuck import Watch
from tests.config.up import ROOT, clean_environment
from tests.servers import start_valkey


@pytest.mark.parametrize(
    ("looks", "deaf"),
    [
        ([1, 1, 1, 1], True),
        ([1, 1, 1], False),
        ([0, 0, 0, 0, 0], False),
        ([None, None, None, None, None], False),
        ([1, 1, 1, 0, 1, 1, 1], False),
        (["began", 1, 1, 1, 1, 1], False),
        (["began", 1, 1, "ended", 1, 1, 1, 1], True),
        ([1, 1, 1, "began", "ended", 1, 1, 1], False),
        (["ended", "began", 1, 1, 1, 1], False),
        (["began", "began", "ended", 1, 1, 1, 1], False),
    ],
)
def test_deaf_is_messages_that_wait_while_nothing_runs(looks: list[int | str | None], deaf: bool) -> None:
    """A look every 10 s of a worker that is deaf after 30 s; a number is what waits, None: not told."""
    waiting: list[int | None] = []
    watch = Watch(waiting.pop, deaf_s=30.0)
    said = False
    for number, look in enumerate(looks):
        if isinstance(look, str):
            getattr(watch, look)()
        else:
            waiting.append(look)
            said = watch.is_deaf(number * 10.0)
    assert said is deaf


def test_a_worker_beside_which_the_queue_fills_ends(tmp_path: Path) -> None:
    valkey = start_valkey(tmp_path)
    try:
        redis.Redis.from_url(valkey.url()).rpush("andon", "rung and not heard")
        script = (
            "import sys; from config import stuck; stuck.DEAF_S = 1.0; from celery.__main__ import main;"
            "sys.argv = ['celery', '-A', 'config.celery', 'worker', '-Q', 'elsewhere', '--pool', 'threads'];"
            "main()"
        )
        worker = subprocess.run(
            [sys.executable, "-c", script],
            cwd=ROOT,
            env=clean_environment(ANDON_BROKER_URL=valkey.url(), ANDON_DATA_DIR=str(tmp_path / "data")),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=90,
            check=False,
        )
    finally:
        valkey.stop()
    assert "while messages waited: this worker ends" in worker.stdout
