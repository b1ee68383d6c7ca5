"""Skipped updates: counted, warned of, and held when they are too many."""

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from andon.detect.nonfinite import SkipCounter, seen_in_event, seen_in_frame
from andon.detect.skips import SkipClass, StepSeen
from andon.policy import NonfiniteRules
from tests.andon.detect.shapes import block, event, frame

NAN, INF = math.nan, math.inf
RULES = NonfiniteRules()


def run(counter, steps):
    """Post steps given as (step, fields) and return (step, kind, severity) of every finding."""
    found = []
    for step, fields in steps:
        found += [
            (f.step, f.kind, f.severity) for f in counter.update(seen_in_event(event(step=step, **fields)))
        ]
    return found


def clean(first, last):
    return [(step, {"loss": 2.0, "grad_norm": 0.5}) for step in range(first, last)]


def overflow(step, scale=1024.0):
    return (step, {"loss": 2.0, "grad_norm": INF, "loss_scale": scale, "skipped": True})


class TestWithoutAScaler:
    def test_one_skipped_nonfinite_step_is_a_warning(self):
        steps = [*clean(500, 510), (510, {"loss": NAN, "skipped": True}), *clean(511, 700)]
        assert run(SkipCounter(RULES), steps) == [(510, "nonfinite_skipped", "warn")]

    def test_two_in_a_row_hold(self):
        steps = [(s, {"grad_norm": NAN, "skipped": True}) for s in (510, 511)]
        assert [f[2] for f in run(SkipCounter(RULES), [*clean(500, 510), *steps])] == ["warn", "halt"]

    def test_three_within_a_hundred_steps_hold(self):
        bad = {510, 550, 609}
        steps = [(s, {"loss": NAN, "skipped": True} if s in bad else {"loss": 2.0}) for s in range(500, 620)]
        assert run(SkipCounter(RULES), steps) == [
            (510, "nonfinite_skipped", "warn"),
            (550, "nonfinite_skipped", "warn"),
            (609, "nonfinite_skipped", "halt"),
        ]

    def test_three_within_a_hundred_and_one_steps_do_not(self):
        bad = {510, 550, 610}
        steps = [(s, {"loss": NAN, "skipped": True} if s in bad else {"loss": 2.0}) for s in range(500, 620)]
        assert {f[2] for f in run(SkipCounter(RULES), steps)} == {"warn"}

    def test_in_a_row_runs_over_the_steps_that_were_posted(self):
        steps = [(s, {"loss": NAN, "skipped": True}) for s in (510, 520)]
        assert run(SkipCounter(RULES), steps)[-1][2] == "halt"

    def test_sixty_four_ranks_posting_one_step_count_once(self):
        counter = SkipCounter(RULES)
        found = []
        for rank in range(64):
            found += counter.update(seen_in_event(event(step=510, rank=rank, nonfinite=4 | 64)))
        assert [f.severity for f in found] == ["warn"]
        assert found[0].lanes == (0,)

    def test_a_skip_event_counts_when_its_reason_is_a_nonfinite_value(self):
        counter = SkipCounter(RULES)
        [warn] = counter.update(seen_in_event(event("skip", step=7, reason="nonfinite gradient")))
        assert warn.severity == "warn"
        assert seen_in_event(event("skip", step=8, reason="finance corpus window")) is None

    def test_a_skip_that_names_nothing_nonfinite_is_not_judged(self):
        assert (
            run(SkipCounter(RULES), [(500, {"loss": 2.0, "skipped": True}), (501, {"skipped": True})]) == []
        )


