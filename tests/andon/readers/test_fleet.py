"""What other tools of a fleet print, read to the conclusion that is right; and no garbage that crashes it."""

import json
import math
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from andon.cli import main
from andon.detect.series import SeriesError
from andon.diagnose.gather.checks import verdict
from andon.readers import dcgmi, foreign, nccl_tests, scalars, wandb
from tests.andon.listener import Listener
from tests.andon.readers.test_tensorboard import field, varint
from tests.andon.readers.test_training_log import on_the_wire

CASES = Path(__file__).resolve().parents[2] / "cases" / "fleet"
PUBLIC = Path(__file__).resolve().parents[4] / "shared" / "cases"
NAMES = sorted(one.name for one in CASES.iterdir())


def case(name):
    return (CASES / name).read_text()


def events(name):
    return foreign.read(name, (CASES / name).read_bytes()).events


class TestDiag:
    def test_the_content_decides_and_every_result_counts(self):
        report = dcgmi.read(case("dcgmi-diag-3.json"))
        assert {(one.test, one.gpu) for one in report.failed} == {("Persistence Mode", n) for n in range(4)}
        (event,) = dcgmi.events(report)
        assert event["type"] == "preflight.report"
        assert event["data"]["verdict"] == "fail"
        assert "disabled" in event["data"]["detail"]
        assert [one["test"] for one in event["data"]["warned"]] == ["Environment Variables"]
        assert report.told["version"] == "3.3.5"

    def test_one_gpu_of_a_test_that_passes_elsewhere(self):
        report = dcgmi.read(case("dcgmi-diag-4.json"))
        (failed,) = report.failed
        assert (failed.test, failed.gpu, failed.error_id, failed.severity) == ("memory", 3, 83, 1)
        assert "row remap" in failed.detail

    def test_a_cell_cut_in_the_middle_of_words_is_joined_without_a_blank(self):
        report = dcgmi.read(case("dcgmi-diag-3.txt"))
        (failed,) = report.failed
        assert (failed.test, failed.gpu) == ("GPU Memory", 0)
        assert "11.2 seconds started" in failed.detail
        assert "for GPU 0 Verify that the fans of this machine turn and that" in failed.detail
        by_status = {s: [one.gpu for one in report.results if one.status == s] for s in ("pass", "skip")}
        assert by_status == {"pass": [None, None, 1, 2], "skip": [None]}
        assert report.told["GPU Device IDs Detected"] == "2330, 2330, 2330"  # no GPU's number

    def test_a_gpu_fails_although_the_test_says_pass(self):
        report = dcgmi.read(case("dcgmi-diag-4.txt"))
        (failed,) = report.failed
        assert (failed.test, failed.gpu, failed.detail) == ("software", 1, "Error: row remap pending")
        assert [one.gpu for one in report.results] == [0, 1, 2, 3]

    def test_a_diagnostic_that_did_not_run_is_no_pass(self):
        with pytest.raises(dcgmi.DcgmiError, match="did not run"):
            dcgmi.read('{"DCGM GPU Diagnostic": {"version": "4.2.3"}}')

    def test_a_run_that_ended_in_an_error_is_a_failure(self):
        report = dcgmi.read('{"DCGM Diagnostic": {"runtime_error": "Unable to connect"}}')
        assert [(one.test, one.detail) for one in report.failed] == [("run", "Unable to connect")]


class TestLinksAndHealth:
    def test_a_link_is_its_place_among_the_letters(self):
        first, second, switch = dcgmi.read(case("dcgmi-nvlink.txt")).results
        assert (first.gpu, first.status, first.links) == (0, "fail", (5,))
        assert (second.gpu, second.status, second.detail) == (1, "pass", "link 10, 11 disabled")
        assert (switch.test, switch.gpu, switch.links) == ("NVLink of switch 8", None, (3,))
        told = events("dcgmi-nvlink.txt")
        assert [one["type"] for one in told] == ["preflight.report", "hardware.link", "hardware.link"]
        assert (told[1]["data"]["gpu"], told[1]["data"]["links"]) == (0, [5])

    def test_counts_of_a_links_errors(self):
        (told,) = events("dcgmi-nvlink-errors.json")
        assert told["data"]["nvlink_errors"] == 19
        (link,) = told["data"]["links"]
        assert (link["gpu"], link["links"], link["detail"]) == (5, [0], "CRC Data Error 17, Replay Error 2")

    def test_health_is_an_enum_and_double_bit_errors_are_damage(self):
        report = dcgmi.read(case("dcgm-health.json"))
        assert report.told["overall"] == "fail"
        (told,) = events("dcgm-health.json")
        assert (told["type"], told["data"]["gpu"], told["data"]["uncorrected"]) == ("hardware.ecc", 3, 41)


