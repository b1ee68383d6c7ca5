"""The board over real public failures: what speaks for and against each family, what leads, what is next.

Each case is an input of the shape of a public failure (tests/cases/diagnosis, its first line says which)
with the conclusion of whoever found the cause, or the limits of what could be concluded.
"""

import json
import shlex
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.cli import COMMANDS
from andon.diagnose.board import FAMILIES, Tried, board
from andon.diagnose.families import Family
from andon.diagnose.meaning import MEANING
from andon.diagnose.probes import OWN, PROBES, own, probe_of
from andon.diagnose.record import Record

CASES = Path(__file__).parents[2] / "cases" / "diagnosis"
ROOT = Path(__file__).parents[3]
D, N, O, S, C, H, X = FAMILIES  # noqa: E741 - in the order of the board


def record(name):
    return msgspec.convert(json.loads((CASES / f"{name}.json").read_text())["record"], Record)


def lines(row):
    return [line.id for line in row.supports], [line.id for line in row.contradicts]


def tried(key, result, number=1):
    probe = probe_of(key)
    return Tried(id=f"H-{number}", probe=probe, result=probe.result(result))


def leading(name, done=()):
    row = board(record(name), done).leading
    return row.family if row else None


class TestWhatLeads:
    @pytest.mark.parametrize(
        ("name", "family"),
        [
            ("001-spike-recovers", Family.DATA),
            ("008-scale-falls", Family.DATA),
            ("010-cuda-unknown-error", Family.HARDWARE),
            ("026-bad-in-the-first-record", Family.DISTRIBUTED),
            ("031-grad-norm-loss-fine", Family.DATA),
            ("044-nan-rank-3-reproducible", Family.DATA),
            ("047-two-ranks-one-fault", Family.DATA),
            ("051-sizes-differ", Family.DISTRIBUTED),
            ("057-reporters-are-victims", Family.HARDWARE),
            ("063-ib-retry-then-flushed", Family.COMMUNICATION),
            ("065-one-device-repeats", Family.HARDWARE),
            ("067-nvlink-then-action", Family.HARDWARE),
            ("069-corrected-and-remapped", Family.DATA),
            ("075-two-xids", Family.HARDWARE),
            ("078-preflight-fails", Family.HARDWARE),
            ("099-killed-from-outside", Family.HARDWARE),
            ("overlong-sample", Family.DATA),
            ("restart-with-other-code", Family.OPTIMIZER),
        ],
    )
    def test_the_first_to_look_at(self, name, family):
        assert leading(name) == family

    @pytest.mark.parametrize("path", sorted(CASES.glob("*.json")), ids=lambda path: path.stem)
    def test_every_line_names_a_row_of_the_record_and_nothing_is_ruled_out_by_facts(self, path):
        one = record(path.stem)
        known = {
            entry.id for group in (one.findings, one.launches, one.events, one.checkpoints) for entry in group
        }
        got = board(one)
        assert [row.family for row in got.rows] == list(FAMILIES)
        assert {row.standing for row in got.rows} <= {"leading", "open", "unlikely"}
        for row in got.rows:
            for line in (*row.supports, *row.contradicts):
                assert line.id in known
                assert line.text
                assert line.because


