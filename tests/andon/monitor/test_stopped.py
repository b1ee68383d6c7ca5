"""Accumulation, scaling, running a step again, corruption, stopping and restoring; on four real ranks."""

import json

import pytest

from andon.loader_batches import batches

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]

KINDS = pytest.mark.parametrize("kind", ["ddp", "fsdp2"])


def everyone(ranks, name):
    return [rank[name] for rank in ranks]


class TestAccumulation:
    @KINDS
    def test_the_micro_batch_of_the_nan_is_named(self, ranks, kind):
        seen = [one[kind] for one in everyone(ranks, "accumulation")]
        assert [one["rows"][1][1] for one in seen] == [None, 1, None, None]
        assert all(one["rows"][1][0] == seen[0]["rows"][1][0] for one in seen)
        assert [row[0][1] for row in seen[0]["rows"]] == [False, True, False]
        assert seen[0]["rank_cells"] == [[2, 1, 1]]

    @KINDS
    def test_the_step_run_again_names_the_first_nonfinite_tensor(self, ranks, kind):
        first = ranks[0]["accumulation"][kind]
        assert first["first"] == [[2, 1, {"module": "first", "what": "input", "micro_batch": 1}]]
        assert first["cells"] == [[2, "first", 1, 1, 1]]

    def test_what_ddp_sees_is_the_sum_of_the_micro_batches(self, ranks):
        for seen in everyone(ranks, "accumulation"):
            for row in (seen["ddp"]["rows"][0], seen["ddp"]["rows"][2]):
                assert row[3] == pytest.approx(row[4], rel=1e-6)


class TestRunAgain:
    @KINDS
    @pytest.mark.parametrize(
        ("fault", "module", "what", "name"),
        [
            ("forward", "second", "forward", "output"),
            ("between", "spoil", "forward", "output"),
            ("backward", "spoil", "gradient", "input"),
            ("random", "loss", "loss", None),
        ],
    )
    def test_the_place_is_named_on_the_rank_that_failed(self, ranks, kind, fault, module, what, name):
        seen = [one[f"{kind} {fault}"] for one in everyone(ranks, "run again")]
        expected = {"module": module, "what": what, "micro_batch": 0}
        assert seen[2][0] == (expected if name is None else expected | {"name": name})
        assert [one[0] for one in seen if one is not seen[2]] == [None] * 3

    @KINDS
    @pytest.mark.parametrize("fault", ["transient", "none"])
    def test_what_does_not_come_again_is_not_named(self, ranks, kind, fault):
        assert [one[f"{kind} {fault}"][0] for one in everyone(ranks, "run again")] == [None] * 4

    def test_gradients_and_random_numbers_are_as_before(self, ranks):
        for seen in everyone(ranks, "run again"):
            assert all(unchanged for _, unchanged in seen.values())


class TestScaler:
    @KINDS
    def test_an_overflow_on_one_rank_backs_off_on_all(self, ranks, kind):
        seen = [one[kind]["rows"] for one in everyone(ranks, "scaler")]
        for rows in seen:
            assert [row[0] for row in rows] == [row[0] for row in seen[0]]
            assert [row[1] for row in rows] == [1024, 1024, 512, 512]
            assert [row[5] for row in rows] == [False, False, True, False]
        assert ranks[0]["scaler"][kind]["scales"] == [1024, 1024, 1024, 512]
        assert ranks[0]["scaler"][kind]["skips"] == [3]
        assert ranks[0]["scaler"][kind]["verdicts"] == []  # one overflow is no failure

    def test_norms_are_unscaled(self, ranks):
        plain = ranks[0]["inf in one backward, ddp"]["steps"][0]
        for kind in ("ddp", "fsdp2"):
            row = ranks[0]["scaler"][kind]["rows"][0]
            assert row[3] == pytest.approx(plain["norm"], rel=1e-5)
            assert row[4] == pytest.approx(plain["global_norm"], rel=1e-5)

    def test_overflows_in_a_row_halt_and_a_scale_that_starts_high_was_not_restored(self, ranks):
        seen = everyone(ranks, "scaler collapse")
        assert [one["count"] for one in seen] == [20] * 4
        assert [one["last"] for one in seen] == [[519, True, True]] * 4
        assert seen[0]["verdicts"] == ["scaler_at_floor", "scaler_not_restored", "scaler_overflows"]


