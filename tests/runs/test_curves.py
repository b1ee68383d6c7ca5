"""Curves through the store: from posts to what a page draws, whether a worker took them in or not yet."""

from typing import Any

import numpy as np
import pytest

from andon import wire
from runs import curve_store, curve_values, curves, queries
from runs.curve_columns import Reports
from runs.models import GridWaiting, NodeReading, Pending
from tests.runs.cells import compact, hand_over
from tests.runs.conftest import Trainer, rank_frame

pytestmark = pytest.mark.django_db
NAN = float("nan")


def steps(trainer: Trainer, first: int, last: int, **spikes: Any) -> None:
    made = [{"type": "step", "step": s, "data": {"loss": 2.0, "eval/acc": 0.5, **spikes.get(f"s{s}", {})}}
            for s in range(first, last)]  # fmt: skip
    assert trainer.events(*made).status_code == 202


def at(trainer: Trainer, name: str, first: int, last: int, most: int = 200) -> list[curves.Point]:
    return queries.series(trainer.run, 1, [name], first, last, most)[name]


def node_frame(*, node: str | None, lane: Any, step: list[int], **metrics: Any) -> wire.Frame:
    """Return a node frame of one row per step and lane."""
    return wire.Frame(
        stream="node",
        attempt=1,
        node=node,
        step=np.array(step, np.int64),
        lane=lane,
        metrics={name: np.array(values, np.float64) for name, values in metrics.items()},
    )


class TestWhereItWaits:
    def test_it_is_the_same_before_the_look_after_it_and_in_blocks(self, trainer: Trainer) -> None:
        steps(trainer, 0, 900, s311={"loss": 9.0}, s700={"loss": NAN})
        seen = []
        for move in (lambda: None, lambda: hand_over(trainer.run.pk), lambda: compact(trainer.run.pk)):
            move()
            seen.append(
                (at(trainer, "loss", 0, 899), at(trainer, "loss", 300, 320), at(trainer, "eval/acc", 0, 9))
            )
        assert not GridWaiting.objects.exists()
        assert not Pending.objects.exists()
        assert seen[0] == seen[1] == seen[2]
        whole, near, _ = seen[0]
        assert {"step": 311, "value": 9.0, "flag": ""} in whole
        assert {"step": 311, "value": 9.0, "flag": ""} in near
        assert {"step": 700, "value": None, "flag": "nan"} in whole

    def test_half_in_blocks_and_half_waiting_is_one_curve(self, trainer: Trainer) -> None:
        steps(trainer, 0, 500, s77={"loss": 7.0})
        compact(trainer.run.pk)
        steps(trainer, 500, 1_000, s900={"loss": 8.0})
        for window in ((0, 999), (60, 920)):
            found = {point["step"]: point["value"] for point in at(trainer, "loss", *window)}
            assert (found[77], found[900]) == (7.0, 8.0)

    def test_a_late_post_repairs_every_level(self, trainer: Trainer) -> None:
        steps(trainer, 0, 800)
        compact(trainer.run.pk)
        trainer.step(1_000_000, loss=2.0)
        compact(trainer.run.pk)
        # The step was told already by another node, with another value: both stand.
        trainer.step(3, loss=55.0)
        compact(trainer.run.pk)
        for last in (10, 800, 1_000_000):
            assert {"step": 3, "value": 55.0, "flag": ""} in at(trainer, "loss", 0, last), last

    def test_a_million_steps_keep_a_planted_spike_at_every_zoom(self, trainer: Trainer) -> None:
        spike, last = 654_321, 999_999
        values = np.full(last + 1, 2.0)
        values[spike], values[123_456] = 9.5, NAN
        curve_store.take(trainer.run.pk, 1, {"loss": Reports.of(np.arange(last + 1), values)})
        half = 1_000_000
        while half >= 1:
            first, end = max(0, spike - half), min(last, spike + half)
            points = at(trainer, "loss", first, end, 4_000)
            assert {"step": spike, "value": 9.5, "flag": ""} in points, half
            assert len(points) <= 4_000
            if first <= 123_456:
                assert {"step": 123_456, "value": None, "flag": "nan"} in points
            half //= 5

    def test_names_without_end_do_not_fill_the_store(self, trainer: Trainer) -> None:
        one = Reports.of(np.array([1]), np.array([1.0]))
        curve_store.take(trainer.run.pk, 1, {f"m{n}": one for n in range(curve_store.MAX_SERIES + 40)})
        curve_store.take(trainer.run.pk, 1, {"late": one, "m3": one})
        assert len(curve_store.names(trainer.run.pk, 1)) == curve_store.MAX_SERIES


