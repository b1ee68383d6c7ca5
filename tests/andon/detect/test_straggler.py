"""One rank that computes longer than its peers."""

import numpy as np
import pytest

from andon.detect.straggler import WINDOW_STEPS, WINDOWS, Straggler
from andon.detect.topology import Topology
from andon.wire import Frame

ENOUGH = WINDOW_STEPS * WINDOWS


def times(slow=(), *, ranks=4, compute_s=0.1, slower=2.0, wait_s=0.1):
    """Return rank → (compute, wait): the others wait for whom is slow."""
    return {
        rank: (compute_s * slower, 0.001) if rank in slow else (compute_s, wait_s if slow else 0.001)
        for rank in range(ranks)
    }


def told(watch, steps, of):
    found = [one for step in range(steps) for one in watch.update_step(step, of(step))]
    return [*found, *watch.close()]


def test_a_rank_that_stays_slow_is_told_once():
    found = told(Straggler(), 4 * ENOUGH, lambda _: times({2}))
    assert [(one.kind, one.severity, one.lanes, one.step) for one in found] == [
        ("straggler", "warn", (2,), ENOUGH - 1)
    ]
    assert found[0].score == pytest.approx(2.0)
    assert found[0].view == "local"


def test_a_rank_that_is_slow_for_less_than_three_windows_is_not():
    assert told(Straggler(), ENOUGH, lambda step: times({2} if step < ENOUGH - WINDOW_STEPS else ())) == []


def test_two_odd_steps_in_a_window_do_not_count():
    assert told(Straggler(), 2 * ENOUGH, lambda step: times({2} if step % WINDOW_STEPS < 2 else ())) == []


def test_a_rank_that_waits_as_long_as_the_others_is_not_what_they_wait_for():
    slow = {rank: (0.2 if rank == 2 else 0.1, 0.1) for rank in range(4)}
    assert told(Straggler(), ENOUGH, lambda _: slow) == []


def test_it_is_told_again_after_it_was_well():
    def of(step):
        return times({1} if step // ENOUGH != 1 else ())

    assert [one.lanes for one in told(Straggler(), 3 * ENOUGH, of)] == [(1,), (1,)]


def test_peers_are_the_ranks_of_one_stage():
    topology = Topology.from_groups({"pp": [[0, 3], [1, 4], [2, 5]]})
    # The second stage computes three times as long: that is its work.
    uneven = {rank: (0.1 if rank < 3 else 0.3, 0.01) for rank in range(6)}
    assert told(Straggler(topology), ENOUGH, lambda _: uneven) == []
    uneven[1] = (0.2, 0.001)
    assert [one.lanes for one in told(Straggler(topology), ENOUGH, lambda _: uneven)] == [(1,)]


def test_a_window_of_which_little_was_seen_does_not_count():
    watch = Straggler()
    found = [one for step in range(2, 2 * WINDOW_STEPS + 2) for one in watch.update_step(step, times({2}))]
    assert [*found, *watch.close()] == []


def test_ranks_may_come_in_parts_and_a_late_part_changes_nothing():
    watch = Straggler()
    found = []
    for step in range(ENOUGH + 1):
        whole = times({3})
        found += watch.update_step(step, {rank: whole[rank] for rank in (0, 1)})
        found += watch.update_step(step, {rank: whole[rank] for rank in (2, 3)})
    assert [one.lanes for one in found] == [(3,)]
    assert watch.update_step(0, {0: (99.0, 0.0)}) == []
    assert watch.close() == []


def test_a_frame_is_read_where_both_times_were_measured():
    steps, ranks = np.arange(ENOUGH), range(3)
    compute = np.tile([0.1, 0.1, 0.3], ENOUGH).astype(np.float32)
    wait = np.tile([0.2, 0.2, 0.0], ENOUGH).astype(np.float32)

    def frame(**changes):
        values = {"compute_s": compute, "wait_s": wait} | changes
        return Frame(
            stream="rank",
            lane=np.tile(np.array(ranks, np.int32), ENOUGH),
            attempt=1,
            step=np.repeat(steps, 3).astype(np.int64),
            time_ns=np.zeros(3 * ENOUGH, np.int64),
            metrics={name: value for name, value in values.items() if value is not None},
        )

    watch = Straggler()
    assert [one.lanes for one in (*watch.update(frame()), *watch.close())] == [(2,)]
    assert Straggler().update(frame(wait_s=None)) == []
