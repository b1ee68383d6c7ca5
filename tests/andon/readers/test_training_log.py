"""Training logs: each trainer's own shape, read to the conclusion that is right."""

import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.detect.nonfinite import SkipCounter, judge_event, seen_in_event
from andon.policy import Policy
from andon.readers.logs.lines import clean, number
from andon.readers.training_log import FORMATS, READERS, Memory, TrainingLog, read_lines
from andon.wire import decode_events, encode_events

CASES = Path(__file__).resolve().parents[2] / "cases" / "logs"
LOGS = sorted(path.stem for path in CASES.glob("*.log"))


def lines_of(name):
    return re.split(r"[\r\n]+", (CASES / f"{name}.log").read_text("utf-8"))


def events_of(name, **options):
    return read_lines(lines_of(name), **options)


def steps(events):
    return [(event["step"], event["data"]) for event in events if event["type"] == "step"]


def on_the_wire(events):
    """Return the events as the server reads them; nothing that a reader makes is refused there."""
    sent = [{name: value for name, value in event.items() if name != "zoned"} for event in events]
    decoded = decode_events(encode_events(sent), "application/json")
    assert decoded.refused == []
    return [event for _, event in decoded.events]


def judged(events):
    """Return {step: "halt"} of what the server stops a run for in the events by themselves."""
    return {
        event.step: finding.severity
        for event in on_the_wire(events)
        for finding in judge_event(event, Policy())
        if finding.severity == "halt"
    }


class TestMegatron:
    def test_a_loss_that_vanishes_from_the_line_is_nonfinite_and_holds(self):
        events = events_of("megatron")
        assert judged(events) == {40: "halt", 50: "halt"}
        by_step = dict(steps(events)[:6])
        assert math.isnan(by_step[40]["loss"])
        assert "left out" in by_step[40]["note"]

    def test_units_and_names_are_the_wires(self):
        first = steps(events_of("megatron"))[0]
        assert first[0] == 10
        expected = {
            "loss": 10.85432,
            "grad_norm": 8.214,
            "lr": 3e-4,
            "step_time_s": 0.8124,
            "consumed_samples": 640,
            "loader_position": 640,
            "tflops": 391.7,
            "loss_scale": 1.0,
            "global_batch_size": 64.0,
            "skipped_steps": 0,
            "skipped": False,
        }
        assert first[1] == pytest.approx(expected)

    def test_a_step_that_goes_back_is_a_new_attempt(self):
        events = events_of("megatron", attempt=4)
        kinds = [event["type"] for event in events]
        at = kinds.index("attempt.launched")
        assert events[at]["attempt"] == 5
        assert events[at]["data"]["reason"] == "the step went from 50 to 30"
        assert {event["attempt"] for event in events[:at]} == {4}
        assert [(event["step"], event["attempt"]) for event in events[at + 1 :]] == [(30, 5), (40, 5)]

    def test_an_evaluation_is_no_training_step(self):
        assert (20, {"eval_loss": 9.401002}) in steps(events_of("megatron"))

    def test_the_error_between_two_attempts_is_told_with_its_rank(self):
        (error,) = [event for event in events_of("megatron") if event["type"] == "process.error"]
        assert error["rank"] == 7
        assert error["data"]["message"] == "RuntimeError: loss is not finite for 20 iterations"
        assert "pretrain.py" in error["data"]["traceback"]

    def test_the_scale_search_is_no_incident_and_nan_iterations_are_one(self):
        events = events_of("megatron-fp16")
        found = dict(steps(events))
        assert [found[step]["skipped_steps"] for step in found] == [10, 7, 0, 10, 0]
        assert found[10]["skipped"] is True
        assert "loss" not in found[10]  # every update was dropped: nothing to average
        assert "skipped" not in found[20]  # 7 of 10: neither true nor false of one step
        assert found[40]["skipped"] is True
        assert "loss" not in found[40]
        assert "grad_norm" not in found[30]  # 0.000 is "not computed"
        assert judged(events) == {50: "halt"}
        counter = SkipCounter(Policy().nonfinite)
        told = [one for event in on_the_wire(events)[:3] for one in counter.update(seen_in_event(event))]
        assert told == []

    def test_every_dialect_gives_one_record_and_its_own_loss(self):
        found = steps(events_of("megatron-dialects"))
        assert [(step, data["loss"], data["step_time_s"]) for step, data in found] == [
            (11, 10.9221, 61.25),
            (12, 10.812, 4.383),
            (13, 10.645, 7.2),
        ]
        assert "loss_scale" not in found[0][1]
        assert found[2][1]["mtp_1_loss"] == 10.91

    def test_the_last_rank_prints_so_another_nodes_silence_is_none(self):
        assert events_of("megatron-dialects")[0]["node"] == "node-14"


