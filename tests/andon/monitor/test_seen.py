"""What a rank sees of itself before the reduce, and what all ranks agree on."""

import math

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]


def everyone(ranks, name):
    return [rank[name] for rank in ranks]


class TestLocalTruth:
    @pytest.mark.parametrize("kind", ["ddp", "ddp hook", "fsdp2"])
    def test_inf_in_rank_3s_backward_names_rank_3_whoever_holds_the_result(self, ranks, kind):
        seen = everyone(ranks, f"inf in one backward, {kind}")
        third = [one["steps"][2] for one in seen]
        assert all(one["loss_finite"] for one in third)
        assert [one["bits"] for one in third] == [0, 0, 0, 4]
        assert [one["view"] for one in third] == ["local"] * 4
        # After the reduce it lies with everyone under DDP, and with the owner of the row under FSDP2.
        owners = [one["reduced_is_bad_here"] for one in third]
        assert owners == ([True, False, False, False] if kind == "fsdp2" else [True] * 4)
        assert seen[0]["local"] == {"3/3": 4 + 8 + 64}
        first = seen[0]["layers"].index("first")
        assert [one["layer_bits"][first] for one in third] == [0, 0, 0, 4]

    @pytest.mark.parametrize("kind", ["ddp", "ddp hook", "fsdp2"])
    def test_all_ranks_drop_that_step_and_no_other(self, ranks, kind):
        seen = everyone(ranks, f"inf in one backward, {kind}")
        for step in range(4):
            agreed = [one["steps"][step]["agreed"] for one in seen]
            assert agreed == [agreed[0]] * 4
            assert agreed[0][1] is (step == 2)
        assert agreed[0][2] is False
        third = seen[0]["steps"][2]["agreed"]
        assert third[4:6] == [1, 0]  # one rank of its own, no loss
        assert [one["action"] for one in seen[0]["actions"]] == ["skip"]

    def test_the_norms_are_those_of_a_model_without_any_wrapper(self, ranks):
        for seen in everyone(ranks, "norms are right"):
            for kind in ("ddp", "ddp, gradients in buckets", "ddp, hook", "fsdp2", "hsdp"):
                assert seen[kind] == pytest.approx(seen["expected"], rel=1e-5)
            assert seen["ddp, tied"] == pytest.approx(seen["expected tied"], rel=1e-5)
            # Only the reduce rounds to fp16: what a rank saw of itself is exact.
            own = seen["ddp, hook of its own"]
            assert own[0] == pytest.approx(seen["expected"][0], rel=1e-5)
            assert own[1] == pytest.approx(seen["expected"][1], rel=1e-2)

    @pytest.mark.parametrize(("kind", "view"), [("ddp", "reduced"), ("fsdp2", "shard")])
    def test_layer_rows_say_whose_weights_they_measure(self, ranks, kind, view):
        seen = ranks[0][f"inf in one backward, {kind}"]
        assert len(seen["views"]) == 1
        assert f'"weight_norm": "{view}"' in seen["views"][0]
        # Steps 2 and 4 by the interval, 3 because it was bad; two layers on four ranks.
        assert len(seen["weights"]) == len(seen["ratios"]) == 3 * 2 * 4
        moved = {key: ratio for key, ratio in seen["ratios"].items() if not key.startswith("3/")}
        assert all(0 < ratio < 1 for ratio in moved.values())
        assert all(ratio == 0 for key, ratio in seen["ratios"].items() if key.startswith("3/"))

    def test_without_a_rank_s_own_gradients_the_cell_is_reduced_and_says_so(self, ranks):
        silent, told = ranks[0]["reduced only"]["silent"], ranks[0]["reduced only"]["told"]
        assert silent["local_bits"] == {}
        assert set(silent["reduced_bits"]) == {"2/0", "2/1", "2/2", "2/3"}
        assert all('"nonfinite": "reduced"' in views for views in silent["views"])
        assert all(said.startswith("reduced") for said in silent["said"])
        assert set(told["local_bits"]) == {"2/3"}
        assert told["said"] == [None] * 3
        assert silent["skips"] == told["skips"] == [2]

    def test_bf16_is_nonfinite_only_where_it_is(self, ranks):
        seen = everyone(ranks, "bf16")
        large, bad = [one[1] for one in seen], [one[2] for one in seen]
        assert all(one[0][1] is False for one in large)
        assert large[1][3] > 1e15
        assert math.isfinite(large[1][3])
        assert [one[1] for one in bad] == [0, 4, 0, 0]
        assert all(one[0][1] and one[2] for one in bad)

    def test_output_norms_are_measured_on_request_for_one_step(self, ranks):
        seen = ranks[0]["activations"]
        assert {key.split("/")[0] for key in seen["act_norm"]} == {"2"}
        own = [seen["act_norm"][f"2/first/{rank}"] for rank in range(4)]
        assert own == pytest.approx(seen["first"], rel=1e-5)


