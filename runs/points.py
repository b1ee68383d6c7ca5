"""Single cells on their way into the blocks: what events, rather than frames, say about ranks.

Stored as one compressed row per look of the worker: steps, ranks (−1: all of them), codes, and the times in
ms at which the step was reported.
"""

import struct
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import zstandard
from numpy.typing import NDArray

from andon.detect.nonfinite import event_cells, row_health
from andon.detect.planes import HEALTHY, NONFINITE, OUTSIDE, SPREAD
from andon.wire import Frame
from runs.models import Event
from runs.wire_rows import as_posted

ALL_RANKS = -1
_HEAD = struct.Struct("<I")


@dataclass(frozen=True, slots=True, eq=False)
class Points:
    """Cells as columns of equal length: int64 steps, int32 ranks, uint8 codes, int64 ms (0: not known)."""

    steps: NDArray[np.int64]
    ranks: NDArray[np.int32]
    codes: NDArray[np.uint8]
    clock: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.steps)

    def pack(self) -> bytes:
        """Return the stored form."""
        columns = (self.steps.astype("<i8"), self.ranks.astype("<i4"), self.codes, self.clock.astype("<i8"))
        raw = b"".join([_HEAD.pack(len(self)), *(column.tobytes() for column in columns)])
        return zstandard.ZstdCompressor(level=1).compress(raw)

    @classmethod
    def unpack(cls, stored: bytes) -> "Points":
        """Return points from their stored form."""
        raw = zstandard.ZstdDecompressor().decompress(stored)
        (n,) = _HEAD.unpack_from(raw)
        at = _HEAD.size
        steps = np.frombuffer(raw, "<i8", n, at).astype(np.int64)
        ranks = np.frombuffer(raw, "<i4", n, at + 8 * n).astype(np.int32)
        codes = np.frombuffer(raw, np.uint8, n, at + 12 * n)
        return cls(steps, ranks, codes, np.frombuffer(raw, "<i8", n, at + 13 * n).astype(np.int64))

    def joined(self, other: "Points") -> "Points":
        """Return both one after the other."""
        return Points(
            np.concatenate([self.steps, other.steps]),
            np.concatenate([self.ranks, other.ranks]),
            np.concatenate([self.codes, other.codes]),
            np.concatenate([self.clock, other.clock]),
        )

    @classmethod
    def of(cls, rows: list[tuple[int, int, int, int]]) -> "Points":
        """Return points from rows of (step, rank, code, ms)."""
        columns = list(zip(*rows, strict=True)) or [(), (), (), ()]
        return cls(
            np.array(columns[0], np.int64),
            np.array(columns[1], np.int32),
            np.array(columns[2], np.uint8),
            np.array(columns[3], np.int64),
        )


def of_events(events: Iterable[Event]) -> dict[int, Points]:
    """Return what `step` events say, by attempt; attempts of which they say nothing are left out.

    A good value without a rank names nobody and only tells the time of its step. A bad one is every
    rank's: it spread to all, or to the ranks it names.
    """
    said: dict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
    for event in events:
        if event.type != "step" or event.step is None:
            continue
        at = (event.step, int(event.occurred_at.timestamp() * 1000))
        found = event_cells(as_posted(event)) if event.flags or event.data.get("nonfinite") else None
        if not found:
            rank, code = (ALL_RANKS, OUTSIDE) if event.rank is None else (event.rank, HEALTHY)
            said[event.attempt].append((at[0], rank, code, at[1]))
            continue
        codes = np.where(found.local, NONFINITE, SPREAD).tolist()
        for rank, code in zip(found.lane.tolist(), codes, strict=True):
            said[event.attempt].append((at[0], rank, code, at[1]))
    return {attempt: Points.of(rows) for attempt, rows in said.items()}


def of_frame(frame: Frame) -> Points:
    """Return the cells of a frame that is too sparse for a state plane."""
    health = row_health(frame)
    codes = np.where(health.local, NONFINITE, np.where(health.bad, SPREAD, HEALTHY)).astype(np.uint8)
    where = health.axes
    ranks = where.lanes[where.column].astype(np.int32)
    return Points(frame.step.astype(np.int64), ranks, codes, np.zeros(len(codes), np.int64))
