"""A tile at any zoom is the worst state of the cells under it, compacted or not; none is ever lost."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from andon import wire
from andon.detect.planes import HEALTHY, HELD, NONFINITE, SPIKE, SPREAD
from runs import cellmap, queries
from runs.blocks import FACTOR
from runs.cellmap import Bins
from runs.models import GridBlock, GridWaiting
from runs.points import Points
from tests.runs.cells import compact, hand_over, store_plane
from tests.runs.conftest import Trainer, new_trainer

pytestmark = pytest.mark.django_db


@dataclass
class Truth:
    """Every cell of an attempt as posted, and the worst of any window by counting them one by one."""

    cells: dict[tuple[int, int], int] = field(default_factory=dict)

    def post(self, run_id: int, steps: np.ndarray, ranks: np.ndarray, codes: np.ndarray) -> None:
        store_plane(run_id, steps, ranks, codes)
        for (i, j), code in np.ndenumerate(codes):
            key = int(steps[i]), int(ranks[j])
            self.cells[key] = max(self.cells.get(key, 0), int(code))

    def bins(self, steps: Bins, ranks: Bins, order: np.ndarray | None, held_after: int | None) -> np.ndarray:
        bad = [step for (step, _), code in self.cells.items() if code >= SPREAD]
        since = min(bad, default=None)
        row_of = (
            (lambda rank: rank)
            if order is None
            else {int(rank): ranks.snapped()[0] + at for at, rank in enumerate(order)}.get
        )
        worst = np.zeros((ranks.count, steps.count), np.uint8)
        for (step, rank), code in self.cells.items():
            row = row_of(rank)
            if row is None:
                continue
            x, y = (step >> steps.shift) - steps.start, (row >> ranks.shift) - ranks.start
            if 0 <= x < steps.count and 0 <= y < ranks.count:
                shown = SPREAD if code == NONFINITE and since is not None and step > since else code
                worst[y, x] = max(worst[y, x], shown)
        if held_after is not None:
            for x in range(steps.count):
                if (steps.start + x + 1 << steps.shift) - 1 > held_after:
                    worst[:, x] = np.maximum(worst[:, x], HELD)
        return worst


@st.composite
def posts(draw):
    """Rectangles of cells, mostly healthy, in a few places of a long attempt."""
    made = []
    for _ in range(draw(st.integers(1, 6))):
        first = draw(st.sampled_from([0, 1, 250, 255, 256, 1_020, 4_095, 16_383, 70_000, 300_000]))
        rank = draw(st.sampled_from([0, 3, 8, 60, 63, 64, 500]))
        rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        shape = (draw(st.integers(1, 40)), draw(st.integers(1, 20)))
        codes = rng.choice([HEALTHY] * 20 + [NONFINITE, SPREAD], shape).astype(np.uint8)
        made.append((np.arange(first, first + shape[0]), np.arange(rank, rank + shape[1]), codes))
    return made


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(posts=posts(), data=st.data())
def test_any_window_is_the_worst_of_its_cells(project, posts, data):
    run, truth = new_trainer().run, Truth()
    cut = data.draw(st.integers(0, len(posts)), "compacted")
    for post in posts[:cut]:
        truth.post(run.pk, *post)
    compact(run.pk) if cut else None
    for post in posts[cut:]:
        truth.post(run.pk, *post)
    if data.draw(st.booleans(), "looked at"):
        hand_over(run.pk)
    starts = sorted({int(post[0][0]) for post in posts})
    for _ in range(4):
        first = max(0, data.draw(st.sampled_from(starts)) - data.draw(st.integers(0, 300)))
        steps = Bins.over(first, first + data.draw(st.sampled_from([0, 7, 139, 3_000, 400_000, 10**9])), 100)
        rank = data.draw(st.integers(0, 80))
        ranks = Bins.over(rank, rank + data.draw(st.sampled_from([0, 5, 63, 511, 16_383])), 30)
        order = None
        if data.draw(st.booleans(), "in another order") and ranks.last < 600:
            low, high = ranks.snapped()
            order = np.random.default_rng(first).permutation(600)[low : high + 1].astype(np.int32)
        held = data.draw(st.sampled_from([None, first + 3]))
        found = cellmap.cell_bins(run, 1, steps, ranks, order=order, held_after=held)
        assert (found == truth.bins(steps, ranks, order, held)).all()


def test_one_bad_cell_among_a_billion_is_in_every_zoom(trainer: Trainer) -> None:
    ranks = np.arange(16_384, dtype=np.int32)
    for first in range(0, 65_536, 8_192 // 32):
        codes = np.full((256, 16_384), HEALTHY, np.uint8)
        if first == 40_960:
            codes[77, 12_345] = NONFINITE
        store_plane(trainer.run.pk, np.arange(first, first + 256), ranks, codes)
    compact(trainer.run.pk)
    assert not GridWaiting.objects.exists()
    bad_step, bad_rank = 40_960 + 77, 12_345
    rng = np.random.default_rng(5)
    order = rng.permutation(16_384).astype(np.int32)
    for zoom in range(0, 17, 2):
        first = max(0, bad_step - (1 << zoom) // 3)
        steps = Bins.over(first, first + (1 << zoom) - 1, 856)
        ranks_ = Bins.over(0, 16_383, 320)
        found = cellmap.cell_bins(trainer.run, 1, steps, ranks_)
        at = ((bad_rank >> ranks_.shift), (bad_step >> steps.shift) - steps.start)
        assert np.argwhere(found == NONFINITE).tolist() == [list(at)], zoom
        mixed = cellmap.cell_bins(trainer.run, 1, steps, ranks_, order=order)
        row = int(np.flatnonzero(order == bad_rank)[0])
        assert np.argwhere(mixed == NONFINITE).tolist() == [[row >> ranks_.shift, at[1]]], zoom


def test_what_a_finding_names_is_drawn_over_what_was_posted(trainer: Trainer) -> None:
    store_plane(trainer.run.pk, np.arange(10), np.arange(4), np.full((10, 4), HEALTHY, np.uint8))
    over = Points.of([(3, 2, SPIKE, 0), (4, 99, SPIKE, 0)])
    found = cellmap.cell_bins(trainer.run, 1, Bins(0, 9, 0), Bins(0, 3, 0), over=over)
    assert np.argwhere(found == SPIKE).tolist() == [[2, 3]]


def test_a_reduced_bad_value_is_spread_over_all_ranks_at_any_zoom(trainer: Trainer) -> None:
    trainer.step(700, loss=2.0)
    trainer.step(701, loss=float("nan"))
    for done in (False, True):
        if done:
            compact(trainer.run.pk)
        for first, last in ((600, 800), (0, 99_999)):
            steps = Bins.over(first, last, 200)
            found = cellmap.cell_bins(trainer.run, 1, steps, Bins(0, 7, 0))
            column = (701 >> steps.shift) - steps.start
            assert np.flatnonzero((found == SPREAD).all(axis=0)).tolist() == [column]


def test_taking_in_twice_changes_nothing(trainer: Trainer) -> None:
    codes = np.full((300, 70), HEALTHY, np.uint8)
    codes[5, 66] = NONFINITE
    store_plane(trainer.run.pk, np.arange(300), np.arange(70), codes)
    compact(trainer.run.pk)
    fields = ("level", "number", "band", "cells", "by_8", "by_64", "columns")

    def stored() -> list[tuple[object, ...]]:
        rows = GridBlock.objects.order_by("level", "number", "band").values_list(*fields)
        return [tuple(bytes(v) if isinstance(v, memoryview) else v for v in row) for row in rows]

    before = stored()
    store_plane(trainer.run.pk, np.arange(300), np.arange(70), codes)
    compact(trainer.run.pk)
    assert stored() == before
    assert len(before) == 2 + 7


def test_a_late_post_repairs_what_was_missing_at_every_level(trainer: Trainer, monkeypatch) -> None:
    from runs import compaction

    monkeypatch.setattr(compaction, "SETTLE_S", 0.0)
    run = trainer.run
    most, late = np.arange(8), np.arange(6, 8)
    store_plane(run.pk, np.arange(0, 40), most, np.full((40, 8), HEALTHY, np.uint8))
    store_plane(run.pk, np.arange(40, 60), np.arange(6), np.full((20, 6), HEALTHY, np.uint8))
    store_plane(run.pk, np.arange(60, 90), most, np.full((30, 8), HEALTHY, np.uint8))
    compact(run.pk)
    compact(run.pk)
    cells = queries.grid_states(run, 1, 0, 89, 90, 0, 7, 8)
    assert np.argwhere(cells == 3).tolist() == [[r, s] for r in (6, 7) for s in range(40, 60)]
    assert 3 in queries.grid_states(run, 1, 0, 4_095, 16, 0, 7, 8)
    store_plane(run.pk, np.arange(40, 60), late, np.full((20, 2), HEALTHY, np.uint8))
    compact(run.pk)
    assert 3 not in queries.grid_states(run, 1, 0, 89, 90, 0, 7, 8)
    assert 3 not in queries.grid_states(run, 1, 0, 4_095, 16, 0, 7, 8)


def test_a_rank_that_joins_later_is_outside_before_and_not_missing(trainer: Trainer, monkeypatch) -> None:
    from runs import compaction

    monkeypatch.setattr(compaction, "SETTLE_S", 0.0)
    store_plane(trainer.run.pk, np.arange(40), np.arange(7), np.full((40, 7), HEALTHY, np.uint8))
    store_plane(trainer.run.pk, np.arange(20, 40), np.array([7]), np.full((20, 1), HEALTHY, np.uint8))
    compact(trainer.run.pk)
    compact(trainer.run.pk)
    cells = queries.grid_states(trainer.run, 1, 0, 39, 40, 0, 7, 8)
    assert cells[7].tolist() == [0] * 20 + [1] * 20


def test_pixels_begin_in_their_bins_and_no_bin_is_left_out() -> None:
    for first, size, pixels in ((0, 1_000_000, 856), (17, 140, 856), (3, 857, 856), (2**62, 2**40, 300)):
        bins = Bins.over(first, first + size - 1, pixels)
        whole = Bins(*bins.snapped(), bins.shift)
        assert whole.count == bins.count <= pixels
        assert sorted(set(whole.of_pixels(pixels).tolist())) == list(range(bins.count))
        assert bins.shift < FACTOR or bins.count > pixels // 2 - 1


def test_numbers_from_outside_size_nothing(trainer: Trainer) -> None:
    far_step, far_rank = 2**62, 2**31 - 1
    frame = wire.Frame(
        stream="rank",
        attempt=1,
        step=np.array([0, 5, far_step], np.int64),
        lane=np.array([0, 1, far_rank], np.int32),
        metrics={"loss": np.array([2.0, np.nan, 2.0], np.float32)},
    )
    assert trainer.frame(frame).status_code == 202
    for done in (False, True):
        if done:
            compact(trainer.run.pk)
        for last in (9, far_step):
            steps, ranks = Bins.over(0, last, 100), Bins.over(0, far_rank, 50)
            found = cellmap.cell_bins(trainer.run, 1, steps, ranks)
            assert np.argwhere(found == NONFINITE).tolist() == [[0, 5 >> steps.shift]]
    assert GridBlock.objects.count() <= 3 * 8


def test_a_whole_band_of_ranks_can_be_missing(trainer: Trainer, monkeypatch) -> None:
    from runs import compaction

    monkeypatch.setattr(compaction, "SETTLE_S", 0.0)
    everyone, few = np.arange(8_200), np.arange(5_000)
    store_plane(trainer.run.pk, np.arange(3), everyone, np.full((3, 8_200), HEALTHY, np.uint8))
    store_plane(trainer.run.pk, np.arange(3, 5), few, np.full((2, 5_000), HEALTHY, np.uint8))
    store_plane(trainer.run.pk, np.arange(5, 7), np.arange(100), np.full((2, 100), HEALTHY, np.uint8))
    compact(trainer.run.pk)
    compact(trainer.run.pk)
    cells = queries.grid_states(trainer.run, 1, 0, 6, 7, 0, 8_199, 8_200)
    # Steps 5 and 6 were posted by a few only: they are not behind, the others are ahead of nobody.
    assert np.unique(np.argwhere(cells == 3)[:, 1]).tolist() == [3, 4]
    assert (cells[5_000:, 3:5] == 3).all()