class TestNccl:
    def test_a_run_is_judged_by_its_largest_size_against_its_baseline_only(self):
        run = nccl_tests.read(case("nccl-one-node.txt"))
        assert (run.ranks, run.nodes, len(run.sizes), run.wrong) == (4, 1, 3, 0)
        assert run.largest is not None
        assert (run.largest.busbw_gbs, run.bus_factor, run.average_gbs) == (261.81, 1.5, 255.99)
        assert nccl_tests.verdict(run)[0] == "not compared"
        assert nccl_tests.verdict(run, 270.0)[0] == "pass"
        assert nccl_tests.verdict(run, 400.0)[0] == "fail"

    def test_wrong_values_are_corruption_whatever_the_bandwidth(self):
        run = nccl_tests.read(case("nccl-wrong.txt"))
        assert nccl_tests.verdict(run, 1.0) == (
            "fail",
            "8192 values were wrong: data is damaged on its way or on a device",
        )

    def test_the_old_error_column_is_rounding_and_no_count(self):
        run = nccl_tests.read(case("nccl-old-errors.txt"))
        assert [one.wrong for one in run.sizes] == [None]
        assert nccl_tests.verdict(run, 140.0)[0] == "pass"

    def test_a_blank_cell_shifts_nothing_and_what_was_not_checked_is_not_right(self):
        run = nccl_tests.read(case("nccl-alltoall.txt"))
        assert run.largest is not None
        assert (run.largest.busbw_gbs, run.largest.wrong) == (218.49, None)
        assert run.bus_factor == 0.87  # never beside an all-reduce's 1.5

    def test_what_did_not_start_measured_nothing(self):
        (event,) = events("nccl-not-started.txt")
        assert event["data"]["verdict"] == "inconclusive"
        assert "not enough slots" in event["data"]["detail"]
        assert "busbw_gbs" not in event["data"]
        assert verdict(event["data"]) is None  # neither a pass nor a failure on the board


class TestReports:
    def test_each_record_says_what_its_tool_means(self):
        told = events("reports.jsonl")
        assert [one["type"] for one in told] == [
            "preflight.report",
            "node.state",
            "preflight.report",
            "verdict",
            "node.state",
            "heartbeat",
        ]
        prolog, nagios, bench, sdc, cycle, beat = told
        assert (prolog["node"], prolog["data"]["verdict"]) == ("node-3", "fail")
        assert nagios["data"]["state"] == "check_warn"
        assert (bench["data"]["verdict"], "deterministic_loss" in bench["data"]["detail"]) == ("fail", True)
        assert (sdc["ranks"], sdc["step"], sdc["data"]["rule"]) == ([3, 12], 410, "corruption")
        assert (cycle["data"]["cycle"], cycle["data"]["active_ranks"]) == ("running", "0-3,6")
        assert (beat["rank"], beat["step"], beat["data"]["state"]) == (5, 900, "checkpoint_start")

    def test_lines_of_logs(self):
        cycle, save, calm, slow, still_open, hang = events("reports.log")
        assert (cycle["node"], cycle["rank"], cycle["data"]["state"]) == ("n7", 12, "nvrx_failure_detected")
        assert (save["data"]["state"], save["data"]["duration_s"]) == ("dlrover_save", 12.5)
        assert (calm["data"]["kind"], "ranks" in calm) == ("straggler_report", False)
        assert (slow["data"]["kind"], slow["ranks"]) == ("straggler", [6])
        assert (still_open["data"]["state"], still_open["data"]["open"]) == ("dlrover_step", True)
        assert (hang["data"]["reporting"], hang["data"]["silent"]) == ([9, 10], [8])