class TestEvidence:
    def test_the_gradient_led_the_loss_and_the_row_is_that_of_the_first_odd_step(self):
        got = board(record("001-spike-recovers"))
        led = next(line for line in got.row(N).supports if "left its range" in line.text)
        assert "step 4,015" in led.text
        assert "step 4,019" in led.text
        event = next(one for one in record("001-spike-recovers").events if one.id == led.id)
        assert event.step == 4015

    def test_a_norm_that_was_never_measured_is_no_collapse_and_the_scale_speaks(self):
        got = board(record("008-scale-falls"))
        texts = [line.text for row in got.rows for line in (*row.supports, *row.contradicts)]
        assert not any("grad norm" in text for text in texts)
        scale = next(line for line in got.row(N).supports if "loss scale" in line.text)
        assert scale.strong
        assert "65536 to 4096" in scale.text

    def test_what_was_bad_in_the_first_record_began_there_or_before(self):
        got = board(record("026-bad-in-the-first-record"))
        assert any("there or before" in line.text for line in got.row(S).supports)
        assert "the rank is not known" not in str(got.row(D))  # and no rank is named
        assert got.row(D).standing == "open"

    def test_before_the_reduce_the_network_is_no_suspect(self):
        got = board(record("044-nan-rank-3-reproducible"))
        assert got.row(C).standing == "unlikely"
        assert got.row(H).standing == "open"

    def test_two_ranks_of_one_group_are_one_cell_and_clean_up_noise_is_not_on_the_board(self):
        got = board(record("047-two-ranks-one-fault"))
        everything = str(got)
        assert "FileNotFoundError" not in everything
        first = got.row(D).supports[0]
        assert first.id == "F-1"
        assert "404-405" in first.text

    def test_ranks_that_disagree_about_sizes_all_entered(self):
        got = board(record("051-sizes-differ"))
        line = got.row(S).supports[0]
        assert line.strong
        assert "record 1" in line.text
        assert "[[5, 5]]" in line.text
        assert "[[4, 4]]" in line.text
        assert not any("never entered" in line.text for line in got.row(H).supports)

    def test_the_rank_that_never_entered_is_named_and_the_reporters_are_victims(self):
        got = board(record("057-reporters-are-victims"))
        line = got.row(H).supports[0]
        assert "ranks 0-2 wait in allreduce 731, rank 3 never entered it" in line.text
        assert any("only wait" in one.because for one in got.row(C).contradicts)

    def test_the_root_of_a_broken_queue_pair_is_cited_and_what_it_flushed_is_not(self):
        got = board(record("063-ib-retry-then-flushed"))
        fabric = [line for line in got.row(C).supports if "status" in line.text]
        assert [line.id for line in fabric] == ["V-90"]

    def test_a_device_that_repeats_itself_is_one_fault_whoever_called_the_driver(self):
        got = board(record("065-one-device-repeats"))
        lines_ = [line for line in got.row(H).supports if "Xid" in line.text]
        assert [(line.id, line.more) for line in lines_] == [("V-40", 4)]
        assert "0000:9b:00" in lines_[0].text
        assert "nvidia-smi" not in lines_[0].text

    def test_an_action_that_the_driver_asks_for_is_no_fault_of_its_own(self):
        got = board(record("067-nvlink-then-action"))
        cited = {line.id for line in (*got.row(H).supports, *got.row(C).supports)}
        assert {"V-20", "V-21"} <= cited
        assert not cited & {"V-22", "V-23"}

    def test_what_was_corrected_damaged_no_value(self):
        got = board(record("069-corrected-and-remapped"))
        against = [line for line in got.row(H).contradicts if "corrected" in line.because]
        assert {line.id for line in against} == {"V-31", "V-32"}

    def test_of_two_xids_the_double_bit_error_decides(self):
        got = board(record("075-two-xids"))
        assert got.row(H).supports[0].id == "V-12"
        assert [line.id for line in got.row(X).supports] == ["V-11"]

    def test_a_creep_and_an_overlong_sample_are_both_on_the_board(self):
        got = board(record("overlong-sample"))
        assert any("48,000 tokens, 23 times" in line.text and line.strong for line in got.row(D).supports)
        crept = next(line for line in got.row(N).supports if "rose to" in line.text)
        assert crept.strong
        assert any(line.id == crept.id for line in got.row(H).contradicts)

    def test_what_a_launch_changed_and_what_a_restore_proved(self):
        got = board(record("restart-with-other-code"))
        assert {line.id for line in got.row(X).supports} == {"N-2"}
        assert any("a41f9c2 → b77d010" in line.text for line in got.row(X).supports)
        assert any("world size 48 → 16" in line.text for line in got.row(O).supports)
        assert any(
            "rate rose 2.0 times at step 1,020, to 2.0e-4" in line.text and line.strong
            for line in got.row(O).supports
        )
        assert any(line.id == "V-2" and line.strong for line in got.row(S).contradicts)


