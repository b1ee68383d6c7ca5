"""The plots' common axis: what lies at one step can be read."""

from runs.stack import Row, Stack


def words(*marks: tuple[int, str, bool]) -> list[str]:
    stack = Stack([Row("marks", 17)], step_first=1, step_last=100, key="test")
    stack.marks(stack.rows["marks"], marks, width_px=1000)
    return [one["text"] for one in stack.annotations]


def test_strong_marks_of_one_step_are_one_text():
    assert words((60, "✕ checkpoint 60, bad", True), (60, "incident 1", True)) == [
        "<b>incident 1 · ✕ checkpoint 60, bad</b>"
    ]


def test_others_are_counted():
    assert words((60, "a", False), (60, "b", False), (61, "c", False)) == ["a and 2 more"]


def test_what_lies_apart_keeps_its_own_words():
    assert words((20, "a", False), (60, "b", True), (90, "c", True)) == ["a", "<b>b</b>", "<b>c</b>"]
