"""Reads: first-bad, series, grid, layers, at the sizes that must answer in time."""

import time
from typing import Any

import numpy as np
import pytest

from andon import wire
from andon.detect.cells import cells
from andon.detect.planes import HEALTHY, NONFINITE, OUTSIDE, SPREAD
from runs import minima, planes, queries
from tests.runs.cells import compact, store_plane
from tests.runs.conftest import Trainer, rank_frame

pytestmark = pytest.mark.django_db
NAN = float("nan")


class TestFirstBad:
    def test_nothing_bad_is_none(self, trainer: Trainer) -> None:
        trainer.step(1, rank=0, loss=2.0)
        assert queries.first_bad(trainer.run, 1) is None

    def test_a_tie_names_all_and_groups_make_one_cell(self, trainer: Trainer) -> None:
        trainer.events(
            {"type": "attempt.launched", "attempt": 1, "data": {"world_size": 8, "groups": {"tp": ["4-5"]}}}
        )
        trainer.step(1, rank=0, loss=2.0)
        for rank in (4, 5):
            trainer.step(9, rank=rank, loss=NAN)
        found = queries.first_bad(trainer.run, 1)
        assert found is not None
        assert (found.step, found.ranks, found.tie) == (9, (4, 5), True)
        assert "tensor" in found.tie_reason

    def test_reduced_only_does_not_name_a_rank(self, trainer: Trainer) -> None:
        trainer.step(1, loss=2.0)
        trainer.step(9, loss=NAN)
        found = queries.first_bad(trainer.run, 1)
        assert found is not None
        assert (found.ranks, found.certainty) == ((), "reduced values only: the rank is not known")

    def test_bad_in_the_first_record_is_a_bound(self, trainer: Trainer) -> None:
        trainer.step(9, rank=1, loss=NAN)
        found = queries.first_bad(trainer.run, 1)
        assert found is not None
        assert "at or before" in found.certainty

    def test_local_layer_values_name_layer_and_rank(self, trainer: Trainer) -> None:
        trainer.step(1, rank=0, loss=2.0)
        frame = wire.Frame(
            stream="layer",
            attempt=1,
            step=np.array([4, 4], dtype=np.int64),
            lane=["layers.0", "layers.1"],
            rank=np.array([3, 3], dtype=np.int32),
            metrics={"grad_norm": np.array([0.1, np.nan], dtype=np.float32)},
            views={"grad_norm": "local"},
        )
        trainer.frame(frame)
        found = queries.first_bad(trainer.run, 1)
        assert found is not None
        assert (found.step, found.ranks, found.layer) == (4, (3,), "layers.1")

    def test_16384_dead_ranks_answer_within_50_ms(self, trainer: Trainer) -> None:
        from django.utils import timezone

        how = {"run_id": trainer.run.pk, "attempt": 1, "stream": "rank", "received_at": timezone.now()}
        ranks = np.arange(16_384, dtype=np.int32)
        trainer.step(1, loss=2.0)
        # All went bad at once, except that one of them did so a step before.
        steps = np.where(ranks == 9_876, 99, 100)
        bad = cells(step=steps, lane=ranks, phase=np.full(16_384, 1), local=np.ones(16_384, dtype=bool))
        assert minima.take(**how, seen=[(bad, None)]) == 16_384
        assert minima.take(**how, seen=[(bad, None)]) == 0
        found = queries.first_bad(trainer.run, 1)
        assert found is not None
        assert (found.step, found.ranks) == (99, (9_876,))
        times = []
        for _ in range(7):
            before = time.perf_counter()
            queries.first_bad(trainer.run, 1)
            times.append(time.perf_counter() - before)
        assert sorted(times)[3] < 0.05


class TestBadCells:
    def test_equal_cells_are_one_line(self, trainer: Trainer) -> None:
        loss = np.full((1, 16), np.nan, dtype=np.float32)
        trainer.step(4, rank=2, loss=NAN)
        trainer.frame(rank_frame(steps=range(5, 6), ranks=range(16), loss=loss))
        groups = queries.bad_cells(trainer.run, 1)
        assert [(g.step, g.ranks, g.series, g.value, g.view) for g in groups] == [
            (4, "2", "loss", "nan", "local"),
            (5, "0-1,3-15", "loss", "nan", "local"),
        ]