class TestReplicas:
    def test_a_flipped_bit_names_rank_and_tensor(self, ranks):
        seen = ranks[1]["replicas"]
        assert seen["clean"]["status"] == "equal"
        assert seen["clean"]["tensors"] == 12
        assert seen["moment"]["differing"] == [
            {"rank": 2, "tensors": ["moments.second.weight.exp_avg"], "count": 1}
        ]
        assert seen["weight"]["differing"] == [{"rank": 2, "tensors": ["weights.first.weight"], "count": 1}]

    def test_all_ranks_halt_on_it_in_the_same_next_step(self, ranks):
        seen = [one["next step"] for one in everyone(ranks, "replicas")]
        assert all(one == seen[0] for one in seen)
        assert seen[0][0][:3] == [2, True, True]
        assert seen[0][1] is True

    def test_where_nothing_is_replicated_it_is_not_available(self, ranks):
        for seen in everyone(ranks, "replicas"):
            assert seen["fsdp2"]["status"] == "not available"
            assert "no tensor" in seen["fsdp2"]["reason"]

    def test_hsdp_compares_the_ranks_that_hold_the_same_slice(self, ranks):
        seen = everyone(ranks, "replicas")
        assert [one["hsdp"]["group"] for one in seen] == [[0, 2], [1, 3], [0, 2], [1, 3]]
        assert [one["hsdp"]["status"] for one in seen] == ["equal"] * 4
        assert [one["hsdp flipped"]["status"] for one in seen] == ["equal", "differs", "equal", "differs"]
        # Two replicas have no majority: both are named, and it says so.
        assert seen[1]["hsdp flipped"]["tie"] is True
        assert [one["rank"] for one in seen[1]["hsdp flipped"]["differing"]] == [1, 3]

    def test_a_loop_may_say_who_replicates_what(self, ranks):
        seen = [one["named"] for one in everyone(ranks, "replicas")]
        assert [[report["status"] for report in one] for one in seen] == [["equal"]] * 2 + [["differs"]] * 2
        assert seen[3][0]["group"] == [2, 3]
        assert {name for one in seen[3][0]["differing"] for name in one["tensors"]} == {
            "weights.first.weight"
        }

    def test_a_watched_loop_checks_by_itself_and_a_suspicion_brings_the_twins(self, ranks):
        seen = ranks[0]["suspicion"]
        assert seen["checksums"] == [[2, "differs"], [4, "differs"]]
        # The flipped weight computes otherwise too.
        assert seen["twins"] == [[3, "differs", [2]]]
        assert seen["verdicts"][0] == [3, "corruption", "halt"]
        assert seen["boundaries"] == [[2, {"name": "context 8k", "tokens": 8192}]]


class TestTwins:
    @KINDS
    def test_a_rank_that_multiplies_wrongly_is_found_and_replicas_do_not_show_it(self, ranks, kind):
        for seen in everyone(ranks, "twins"):
            assert seen[f"{kind} clean"]["status"] == "equal"
            assert seen[f"{kind} checksum"] == ["equal" if kind == "ddp" else "not available"]
            assert seen[f"{kind} persistent"]["differing"] == [
                {"rank": 1, "first": "second output", "count": 4, "again": "persistent"}
            ]
            assert seen[f"{kind} transient"]["differing"][0]["rank"] == 1
            assert seen[f"{kind} transient"]["differing"][0]["again"] == "transient"

    @KINDS
    def test_its_gradients_are_thrown_away(self, ranks, kind):
        assert [one[f"{kind} grads left"] for one in everyone(ranks, "twins")] == [0] * 4
        assert ranks[0]["twins"][f"{kind} posted"] == ["equal", "differs", "differs"]


class TestHalted:
    @KINDS
    def test_all_ranks_leave_before_that_update(self, ranks, kind):
        seen = [one[kind] for one in everyone(ranks, "halted")]
        assert [one["code"] for one in seen] == [93] * 4
        assert [one["stopped_at"] for one in seen] == [6] * 4
        assert all(one["untouched"] for one in seen)
        assert seen[0]["actions"] == [[5, "skip"], [6, "halt"]]
        assert seen[0]["acks"] == sorted(
            [["received", 0]] + [[state, rank] for state in ("held", "exited") for rank in range(4)]
        )

    @KINDS
    def test_the_directory_stays_held(self, ranks, kind):
        for seen in (one[kind] for one in everyone(ranks, "halted")):
            assert seen["held"]["kind"] == "hold"
            assert "2 in a row" in seen["held"]["reason"]
            assert seen["refused"] == 93

    @KINDS
    def test_the_snapshot_brings_everything_back(self, ranks, kind):
        seen = [one[kind] for one in everyone(ranks, "halted")]
        snapshot = seen[0]["snapshot"]
        assert snapshot["step"] == 5
        assert snapshot["quarantined"] is snapshot["finite"] is True
        assert {"weights", "optimizer", "rng", "batches", "loader", "schedule", "decider", "digests"} <= set(
            snapshot["parts"]
        )
        assert snapshot["positions"]["loader_position"] == 6 * 16
        assert snapshot["positions"]["optimizer_step"] == 4
        for one in seen:
            assert one["same_state"]
            assert one["loader"] == 6 * 16
            assert dict(one["lines"]) == dict.fromkeys(
                ("weights", "moments", "schedule", "loader", "rng"), "equal"
            )

    @KINDS
    def test_the_ring_has_each_rank_s_samples_of_the_last_steps(self, ranks, kind):
        for rank, seen in enumerate(one[kind] for one in everyone(ranks, "halted")):
            assert seen["ring"] == [[step, f"sample-{16 * (step - 1) + 4 * rank}"] for step in range(1, 7)]