class TestUnderAScaler:
    def test_the_search_at_the_start_of_a_run_is_benign(self):
        """Shape of a Megatron start: 19 of the first 30 updates skipped, without loss or norm."""
        scale, steps = 2.0**32, []
        for step in range(1, 200):
            skipped = step <= 18 or step == 21
            scale = scale / 2 if skipped else scale
            fields = {"loss_scale": scale, "skipped": skipped}
            steps.append((step, fields if skipped else {**fields, "loss": 9.0, "grad_norm": 12.0}))
        assert run(SkipCounter(RULES), steps) == []

    def test_about_one_overflow_per_growth_interval_is_normal(self):
        calm = {"loss": 2.0, "loss_scale": 1024.0}
        steps = [overflow(step) if step % 2000 == 0 else (step, calm) for step in range(101, 8000)]
        assert run(SkipCounter(RULES, attempt_first_step=1), steps) == []

    def test_above_five_percent_of_two_hundred_steps_is_a_warning_once(self):
        steps = []
        for step in range(1000, 1400):
            bad = step % 15 == 0
            steps.append(overflow(step) if bad else (step, {"loss": 2.0, "loss_scale": 1024.0}))
        found = run(SkipCounter(RULES, attempt_first_step=1), steps)
        assert [(kind, severity) for _, kind, severity in found] == [("scaler_overflows", "warn")]

    def test_exactly_five_percent_is_not_above(self):
        skipped = set(range(1000, 1200, 20))  # ten of two hundred
        steps = [
            overflow(s) if s in skipped else (s, {"loss": 2.0, "loss_scale": 1024.0})
            for s in range(1000, 1200)
        ]
        assert run(SkipCounter(RULES, attempt_first_step=1), steps) == []

    def test_an_overflow_at_the_floor_of_the_scale_is_a_warning(self):
        [finding] = SkipCounter(RULES, attempt_first_step=1).update(
            seen_in_event(event(step=900, grad_norm=INF, loss=2.0, loss_scale=1.0, skipped=True))
        )
        assert (finding.kind, finding.severity) == ("scaler_at_floor", "warn")

    def test_twenty_in_a_row_hold(self):
        found = run(SkipCounter(RULES, attempt_first_step=1), [overflow(s) for s in range(900, 920)])
        assert found[-1] == (919, "scaler_overflows", "halt")
        assert [f[2] for f in found].count("halt") == 1

    def test_a_nonfinite_loss_under_a_scaler_is_no_overflow(self):
        fields = {"loss": NAN, "loss_scale": 1024.0, "skipped": True}
        found = run(SkipCounter(RULES), [(10, fields), (11, fields)])
        assert [f[2] for f in found] == ["warn", "halt"]

    def test_a_scale_of_minus_one_is_no_scaler(self):
        seen = seen_in_event(event(step=500, grad_norm=INF, loss_scale=-1.0, skipped=True))
        assert seen is not None
        assert seen.loss_scale is None
        assert SkipCounter(RULES).update(seen)[0].kind == "nonfinite_skipped"


class TestAfterARestart:
    def test_a_new_search_says_that_the_scaler_was_not_restored(self):
        steps = [overflow(5001 + i, 65536.0 / 2**i) for i in range(6)]
        steps += [(s, {"loss": 2.0, "loss_scale": 1024.0}) for s in range(5007, 5100)]
        assert run(SkipCounter(RULES), steps) == [(5002, "scaler_not_restored", "warn")]

    def test_one_overflow_after_a_restart_says_nothing(self):
        steps = [(5000, {"loss": 2.0, "loss_scale": 4096.0}), overflow(5001)]
        assert run(SkipCounter(RULES), steps) == []

    def test_a_scale_far_above_the_last_one_says_it_at_once(self):
        counter = SkipCounter(RULES, attempt_first_step=5001, previous_scale=1024.0)
        found = run(counter, [(5001, {"loss": 2.0, "loss_scale": 65536.0})])
        assert found == [(5001, "scaler_not_restored", "warn")]

    def test_a_scale_that_grew_once_since_the_checkpoint_is_ordinary(self):
        counter = SkipCounter(RULES, attempt_first_step=5001, previous_scale=1024.0)
        assert run(counter, [(5001, {"loss": 2.0, "loss_scale": 2048.0})]) == []

    def test_overflows_long_after_the_restart_are_ordinary(self):
        steps = [*clean(5000, 5300), overflow(5300), overflow(5301), overflow(5302)]
        assert run(SkipCounter(RULES), steps) == []


class TestFrames:
    def test_bit_64_of_any_rank_skips_the_step_for_all(self):
        rows = {"step": [7, 7, 8, 8], "lane": [0, 1, 0, 1], "nonfinite": [4, 8 | 64, 0, 0]}
        seen = seen_in_frame(frame(rows))
        assert [(s.step, s.skipped, s.what) for s in seen] == [
            (7, True, SkipClass.GRADIENT),
            (8, False, SkipClass.NOT_SAID),
        ]
        assert seen[0].ranks == (0,)

    def test_a_layer_frame_says_nothing_about_skips(self):
        assert seen_in_frame(block(2, 2, stream="layer", grad_norm=1.0)) == []


posts = st.lists(
    st.builds(
        StepSeen,
        step=st.integers(90, 400),
        skipped=st.booleans(),
        what=st.sampled_from(list(SkipClass)),
        loss_scale=st.sampled_from([None, 1.0, 1024.0]),
    ),
    max_size=60,
)


@given(posts, st.integers(0, 60))
def test_a_counter_restored_from_json_goes_on_as_if_nothing_happened(seen, cut):
    whole, first = SkipCounter(RULES), SkipCounter(RULES)
    expected = [whole.update(one) for one in seen]
    got = [first.update(one) for one in seen[:cut]]
    second = SkipCounter.restore(RULES, json.loads(json.dumps(first.state())))
    got += [second.update(one) for one in seen[cut:]]
    assert got == expected
    assert second.state() == whole.state()


@given(posts)
def test_posting_everything_twice_says_nothing_new(seen):
    counter = SkipCounter(RULES)
    for one in sorted(seen, key=lambda s: s.step):
        counter.update(one)
    again = [f for one in seen for f in counter.update(one)]
    assert [f for f in again if f.kind == "nonfinite_skipped"] == []
