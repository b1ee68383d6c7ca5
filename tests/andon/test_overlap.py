"""The steps two attempts both ran: bit-equal, within the run's own noise, or different from a step on."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.overlap import compare, noise


def curve(first, last, *, seed=1, sigma=0.02, offset=0.0, jitter=0.0):
    """A falling loss with noise of its own; `jitter` is what a replay on other kernels adds."""
    own, other = random.Random(seed), random.Random(seed + 100)
    values = {step: 2.6 + 1.2 * math.exp(-step / 400) + own.gauss(0, sigma) for step in range(1, last + 1)}
    return {step: value + offset + other.gauss(0, jitter) for step, value in values.items() if step >= first}


def test_the_noise_is_that_of_the_steps_not_of_the_trend():
    assert noise([*curve(300, 600).values()]) == pytest.approx(0.02, rel=0.25)
    assert noise([1.0] * 5) is None
    assert noise([2.3] * 50) == 1e-8
    assert noise([2.5, 2.5078125] * 25) == 1 / 128  # bf16


def test_a_replay_on_deterministic_kernels_is_bit_equal():
    found = compare(curve(700, 1002), curve(901, 1100), after=900, until=1000)
    assert (found.outcome, found.first, found.last, found.steps) == ("equal", 901, 999, 99)
    assert "bit-equal over 99 common steps, 901 to 999" in found.says()


def test_a_replay_that_differs_by_less_than_the_noise_is_within():
    found = compare(curve(700, 1002), curve(901, 1100, jitter=0.004), after=900, until=1000)
    assert found.outcome == "within"
    assert found.noise == pytest.approx(0.02, rel=0.3)
    assert 0 < found.largest < 4 * found.noise


def test_the_first_step_that_differs_is_named():
    new = curve(901, 1100)
    new |= {step: value + 0.5 for step, value in new.items() if step >= 950}
    found = compare(curve(700, 1002), new, after=900, until=1000)
    assert (found.outcome, found.differs_from) == ("differs", 950)
    assert "differs from step 950 on" in found.says()
    assert found.typical == pytest.approx(0.5)


def test_other_data_is_not_called_a_difference():
    found = compare(
        curve(700, 1002), curve(901, 1100, seed=2, offset=0.3), after=900, until=1000, other="other data"
    )
    assert (found.outcome, found.differs_from) == ("not_comparable", None)
    assert found.typical == pytest.approx(0.3, abs=0.02)
    assert "loss on other data" in found.says()


def test_bad_steps_and_nonfinite_values_are_not_compared():
    old = curve(700, 1002) | {1000: None, 1001: 9.0}
    found = compare(old, curve(901, 1100) | {905: None}, after=900, until=1000)
    assert (found.steps, found.last, found.outcome) == (98, 999, "equal")


def test_without_a_common_step_nothing_is_said():
    found = compare(curve(1, 100), curve(200, 300), after=150, until=None)
    assert (found.steps, found.outcome) == (0, "not_known")
    assert "no step was run by both" in found.says()


def test_too_few_steps_have_no_noise():
    found = compare({1: 2.0, 2: 2.1}, {2: 2.2}, after=1, until=None)
    assert (found.outcome, found.noise) == ("not_known", None)
    assert "too few steps" in found.says()


losses = st.dictionaries(st.integers(0, 40), st.none() | st.floats(-9, 9), max_size=40)


@given(
    losses, losses, st.integers(0, 40), st.none() | st.integers(0, 41), st.sampled_from(["", "other data"])
)
def test_any_two_curves_have_a_comparison_that_can_be_said(old, new, after, until, other):
    found = compare(old, new, after=after, until=until, other=other)
    common = [
        step
        for step in old.keys() & new.keys()
        if step > after and (until is None or step < until) and None not in (old[step], new[step])
    ]
    assert found.steps == len(common)
    assert found.says()
    if common:
        assert found.largest == max(abs(new[step] - old[step]) for step in common)
