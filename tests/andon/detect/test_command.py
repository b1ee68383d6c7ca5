"""`andon detect FILE`: what it reads, what it prints, how it exits."""

import io
import json
import math
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.cli import main
from andon.detect.series import SeriesError, parse, watch
from andon.policy import Policy
from tests.andon.detect.test_spike import noise, worked_example

CASES = Path(__file__).parents[2] / "cases" / "series"
PUBLIC = Path(__file__).parents[4] / "shared" / "cases" / "series"


@pytest.fixture
def detect(tmp_path, capsys):
    """Write a table, run the command on it, return exit code, findings and standard error."""

    def run(content, *options):
        if isinstance(content, Path):
            path = content
        else:
            path = tmp_path / "loss.csv"
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        code = main(["detect", str(path), *options])
        out, err = capsys.readouterr()
        return code, [json.loads(line) for line in out.splitlines()], err

    return run


def table(values, header="step,loss"):
    return "\n".join([header, *(f"{i},{value}" for i, value in enumerate(values))]) + "\n"


class TestFindings:
    def test_the_worked_example_warns_at_1000_and_halts_at_1002(self, detect):
        code, found, _ = detect(table(worked_example(0)))
        assert code == 1
        assert {"kind", "severity", "step", "score", "numbers", "detector", "series"} <= found[0].keys()
        assert (found[0]["severity"], found[0]["step"]) == ("warn", 1000)
        assert next(f["step"] for f in found if f["severity"] == "halt") == 1002
        assert found[0]["score"] == found[0]["numbers"]["z"]

    def test_a_calm_curve_prints_nothing_and_exits_0(self, detect):
        assert detect(table(noise(300))) == (0, [], "")

    @pytest.mark.parametrize("spelling", ["nan", "NaN", "-nan", "inf", "-Inf", "Infinity", "1e999"])
    def test_a_nonfinite_loss_is_a_halt(self, detect, spelling):
        code, found, _ = detect(table([*noise(60), spelling]))
        assert code == 1
        assert [(f["kind"], f["severity"], f["step"], f["score"]) for f in found] == [
            ("nonfinite", "halt", 60, None)
        ]

    def test_a_nonfinite_gradient_norm_is_a_halt(self, detect):
        code, found, _ = detect("step,loss,grad_norm\n5426,,nan\n5427,,nan\n")
        assert code == 1
        assert [f["step"] for f in found if f["severity"] == "halt"] == [5426, 5427]

    def test_blank_cells_and_sentinels_are_not_recorded(self, detect):
        rows = [f"{i},{v},0.000" for i, v in enumerate(noise(100))] + ["100,-1.0,-1", "101,,", "102,null,"]
        code, found, err = detect("step,loss,grad_norm\n" + "\n".join(rows))
        assert code == 0
        assert [(f["kind"], f["series"]) for f in found] == [("not_judged", "grad_norm")]
        assert "grad_norm: not judged: 0 of 50 values" in err

    def test_a_loss_that_is_always_minus_one_is_no_incident(self, detect):
        """Shape of a pipeline stage without the loss."""
        code, found, _ = detect(table([-1.0] * 300))
        assert code == 0
        assert [f["detail"] for f in found] == ["not judged: 0 of 50 values"]

    def test_an_excerpt_shorter_than_the_warm_up_says_so(self, detect):
        code, found, err = detect(table(noise(18)))
        assert code == 0
        assert [(f["kind"], f["severity"], f["detail"]) for f in found] == [
            ("not_judged", "info", "not judged: 18 of 50 values")
        ]
        assert "not judged: 18 of 50 values" in err

    def test_a_gradient_spike_is_found_beside_a_calm_loss(self, detect):
        rows = [f"{i},{v},{0.3 + 0.01 * (i % 7)}" for i, v in enumerate(noise(100))]
        rows[80] = "80,2.0,90"
        code, found, _ = detect("step,loss,grad_norm\n" + "\n".join(rows))
        assert code == 0
        assert [(f["kind"], f["step"]) for f in found] == [("grad_norm_spike", 80)]

    def test_noise_printed_with_two_decimals_is_calm_and_a_spike_in_it_is_not(self, detect):
        values = [f"{2.304 + v - 2:.2f}" for v in noise(300, sigma=0.003)]
        assert detect(table(values)) == (0, [], "")
        code, found, _ = detect(table([*["2.30"] * 60, "2.50", "2.50", "2.50"]))
        assert (code, [f["severity"] for f in found]) == (1, ["warn", "warn", "halt"])
        assert found[0]["numbers"]["mad"] == pytest.approx(0.01)

    def test_thresholds_come_from_a_policy(self, detect, tmp_path):
        policy = tmp_path / "policy.json"
        policy.write_text(json.dumps({"spike": {"warm_up": 10}}))
        code, found, _ = detect(table([*noise(20), 9.0]), "--policy", str(policy))
        assert (code, [f["step"] for f in found]) == (0, [20])


