"""A curve as columns: of each stretch of steps the least and the greatest value, and all that was nonfinite.

On level 0 a column is one step, and on each further level it is four columns of the level below, as in the
grid (`runs.blocks`). Nothing is averaged over steps: a spike of one step is the greatest value of its column
on every level, at its own step, and a nonfinite one is counted and keeps the step where it began.
"""

from dataclasses import dataclass

import numpy as np
import zstandard
from numpy.typing import NDArray

from runs.blocks import COLUMNS, steps_of

REDUCED = np.uint32(2**32 - 1)  # weight of a value that is the same on all ranks
KINDS = ("", "nan", "+inf", "-inf")  # what a nonfinite value was, as the wire flags it

# at: first step of the column. lo, hi: least and greatest value, and the steps of both. total: sum of the
# values of its n steps that have one. bad: steps that were nonfinite; where that began, and the kind of it.
# who: the lane of the extreme that counts (0: not said). weight, on level 0: how many ranks' values it is of.
DTYPE = np.dtype(
    [
        *(("at", "<i8"), ("lo", "<f8"), ("hi", "<f8"), ("total", "<f8"), ("n", "<u4"), ("bad", "<u4")),
        *(("lo_at", "<i8"), ("hi_at", "<i8"), ("bad_at", "<i8")),
        *(("who", "<u4"), ("weight", "<u4"), ("kind", "u1")),
    ]
)
_OFFSETS = ("lo_at", "hi_at", "bad_at")  # at most 4^7 steps from the column's first: stored in two bytes
_PLAIN = ("lo", "hi", "total", "n", "bad", "who", "weight", "kind")

