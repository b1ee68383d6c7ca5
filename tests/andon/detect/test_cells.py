"""The first-bad cell: what decides, what ties, and that arrival never does."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.detect.cells import (
    AT_OR_BEFORE,
    LOCAL_VALUE,
    NO_LANE,
    REDUCED_ONLY,
    BadCells,
    FirstBad,
    LaneMinima,
    Phase,
    cells,
    concat,
    depth_key,
    earliest_per_lane,
    first_bad,
    no_cells,
    order_key,
)
from andon.detect.topology import Topology


def table(*rows: tuple, rank=None) -> BadCells:
    """Build cells from (step, lane, micro_batch, phase, local[, skipped])."""
    full = [(*row, False) if len(row) == 5 else row for row in rows]
    step, lane, micro_batch, phase, local, skipped = zip(*full, strict=True)
    return cells(
        step=step, lane=lane, micro_batch=micro_batch, phase=phase, local=local, skipped=skipped, rank=rank
    )


def found(rows: BadCells, **known: Any) -> FirstBad:
    """Return the first-bad cell of rows that have one."""
    first = first_bad(rows, **known)
    assert first is not None
    return first


F, B, R, O = Phase.FORWARD, Phase.BACKWARD, Phase.REDUCE, Phase.OPTIMIZER  # noqa: E741


class TestWhatComesFirst:
    def test_the_earlier_step(self):
        first = found(table((11, 3, 0, F, True), (10, 7, 4, B, True)))
        assert (first.step, first.ranks, first.phase) == (10, (7,), B)
        assert first.certainty == LOCAL_VALUE

    def test_then_the_earlier_micro_batch_even_in_a_later_phase(self):
        assert found(table((10, 3, 1, F, True), (10, 7, 0, B, True))).ranks == (7,)

    def test_then_the_earlier_phase(self):
        first = found(table((10, 3, 0, B, True), (10, 7, 0, F, True), (10, 9, 0, Phase.DATA, True)))
        assert first.ranks == (9,)
        assert first.phase == Phase.DATA

    def test_the_rank_that_was_bad_before_the_reduce_and_not_those_that_followed(self):
        rows = [(18_003, rank, None, R, False) for rank in range(64)]
        first = found(table(*rows, (18_003, 61, None, B, True)))
        assert first.ranks == (61,)
        assert not first.tie

    def test_nothing_bad_has_no_first(self):
        assert first_bad(no_cells()) is None

    def test_micro_batches_do_not_decide_when_a_rank_reports_none(self):
        first = found(table((10, 3, 5, F, True), (10, 7, None, F, True)))
        assert first.ranks == (3, 7)
        assert "micro-batches not compared" in first.tie_reason
        assert first.micro_batch is None


class TestTies:
    def test_equal_cells_tie(self):
        first = found(table((9210, 40, None, F, True), (9210, 12, None, F, True)))
        assert first.ranks == (12, 40)
        assert first.tie
        assert "2 equal cells in forward" in first.tie_reason

    def test_ranks_that_exchange_values_inside_the_phase_are_one_cell(self):
        topology = Topology.from_groups({"tp": ["56-63", "48-55"]})
        first = found(table((5, 57, 0, F, True), (5, 60, 0, F, True)), topology=topology)
        assert first.ranks == (57, 60)
        assert first.tie_reason == "ranks 57,60 exchange values in forward (tensor group): one cell"

    def test_two_tensor_groups_are_two_cells(self):
        topology = Topology.from_groups({"tp": [[0, 1], [2, 3]]})
        first = found(table(*((5, rank, 0, F, True) for rank in range(4))), topology=topology)
        assert first.tie_reason == "2 equal cells in forward"

    def test_groups_of_different_kinds_join_through_a_common_rank(self):
        topology = Topology.from_groups({"tp": [[0, 1]], "cp": [[1, 2]], "dp": [[2, 3]]})
        chosen, kinds = topology.exchange_cells(np.array([0, 1, 2, 3]))
        assert [c.tolist() for c in chosen] == [[0, 1, 2], [3]]
        assert kinds == ["tensor", "context"]


class TestStages:
    topology = Topology.from_groups({"pp": [[0, 1, 2, 3]]})

    def test_the_lowest_stage_in_forward(self):
        first = found(table(*((5, r, 0, F, True) for r in (3, 1, 2))), topology=self.topology)
        assert (first.ranks, first.stage) == ((1,), 1)

    def test_the_highest_stage_in_backward(self):
        first = found(table(*((5, r, 0, B, True) for r in (0, 1, 2))), topology=self.topology)
        assert (first.ranks, first.stage) == ((2,), 2)

    def test_a_rank_outside_every_pipeline_group_leaves_stages_out(self):
        first = found(table((5, 1, 0, F, True), (5, 77, 0, F, True)), topology=self.topology)
        assert (first.ranks, first.stage) == ((1, 77), None)


class TestReducedValuesOnly:
    def test_the_rank_is_not_known(self):
        first = found(table(*((7, rank, None, R, False) for rank in range(8))))
        assert (first.step, first.ranks, first.tie) == (7, (), False)
        assert first.certainty == REDUCED_ONLY

    def test_a_local_value_of_a_later_step_is_a_consequence(self):
        rows = [(7, NO_LANE, None, R, False), *((8, rank, None, F, True) for rank in range(4))]
        first = found(table(*rows))
        assert (first.step, first.ranks) == (7, ())

    def test_a_local_value_of_the_same_step_names_its_rank(self):
        assert found(table((7, NO_LANE, None, F, False), (7, 3, None, B, True))).ranks == (3,)

    def test_bad_in_the_first_record_means_at_or_before(self):
        first = found(table((5426, NO_LANE, None, R, False)), first_recorded_step=5426)
        assert AT_OR_BEFORE in first.certainty
        later = found(table((5426, NO_LANE, None, R, False)), first_recorded_step=5425)
        assert AT_OR_BEFORE not in later.certainty


class TestSkippedSteps:
    def test_an_overflow_of_the_scale_search_does_not_hide_the_failure(self):
        first = found(table((3, 1, 0, B, True, True), (18_003, 61, 0, B, True, False)))
        assert (first.step, first.ranks, first.skipped) == (18_003, (61,), False)

    def test_with_skipped_steps_only_the_earliest_counts(self):
        first = found(table((510, 4, 0, B, True, True), (511, 5, 0, B, True, True)))
        assert (first.step, first.ranks, first.skipped) == (510, (4,), True)

    def test_cells_of_an_incident_before_are_left_out(self):
        rows = table((510, 4, 0, B, True), (900, 5, 0, B, True))
        assert found(rows, since_step=600).ranks == (5,)
        assert first_bad(rows, since_step=901) is None


class TestLayers:
    def layers(self, phase, *names, local=False, rank=None, step=5):
        n = len(names)
        return cells(
            step=[step] * n, lane=list(names), phase=[phase] * n, local=[local] * n,
            rank=None if rank is None else rank,
        )  # fmt: skip

    def test_the_highest_block_in_backward(self):
        names = [f"layers.{i}.attn.qkv" for i in range(7)]
        first = found(table((5, 61, 0, B, True)), layers=self.layers(R, *names))
        assert first.layer == "layers.6.attn.qkv"

    def test_the_lowest_block_in_forward(self):
        first = found(table((5, 61, 0, F, True)), layers=self.layers(F, 9, 4, 11))
        assert first.layer == 4

    def test_gradients_say_nothing_about_where_a_forward_failure_began(self):
        assert found(table((5, 61, 0, F, True)), layers=self.layers(R, 0, 1, 2)).layer is None

    def test_layers_of_the_named_rank_count_before_those_of_others(self):
        layers = self.layers(B, 3, 9, local=True, rank=[61, 12])
        assert found(table((5, 61, 0, B, True)), layers=layers).layer == 3

    def test_layers_of_another_step_do_not_count(self):
        assert found(table((5, 61, 0, B, True)), layers=self.layers(R, 3, step=6)).layer is None

    def test_depth_follows_the_block_number_and_ends_are_known(self):
        names = ["lm_head", "unembed", "layers.10.mlp", "h.2.attn", "tok_embeddings", "h_3_mlp"]
        assert sorted(names, key=depth_key) == [
            "tok_embeddings",
            "h.2.attn",
            "h_3_mlp",
            "layers.10.mlp",
            "lm_head",
            "unembed",
        ]


rows_strategy = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.integers(0, 5),
        st.sampled_from([None, 0, 1, 2]),
        st.sampled_from([Phase.DATA, F, B]),
        st.just(True),
        st.booleans(),
    )
    | st.tuples(
        st.integers(0, 3),
        st.integers(-1, 5),
        st.sampled_from([None, 0, 4]),
        st.sampled_from([F, R, O]),
        st.just(False),
        st.booleans(),
    ),
    min_size=1,
    max_size=14,
)


def brute_force(rows, stage_of=None):
    """The rule read aloud, over single rows."""
    applied = [r for r in rows if not r[5]] or rows
    step = min(r[0] for r in applied)
    here = [r for r in applied if r[0] == step]
    local = [r for r in here if r[4]]
    if not local:
        return step, min(r[3] for r in here), ()
    # One row per lane first: what a lane says with a micro-batch before what it says without.
    lanes: dict[int, tuple[int, int]] = {}
    for r in local:
        key = (99 if r[2] is None else r[2], r[3])
        if r[1] not in lanes or key < lanes[r[1]]:
            lanes[r[1]] = key
    kept = dict(lanes)
    if all(batch != 99 for batch, _ in kept.values()):
        lowest = min(batch for batch, _ in kept.values())
        kept = {lane: key for lane, key in kept.items() if key[0] == lowest}
    phase = min(p for _, p in kept.values())
    kept = {lane: key for lane, key in kept.items() if key[1] == phase}
    if stage_of is not None and all(lane in stage_of for lane in kept):
        pick = max if phase == B else min
        wanted = pick(stage_of[lane] for lane in kept)
        kept = {lane: key for lane, key in kept.items() if stage_of[lane] == wanted}
    return step, phase, tuple(sorted(kept))


@given(rows_strategy, st.randoms(use_true_random=False), st.integers(1, 4))
def test_the_order_and_the_packaging_of_arrival_change_nothing(rows, random, parts):
    expected = None
    for _ in range(3):
        random.shuffle(rows)
        minima = LaneMinima()
        for i in range(parts):
            chunk = rows[i::parts]
            if chunk:
                minima.update(table(*chunk))
        got = found(minima.rows)
        expected = expected or got
        assert got == expected


@given(rows_strategy)
def test_it_equals_the_rule_read_aloud(rows):
    first = found(earliest_per_lane(table(*rows)))
    assert (first.step, first.phase, first.ranks) == brute_force(rows)


@given(rows_strategy)
def test_stages_narrow_as_the_rule_read_aloud_says(rows):
    stage_of = {0: 0, 1: 1, 2: 2, 3: 0, 4: 1, 5: 2}
    topology = Topology.from_groups({"pp": [[0, 1, 2], [3, 4, 5]]})
    first = found(earliest_per_lane(table(*rows)), topology=topology)
    assert first.ranks == brute_force(rows, stage_of)[2]


@given(rows_strategy)
def test_a_lane_keeps_its_smallest_cell_by_the_order_key(rows):
    kept = earliest_per_lane(table(*rows))
    expected: dict[tuple[int, bool], tuple] = {}
    for step, lane, micro_batch, phase, local, skipped in rows:
        key = order_key(step=step, micro_batch=micro_batch, phase=phase, skipped=skipped)
        slot = (lane, local)
        expected[slot] = min(expected.get(slot, key), key)
    got: dict[tuple[int, bool], tuple] = {}
    for i in range(len(kept)):
        slot = (int(kept.lane[i]), bool(kept.local[i]))
        assert slot not in got
        got[slot] = order_key(
            step=int(kept.step[i]),
            micro_batch=int(kept.micro_batch[i]),
            phase=int(kept.phase[i]),
            skipped=bool(kept.skipped[i]),
        )
    assert got == expected


@given(st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**31 - 1)), min_size=1, max_size=20))
def test_any_step_and_any_lane_number_fit(pairs):
    part = table(*((step, lane, None, F, True) for step, lane in pairs))
    first = found(earliest_per_lane(part))
    assert first.step == min(step for step, _ in pairs)
    assert first.ranks == tuple(sorted({lane for step, lane in pairs if step == first.step}))


def test_names_as_lanes_keep_one_row_each():
    kept = earliest_per_lane(cells(step=[3, 2, 2], lane=["b", "b", "a"], phase=[F, F, F], local=[False] * 3))
    assert kept.lane.tolist() == ["a", "b"]
    assert kept.step.tolist() == [2, 2]


def test_a_layer_of_several_ranks_keeps_one_row_for_each():
    part = cells(
        step=[3, 2, 2, 9], lane=[4, 4, 4, 4], phase=[B] * 4, local=[True] * 4, rank=[0, 0, 1, 1]
    )  # fmt: skip
    kept = earliest_per_lane(part)
    assert kept.rank is not None
    assert list(zip(kept.rank.tolist(), kept.step.tolist(), strict=True)) == [(0, 2), (1, 2)]


def test_the_reduce_ends_a_step_so_its_micro_batch_orders_nothing():
    kept = earliest_per_lane(table((5, 0, 0, R, False), (5, 0, 4, F, False)))
    assert kept.phase.tolist() == [F]


def test_cells_that_differ_only_in_what_they_show_leave_one_row_in_either_order():
    rows = [(5, 0, None, R, False), (5, 0, 4, R, False)]
    kept = [earliest_per_lane(table(*order)) for order in (rows, rows[::-1])]
    assert kept[0].micro_batch.tolist() == kept[1].micro_batch.tolist()
    assert found(kept[0]).micro_batch is None


def test_columns_of_different_length_are_refused():
    with pytest.raises(ValueError, match="lane"):
        cells(step=[1, 2], lane=np.array([1], dtype=np.int32), phase=[1, 1], local=[True, True])
    with pytest.raises(ValueError, match="phase"):
        cells(step=[1], lane=[1], phase=[7], local=[True])


def test_joining_nothing_is_nothing():
    assert len(concat([])) == 0
    assert len(LaneMinima().rows) == 0


def test_the_document_names_the_phase_and_lists_the_ranks():
    document = found(table((9, 3, 2, B, True))).to_document()
    assert document["phase"] == "backward"
    assert document["ranks"] == [3]
    assert document["micro_batch"] == 2


@pytest.mark.parametrize(
    "groups", [{"tp": [["x"]]}, {"tp": "0-"}, {"pp": [[-1]]}, {"tp": None}, {"tp": ["0-99999999999"]}]
)
def test_groups_that_are_no_ranks_are_refused_with_their_name(groups):
    with pytest.raises(ValueError, match=r"groups\.(tp|pp)"):
        Topology.from_groups(groups)


def test_a_rank_near_the_end_of_int32_costs_no_memory():
    topology = Topology.from_groups({"tp": [[0, 2**31 - 1]], "pp": [[0, 2**31 - 1]]})
    assert topology.stages(np.array([2**31 - 1, 5])).tolist() == [1, -1]


def test_all_combinations_of_two_cells_agree_with_the_order_key():
    options = list(product((1, 2), (0, 1), (F, B), (False, True)))
    for a, b in product(options, repeat=2):
        rows = [(a[0], 0, a[1], a[2], True, a[3]), (b[0], 1, b[1], b[2], True, b[3])]
        keys = [order_key(step=r[0], micro_batch=r[2], phase=r[3], skipped=r[5]) for r in rows]
        first = found(table(*rows))
        winners = tuple(i for i, key in enumerate(keys) if key == min(keys))
        assert first.ranks == winners