def number(value):
    return struct.pack("<d", value)


def zigzag(value):
    return varint(value << 1 if value >= 0 else -value * 2 - 1)


def history(step, *items):
    body = b"".join(field(1, item) for item in items) + field(2, varint(1 << 3) + varint(step))
    return varint(1 << 3) + varint(step) + field(2, body)


def as_json(key, value):
    return field(1, key.encode()) + varint(16 << 3 | 2) + varint(len(value)) + value.encode()


def as_double(key, value):
    return field(1, key.encode()) + varint(6 << 3 | 1) + number(value)


def nested_integer(*keys, value):
    return b"".join(field(2, key.encode()) for key in keys) + varint(5 << 3) + zigzag(value)


def run_file(*records):
    """Return records as a LevelDB log: 32 KiB blocks, a record over several of them in parts."""
    out = bytearray(b":W&B" + struct.pack("<HB", 0xBEE1, 0))
    for record in records:
        at, first = 0, True
        while first or at < len(record):
            left = 32_768 - len(out) % 32_768
            if left < 7:
                out += b"\0" * left
                continue
            part = record[at : at + left - 7]
            at += len(part)
            kind = {(True, True): 1, (True, False): 2, (False, False): 3, (False, True): 4}[
                first, at == len(record)
            ]
            out += struct.pack("<IHB", 0, len(part), kind) + part
            first = False
    return bytes(out)


class TestWandb:
    ROWS = (
        history(0, as_json("train/loss", "2.5"), as_json("train/global_step", "10")),
        history(1, as_double("train/loss", math.nan), nested_integer("train", "global_step", value=20)),
        history(
            2, as_json("train/loss", "Infinity"), as_json("note", '"text"'), as_json("global_step", "30")
        ),
    )

    def test_a_run_file_of_an_offline_run(self):
        found = wandb.read(run_file(*self.ROWS))
        loss = [(one.step, one.value) for one in found if one.tag == "train/loss"]
        assert loss[0] == (10, 2.5)
        assert (loss[1][0], math.isnan(loss[1][1])) == (20, True)
        assert loss[2] == (30, math.inf)

    def test_a_record_longer_than_a_block_and_a_torn_end(self):
        long = history(0, as_json("train/loss", "2.0"), as_json("image", json.dumps("x" * 100_000)))
        whole = run_file(long, *self.ROWS)
        assert [one.value for one in wandb.read(whole) if one.tag == "train/loss"][:2] == [2.0, 2.5]
        for cut in range(len(whole) - 30, len(whole)):
            assert wandb.read(whole[:cut])[0].value == 2.0

    def test_an_export_line_by_line(self):
        found = scalars.events(wandb.read((CASES / "wandb-history.jsonl").read_bytes()))
        assert [one["step"] for one in found] == [10, 20]  # an evaluation between them is of the first
        first, second = (one["data"] for one in found)
        assert first | {"loss": 2.5, "grad_norm": 0.31, "eval/loss": 2.7} == first
        assert math.isnan(second["loss"])
        assert (second["grad_norm"], second["lr"]) == (math.inf, 0.0003)
        assert found[0]["time"] == 1796003001.5

    def test_a_charts_export_without_the_spread_of_its_averaging(self):
        found = wandb.read((CASES / "wandb-chart.csv").read_bytes())
        assert [(one.step, one.tag) for one in found] == [(1, "train/loss"), (3, "train/loss")]

    def test_a_chart_of_several_runs_is_refused(self):
        with pytest.raises(SeriesError, match="2 runs: a, b"):
            wandb.read(b"Step,a - loss,b - loss\n1,2,3\n")

    @pytest.mark.parametrize("name", ["wandb-history.jsonl", "wandb-chart.csv"])
    def test_andon_detect_judges_it(self, name, capsys):
        assert main(["detect", str(CASES / name)]) == 1
        assert '"kind": "nonfinite"' in capsys.readouterr().out

    def test_andon_detect_judges_a_run_file(self, tmp_path, capsys):
        file = tmp_path / "run-x.wandb"
        file.write_bytes(run_file(*self.ROWS))
        assert main(["detect", str(file)]) == 1
        assert "W&B: train/loss, 3 values" in capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES)
