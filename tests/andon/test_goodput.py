"""Goodput: every second of every GPU has exactly one cause."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.goodput import CAUSES, Attempt, Hold, amounts, kept, spans

HOUR = 3600.0


def test_a_day_in_numbers():
    """Two attempts of 8 GPUs: a rollback after a hold of an hour, then a run that goes on."""
    first = Attempt(
        number=1,
        gpus=8,
        launched=0.0,
        ended=6 * HOUR,
        first=600 + 2.0,
        last=4 * HOUR,
        kept_to=3 * HOUR,
        kept_steps=4500,
        step_s=2.0,
        numeric=True,
    )
    second = Attempt(
        number=2,
        gpus=8,
        launched=6 * HOUR,
        first=6 * HOUR + 302,
        last=10 * HOUR,
        kept_to=10 * HOUR,
        kept_steps=7000,
        step_s=2.0,
    )
    found = spans([first, second], [Hold(4 * HOUR, 6 * HOUR, "7")], 10 * HOUR)
    total = amounts(found, 0, 10 * HOUR)
    assert total["PROGRAM_STARTUP"] == 8 * (600 + 300)
    assert total["NUMERIC_ROLLBACK"] == 8 * HOUR
    assert total["HELD_FOR_APPROVAL"] == 8 * 2 * HOUR
    assert total["PRODUCTIVE"] == pytest.approx(8 * 2 * (4500 + 7000))
    assert kept(total) == pytest.approx((8 * 23_000, 8 * 10 * HOUR))
    assert {span.incident for span in found if span.cause == "HELD_FOR_APPROVAL"} == {"7"}


def test_a_false_alarm_is_charged_to_andon():
    one = Attempt(number=1, gpus=2, launched=0, first=2, last=100, kept_to=100, kept_steps=50, step_s=2)
    total = amounts(spans([one], [Hold(40, 70, "3", True)], 100), 0, 100)
    assert total["FALSE_ALARM"] == 60


def test_a_false_alarm_is_charged_with_the_way_back_and_what_was_thrown_away():
    """The ranks left, so the run went back 20 s to its snapshot and took 30 s to its next step."""
    first = Attempt(
        number=1, gpus=2, launched=0, ended=130, first=2, last=100, kept_to=80, kept_steps=40, step_s=2
    )
    after = Attempt(number=2, gpus=4, launched=200, first=232, last=300, kept_to=300, kept_steps=35, step_s=2)
    hold = Hold(104, 200, "3", True)
    charged = msgspec.structs.replace(after, false_alarm="3")
    found = spans([first, charged], [hold], 300)
    total = amounts(found, 0, 300)
    assert total == {"PRODUCTIVE": 2 * 80 + 4 * 70, "FALSE_ALARM": 2 * 120 + 4 * 30}
    assert {span.incident for span in found if span.cause == "FALSE_ALARM"} == {"3"}
    # The same stop for something that was wrong is nobody's fault.
    right = amounts(spans([first, after], [Hold(104, 200, "3")], 300), 0, 300)
    assert right["WASTED_PROGRESS_FROM_DISRUPTION"] == 2 * 20
    assert right["PROGRAM_STARTUP"] == 4 * 30
    assert "FALSE_ALARM" not in right


def test_a_crash_loses_its_steps_and_the_time_to_the_next_launch():
    crashed = Attempt(
        number=1, gpus=1, launched=0, ended=130, first=10, last=120, kept_to=80, kept_steps=7, step_s=10
    )
    after = Attempt(number=2, gpus=1, launched=200, first=None)
    total = amounts(spans([crashed, after], [], 260), 0, 260)
    assert total == {
        "PRODUCTIVE": 70,
        "OTHER": 10,
        "WASTED_PROGRESS_FROM_DISRUPTION": 40,
        "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION": 80,
        "PROGRAM_STARTUP": 60,
    }


def test_an_attempt_of_unknown_size_is_not_counted():
    assert spans([Attempt(number=1, gpus=None, launched=0)], [], 100) == []


moments = st.none() | st.floats(-50, 400)
attempts = st.lists(
    st.builds(
        lambda gpus, gap, ended, first, last, kept_to, steps, step_s, numeric, alarm: (
            gap,
            {
                "gpus": gpus,
                "ended": ended,
                "first": first,
                "last": last,
                "kept_to": kept_to,
                "kept_steps": steps,
                "step_s": step_s,
                "numeric": numeric,
                "false_alarm": alarm,
            },
        ),
        st.integers(1, 8),
        st.floats(0, 80),
        moments,
        moments,
        moments,
        moments,
        st.integers(0, 50),
        st.none() | st.floats(0.1, 20),
        st.booleans(),
        st.sampled_from(["", "2"]),
    ),
    min_size=1,
    max_size=5,
)
holds = st.lists(st.tuples(st.floats(0, 60), st.floats(0, 60), st.booleans()), max_size=4)


@given(attempts, holds, st.floats(0, 500), st.floats(0, 500))
def test_every_second_of_every_gpu_has_one_cause_and_windows_add_up(given_attempts, gaps, until, cut):
    made, at = [], 0.0
    for number, (gap, fields) in enumerate(given_attempts, start=1):
        at += gap
        made.append(Attempt(number=number, launched=at, **fields))
    held, begin = [], 0.0
    for wait, length, false in gaps:
        begin += wait
        held.append(Hold(begin, begin + length, "1", false))
        begin += length
    found = spans(made, held, until)
    assert all(a.end <= b.start + 1e-9 for a, b in pairwise(found))
    allocated = sum(
        max(0.0, min(until, following) - one.launched) * one.gpus
        for one, following in zip(made, [*(one.launched for one in made[1:]), until], strict=True)
    )
    whole = amounts(found, -1e9, 1e9)
    assert set(whole) <= set(CAUSES)
    assert min(whole.values(), default=0) >= 0
    assert sum(whole.values()) == pytest.approx(allocated, abs=1e-6)
    left, right = amounts(found, -1e9, cut), amounts(found, cut, 1e9)
    for cause in whole:
        assert left.get(cause, 0) + right.get(cause, 0) == pytest.approx(whole[cause], abs=1e-6)