Columns = NDArray[np.void]  # of DTYPE, ascending by `at`; columns that have nothing are not there
Steps = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Reports:
    """What was said of one series, as columns of equal length, in any order.

    Attributes:
        values: float64; anything where `kinds` is not 0.
        kinds: uint8, index into `KINDS`.
        weights: uint32, of how many ranks the value is the mean, or `REDUCED`.
        who: uint32, the lane that said it, 0 for none.
    """

    steps: Steps
    values: NDArray[np.float64]
    kinds: NDArray[np.uint8]
    weights: NDArray[np.uint32]
    who: NDArray[np.uint32]

    @classmethod
    def of(cls, steps: Steps, values: NDArray[np.float64], *, weight: int = int(REDUCED)) -> "Reports":
        """Return reports of equal weight; NaN and the infinities are nonfinite values."""
        kinds = np.where(
            np.isnan(values), 1, np.where(np.isposinf(values), 2, np.where(np.isneginf(values), 3, 0))
        )
        n = len(steps)
        return cls(
            steps.astype(np.int64),
            values.astype(np.float64),
            kinds.astype(np.uint8),
            np.full(n, weight, np.uint32),
            np.zeros(n, np.uint32),
        )

    def __len__(self) -> int:
        return len(self.steps)

    def joined(self, other: "Reports") -> "Reports":
        """Return both one after the other."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in self.__slots__)
        return Reports(*(np.concatenate(pair) for pair in pairs))

    def between(self, first: int, last: int) -> "Reports":
        """Return those of steps `first` to `last`."""
        inside = (self.steps >= first) & (self.steps <= last)
        return self if inside.all() else Reports(*(getattr(self, name)[inside] for name in self.__slots__))


def empty() -> Columns:
    """Return no columns."""
    return np.zeros(0, DTYPE)


def settled(reports: Reports, how: str = "mean") -> Columns:
    """Return one column per step from all that was said of it at once.

    A reduced value stands before those of single ranks. Where nodes say different reduced values of a step,
    the least and the greatest stand. Values of single ranks become their mean, or with `how` the greatest
    (max), the least (min) or the sum; a mean over a nonfinite one is nonfinite.
    """
    order = np.lexsort((reports.values, reports.steps))
    steps, reduced = reports.steps[order], reports.weights[order] == REDUCED
    if not len(steps):
        return empty()
    group = np.cumsum(np.diff(steps, prepend=steps[0]) > 0)
    shared = np.zeros(group[-1] + 1, bool)
    shared[group[reduced]] = True
    order = order[reduced | ~shared[group]]  # of every step something stays
    steps, values, kinds = reports.steps[order], reports.values[order], reports.kinds[order]
    weights, who = reports.weights[order].astype(np.float64), reports.who[order]
    starts = np.flatnonzero(np.diff(steps, prepend=steps[0] - 1))
    finite = kinds == 0
    found = np.zeros(len(starts), DTYPE)
    found["at"] = steps[starts]
    for name in _OFFSETS:
        found[name] = found["at"]
    found["kind"] = np.maximum.reduceat(kinds, starts)
    found["bad"] = found["kind"] > 0
    known = np.logical_or.reduceat(finite, starts)
    low = np.minimum.reduceat(np.where(finite, values, np.inf), starts)
    high = np.maximum.reduceat(np.where(finite, values, -np.inf), starts)
    weight = np.add.reduceat(np.where(finite, weights, 0), starts)
    local = ~shared
    if how == "mean":
        mean = np.add.reduceat(np.where(finite, values * weights, 0), starts) / np.maximum(weight, 1)
        low, high = np.where(local, mean, low), np.where(local, mean, high)
        known &= ~(local & (found["bad"] > 0))
    elif how == "sum":
        added = np.add.reduceat(np.where(finite, values, 0), starts)
        low, high = np.where(local, added, low), np.where(local, added, high)
    elif how == "min":
        high = np.where(local, low, high)
    else:
        low = np.where(local, high, low)
    # Sorted by value inside a step: the first of it said the least, the last the greatest.
    ends = np.append(starts[1:], len(steps)) - 1
    found["who"] = who[starts if how == "min" else ends]
    found["n"] = known
    for name, column in (("lo", low), ("hi", high), ("total", high)):
        found[name] = np.where(known, column, 0.0)
    found["weight"] = np.where(local, np.minimum(weight, REDUCED - 1), REDUCED).astype(np.uint32)
    return found


def merged(old: Columns, new: Columns, how: str = "mean") -> Columns:
    """Return what two looks of level 0 say together of the same steps, by the rules of `settled`."""
    if not len(old) or not len(new):
        return new if not len(old) else old
    _, mine, theirs = np.intersect1d(old["at"], new["at"], assume_unique=True, return_indices=True)
    result = np.concatenate([old, np.delete(new, theirs)])
    result[mine] = _same_steps(old[mine], new[theirs], how)
    return result[np.argsort(result["at"], kind="stable")]


def _same_steps(old: Columns, new: Columns, how: str) -> Columns:
    found = old.copy()
    was, now = old["weight"] == REDUCED, new["weight"] == REDUCED
    found[now & ~was] = new[now & ~was]
    both = was == now
    found["kind"][both] = np.maximum(old["kind"], new["kind"])[both]
    found["bad"][both] = (found["kind"] > 0)[both]
    takes = both & (new["n"] > 0)
    lone = takes & (old["n"] == 0)
    pair = takes & ~lone
    for name in ("lo", "hi", "total", "n", "who"):
        found[name][lone] = new[name][lone]
    reduced, local = pair & now, pair & ~now
    if how == "mean":
        weight = old["weight"].astype(np.float64) + new["weight"]
        mean = (old["lo"] * old["weight"] + new["lo"] * new["weight"]) / np.maximum(weight, 1)
        for name in ("lo", "hi", "total"):
            found[name][local] = mean[local]
    elif how == "sum":
        for name in ("lo", "hi", "total"):
            found[name][local] = (old["hi"] + new["hi"])[local]
    else:
        better = new["hi"] < old["hi"] if how == "min" else new["hi"] > old["hi"]
        for name in ("lo", "hi", "total", "who"):
            found[name][local & better] = new[name][local & better]
    found["lo"][reduced] = np.minimum(old["lo"], new["lo"])[reduced]
    found["hi"][reduced] = np.maximum(old["hi"], new["hi"])[reduced]
    added = np.minimum(old["weight"].astype(np.int64) + new["weight"], int(REDUCED) - 1)
    found["weight"][both & ~now] = added[both & ~now]
    if how == "mean":
        # A mean over a nonfinite value is none.
        gone = both & ~now & (found["bad"] > 0)
        for name in ("lo", "hi", "total", "n"):
            found[name][gone] = 0
    return found


def grouped(columns: Columns, width: int, how: str = "mean", *, start: int = 0) -> Columns:
    """Return columns of `width` steps each from narrower ones: extremes, sums and what was nonfinite.

    Args:
        columns: ascending, none across an edge of the wider ones, which lie at `start` + n × `width`.
    """
    if not len(columns):
        return columns
    place = (columns["at"] - start) // width
    starts = np.flatnonzero(np.diff(place, prepend=place[0] - 1))
    group = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(place))))
    found = np.zeros(len(starts), DTYPE)
    found["at"] = start + place[starts] * width
    for name in ("total", "n", "bad"):
        found[name] = np.add.reduceat(columns[name], starts)
    known = columns["n"] > 0
    low = np.where(known, columns["lo"], np.inf)
    high = np.where(known, columns["hi"], -np.inf)
    least = np.lexsort((low, group))[starts]  # the first of each group, once sorted by value inside it
    most = np.lexsort((-high, group))[starts]
    first_bad = np.lexsort((columns["bad_at"], columns["bad"] == 0, group))[starts]
    found["lo"], found["lo_at"] = columns["lo"][least], columns["lo_at"][least]
    found["hi"], found["hi_at"] = columns["hi"][most], columns["hi_at"][most]
    found["bad_at"], found["kind"] = columns["bad_at"][first_bad], columns["kind"][first_bad]
    found["who"] = columns["who"][least if how == "min" else most]
    return found


def adjoined(one: Columns, other: Columns, width: int, how: str = "mean") -> Columns:
    """Return columns of one width from two looks at the same steps: their extremes, with either's marks."""
    both = np.concatenate([one, other])
    return grouped(both[np.argsort(both["at"], kind="stable")], width, how)


def pack(columns: Columns, level: int, number: int) -> bytes:
    """Return the stored form of the columns of one block."""
    width = steps_of(level)
    place = (columns["at"] - number * COLUMNS * width) // width
    raw = [place.astype("u1").tobytes()]
    raw += [columns[name].tobytes() for name in _PLAIN]
    raw += [np.clip(columns[name] - columns["at"], 0, 65_535).astype("<u2").tobytes() for name in _OFFSETS]
    return zstandard.ZstdCompressor(level=1).compress(b"".join(raw))


_BYTES = 1 + sum(DTYPE[name].itemsize for name in _PLAIN) + 2 * len(_OFFSETS)


def unpack(stored: bytes, level: int, number: int) -> Columns:
    """Return the columns of one block from their stored form."""
    raw = zstandard.ZstdDecompressor().decompress(stored)
    n, width = len(raw) // _BYTES, steps_of(level)
    found, at = np.zeros(n, DTYPE), n
    found["at"] = (number * COLUMNS + np.frombuffer(raw, "u1", n).astype(np.int64)) * width
    for name in _PLAIN:
        kind = DTYPE[name]
        found[name] = np.frombuffer(raw, kind, n, at)
        at += n * kind.itemsize
    for name in _OFFSETS:
        found[name] = found["at"] + np.frombuffer(raw, "<u2", n, at)
        at += 2 * n
    return found