class TestProbes:
    def test_only_a_rerun_on_another_gpu_settles_a_reproducible_nan(self):
        one = record("044-nan-rank-3-reproducible")
        assert board(one).row(H).standing == "open"
        after = board(one, [tried("swap_node", "breaks")])
        assert after.row(H).standing == "ruled out"
        assert after.row(H).by == "H-1"
        assert after.row(H).probe is None
        assert board(one, [tried("swap_node", "clean")]).leading.family == H

    def test_a_batch_that_is_clean_alone_does_not_clear_data(self):
        one = record("overlong-sample")
        assert board(one, [tried("batch_alone", "clean")]).row(D).standing == "leading"
        broke = board(one, [tried("batch_alone", "breaks")])
        assert broke.leading.family == D
        assert broke.row(C).standing == broke.row(S).standing == "ruled out"

    @pytest.mark.parametrize(
        ("key", "result"), [("dcgm", "passes"), ("all_reduce", "no_baseline"), ("ecc", "none")]
    )
    def test_a_test_that_passes_once_rules_nothing_out(self, key, result):
        got = board(record("075-two-xids"), [tried(key, result)])
        assert "ruled out" not in {row.standing for row in got.rows}
        assert got.leading.family == H

    def test_when_the_leader_is_ruled_out_the_facts_choose_the_next(self):
        got = board(record("overlong-sample"), [tried("other_batch", "breaks")])
        assert got.row(D).standing == "ruled out"
        assert got.leading.family == N

    def test_a_later_result_brings_a_family_back(self):
        done = [tried("swap_node", "breaks"), tried("twin", "differ", 2)]
        got = board(record("075-two-xids"), done)
        assert got.leading.family == H
        assert got.row(H).by == "H-2"

    def test_a_probe_is_not_offered_twice(self):
        one = record("044-nan-rank-3-reproducible")
        first = board(one).row(D).probe.probe
        then = board(one, [Tried(id="H-1", probe=first, result=first.result("unclear"))]).row(D).probe
        assert then.probe.key != first.key

    def test_names_are_filled_in_and_quoted(self):
        got = board(record("restart-with-other-code"))
        command = got.row(X).probe.command
        assert shlex.split(command) == ["git", "diff", "--stat", "a41f9c2", "b77d010"]
        replay = probe_of("fp32").command(record("restart-with-other-code")).splitlines()
        assert shlex.split(replay[0]) == ["python", "manage.py", "export_bag", "7", "incident-7"]
        assert shlex.split(replay[1])[-1] == "/scratch/new run"
        checked = probe_of("verify_checkpoint").command(record("restart-with-other-code"))
        assert shlex.split(checked)[-1] == "/ckpt/step 1000"

    def test_every_command_of_ours_exists(self):
        one = record("restart-with-other-code")
        for probe in PROBES:
            for line in (probe.command(one) or "").splitlines():
                words = shlex.split(line, comments=True)
                if "manage.py" in words:
                    name = words[words.index("manage.py") + 1]
                    assert list(ROOT.glob(f"*/management/commands/{name}.py")), line
                if words[:1] == ["andon"]:
                    assert words[1] in COMMANDS

    def test_every_family_has_a_probe_that_can_rule_it_out_and_changes_one_condition_at_most(self):
        for family in FAMILIES:
            assert any(family in result.rules_out for probe in PROBES for result in probe.results), family
        for probe in PROBES:
            assert " and " not in probe.condition
            assert probe.result("unclear").supports is None
            for result in probe.results:
                named = {*result.rules_out, *([result.supports] if result.supports else [])}
                assert named <= set(probe.splits) | {H, S}, probe.key

    def test_a_probe_that_a_person_thought_of_counts_like_the_others(self):
        mine = own(N, "Run the step with logits in fp64", "dtype of the logits")
        got = board(record("overlong-sample"), [Tried(id="H-3", probe=mine, result=mine.result("rules_out"))])
        assert got.row(N).standing == "ruled out"
        assert probe_of(OWN) is None


hostile = st.text(max_size=30)


@given(node=hostile, revision=hostile, words=st.lists(hostile, max_size=4))
def test_no_name_can_become_another_command(node, revision, words):
    given_names = msgspec.convert(
        {
            "incident": "I-7",
            "attempt": 2,
            "first": {"step": 5, "phase": "backward", "ranks": [0]},
            "launches": [
                {"id": "N-1", "number": 1, "data": {"revision": "a1"}},
                {
                    "id": "N-2",
                    "number": 2,
                    "nodes": [{"node": node, "ranks": [0]}],
                    "data": {"revision": revision, "command": words},
                },
            ],
            "checkpoints": [{"id": "C-1", "step": 1, "state": "verified", "uri": f"file:///{node}"}],
        },
        Record,
    )
    for probe in PROBES:
        for line in (probe.command(given_names) or "").splitlines():
            split = shlex.split(line.split("  #")[0])
            assert split[0] in {"python", "ssh", "env", "git", "grep", "find", "mpirun"}
            # Unquoted, nothing of the shell's is left but the words themselves.
            assert shlex.join(split) == line.split("  #")[0]


def test_every_meaning_names_a_family_once_and_its_weights_are_small():
    for kind, says in MEANING.items():
        families = [family for family, _, _ in says]
        assert len(set(families)) == len(families), kind
        assert all(weight in (-2, -1, 1, 2) and because for _, weight, because in says), kind
