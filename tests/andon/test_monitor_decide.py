"""What the agreed numbers of a step mean. No torch: the same code decides on every rank and on the server."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.monitor_decide import Agreed, Decider
from andon.policy import DEFAULT_MODES, Policy


def decider(*, acting=True, guard="skip", first_step=None, previous_scale=None, **modes):
    policy = Policy(modes=DEFAULT_MODES | modes)
    return Decider(policy, acting=acting, guard=guard, first_step=first_step, previous_scale=previous_scale)


def bad(step, **numbers):
    return Agreed(step=step, loss=2.0, nonfinite_ranks=1, reduced_ranks=4, **numbers)


class TestNonfinite:
    def test_one_is_dropped_the_second_in_a_row_halts(self):
        one = decider()
        first, second = one.decide(bad(7)), one.decide(bad(8))
        assert (first.skip, first.halt) == (True, False)
        assert [finding.severity for finding in first.findings] == ["warn"]
        assert (second.skip, second.halt) == (True, True)
        assert "2 in a row" in second.reason

    def test_three_within_a_hundred_steps_halt(self):
        one = decider()
        for step in range(1, 90):
            decision = one.decide(bad(step) if step in (10, 40, 80) else Agreed(step=step, loss=2.0))
            assert decision.halt is (step == 80)

    def test_an_overflow_of_the_reduce_alone_is_dropped_too(self):
        decision = decider().decide(Agreed(step=1, loss=2.0, reduced_ranks=4))
        assert decision.skip
        assert "after the reduce" in decision.reason

    def test_nonfinite_moments_halt_at_once(self):
        decision = decider().decide(Agreed(step=1, loss=2.0, state_ranks=1))
        assert (decision.skip, decision.halt) == (True, True)

    @pytest.mark.parametrize("how", [{"acting": False}, {"nonfinite": "observe"}])
    def test_under_observe_nothing_is_dropped_and_it_says_what_would_have_been(self, how):
        one = decider(**how)
        first, second = one.decide(bad(1)), one.decide(bad(2))
        assert not any((first.skip, first.halt, second.skip, second.halt))
        assert (first.would, second.would) == ("skip", "halt")

    def test_without_the_guard_every_decision_is_the_servers(self):
        one = decider(guard="off")
        for step in range(1, 5):
            decision = one.decide(bad(step, state_ranks=4))
            assert (decision.skip, decision.halt) == (False, False)


class TestScaler:
    def test_it_skips_under_every_mode_and_twenty_in_a_row_halt(self):
        for one in (decider(), decider(acting=False)):
            decisions = [one.decide(bad(step, loss_scale=1024.0)) for step in range(200, 221)]
            assert all(decision.skip for decision in decisions)
            assert [d.halt for d in decisions].index(True) == 19 if one.nonfinite_acts else True

    def test_its_search_in_the_first_hundred_steps_is_exempt(self):
        one = decider()
        assert not any(one.decide(bad(step, loss_scale=2.0)).findings for step in range(1, 40))


class TestSpike:
    def rise(self, one):
        for step in range(1, 61):
            one.decide(Agreed(step=step, loss=2.0 + 0.001 * (step % 5)))
        return [one.decide(Agreed(step=step, loss=5.0)) for step in range(61, 64)]

    def test_the_third_strike_halts_where_the_rule_acts(self):
        assert [d.halt for d in self.rise(decider(spike="act"))] == [False, False, True]

    def test_by_default_it_observes(self):
        decisions = self.rise(decider())
        assert not any(d.halt or d.skip for d in decisions)
        assert decisions[-1].would == "halt"

    def test_after_a_declared_boundary_there_is_none(self):
        one = decider(spike="act")
        for step in range(1, 61):
            one.decide(Agreed(step=step, loss=2.0 + 0.001 * (step % 5)))
        one.boundary()
        assert not any(one.decide(Agreed(step=step, loss=5.0)).findings for step in range(61, 90))


class TestCorruption:
    @pytest.mark.parametrize(("mode", "halts"), [("act", True), ("observe", False)])
    def test_a_suspicion_halts_where_the_rule_acts(self, mode, halts):
        decision = decider(corruption=mode).decide(Agreed(step=1, loss=2.0, suspects=4))
        assert decision.halt is halts
        assert decision.findings[0].kind == "corruption"


agreements = st.builds(
    Agreed,
    step=st.just(0),
    loss=st.one_of(st.floats(1.9, 2.1), st.just(9.0), st.just(math.nan)),
    nonfinite_ranks=st.sampled_from([0, 0, 0, 0, 1]),
    reduced_ranks=st.sampled_from([0, 0, 0, 4]),
    nonfinite_losses=st.sampled_from([0, 0, 1]),
    loss_scale=st.sampled_from([None, None, 8.0]),
)


@given(st.lists(agreements, min_size=1, max_size=80), st.integers(0, 80))
def test_a_decider_restored_in_the_middle_decides_the_same(listed, cut):
    """All ranks must agree after a restore, so the memory must come back whole."""
    import msgspec

    steps = [msgspec.structs.replace(one, step=n) for n, one in enumerate(listed, start=1)]
    whole, first, second = (decider(spike="act") for _ in range(3))
    expected = [whole.decide(one) for one in steps]
    got = [first.decide(one) for one in steps[:cut]]
    second.load(msgspec.json.decode(msgspec.json.encode(first.state())))
    got += [second.decide(one) for one in steps[cut:]]
    assert repr(got) == repr(expected)