class TestDeepSpeed:
    def test_overflows_of_three_generations_are_dropped_updates_without_a_culprit(self):
        dropped = [event for event in events_of("deepspeed") if event["type"] == "skip"]
        assert [event["data"]["attempted_loss_scale"] for event in dropped] == [4096, 4096, 2048]
        assert not any("rank" in event for event in dropped)

    def test_the_running_count_of_skips_is_turned_into_one_per_interval(self):
        counts = [
            data["skipped_steps"] for _, data in steps(events_of("deepspeed")) if "skipped_steps" in data
        ]
        assert counts == [3, 1]

    def test_a_nan_loss_holds_and_counter_and_loss_are_one_step(self):
        events = events_of("deepspeed")
        assert [(step, data.get("loss")) for step, data in steps(events)[:2]] == [(20, None), (20, 8.213)]
        assert judged(events) == {40: "halt"}


class TestTorchtitan:
    def test_colours_commas_and_percentages_are_no_hindrance(self):
        step, data = steps(events_of("torchtitan"))[1]
        assert step == 10
        assert data == {
            "loss": 9.7433,
            "grad_norm": 2.205,
            "memory_gib": 41.2,
            "tps": 41870,
            "tflops": 312.44,
            "mfu_percent": 31.59,
        }

    def test_two_ranks_that_print_the_same_are_one_run_and_no_restart(self):
        events = events_of("torchtitan")
        assert [step for step, data in steps(events) if "eval_loss" not in data] == [1, 10, 20, 30]
        assert not [event for event in events if event["type"] == "attempt.launched"]

    def test_a_nan_holds_and_a_validation_does_not_stand_for_it(self):
        assert judged(events_of("torchtitan")) == {30: "halt"}

    def test_minus_one_is_a_stage_without_loss_and_the_stage_with_one_is_heard(self):
        events = events_of("torchtitan-pipeline")
        assert [data.get("loss") for _, data in steps(events)] == [None, None, 9.512]
        assert judged(events) == {}


class TestNemo:
    def test_the_step_is_global_step_and_nothing_else(self):
        assert [step for step, _ in steps(events_of("nemo"))] == [199, 249, 299, 911, 912]

    def test_a_repeated_validation_loss_is_no_new_measurement(self):
        told = [data.get("val_loss") for _, data in steps(events_of("nemo"))]
        assert told == [None, None, 3.902, None, None]

    def test_a_rounded_counter_is_left_out(self):
        assert [data.get("consumed_samples") for _, data in steps(events_of("nemo"))] == [
            25600,
            32000,
            38400,
            None,
            None,
        ]

    def test_a_nan_holds(self):
        assert judged(events_of("nemo")) == {299: "halt"}


class TestOlmo:
    def test_lines_below_a_header_are_one_record(self):
        found = steps(events_of("olmo"))
        assert [step for step, _ in found] == [1, 10, 20, 30]
        assert found[1][1]["loss"] == 10.02
        assert found[1][1]["grad_norm"] == 3.411
        assert found[1][1]["lr"] == 4e-05
        assert found[1][1]["throughput_total_tokens"] == 4_194_304

    def test_a_dropped_step_is_told_and_only_the_nan_holds(self):
        events = events_of("olmo")
        dropped = {step: data.get("skipped_steps") for step, data in steps(events)}
        assert dropped == {1: 0, 10: 0, 20: 1, 30: 0}
        assert judged(events) == {30: "halt"}

    def test_the_last_record_is_told_when_nothing_follows(self):
        log = TrainingLog()
        told = [event for line in lines_of("olmo")[:7] for event in log.feed(line)]
        assert told == []
        assert log.is_open
        assert [event["step"] for event in log.flush()] == [1]