class TestTables:
    def test_columns_in_any_order_with_other_columns_between(self):
        series = parse("lr,Loss,grad norm,Iteration\n1e-4,2.5,0.3,7\n")
        assert series.has_grad_norm
        assert [(r.step, r.loss, r.grad_norm) for r in series.rows] == [(7, 2.5, 0.3)]

    @pytest.mark.parametrize(
        "text", ["1 2.5\n2 2.4\n", "1\t2.5\n2\t2.4", "1,2.5\r\n2,2.4\r\n", "1; 2.5\n2; 2.4\n"]
    )
    def test_two_columns_without_a_header(self, text):
        assert [(r.step, r.loss) for r in parse(text).rows] == [(1, 2.5), (2, 2.4)]

    def test_a_headerless_file_may_begin_with_a_nan(self):
        loss = parse("1 nan\n").rows[0].loss
        assert loss is not None
        assert math.isnan(loss)

    def test_without_a_step_column_records_are_counted_and_that_is_said(self, detect):
        _, found, err = detect("loss\n" + "\n".join(str(v) for v in [*noise(60), "nan"]))
        assert [f["step"] for f in found] == [61]
        assert "no step column" in err

    def test_steps_that_go_back_are_said(self, detect):
        _, _, err = detect(table(noise(60)) + table(noise(60)).split("\n", 1)[1])
        assert "did not grow 1 times" in err

    def test_comments_blank_lines_quotes_and_a_byte_order_mark(self):
        text = '\ufeff# a comment\n\n"step","train/loss"\n"3","2.5"\n\n'
        assert [(r.line, r.step, r.loss) for r in parse(text).rows] == [(4, 3, 2.5)]

    def test_steps_may_be_written_as_floats(self):
        assert [r.step for r in parse("step,loss\n10.0,1\n1e3,1\n").rows] == [10, 1000]

    def test_the_own_case_without_header(self, detect):
        code, found, _ = detect(CASES / "headerless.txt")
        assert (code, [f["kind"] for f in found]) == (0, ["not_judged"])


class TestUnreadable:
    @pytest.mark.parametrize(
        ("content", "says"),
        [
            (b"", ["line 1"]),
            (b"step,loss\n", ["line 1", "no record"]),
            (b"step,accuracy\n1,2\n", ["line 1", "loss", "accuracy"]),
            (b"step,loss\n1,2\n2,abc\n", ["line 3", "column loss", "'abc'"]),
            (b"step,loss\n1,2\n2,1_000\n", ["line 3", "column loss"]),
            (b"step,loss\n1.5,2\n", ["line 2", "column step", "'1.5'"]),
            (b"step,loss\n,2\n", ["line 2", "column step"]),
            (b"step,loss\nnan,2\n", ["line 2", "column step"]),
            (b"step,loss\n-1,2\n", ["line 2", "column step", "-1"]),
            (b"step,loss\n9223372036854775808,2\n", ["line 2", "column step"]),
            (b"step,loss\n99999999999999999999999,2\n", ["line 2", "column step"]),
            (b"step,loss,grad_norm\n1,2,x\n", ["line 2", "column grad_norm"]),
            (b"step,loss\n1,2,3\n", ["line 2", "3 columns"]),
            (b"step,loss,loss\n1,2,3\n", ["line 1", "two columns"]),
            (b"1 2 3\n", ["line 1", "3 columns", "header"]),
            (b"step,loss\n1,\xff\xfe\n", ["line 2", "UTF-8"]),
            (b'step,loss\n1,"2\n', ["line 2"]),
        ],
    )
    def test_exit_2_with_the_line_and_the_column(self, detect, content, says):
        code, found, err = detect(content)
        assert (code, found) == (2, [])
        for words in says:
            assert words in err
        assert "loss.csv" in err

    def test_a_missing_file_and_a_directory(self, detect, tmp_path):
        for path in (tmp_path / "absent.csv", tmp_path):
            code, found, err = detect(path)
            assert (code, found) == (2, [])
            assert str(path) in err

    def test_a_policy_that_is_none(self, detect, tmp_path):
        policy = tmp_path / "policy.json"
        policy.write_text('{"spike": {"windw": 3}}')
        code, _, err = detect(table(noise(60)), "--policy", str(policy))
        assert code == 2
        assert "policy.json" in err
        assert "windw" in err

    @given(st.text(max_size=200))
    def test_any_text_is_read_or_refused_with_its_line(self, text):
        refusal, series = "", None
        try:
            series = parse(text)
        except SeriesError as error:
            refusal = str(error)
        assert (series is None) == refusal.startswith("line ")
        if series is not None:
            assert series.rows
            for finding in watch(series, Policy()):
                json.dumps(finding.to_document(), allow_nan=False)


def test_standard_input_is_read(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"step,loss\n1,nan\n")))
    assert main(["detect", "-"]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[0])["step"] == 1


class TestPublicRuns:
    def test_two_spikes_that_recovered_are_warnings(self, detect):
        code, found, _ = detect(CASES / "moe_spikes_recover.csv")
        assert code == 0
        # 3855 is the second half of the spike at 3850; with the longer history of the whole run it passes.
        assert [(f["severity"], f["step"]) for f in found] == [("warn", 3800), ("warn", 3850), ("warn", 3855)]

    @pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public series lie beside the repository, not in it")
    def test_the_three_spikes_of_the_mixtral_series_and_no_halt(self, detect):
        code, found, _ = detect(PUBLIC / "megatron_mixtral8x7b_dev_h100.csv")
        assert code == 0
        assert [(f["severity"], f["step"]) for f in found] == [("warn", 3800), ("warn", 3850), ("warn", 4260)]

    @pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public series lie beside the repository, not in it")
    @pytest.mark.parametrize("name", ["megatron_gpt3_15b_dev_h100.csv", "megatron_bert_lts_a100.csv"])
    def test_the_negative_controls_give_no_halt(self, detect, name):
        code, found, _ = detect(PUBLIC / name)
        assert (code, found) == (0, [])

    @pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public series lie beside the repository, not in it")
    @pytest.mark.parametrize("name", ["bigscience_tr11_176B_excerpts.csv", "bigscience_tr1_13B_excerpts.csv"])
    def test_excerpts_are_not_judged(self, detect, name):
        code, found, err = detect(PUBLIC / name)
        assert code == 0
        assert {f["kind"] for f in found if f["series"] == "loss"} == {"not_judged"}
        assert "of 50 values" in err
