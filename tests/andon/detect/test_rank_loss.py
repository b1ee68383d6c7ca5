"""Whose loss moved the mean?"""

import numpy as np

from andon.detect.rank_loss import RankLoss
from andon.policy import SpikeRules
from andon.wire import Frame

RULES = SpikeRules()
STEPS = 60


def frame(values, first=0, **more):
    steps, ranks = values.shape
    return Frame(
        stream="rank",
        lane=np.tile(np.arange(ranks, dtype=np.int32), steps),
        attempt=1,
        step=np.repeat(np.arange(first, first + steps), ranks).astype(np.int64),
        time_ns=np.zeros(values.size, np.int64),
        metrics={"loss": values.astype(np.float32).reshape(-1)},
        **more,
    )


def healthy(steps=STEPS, ranks=4, seed=1):
    # Every rank has a level of its own: its domain's.
    return np.random.default_rng(seed).normal(2.0, 0.05, (steps, ranks)) + np.arange(ranks)


def test_the_rank_whose_own_loss_jumped_is_named_and_holds_nothing():
    watch = RankLoss(RULES)
    assert watch.update(frame(healthy())) == []
    odd = healthy(3, seed=2)
    odd[1, 2] += 4.0
    found = watch.update(frame(odd, STEPS))
    assert [(one.kind, one.severity, one.step, one.lanes) for one in found] == [
        ("rank_loss_outlier", "info", STEPS + 1, (2,))
    ]


def test_the_worst_rank_stands_first():
    watch = RankLoss(RULES)
    watch.update(frame(healthy()))
    odd = healthy(1, seed=2)
    odd[0] += [2.0, 0.0, 6.0, 0.0]
    assert watch.update(frame(odd, STEPS))[0].lanes == (2, 0)


def test_a_level_that_only_differs_from_the_other_ranks_is_none():
    watch = RankLoss(RULES)
    assert watch.update(frame(healthy() + np.array([0, 0, 0, 50]))) == []


def test_what_is_nonfinite_not_measured_or_reduced_is_left_out():
    watch = RankLoss(RULES)
    watch.update(frame(healthy()))
    odd = np.array([[np.nan, np.inf, -1.0, 99.0]])
    missing = {"loss": np.array([False, False, False, True])}
    assert watch.update(frame(odd, STEPS, missing=missing)) == []
    odd = np.full((1, 4), 99.0)
    assert watch.update(frame(odd, STEPS, views={"loss": "reduced"})) == []
    assert len(watch.update(frame(odd, STEPS))) == 1