class TestHuggingFace:
    def test_the_gradient_norm_tells_before_the_loss_is_zero(self):
        events = events_of("huggingface")
        assert judged(events) == {3: "halt", 4: "halt"}

    def test_records_are_counted_and_that_is_said(self):
        found = [one for one in steps(events_of("huggingface", logging_steps=10)) if "loss" in one[1]]
        assert [step for step, _ in found] == [10, 20, 30, 40]
        assert all("counted" in data["note"] for _, data in found)

    def test_a_step_that_is_printed_is_taken(self):
        (event,) = read_lines(['{"loss": 2.5, "grad_norm": 1.0, "learning_rate": 1e-05, "step": 70}'])
        assert event["step"] == 70
        assert "note" not in event["data"]

    def test_evaluation_and_summary_are_no_steps(self):
        evaluated = [one for one in steps(events_of("huggingface")) if "eval_loss" in one[1]]
        assert [step for step, _ in evaluated] == [2]
        assert len(steps(events_of("huggingface"))) == 5


class TestSimple:
    def test_a_sentence_is_a_value(self):
        found = steps(events_of("simple"))
        assert [step for step, _ in found] == [801, 802, 803, 2040]
        assert judged(events_of("simple")) == {802: "halt"}

    def test_a_nan_in_the_running_mean_is_an_earlier_steps(self):
        data = steps(events_of("simple"))[-1][1]
        assert data["grad_norm"] == 0.512
        assert math.isnan(data["grad_norm_running_mean"])
        assert "an earlier step" in data["note"]


class TestFailures:
    def test_interleaved_tracebacks_keep_their_ranks(self):
        errors = [one for one in events_of("failures") if one["data"].get("class") == "exception"]
        assert [(one["rank"], one["data"]["message"].split(":")[0]) for one in errors] == [
            (2, "torch.OutOfMemoryError"),
            (5, "ValueError"),
        ]

    def test_each_kind_is_told_once_and_warnings_are_left_alone(self):
        events = events_of("failures")
        told = [(one["data"].get("class"), one.get("rank"), one.get("node")) for one in events[2:]]
        assert told == [
            ("device", None, None),
            ("nccl_timeout", 0, None),
            ("fabric", None, "node-21"),
            ("distributed", 14, None),
            (None, 6, None),
            ("rerun", 6, "node-09"),
            ("worker_failed", 14, "node-09"),
        ]
        assert not any("700" in str(one) for one in events)

    def test_megatrons_own_verdict_names_rank_step_and_phase(self):
        (event,) = [one for one in on_the_wire(events_of("failures")) if one.type == "step"]
        assert (event.step, event.rank, event.data["nonfinite"], event.view) == (311, 6, 2, "local")
        assert [finding.severity for finding in judge_event(event, Policy())] == ["halt"]

    def test_a_killed_worker_has_exit_code_and_no_traceback(self):
        event = events_of("failures")[-1]
        assert event["data"]["exitcode"] == -9
        assert event["data"]["message"] == "Signal 9 (SIGKILL) received by PID 4120"

    def test_a_rank_that_fails_for_ever_is_told_a_bounded_number_of_times(self):
        found = read_lines([f"RuntimeError: number {count}" for count in range(2_000)])
        assert len(found) == 500
        assert "more errors" in found[-1]["data"]["note"]


class TestRestarts:
    def test_a_job_that_moved_to_another_node_is_a_new_attempt(self):
        line = " iteration {:8d}/ 900 | elapsed time per iteration (ms): 1.0 | lm loss: 2.0 |"
        told = read_lines([f"node-1: {line.format(50)}", f"node-2: {line.format(40)}"])
        assert [event["type"] for event in told] == ["step", "attempt.launched", "step"]

    def test_what_was_begun_is_ended_after_reading_went_on_elsewhere(self):
        """Memory is all that is kept: a second reader with it goes on in the middle of a record."""
        for name in LOGS:
            whole = events_of(name)
            lines = lines_of(name)
            for at in range(len(lines)):
                first = TrainingLog()
                told = [event for line in lines[:at] for event in first.feed(line)]
                second = TrainingLog(memory=kept(first.memory))
                told += [event for line in lines[at:] for event in second.feed(line)] + second.flush()
                assert encode_events(told) == encode_events(whole), (name, at)


