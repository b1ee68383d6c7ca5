"""Frames: which rows are bad, which may be an origin, and what the grid draws."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.detect.cells import SOURCES, VALUES, Phase, first_bad
from andon.detect.nonfinite import bad_cells, coarsen, combine_planes, judge_frame, row_health, state_plane
from andon.policy import Policy
from tests.andon.detect.shapes import block, frame

POLICY = Policy()
NAN, INF = math.nan, math.inf


class TestOrigins:
    def test_a_local_loss_may_name_its_rank(self):
        part = bad_cells(frame({"step": [5, 5], "lane": [0, 1], "loss": [2.0, "nan"]}))
        assert part.lane.tolist() == [1]
        assert part.local.tolist() == [True]
        assert part.phase.tolist() == [Phase.FORWARD]
        assert (SOURCES[part.source[0]], VALUES[part.value[0]]) == ("loss", "nan")

    @pytest.mark.parametrize("view", ["reduced", "shard"])
    def test_a_reduced_value_and_a_shard_name_nobody(self, view):
        columns = {"step": [5, 5], "lane": [0, 1], "loss": [2.0, "nan"], "grad_norm": ["inf", 1.0]}
        part = bad_cells(frame(columns, views={"loss": view, "grad_norm": view}))
        assert len(part) == 2
        assert not part.local.any()
        first = first_bad(part)
        assert first is not None
        assert first.ranks == ()

    def test_a_gradient_norm_is_reduced_unless_its_column_says_local(self):
        columns = {"step": [5], "lane": [0], "grad_norm": ["-inf"]}
        spread, local = bad_cells(frame(columns)), bad_cells(frame(columns, views={"grad_norm": "local"}))
        assert (bool(spread.local[0]), spread.phase[0]) == (False, Phase.REDUCE)
        assert (bool(local.local[0]), local.phase[0]) == (True, Phase.BACKWARD)
        assert VALUES[local.value[0]] == "-inf"

    def test_the_phase_is_read_from_the_bits(self):
        columns = {"step": [5] * 4, "lane": [0, 1, 2, 3], "nonfinite": [8, 4 | 8, 16, 1 | 2]}
        part = bad_cells(frame(columns))
        assert part.phase.tolist() == [Phase.REDUCE, Phase.BACKWARD, Phase.OPTIMIZER, Phase.DATA]
        assert part.local.tolist() == [False, True, False, True]
        assert part.bits.tolist() == [8, 12, 16, 3]

    def test_bits_of_a_column_that_was_reduced_name_nobody(self):
        part = bad_cells(frame({"step": [5], "lane": [0], "nonfinite": [2]}, views={"nonfinite": "reduced"}))
        assert not part.local.any()

    def test_bits_overrule_the_columns_beside_them(self):
        part = bad_cells(frame({"step": [5], "lane": [0], "loss": ["nan"], "nonfinite": [8]}))
        assert (bool(part.local[0]), part.phase[0]) == (False, Phase.REDUCE)
        assert VALUES[part.value[0]] == "nan"

    def test_without_bits_in_a_row_its_columns_decide(self):
        part = bad_cells(frame({"step": [5], "lane": [0], "loss": ["nan"], "nonfinite": [0]}))
        assert (bool(part.local[0]), part.phase[0]) == (True, Phase.FORWARD)

    def test_a_layer_frame_carries_the_rank_that_computed_it(self):
        columns = {"step": [5, 5], "lane": ["h.0", "h.1"], "rank": [7, 7], "grad_norm": [1.0, "nan"]}
        part = bad_cells(frame(columns, stream="layer", views={"grad_norm": "local"}))
        assert part.lane.tolist() == ["h.1"]
        assert part.rank is not None
        assert part.rank.tolist() == [7]

    @pytest.mark.parametrize("name", ["weight_norm", "update_ratio"])
    def test_a_weight_is_never_an_origin(self, name):
        part = bad_cells(
            frame({"step": [5], "lane": ["h.0"], name: ["nan"]}, stream="layer", views={name: "local"})
        )
        assert (bool(part.local[0]), part.phase[0]) == (False, Phase.OPTIMIZER)

    def test_micro_batches_travel(self):
        part = bad_cells(frame({"step": [5, 5], "lane": [0, 0], "micro_batch": [0, 3], "loss": [1.0, "nan"]}))
        assert part.micro_batch.tolist() == [3]


class TestNotMeasured:
    def test_null_and_sentinels_are_no_bad_cells(self):
        columns = {
            "step": [5] * 3,
            "lane": [0, 1, 2],
            "loss": [-1.0, None, 2.0],
            "grad_norm": [0.0, -1.0, None],
        }
        one = frame(columns)
        assert len(bad_cells(one)) == 0
        assert judge_frame(one, POLICY) == []
        # Ranks 0 and 1 measured nothing that is judged: not applicable, drawn as outside.
        assert state_plane(one).tolist() == [[0, 0, 1]]

    def test_a_nan_beside_a_null_is_still_found(self):
        part = bad_cells(frame({"step": [5] * 2, "lane": [0, 1], "loss": [None, "nan"]}))
        assert part.lane.tolist() == [1]

    def test_what_was_not_measured_is_not_shown_as_the_value_of_a_bad_cell(self):
        part = bad_cells(frame({"step": [5] * 2, "lane": [0, 1], "loss": [None, "nan"], "nonfinite": [2, 2]}))
        assert [VALUES[v] for v in part.value] == ["", "nan"]

    def test_unknown_columns_activations_and_nodes_are_information(self):
        for stream, columns in (
            ("rank", {"step": [5], "lane": [0], "mystery": ["nan"]}),
            ("layer", {"step": [5], "lane": ["h.0"], "act_norm": ["inf"]}),
            ("node", {"step": [5], "lane": ["n1"], "gpu_temp_c": ["nan"]}),
        ):
            one = frame(columns, stream=stream)
            [finding] = judge_frame(one, POLICY)
            assert (finding.kind, finding.severity) == ("nonfinite_shown", "info")
            assert len(bad_cells(one)) == 0


class TestJudgement:
    def test_the_halt_names_the_origins_of_the_first_applied_bad_step(self):
        bits = np.zeros((4, 64), dtype=np.int16)
        bits[2], bits[2, 61], bits[3] = 8, 4 | 8, 2
        [finding] = judge_frame(block(4, 64, first_step=18_001, nonfinite=bits), POLICY)
        assert (finding.severity, finding.step, finding.lanes, finding.view) == (
            "halt",
            18_003,
            (61,),
            "local",
        )
        assert finding.phase == "backward"
        assert finding.numbers["bad_cells"] == 128
        assert finding.numbers["last_step"] == 18_004

    def test_reduced_values_hold_and_name_no_origin(self):
        [finding] = judge_frame(block(1, 8, grad_norm=NAN), POLICY)
        assert (finding.severity, finding.view) == ("halt", "reduced")
        assert finding.lanes == tuple(range(8))

    def test_a_skipped_step_does_not_hold(self):
        bits = np.array([[4, 8 | 64], [0, 0]], dtype=np.int16)
        one = block(2, 2, nonfinite=bits)
        assert judge_frame(one, POLICY) == []
        assert bad_cells(one).skipped.all()

    def test_only_the_skipped_step_of_two_is_let_through(self):
        bits = np.array([[4 | 64, 8 | 64], [8, 8]], dtype=np.int16)
        [finding] = judge_frame(block(2, 2, nonfinite=bits), POLICY)
        assert finding.step == 1

    def test_a_layer_frame_of_a_step_known_to_be_skipped_does_not_hold(self):
        one = frame({"step": [5, 6], "lane": ["h.0", "h.0"], "grad_norm": ["nan", "nan"]}, stream="layer")
        assert [f.step for f in judge_frame(one, POLICY, skipped_steps={5})] == [6]
        assert judge_frame(one, POLICY, skipped_steps={5, 6}) == []

    def test_broken_weights_hold_although_skipped(self):
        [finding] = judge_frame(block(1, 2, nonfinite=np.array([[32 | 64, 64]], dtype=np.int16)), POLICY)
        assert (finding.kind, finding.severity) == ("nonfinite_state", "halt")

    def test_a_nonfinite_weight_norm_is_a_nonfinite_weight(self):
        one = frame({"step": [5], "lane": ["h.0"], "weight_norm": ["nan"]}, stream="layer")
        assert [f.kind for f in judge_frame(one, POLICY)] == ["nonfinite_state"]

    def test_a_skip_does_not_hide_the_cell_of_a_broken_weight(self):
        part = bad_cells(block(1, 2, nonfinite=np.array([[32 | 64, 8 | 64]], dtype=np.int16)))
        assert part.skipped.tolist() == [False, True]

    @pytest.mark.parametrize("name", ["grad_norm", "update_ratio"])
    def test_a_nonfinite_layer_norm_holds(self, name):
        one = frame({"step": [5], "lane": ["h.0"], name: ["nan"]}, stream="layer")
        [finding] = judge_frame(one, POLICY)
        assert (finding.severity, finding.lanes) == ("halt", ("h.0",))

    def test_backfill_never_asks_to_hold(self):
        [finding] = judge_frame(block(1, 2, loss=NAN), POLICY, backfill=True)
        assert finding.severity == "info"

    def test_the_rule_can_be_switched_off(self):
        assert judge_frame(block(1, 2, loss=NAN), Policy(modes={"nonfinite": "off"})) == []

    def test_sixteen_thousand_ranks_make_one_finding_of_bounded_size(self):
        [finding] = judge_frame(block(2, 16_384, loss=np.float32(NAN)), POLICY)
        assert len(finding.lanes) == 4096
        assert finding.numbers["lanes"] == 16_384
        json.dumps(finding.to_document(), allow_nan=False)


class TestStatePlane:
    def test_codes(self):
        columns = {
            "step": [5, 5, 6],
            "lane": [0, 1, 1],
            "loss": ["nan", 2.0, 2.0],
            "grad_norm": [1.0, "nan", 1.0],
        }
        assert state_plane(frame(columns)).tolist() == [[9, 4], [0, 1]]

    def test_the_worst_micro_batch_is_drawn(self):
        columns = {"step": [5] * 3, "lane": [0] * 3, "micro_batch": [0, 1, 2], "loss": [1.0, "nan", 1.0]}
        assert state_plane(frame(columns)).tolist() == [[9]]

    def test_after_an_applied_nonfinite_update_every_bad_cell_followed_it(self):
        one = block(3, 2, first_step=10, loss=NAN)
        assert state_plane(one).tolist() == [[9, 9]] * 3
        assert state_plane(one, poisoned_after=10).tolist() == [[9, 9], [4, 4], [4, 4]]

    def test_planes_are_laid_over_each_other_worst_wins(self):
        a = (np.array([5, 6]), np.array([0, 2], np.int32), np.array([[1, 1], [4, 1]], np.uint8))
        b = (np.array([6, 8]), np.array([2, 9], np.int32), np.array([[9, 1], [1, 1]], np.uint8))
        steps, lanes, plane = combine_planes([a, b])
        assert (steps.tolist(), lanes.tolist()) == ([5, 6, 8], [0, 2, 9])
        assert plane.tolist() == [[1, 1, 0], [4, 9, 1], [0, 1, 1]]

    def test_named_lanes_keep_the_order_of_the_model(self):
        a = (np.array([5]), np.array(["wte", "h.10"], object), np.array([[1, 9]], np.uint8))
        b = (np.array([5]), np.array(["h.2"], object), np.array([[4]], np.uint8))
        _, lanes, plane = combine_planes([a, b])
        assert lanes.tolist() == ["wte", "h.10", "h.2"]
        assert plane.tolist() == [[1, 9, 4]]

    def test_no_planes_make_an_empty_one(self):
        assert combine_planes([])[2].shape == (0, 0)

    @given(st.integers(1, 7), st.integers(1, 7), st.integers(1, 9), st.integers(1, 9), st.randoms())
    def test_coarsening_never_loses_the_worst_cell(self, steps, lanes, by_step, by_lane, random):
        plane = np.array([[random.randrange(10) for _ in range(lanes)] for _ in range(steps)], np.uint8)
        coarse = coarsen(plane, by_step, by_lane)
        assert coarse.shape == (-(-steps // by_step), -(-lanes // by_lane))
        for i, j in np.ndindex(*coarse.shape):
            part = plane[i * by_step : (i + 1) * by_step, j * by_lane : (j + 1) * by_lane]
            assert coarse[i, j] == part.max()

    def test_a_factor_below_one_is_refused(self):
        with pytest.raises(ValueError, match="at least 1"):
            coarsen(np.zeros((1, 1), np.uint8), 0)


value = st.sampled_from([1.5, 2.0, NAN, INF, -INF, None, -1.0])
cell_rows = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 4), value, value, st.integers(0, 127)),
    min_size=1,
    max_size=20,
)


@given(
    cell_rows, st.sampled_from(["local", "reduced", "shard"]), st.sampled_from(["local", "reduced", "shard"])
)
def test_every_row_is_judged_as_it_would_be_alone(rows, loss_view, norm_view):
    """The columns at once equal the rule read aloud, row by row."""
    step, lane, loss, norm, bits = (list(column) for column in zip(*rows, strict=True))
    spelled = [[None if x is None else x if math.isfinite(x) else str(x) for x in c] for c in (loss, norm)]
    columns = {"step": step, "lane": lane, "loss": spelled[0], "grad_norm": spelled[1], "nonfinite": bits}
    one = frame(columns, views={"loss": loss_view, "grad_norm": norm_view})
    health = row_health(one)
    skipped_steps = {s for s, b in zip(step, bits, strict=True) if b & 64}
    plane: dict[tuple[int, int], int] = {}
    for i, (s, cell, x, g, b) in enumerate(rows):
        bad_loss, bad_norm = x is not None and not math.isfinite(x), g is not None and not math.isfinite(g)
        origin = False
        if b & 63:
            bad, origin = True, bool(b & 7)
        else:
            bad = bad_loss or bad_norm
            origin = (bad_loss and loss_view == "local") or (bad_norm and norm_view == "local")
        assert bool(health.bad[i]) == bad
        assert bool(health.local[i]) == origin
        assert bool(health.skipped[i]) == (s in skipped_steps and bad) or not bad
        plane[s, cell] = max(plane.get((s, cell), 0), 9 if origin else 4 if bad else 1)
    drawn = state_plane(one, health)
    for i, s in enumerate(health.axes.steps.tolist()):
        for j, cell in enumerate(health.axes.lanes.tolist()):
            assert drawn[i, j] == plane.get((s, cell), 0)
    assert len(bad_cells(one, health)) == int(health.bad.sum())


def test_a_rectangle_in_any_row_order_gives_the_same_plane():
    bits = np.zeros((5, 7), dtype=np.int16)
    bits[3, 2], bits[4] = 2, 8
    one = block(5, 7, first_step=9, nonfinite=bits)
    order = np.random.default_rng(1).permutation(35)
    shuffled = block(5, 7, first_step=9, nonfinite=bits)
    shuffled.step, shuffled.lane = one.step[order], np.asarray(one.lane)[order]
    shuffled.metrics = {name: column[order] for name, column in one.metrics.items()}
    assert row_health(one).axes.regular
    assert not row_health(shuffled).axes.regular
    assert state_plane(one).tolist() == state_plane(shuffled).tolist()
