"""A run that stands without a bad value: who is missing is said, and a post of many nodes counts for each."""

import numpy as np
import pytest

from incidents.ranks_behind import behind
from runs import progress
from runs.models import RunProgress
from tests.runs.cells import compact, store_plane
from tests.runs.conftest import _nothing_remembered, new_trainer  # noqa: F401

pytestmark = pytest.mark.django_db


def stood(last_of_rank_3: int) -> str:
    run = new_trainer().run
    healthy = np.ones((12, 3), np.uint8)
    store_plane(run.pk, np.arange(1, 13), np.arange(3), healthy)
    store_plane(run.pk, np.arange(1, last_of_rank_3 + 1), np.array([3]), healthy[:last_of_rank_3, :1])
    compact(run.pk)
    return behind(run.pk, 1)


def test_the_rank_that_stands_behind_is_named(project):
    assert stood(11) == "rank 3 never posted step 12, 3\u00a0ranks did"


def test_all_at_one_step_is_nothing_to_say(project):
    assert stood(12) == ""
    assert behind(new_trainer().run.pk, 1) == ""


def test_a_post_of_several_nodes_is_a_sign_of_life_of_each(project):
    trainer = new_trainer()
    beats = [
        {"type": "heartbeat", "node": f"n{n}", "ranks": [n], "data": {"state": "held"}} for n in range(3)
    ]
    assert trainer.events(*beats).status_code == 202
    progress.board.flush()
    assert set(RunProgress.objects.get(run=trainer.run).nodes) == {"n0", "n1", "n2"}