class TestRanks:
    def test_frames_of_ranks_give_loss_step_time_and_time_in_collectives(self, trainer: Trainer) -> None:
        shape = (20, 8)
        wait = np.full(shape, 0.3)
        wait[:, 5] = 0.1  # it came last, so it waited for nobody
        time_s = np.full(shape, 1.0)
        time_s[4, 2] = 3.0
        bits = np.zeros(shape, np.int32)
        bits[7] = 64
        frame = rank_frame(steps=range(20), ranks=range(8), wait_s=wait, step_time_s=time_s, nonfinite=bits)
        trainer.frame(frame)
        compact(trainer.run.pk)
        assert {point["value"] for point in at(trainer, curve_values.WAIT, 0, 19)} == {0.1}
        assert {p["step"]: p["value"] for p in at(trainer, "step_time_s", 0, 19)}[4] == 3.0
        assert {p["step"] for p in at(trainer, curve_values.SKIPPED, 0, 19) if p["value"]} == {7}
        assert at(trainer, "loss", 0, 19)[0]["value"] == 2.25

    def test_a_loss_reduced_over_all_ranks_stands_before_those_of_frames(self, trainer: Trainer) -> None:
        trainer.frame(rank_frame(steps=range(3), ranks=range(4)))
        trainer.step(1, loss=7.0)
        compact(trainer.run.pk)
        assert [point["value"] for point in at(trainer, "loss", 0, 2)] == [2.25, 7.0, 2.25]

    def test_skips_are_counted_over_any_zoom(self, trainer: Trainer) -> None:
        steps(trainer, 0, 600)
        trainer.events(*[{"type": "skip", "step": s, "data": {}} for s in (5, 300, 301)])
        compact(trainer.run.pk)
        shown = curves.window(0, 599, 20)
        found = curves.read(trainer.run.pk, [1], [curve_values.SKIPPED], shown)[1, curve_values.SKIPPED]
        assert (found["total"].sum(), found["n"].sum()) == (3, 600)


class TestNodes:
    def test_the_worst_node_is_named_and_counters_are_what_they_rose_by(self, trainer: Trainer) -> None:
        trainer.events({"type": "attempt.launched", "attempt": 1, "data": {"world_size": 16}})
        first = node_frame(
            node=None,
            lane=["node-0", "node-1"],
            step=[1, 1],
            gpu_temp_c=[61, 88],
            sm_clock_mhz=[1_900, 1_400],
            nvlink_errors=[1_000, 5],
            retransmits=[10, 10],
        )
        second = node_frame(
            node=None,
            lane=["node-0", "node-1"],
            step=[2, 2],
            gpu_temp_c=[62, 70],
            sm_clock_mhz=[1_900, 1_890],
            nvlink_errors=[1_007, 2],  # the second one was booted in between
            retransmits=[10, 14],
        )
        for frame in (first, second):
            assert trainer.frame(frame).status_code == 202
            compact(trainer.run.pk)
        hot = at(trainer, curve_values.TEMPERATURE, 0, 9)
        assert [(point["step"], point["value"]) for point in hot] == [(1, 88.0), (2, 70.0)]
        node_1 = NodeReading.objects.get(node="node-1")
        assert hot[0]["who"] == node_1.pk
        assert [p["value"] for p in at(trainer, curve_values.CLOCK, 0, 9)] == [1_400.0, 1_890.0]
        assert [p["value"] for p in at(trainer, curve_values.LINK_ERRORS, 0, 9)] == [9.0]
        assert [p["value"] for p in at(trainer, curve_values.RETRANSMITS, 0, 9)] == [4.0]
        assert node_1.worst == {"gpu_temp_c": [88.0, 1], "sm_clock_mhz": [1_400.0, 1]}
        assert node_1.grown == {"nvlink_errors": 2.0, "retransmits": 4.0}

    def test_lanes_of_a_named_node_are_its_devices(self, trainer: Trainer) -> None:
        trainer.step(1, loss=2.0)
        trainer.frame(
            node_frame(node="n7", lane=np.array([0, 3], np.int32), step=[1, 1], gpu_temp_c=[60, 91])
        )
        trainer.frame(node_frame(node="n7", lane=["n7"], step=[1], clock_offset_ms=[0.5]))
        compact(trainer.run.pk)
        rows = NodeReading.objects.order_by("device").values_list("node", "device")
        assert list(rows) == [("n7", ""), ("n7", "GPU 0"), ("n7", "GPU 3")]
