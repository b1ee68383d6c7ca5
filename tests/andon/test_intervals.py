"""Windows of samples: each operation against the plain set of positions it stands for."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.intervals import Window, common, merged, more_than_once, part, total, without

one = st.tuples(st.integers(0, 40), st.integers(0, 15)).map(lambda w: Window(w[0], w[0] + w[1]))
some = st.lists(one, max_size=7)


def positions(windows):
    return {at for window in windows for at in range(window.start, window.stop)}


def tidy(windows):
    assert all(window.start < window.stop for window in windows)
    assert all(a.stop < b.start for a, b in pairwise(windows))
    return positions(windows)


@given(some, some)
def test_union_difference_and_intersection_are_those_of_sets(left, right):
    assert tidy(merged(left)) == positions(left)
    assert tidy(without(left, right)) == positions(left) - positions(right)
    assert tidy(common(left, right)) == positions(left) & positions(right)
    assert total(left) == len(positions(left))


@given(some)
def test_more_than_once_counts_each_window_by_itself(given_windows):
    times = [at for window in given_windows for at in range(window.start, window.stop)]
    assert tidy(more_than_once(given_windows)) == {at for at in times if times.count(at) > 1}


@given(some, st.integers(0, 60), st.integers(0, 60))
def test_a_part_is_a_slice_of_the_positions_in_order(given_windows, first, count):
    assert (
        sorted(tidy(part(given_windows, first, count)))
        == sorted(positions(given_windows))[first : first + count]
    )


def test_a_window_that_ends_before_it_begins_is_refused():
    with pytest.raises(ValueError, match="0 <= start <= stop"):
        Window(5, 4)
