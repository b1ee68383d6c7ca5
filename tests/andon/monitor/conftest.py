"""Tests that train need torch; where it is not installed they are named as not run.

All of them read the results of one launch of four ranks, which plays every scenario one after another.
"""

import json
import multiprocessing
import time

import pytest

LAUNCH_S = 150


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """Return what each of the four ranks saw: a list of {scenario: result}."""
    from tests.andon.monitor.launch import rank_main

    folder = tmp_path_factory.mktemp("ranks")
    context = multiprocessing.get_context("spawn")
    started = [context.Process(target=rank_main, args=(rank, 4, str(folder))) for rank in range(4)]
    for process in started:
        process.start()
    end = time.monotonic() + LAUNCH_S
    for process in started:
        process.join(max(1.0, end - time.monotonic()))
    late = [process for process in started if process.is_alive()]
    for process in late:
        process.kill()
        process.join()
    errors = [path.read_text() for path in sorted(folder.glob("error-*.txt"))]
    assert not errors, "\n".join(errors)
    assert not late, f"{len(late)} ranks hang: {[p.read_text() for p in folder.glob('at-*.txt')]}"
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(4)]
