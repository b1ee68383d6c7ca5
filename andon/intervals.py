"""Sets of sample positions as sorted half-open windows: the arithmetic of "which data".

A run reads hundreds of millions of samples, in a few long ranges. Every function takes windows in any
order, overlapping or not, and returns them sorted, disjoint, none empty and none touching.
"""

from collections.abc import Iterable

import msgspec


class Window(msgspec.Struct, frozen=True, order=True):
    """A half-open range of absolute sample positions: `start` is in it, `stop` is not."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"window [{self.start}, {self.stop}): needs 0 <= start <= stop")


Windows = tuple[Window, ...]


def merged(windows: Iterable[Window]) -> Windows:
    """Return every position that is in some of `windows`."""
    joined: list[Window] = []
    for window in sorted(w for w in windows if w.stop > w.start):
        if joined and window.start <= joined[-1].stop:
            joined[-1] = Window(joined[-1].start, max(joined[-1].stop, window.stop))
        else:
            joined.append(window)
    return tuple(joined)


def without(windows: Iterable[Window], others: Iterable[Window]) -> Windows:
    """Return every position that is in `windows` and in none of `others`."""
    left: list[Window] = []
    holes = merged(others)
    first = 0
    for window in merged(windows):
        at = window.start
        while first < len(holes) and holes[first].stop <= at:
            first += 1
        for hole in holes[first:]:
            if hole.start >= window.stop:
                break
            if hole.start > at:
                left.append(Window(at, hole.start))
            at = max(at, hole.stop)
        if at < window.stop:
            left.append(Window(at, window.stop))
    return tuple(left)


def common(windows: Iterable[Window], others: Iterable[Window]) -> Windows:
    """Return every position that is in both."""
    mine = merged(windows)
    return without(mine, without(mine, others))


def more_than_once(windows: Iterable[Window]) -> Windows:
    """Return every position that is in two or more of `windows`, each of which counts by itself."""
    twice: list[Window] = []
    reached = 0
    for window in sorted(w for w in windows if w.stop > w.start):
        if window.start < reached:
            twice.append(Window(window.start, min(window.stop, reached)))
        reached = max(reached, window.stop)
    return merged(twice)


def total(windows: Iterable[Window]) -> int:
    """Return how many positions `windows` hold, each counted once."""
    return sum(window.stop - window.start for window in merged(windows))


def part(windows: Iterable[Window], first: int, count: int) -> Windows:
    """Return `count` positions of `windows` in ascending order, the first `first` left out."""
    taken: list[Window] = []
    for window in merged(windows):
        length = window.stop - window.start
        begin, end = max(0, first), min(length, first + count)
        if begin < end:
            taken.append(Window(window.start + begin, window.start + end))
        first -= length
    return tuple(taken)