def test_every_case_is_recognised_and_taken_by_the_server(name):
    found = events(name)
    assert found
    assert len(on_the_wire(found)) == len(found)


@pytest.mark.parametrize(
    ("folder", "verdict"),
    [
        ("078-dcgmi-text-table-wrapped-mid-word", "fail"),
        ("079-dcgmi-v4-text-rows-per-gpu", "fail"),
        ("083-nccl-tests-a100-one-and-two-nodes", "not compared"),
        ("086-nccl-tests-alltoall-no-redop-column", "not compared"),
        ("089-nccl-tests-old-error-column-rounding", "not compared"),
    ],
)
def test_the_public_cases_end_as_they_should(folder, verdict):
    if not PUBLIC.is_dir():
        pytest.skip("the public cases are not here")
    for path in sorted((PUBLIC / folder).glob("input*")):
        (event,) = foreign.read(path.name, path.read_bytes()).events
        assert event["data"]["verdict"] == verdict


TEXTS = [case(name) for name in NAMES]


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=300),
        st.text(max_size=300).map(str.encode),
        st.recursive(
            st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=20),
            lambda inner: (
                st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4)
            ),
            max_leaves=12,
        ).map(lambda value: json.dumps(value).encode()),
        st.builds(
            lambda text, at, size, more: (text[:at] + more + text[at + size :]).encode(),
            st.sampled_from(TEXTS),
            st.integers(0, 1_500),
            st.integers(0, 40),
            st.text(max_size=8),
        ),
        st.builds(
            lambda at, more: run_file(*TestWandb.ROWS)[:at] + more + run_file(*TestWandb.ROWS)[at:],
            st.integers(0, 200),
            st.binary(max_size=8),
        ),
    )
)
def test_garbage_is_read_or_refused_and_what_is_read_the_server_takes(body):
    found, refusal = [], "no refusal"
    try:
        found = foreign.read("file", body).events
    except foreign.Unknown as error:
        refusal = str(error)
    assert refusal
    if found:
        assert len(on_the_wire(found[:50])) == len(found[:50])


class TestTheCommand:
    def test_it_prints_what_it_would_post(self, capsys):
        assert main(["read", str(CASES / "nccl-one-node.txt"), "--baseline-gbs", "270", "--node", "n1"]) == 0
        out, err = capsys.readouterr()
        (event,) = [json.loads(line) for line in out.splitlines()]
        assert (event["node"], event["data"]["verdict"]) == ("n1", "pass")
        assert "nccl-tests, 1 events" in err

    def test_a_file_read_twice_is_posted_once(self, tmp_path, monkeypatch):
        listener = Listener(tmp_path)
        monkeypatch.setenv("ANDON_RUN_SECRET", listener.secret)
        told = ["--url", listener.url, "--run", listener.run, "--node", "n1"]
        files = [str(CASES / name) for name in ("dcgmi-nvlink.txt", "wandb-history.jsonl")]
        try:
            assert main(["read", *files, *told]) == 0
            assert main(["read", *files, *told]) == 0
        finally:
            listener.close()
        assert [one.type for _, one in listener.events] == [
            "preflight.report",
            "hardware.link",
            "hardware.link",
            *["step"] * 2,
        ]
        assert listener.of("hardware.link")[0].node == "n1"

    def test_what_is_unknown_is_said_and_the_others_are_read(self, tmp_path, capsys):
        (tmp_path / "x").write_text("nothing of anybody's\n")
        assert main(["read", str(tmp_path / "x"), str(CASES / "dcgm-health.json"), str(tmp_path / "no")]) == 2
        out, err = capsys.readouterr()
        assert "no format fits" in err
        assert "No such file" in err
        assert json.loads(out)["type"] == "hardware.ecc"