def kept(memory):
    import msgspec

    return msgspec.msgpack.decode(msgspec.msgpack.encode(memory), type=Memory)


class TestLines:
    @pytest.mark.parametrize(
        ("raw", "source", "text"),
        [
            ("[default7]: iteration 1", "[default7]:", "iteration 1"),
            ("[rank0]:[titan] x", "[rank0]:", "[titan] x"),
            ("[rank1]:[rank9]: x", "[rank1]:[rank9]:", "x"),
            ("12: node-1: x y", "12:node-1:", "x y"),
            ("vm-07-14:  iteration 1", "vm-07-14:", " iteration 1"),
            ("loss: 2.5", "", "loss: 2.5"),
            ("step: 3  loss: 2", "", "step: 3  loss: 2"),
        ],
    )
    def test_prefixes(self, raw, source, text):
        line = clean(raw)
        assert (line.source, line.text) == (source, text)

    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("1.5E-04", 1.5e-4),
            ("152,515", 152515.0),
            ("-inf", -math.inf),
            ("Infinity", math.inf),
            ("1e999", math.inf),
        ],
    )
    def test_numbers(self, text, value):
        assert number(text) == value

    @pytest.mark.parametrize("text", ["", "N/A", "--", "1,5", "1_000", "0x1f", "--1", "nano", "１２", "1 2"])
    def test_no_numbers(self, text):
        assert number(text) is None


# --- whatever comes

PIECES = [line for name in LOGS for line in lines_of(name) if line]
VALUES = [
    "nan",
    "inf",
    "-inf",
    "",
    "-",
    "1e999",
    "9" * 400,
    "1,2,3",
    "0x10",
    "１",
    "-1",
    "0.000",
    "\x1b[31m",
    "|",
    "{",
    "'",
]


@st.composite
def torn_lines(draw):
    """A real line, cut, doubled, spliced with another, or with a value replaced."""
    line = draw(st.sampled_from(PIECES))
    how = draw(st.integers(0, 4))
    at = draw(st.integers(0, len(line)))
    if how == 0:
        return line[:at]
    if how == 1:
        return line[at:]
    if how == 2:
        return line[:at] + draw(st.sampled_from(PIECES))[at:]
    if how == 3:
        return re.sub(r"-?\d[\d.,eE+\-]*", lambda _: draw(st.sampled_from(VALUES)), line, count=4)
    return line[:at] + draw(st.text(max_size=8)) + line[at:]


def numbers_in(text):
    """Return every number that stands in a text, also those that end in a letter or a percent sign."""
    return {
        value
        for found in re.findall(r"[+-]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", text)
        for part in {found, found.rstrip(","), *found.split(",")}
        if (value := number(part)) is not None
    }


@pytest.mark.parametrize("name", sorted(READERS))
@given(lines=st.lists(st.one_of(torn_lines(), st.text(max_size=200)), max_size=3))
def test_no_reader_crashes_or_invents_a_number(name, lines):
    _, read = READERS[name]
    for raw in lines:
        line = clean(raw)
        record = read(line)
        if record is None:
            continue
        there = numbers_in(line.text)
        for key, value in record.values.items():
            if math.isfinite(value):
                milliseconds = key == "step_time_s" and any(value == one / 1000 for one in there)
                assert value in there or milliseconds, (key, value, line.text)
        for count in (record.skipped_total, record.nan_steps):
            assert count is None or count in there
        timm = name == "simple" and "Epoch" in line.text  # its step is epoch × length + place
        assert record.step is None or record.step in there or timm


@given(
    lines=st.lists(st.one_of(torn_lines(), st.sampled_from(PIECES), st.text(max_size=300)), max_size=12),
    name=st.sampled_from(FORMATS),
    attempt=st.sampled_from([None, 1, 7]),
)
def test_what_a_log_says_is_always_taken_by_the_server(lines, name, attempt):
    events = read_lines(lines, format=name, attempt=attempt)
    if events:
        assert len(on_the_wire(events)) == len(events)