class TestSeries:
    def test_nonfinite_values_are_marks(self, trainer: Trainer) -> None:
        for step, loss in ((1, 2.5), (2, NAN), (3, 2.25)):
            trainer.step(step, loss=loss)
        points = queries.series(trainer.run, 1, ["loss", "grad_norm"], 0, 10, 100)
        assert points["loss"] == [
            {"step": 1, "value": 2.5, "flag": ""},
            {"step": 2, "value": None, "flag": "nan"},
            {"step": 3, "value": 2.25, "flag": ""},
        ]
        assert points["grad_norm"] == []

    def test_decimation_loses_no_extreme_and_no_nan(self, trainer: Trainer) -> None:
        events: list[dict[str, Any]] = [
            {"type": "step", "step": step, "data": {"loss": 2.0 + (step % 7) / 100}} for step in range(5_000)
        ]
        events[1_234]["data"]["loss"] = 99.0
        events[2_345]["data"]["loss"] = 0.5
        events[3_456]["data"]["loss"] = "nan"
        trainer.events(*events)
        points = queries.series(trainer.run, 1, ["loss"], 0, 5_000, 300)["loss"]
        assert 100 < len(points) <= 310
        assert [p["step"] for p in points] == sorted(p["step"] for p in points)
        assert {1_234, 2_345, 3_456} <= {p["step"] for p in points}

    def test_local_values_are_averaged_where_no_reduced_one_was_posted(self, trainer: Trainer) -> None:
        for rank, loss in ((0, 2.0), (1, 3.0)):
            trainer.step(1, rank=rank, loss=loss)
        assert queries.series(trainer.run, 1, ["loss"], 0, 9, 10)["loss"][0]["value"] == 2.5


class TestGrid:
    def test_states_of_frames_events_and_what_followed(self, trainer: Trainer) -> None:
        loss = np.full((4, 8), 2.0, dtype=np.float32)
        loss[1, 3] = np.nan
        loss[2:] = np.nan
        trainer.frame(rank_frame(steps=range(10, 14), ranks=range(8), loss=loss))
        grid = queries.grid_states(trainer.run, 1, 9, 14, 6, 0, 7, 8)
        assert grid.shape == (8, 6)
        assert set(grid[:, 0]) == {OUTSIDE}
        assert set(grid[:, 1]) == {HEALTHY}
        assert grid[3, 2] == NONFINITE
        assert set(np.delete(grid[:, 2], 3)) == {HEALTHY}
        assert set(grid[:, 3:5].reshape(-1)) == {SPREAD}

    def test_the_worst_cell_under_a_pixel_wins(self, trainer: Trainer) -> None:
        loss = np.full((100, 64), 2.0, dtype=np.float32)
        loss[57, 41] = np.nan
        trainer.frame(rank_frame(steps=range(100), ranks=range(64), loss=loss))
        grid = queries.grid_states(trainer.run, 1, 0, 99, 10, 0, 63, 8)
        assert np.argwhere(grid == NONFINITE).tolist() == [[41 // 8, 57 // 16]]

    def test_events_of_single_ranks_are_cells_too(self, trainer: Trainer) -> None:
        for rank in range(4):
            trainer.step(1, rank=rank, loss=2.0)
            trainer.step(2, rank=rank, loss=NAN if rank == 2 else 2.0)
        grid = queries.grid_states(trainer.run, 1, 1, 2, 2, 0, 3, 4)
        assert grid.tolist() == [[1, 1], [1, 1], [1, NONFINITE], [1, 1]]

    def test_a_whole_attempt_of_16384_ranks_and_10000_steps(self, trainer: Trainer) -> None:
        lanes = np.arange(16_384, dtype=np.int32)
        for first in range(0, 10_000, 100):
            codes = np.full((100, 16_384), HEALTHY, dtype=np.uint8)
            if first == 7_700:
                codes[42, 12_345] = NONFINITE
            store_plane(trainer.run.pk, np.arange(first, first + 100), lanes, codes)
        compact(trainer.run.pk)
        before = time.perf_counter()
        grid = queries.grid_states(trainer.run, 1, 0, 9_999, 856, 0, 16_383, 256)
        took_s = time.perf_counter() - before
        assert np.argwhere(grid == NONFINITE).tolist() == [[12_345 // 64, 7_742 // 16]]
        assert took_s < 1.0


class TestLayers:
    def test_values_come_as_a_table_with_gaps(self, trainer: Trainer) -> None:
        for step, norms in ((1, [0.5, 0.25]), (3, [0.5, np.inf])):
            trainer.frame(
                wire.Frame(
                    stream="layer",
                    attempt=1,
                    step=np.full(2, step, dtype=np.int64),
                    lane=["embed", "head"],
                    metrics={"grad_norm": np.array(norms, dtype=np.float32)},
                )
            )
        names, steps, values = queries.layer_series(trainer.run, 1, "grad_norm", 0, 10)
        assert (names, steps.tolist()) == (["embed", "head"], [1, 3])
        assert values[0].tolist() == [0.5, 0.5]
        assert values[1][0] == 0.25
        assert np.isnan(values[1][1])


class TestPlanes:
    def test_what_is_packed_is_unpacked(self) -> None:
        steps = np.array([3, 10, 11], dtype=np.int64)
        lanes = np.array([0, 9, 70_000], dtype=np.int32)
        codes = np.arange(9, dtype=np.uint8).reshape(3, 3)
        after = planes.unpack(planes.pack(steps, lanes, codes))
        assert after[0].tolist() == steps.tolist()
        assert after[1].tolist() == lanes.tolist()
        assert after[2].tolist() == codes.tolist()

    @pytest.mark.parametrize("stored", [b"", b"junk", b"\x28\xb5\x2f\xfd\x20\x01\x09\x00\x00x"])
    def test_anything_else_is_refused(self, stored: bytes) -> None:
        with pytest.raises(ValueError, match="no state plane"):
            planes.unpack(stored)
