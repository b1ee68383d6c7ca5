"""Compaction killed in the middle loses nothing and leaves nothing half done."""

import os
import signal
import time

import numpy as np
from django.db import connection, transaction
from django.utils import timezone

from andon.detect.planes import HEALTHY, NONFINITE
from runs import queries, work
from runs.models import Grid, GridBlock, GridWaiting, Work
from tests.runs.cells import hand_over, store_plane
from tests.runs.conftest import Trainer

_WAITS = "SELECT count(*) FROM pg_locks WHERE NOT granted AND pid <> pg_backend_pid()"


def _compact_in_a_child(work_id: int) -> int:
    """Run the work row in a process of its own, with a connection of its own."""
    child = os.fork()
    if child:
        return child
    connection.connection = None  # the parent's; closing it would end the parent's session
    try:
        work.run_one(work_id)
    finally:
        os._exit(0)


def test_a_worker_killed_before_it_commits_is_followed_by_another(committing_trainer: Trainer) -> None:
    run = committing_trainer.run
    codes = np.full((20, 8), HEALTHY, np.uint8)
    codes[7, 5] = NONFINITE
    store_plane(run.pk, np.arange(20), np.arange(8), codes)
    hand_over(run.pk)
    due = Work.objects.get(kind="grid", key=str(run.pk))
    Work.objects.filter(pk=due.pk).update(not_before=timezone.now())
    with transaction.atomic():
        # Blocks are written by then; taking the waiting row away is the last thing before the commit.
        list(GridWaiting.objects.select_for_update())
        child = _compact_in_a_child(due.pk)
        with connection.cursor() as cursor:
            for _ in range(200):
                cursor.execute(_WAITS)
                if cursor.fetchone()[0]:
                    break
                time.sleep(0.05)
            else:
                raise AssertionError("the child never came to the waiting row")
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert GridWaiting.objects.count() == 1
    assert not Grid.objects.exists()
    assert not GridBlock.objects.exists()
    assert not work.run_one(due.pk)  # the lease of the killed one still stands
    Work.objects.filter(pk=due.pk).update(lease_until=timezone.now())
    assert work.run_one(due.pk)
    assert not GridWaiting.objects.exists()
    assert np.argwhere(queries.grid_states(run, 1, 0, 19, 20, 0, 7, 8) == NONFINITE).tolist() == [[5, 7]]
