"""A failure that came back: what differs from the first one is innocent."""

import pytest

from andon.intervals import Window
from andon.recurrence import Failure, verdict

EIGHT = frozenset(f"node-{n:02d}" for n in range(8))


def failure(step=1000, samples=None, suspects=(), ran_on=EIGHT, excluded=()):
    window = (Window(*samples),) if samples else ()
    return Failure(
        step=step,
        samples=window,
        suspects=frozenset(suspects),
        ran_on=frozenset(ran_on),
        excluded=frozenset(excluded),
    )


FIRST = failure(samples=(32_000, 32_064), suspects=["node-07"])


@pytest.mark.parametrize(
    ("after", "kind", "says"),
    [
        # A different step with other data.
        (failure(1300, (41_600, 41_664)), "other_step", "optimisation, not data"),
        (failure(1300), "other_step", "optimisation, not data"),
        # The same data, at whatever step it is read now.
        (failure(1000, (32_000, 32_064)), "same_data", "data first"),
        (failure(870, (32_032, 32_096)), "same_data", "the same samples failed again"),
        (
            failure(1000, (32_000, 32_064), ["node-03"], EIGHT - {"node-07"}),
            "other_nodes",
            "data or software, not hardware",
        ),
        # The same step.
        (failure(1000, None, ["node-03"]), "other_nodes", "software or data, not hardware"),
        (failure(1000, None, (), EIGHT - {"node-07"}), "other_nodes", "software or data"),
        (failure(1000, None, (), (), ["node-07"]), "other_nodes", "software or data"),
        (failure(1000), "same_step", "data, software or hardware"),
        (failure(1000, None, ["node-07"]), "same_step", "on node-07: data, software or hardware"),
        (failure(1000, (90_000, 90_064)), "same_step", "not these samples"),
        (failure(1000, (90_000, 90_064), ["node-01"]), "other_nodes", "software or the schedule"),
        # The same node, whatever it did.
        (failure(1300, (41_600, 41_664), ["node-07"]), "same_node", "on node-07 again: hardware first"),
        # Every node went bad: that names none.
        (failure(1300, (41_600, 41_664), EIGHT), "other_step", "optimisation, not data"),
        (failure(None), "none", "nothing more can be said"),
    ],
)
def test_what_came_back_and_what_it_says(after, kind, says):
    got = verdict(FIRST, after)
    assert got.kind == kind
    assert says in got.says
    assert got.numbers["recurrence"] == kind


def test_the_numbers_are_what_was_compared():
    numbers = verdict(FIRST, failure(1300, (41_600, 41_664), ["node-02"])).numbers
    assert numbers == {
        "recurrence": "other_step",
        "step_before": 1000,
        "step_after": 1300,
        "samples_before": [[32_000, 32_064]],
        "samples_after": [[41_600, 41_664]],
        "nodes_before": ["node-07"],
        "nodes_after": ["node-02"],
    }
