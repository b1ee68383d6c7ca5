"""The plots' common axis: what lies at one step can be read, and no two words run together."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from runs import marks_lane
from runs.marks_lane import CHARACTER_PX
from runs.stack import Row, Stack

WIDTH_PX = 1_000


def lane(*marks: tuple[int, str, bool]) -> Stack:
    stack = Stack([Row("marks", 17)], step_first=1, step_last=100, key="test")
    marks_lane.add(stack, stack.rows["marks"], marks, WIDTH_PX)
    return stack


def words(*marks: tuple[int, str, bool]) -> list[str]:
    return [one["text"] for one in sorted(lane(*marks).annotations, key=lambda one: one["x"])]


def test_strong_marks_of_one_step_are_one_text():
    assert words((60, "✕ checkpoint 60, bad", True), (60, "incident 1", True)) == [
        "<b>incident 1 · ✕ checkpoint 60, bad</b>"
    ]


def test_others_are_counted():
    assert words((60, "a", False), (60, "b", False), (61, "c", False)) == ["a and 2 more"]


def test_what_lies_apart_keeps_its_own_words():
    assert words((20, "a", False), (60, "b", True), (90, "c", True)) == ["a", "<b>b</b>", "<b>c</b>"]


def test_a_checkpoint_just_before_the_first_bad_step_gives_way_to_it():
    beside = lane((58, "◆ checkpoint 58, last good", False), (60, "step 60", True)).annotations
    assert [(one["text"], one["xanchor"]) for one in beside] == [
        ("<b>step 60</b>", "left"),
        ("◆ checkpoint 58, last good", "right"),
    ]
    # Near the end both want the left side: what is strong has it.
    assert words((97, "◆ checkpoint 97, last good", False), (99, "step 99", True)) == ["<b>step 99</b>"]


@given(st.lists(st.tuples(st.integers(1, 100), st.integers(1, 30)), max_size=20))
def test_no_two_words_overlap(marks: list[tuple[int, int]]):
    spans = []
    for one in lane(*((step, "a" * length, False) for step, length in marks)).annotations:
        at = (one["x"] - 0.5) / 100 * WIDTH_PX
        long = len(one["text"]) * CHARACTER_PX
        spans.append((at, at + long) if one["xanchor"] == "left" else (at - long, at))
    assert all(before[1] <= after[0] + 0.001 for before, after in pairwise(sorted(spans)))