def test_a_rank_that_is_new_takes_the_loader_of_rank_0(tmp_path):
    from andon.halt_snapshot import restore_loader

    data = [f"s{n}" for n in range(50)]
    saved = batches(data, batch_size=3, world_size=2)
    next(saved)
    (tmp_path / "loader-00000.json").write_text(json.dumps(saved.state_dict()))
    new = batches(data, batch_size=2, rank=3, world_size=4)
    restore_loader(tmp_path, new, 3)
    next(new)
    assert new.positions == (12, 13)


class TestServerDead:
    @pytest.mark.parametrize(
        "kind",
        ["ddp, loss", "ddp, gradient", "fsdp2, gradient", "ddp, gradient, on the device"],
    )
    def test_no_bad_update_is_applied_and_all_ranks_leave_by_themselves(self, ranks, kind):
        deferred = kind.endswith("device")  # dropped in its step, known on the host one later
        seen = [one[kind] for one in everyone(ranks, "server dead")]
        for one in seen:
            assert (one["code"], one["stopped_at"], one["bad"]) == ((93, 7, 4) if deferred else (93, 6, 3))
            assert one["bad_left_all_untouched"]
            assert one["good_trained"]
            assert one["finite"]
        assert seen[0]["actions"] == [[3, "skip"], [5, "skip"], [6, "halt"]]
        assert seen[0]["exited"] == 3  # received, held, exited wait in the spool with the rest


class TestWaitsInPlace:
    def test_all_ranks_wait_and_go_on_from_memory_as_if_nothing_had_been(self, ranks):
        seen = everyone(ranks, "waits in place")
        assert len({one["held_at"] for one in seen}) == 1
        assert all(one["attempt"] == 2 and one["as_if_never_held"] for one in seen)
        assert all(one["file"] is None for one in seen)
        held = seen[0]["held_at"]
        assert seen[0]["launched"] == [[1, None], [2, "P-1"]]
        assert seen[0]["exited"] == [[2, 0]]
        assert seen[0]["second"] == [held + 1, held + 2]
        assert seen[0]["acks"] == [["held", rank] for rank in range(4)] + [["received", 0]]

    def test_the_launch_is_told_with_its_nodes_and_layers(self, ranks):
        seen = ranks[0]["waits in place"]
        told = [4, {"dp": [[0, 1, 2, 3]]}, "float32", "ddp", ["first", "second"], {"revision": "abc"}]
        assert seen["said"] == told
        assert seen["ranks"] == [[0, 1, 2, 3]]


class TestRestored:
    def test_a_whole_restore_is_equal_in_every_part(self, ranks):
        for seen in everyone(ranks, "restores"):
            assert dict(seen["equal"]) == dict.fromkeys(("weights", "moments", "loader", "rng"), "equal")

    def test_random_numbers_of_one_rank_are_found(self, ranks):
        verdicts = [dict(one["rng"])["rng"] for one in everyone(ranks, "restores")]
        assert verdicts == ["equal", "equal", "differs", "equal"]
        assert ranks[0]["restores"]["reports"][:2] == [[], [["rng", 2]]]

    def test_one_number_of_one_moment_is_found_and_named(self, ranks):
        for seen in everyone(ranks, "restores"):
            assert [one[:2] for one in seen["moments"]] == [["moments", "differs"]]
            assert "first.weight.exp_avg_sq" in seen["moments"][0][2]

    def test_on_another_number_of_ranks_all_is_compared_but_what_belongs_to_a_rank(self, ranks):
        for seen in everyone(ranks, "restores"):
            verdicts = {part: verdict for part, verdict, _ in seen["eight"]}
            assert verdicts.pop("rng") == "not comparable"
            assert verdicts == dict.fromkeys(("weights", "moments", "loader"), "equal")
            assert [equal for part, _, equal in seen["eight"] if part == "rng"] == [None]

    def test_no_record_is_no_pass(self, ranks):
        for seen in everyone(ranks, "restores"):
            assert set(seen["absent"]) == {"not recorded"}

    def test_a_failed_check_holds_all_ranks_before_the_first_step(self, ranks):
        assert [one["held"] for one in everyone(ranks, "restores")] == [93] * 4
        assert ranks[0]["restores"]["reason"].startswith("restore check failed: loader on rank 0")

    def test_the_checksums_do_not_depend_on_the_layout(self, ranks):
        assert all(one["layout"] for one in everyone(ranks, "restores"))


def test_the_lines_in_the_documentation_train_and_drop_the_bad_step(ranks):
    assert everyone(ranks, "documented") == [[5, 4, True]] * 4
