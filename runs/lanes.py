"""Lanes as the database keeps them, text, and as arrays of rank numbers: thousands of them at once."""

import numpy as np
from numpy.typing import NDArray


def numbers(lanes: list[str]) -> tuple[NDArray[np.int64], list[str]]:
    """Return the rank numbers among lanes, ascending, and the names of lanes that are none."""
    try:
        known = np.unique(np.array(lanes, dtype=np.int64))
    except (ValueError, OverflowError):
        digits = [int(lane) for lane in lanes if lane.isdecimal() and len(lane) < 19]
        known = np.unique(np.array(digits, dtype=np.int64))
        return known, sorted(lane for lane in lanes if not lane.lstrip("-").isdecimal())
    return known[known >= 0], []


def folded(ranks: NDArray[np.int64]) -> str:
    """Return ascending ranks as `0-3,6`."""
    starts = np.flatnonzero(np.diff(ranks, prepend=ranks[:1] - 2) != 1)
    lasts = ranks[np.append(starts[1:], len(ranks)) - 1]
    pairs = zip(ranks[starts].tolist(), lasts.tolist(), strict=True)
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in pairs)