class TestCosts:
    def test_a_healthy_step_is_one_collective_and_one_host_read(self, ranks):
        for seen in everyone(ranks, "counted"):
            for kind in ("ddp", "fsdp2"):
                assert seen[f"read {kind}"]["steps"] == [[{"c10d::allreduce_": 1}, {"tolist": 1}]] * 6

    def test_with_found_inf_on_the_device_there_is_no_host_read(self, ranks):
        for seen in everyone(ranks, "counted"):
            for kind in ("ddp", "fsdp2"):
                assert seen[f"deferred {kind}"]["steps"] == [[{"c10d::allreduce_": 1}, {}]] * 6

    def test_the_layers_travel_with_it(self, ranks):
        for seen in everyone(ranks, "counted"):
            assert [one["layer_steps"] for one in seen.values()] == [["3", "6"]] * 4


class TestSkips:
    @pytest.mark.parametrize("optimizer", ["foreach", "fused"])
    def test_nan_and_inf_leave_weights_moments_and_step_count_untouched(self, ranks, optimizer):
        for seen in everyone(ranks, "skipped"):
            rows = seen[optimizer]["rows"]
            assert [row[0][1] for row in rows] == [False, True, False, True, False]
            assert [row[1] for row in rows] == [False, True, False, True, False]
            assert [row[2] for row in rows] == [1, 1, 2, 2, 3]

    def test_on_the_device_too_and_all_ranks_hear_of_it_one_step_later(self, ranks):
        for seen in everyone(ranks, "skipped"):
            rows = seen["deferred"]["rows"]
            assert [row[1] for row in rows] == [False, True, False, True, False]
            assert [row[2] for row in rows] == [1, 1, 2, 2, 3]
            assert [row[0][0] for row in rows] == [-1, 1, 2, 3, 4]
            assert [row[0][1] for row in rows] == [False, False, True, False, True]
            assert seen["deferred"]["last"][:2] == [5, False]
        assert len({str(seen["deferred"]) for seen in everyone(ranks, "skipped")}) == 1

    def test_a_nonfinite_moment_halts_all_ranks_in_the_next_step(self, ranks):
        seen = everyone(ranks, "state is bad")
        assert seen == [seen[0]] * 4
        assert [row[0][2] for row in seen[0]] == [False, False, True]
        assert "moments are nonfinite" in seen[0][2][0][7]
        assert seen[0][2][1] is True


class TestDecidingTogether:
    def test_a_spike_halts_all_ranks_at_the_third_strike(self, ranks):
        seen = everyone(ranks, "spike")
        assert all(one["act"]["rows"] == seen[0]["act"]["rows"] for one in seen)
        last = seen[0]["act"]["rows"][-1]
        assert last[0] == 63
        assert last[1:3] == [True, True]
        assert [step for step, *_ in seen[0]["act"]["verdicts"]] == [61, 62, 63]

    def test_under_observe_it_says_what_it_would_have_done(self, ranks):
        seen = ranks[0]["spike"]["observe"]
        assert not any(row[1] or row[2] for row in seen["rows"])
        assert [one[2:] for one in seen["verdicts"][:3]] == [
            ["observe", "ok"],
            ["observe", "ok"],
            ["observe", "halt"],
        ]

    def test_a_declared_boundary_is_no_spike(self, ranks):
        assert ranks[0]["boundary"] == {"verdicts": 0, "said": ["mixture change"]}

    def test_an_order_that_only_rank_0_read_takes_effect_everywhere_in_the_same_step(self, ranks):
        for rows in everyone(ranks, "ordered"):
            assert [row[3] for row in rows] == [False, False, True, True]

    @pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
    def test_a_straggler_s_time_is_its_own_and_the_others_wait(self, ranks, kind):
        # The third step: DDP lays out its buckets anew in the second forward, where all wait.
        third = [seen[kind][2] for seen in everyone(ranks, "straggler")]
        assert third[2][0] >= 0.3
        assert all(wait >= 0 for _, wait in third)
        assert max(third[rank][1] for rank in (0, 1, 3)) > third[2][1]

    def test_a_pipeline_stage_without_loss_says_so_and_still_names_its_rank(self, ranks):
        seen = everyone(ranks, "pipeline")
        for step in range(3):
            rows = [one["rows"][step] for one in seen]
            assert all(row[0] == rows[0][0] for row in rows)
            assert [row[1] for row in rows] == [False, False, True, True]
        second = [one["rows"][1] for one in seen]
        assert [row[2] & 2 for row in second] == [0, 2, 0, 2]
        assert all(row[0][1] for row in second)
        # Both stages' gradients make one norm.
        third = [one["rows"][2] for one in seen]
        assert third[0][3] == pytest.approx(math.sqrt(third[0][4] + third[2][4]), rel=1e-6)
        assert {key.split("/")[1] for key in seen[0]["losses"]} == {"2", "3"}
