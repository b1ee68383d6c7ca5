"""Gradient norm: one-step, sustained, creep, level shift and collapse are told apart, and only warn."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from andon.detect.grad_norm import GradNorm
from andon.policy import SpikeRules

RULES = SpikeRules()


def usual(n, level=0.3, sigma=0.1, seed=0):
    """Log-normal noise around `level`, as gradient norms have it."""
    return (level * np.exp(np.random.default_rng(seed).normal(0, sigma, n))).tolist()


def run(values, detector=None, first_step=0):
    detector = detector or GradNorm(RULES)
    return [f for i, value in enumerate(values, start=first_step) for f in detector.update(i, value)]


def said(values, **kwargs):
    return [(f.step, f.kind) for f in run(values, **kwargs)]


class TestKinds:
    def test_a_one_step_spike(self):
        assert said([*usual(200), 30.0, *usual(100, seed=1)]) == [(200, "grad_norm_spike")]

    def test_a_sustained_spike_from_the_third_value_on(self):
        found = said([*usual(200), *[30.0] * 5, *usual(100, seed=1)])
        assert found == [
            (200, "grad_norm_spike"),
            (201, "grad_norm_spike"),
            (202, "grad_norm_sustained"),
            (203, "grad_norm_sustained"),
            (204, "grad_norm_sustained"),
        ]

    def test_the_growth_that_announced_a_published_nan_is_seen_as_creep(self):
        """Shape of a run whose norm crept up over ten steps before an overflow."""
        creep = [0.3 * 1.09**i for i in range(1, 12)]
        kinds = {kind for _, kind in said([*usual(200), *creep])}
        assert "grad_norm_creep" in kinds

    def test_a_rise_too_slow_for_any_single_value_is_creep_and_told_once(self):
        slow = (0.3 * np.exp(np.arange(600) / 200 + np.random.default_rng(3).normal(0, 0.1, 600))).tolist()
        assert [kind for _, kind in said([*usual(200), *slow])] == ["grad_norm_creep"]

    def test_a_level_shift_after_fifty_stable_values(self):
        found = run([*usual(200), *usual(300, level=5.0, seed=1)])
        [shift] = [f for f in found if f.kind == "grad_norm_level_shift"]
        assert shift.step == 249
        assert shift.numbers["new_median"] == pytest.approx(5.0, rel=0.1)
        assert not [f for f in found if f.step > 249]

    @pytest.mark.parametrize("value", [0.0, 1e-9])
    def test_a_collapse_to_zero_is_told_once_at_the_third_value(self, value):
        assert said([*usual(200), *[value] * 30]) == [(202, "grad_norm_collapse")]

    def test_two_zeros_are_no_collapse(self):
        assert said([*usual(200), 0.0, 0.0, *usual(50, seed=1), 0.0]) == []

    def test_ordinary_noise_says_nothing_in_twenty_thousand_steps(self):
        assert run(usual(20_000, seed=7)) == []

    def test_an_ordinary_decline_during_training_says_nothing(self):
        decline = (2.0 * np.exp(-np.arange(3000) / 800)).clip(0.2)
        noise = np.exp(np.random.default_rng(5).normal(0, 0.1, 3000))
        assert run((decline * noise).tolist()) == []

    def test_the_gradient_norm_alone_never_halts(self):
        """Shape of BLOOM-176B: 0.24 → 960 within seven steps, recovered without a rollback."""
        found = run(
            [*usual(200, level=0.24), 0.95, 2.4, 16.0, 145.0, 960.0, 40.0, 0.3, *usual(50, level=0.25)]
        )
        assert found[0].step == 200
        assert {f.severity for f in found} == {"warn"}
        assert "grad_norm_sustained" in {f.kind for f in found}


class TestRounded:
    def test_a_norm_that_moves_by_its_last_digit_is_no_spike(self):
        values = np.round(usual(2_000, level=0.31, sigma=0.012), 2).tolist()
        assert len(set(values)) > 1
        assert run(values) == []

    def test_a_spike_among_rounded_norms_is_one(self):
        assert said([*[0.31] * 200, 0.9, 0.31]) == [(200, "grad_norm_spike")]


class TestNotMeasured:
    def test_a_logger_without_the_norm_writes_zero_and_is_never_judged(self):
        detector = GradNorm(RULES)
        assert run([0.0] * 500, detector) == []
        assert (len(detector.baseline), detector.judged) == (0, 0)

    @pytest.mark.parametrize("value", [None, -1.0, math.nan, math.inf])
    def test_it_changes_nothing(self, value):
        detector = GradNorm(RULES)
        run(usual(100), detector)
        before = detector.state()
        assert detector.update(100, value) == []
        assert detector.state() == before


class TestTooFewValues:
    def test_a_huge_norm_among_few_is_a_spike_by_itself(self):
        """Shape of a short Hugging Face log: flat loss, norms around ten, then eleven thousand."""
        found = run([15.0, 9.8, 7.6, 92.1, 29.0, 5.2, 7.8, 7.8, 11_140.0], first_step=1)
        assert [(f.step, f.kind, f.severity) for f in found] == [(9, "grad_norm_spike", "warn")]
        assert found[0].score is None
        assert found[0].numbers["n"] == 8

    def test_large_norms_from_the_start_are_no_spike(self):
        assert run([4000.0, 2500.0, 1800.0, 1500.0, 1900.0, 1200.0, 1100.0]) == []


def test_a_finding_carries_its_numbers_in_log_and_in_plain():
    [finding] = run([*usual(200), 30.0])
    numbers = finding.numbers
    assert numbers["median"] == pytest.approx(math.exp(numbers["log_median"]))
    assert finding.score == pytest.approx(
        (math.log(30.0) - numbers["log_median"]) / (1.4826 * numbers["log_mad"])
    )
    assert (finding.rule, finding.series, finding.detector_version) == ("grad_norm", "grad_norm", 1)
    json.dumps(finding.to_document(), allow_nan=False)


def test_reset_begins_a_new_warm_up():
    detector = GradNorm(RULES)
    run(usual(100), detector)
    detector.reset()
    assert run(usual(49, level=50.0), detector) == []


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 299))
def test_a_detector_restored_from_json_gives_the_same_verdicts(seed, cut):
    rng = np.random.default_rng(seed)
    spikes = np.where(rng.random(300) < 0.05, 200.0, 1.0) * np.where(rng.random(300) < 0.05, 0.0, 1.0)
    values = (np.array(usual(300, seed=seed)) * spikes * np.exp(np.arange(300) / 150)).tolist()
    whole, first = GradNorm(RULES), GradNorm(RULES)
    expected = run(values, whole)
    got = run(values[:cut], first)
    second = GradNorm.restore(RULES, json.loads(json.dumps(first.state())))
    got += run(values[cut:], second, first_step=cut)
    assert got == expected
    assert second.state() == whole.state()
