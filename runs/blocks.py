"""Blocks: the cells of an attempt at rest, so that any tile reads about one screen of data.

A block is 256 columns of up to 4,096 ranks. On level 0 a column is one step, and on each further level it
is four columns of the level below, of which the worst state stays. Each block is kept three times: with a
row per rank, per 8 and per 64 ranks. What is stored is what was posted: which nonfinite cells only followed
an earlier one is decided when a tile is read, since a late post may move where that began.
"""

from dataclasses import dataclass

import numpy as np
import zstandard
from numpy.typing import NDArray

from andon.detect.planes import MISSING

Plane = NDArray[np.uint8]

COLUMNS = 256
FACTOR = 4
TOP = 7  # a column of the coarsest level is 16,384 steps
BAND = 4_096  # ranks of one block
MAX_RANKS = 32 * BAND  # a rank number from outside must size no array; higher ones are not drawn
FOLDS = (1, 8, 64)  # ranks per row of the three forms
NEVER = np.iinfo(np.int64).max


@dataclass(slots=True)
class Block:
    """One block.

    Attributes:
        cells: uint8[256, ranks], column by column; the ranks are a multiple of 64.
        shared: uint8[256], the state that a value of all ranks gave to the whole column, 0 without one.
        clock: int64[256], when the last step of the column was first reported, in ms since 1970; 0 unknown.
    """

    cells: Plane
    shared: Plane
    clock: NDArray[np.int64]

    @classmethod
    def empty(cls, ranks: int) -> "Block":
        """Return a block in which nothing was posted."""
        wide = max(1, -(-ranks // 64)) * 64
        return cls(
            np.zeros((COLUMNS, wide), np.uint8), np.zeros(COLUMNS, np.uint8), np.zeros(COLUMNS, np.int64)
        )

    @classmethod
    def read(cls, cells: bytes, columns: bytes) -> "Block":
        """Return a block from its stored form, which may be changed."""
        shared, clock = read_columns(columns)
        return cls(read_cells(cells).copy(), shared.copy(), clock.copy())

    def widen(self, ranks: int) -> None:
        """Make room for `ranks` ranks."""
        if ranks > self.cells.shape[1]:
            more = -(-ranks // 64) * 64 - self.cells.shape[1]
            self.cells = np.pad(self.cells, ((0, 0), (0, more)))

    def merge(self, posted: "Block") -> None:
        """Take in what was posted; the worst state of a cell stays, and a cell that came is not missing."""
        self.widen(posted.cells.shape[1])
        here = self.cells[:, : posted.cells.shape[1]]
        if (came := here == MISSING).any():
            here[came & (posted.cells > 0)] = 0
        np.maximum(here, posted.cells, out=here)
        np.maximum(self.shared, posted.shared, out=self.shared)
        self.clock = earliest(self.clock, posted.clock)

    def posted(self) -> NDArray[np.int64]:
        """Return how many ranks posted each column."""
        ranks: NDArray[np.int64] = ((self.cells > 0) & (self.cells != MISSING)).sum(axis=1, dtype=np.int64)
        return ranks

    def mark_missing(
        self, steps: NDArray[np.int64], joined: NDArray[np.int64], complete: NDArray[np.bool_]
    ) -> bool:
        """Mark what did not come in complete columns; whether there was any.

        Args:
            steps: int64[256], of the columns.
            joined: int64[ranks], the first step that each rank ever posted (`NEVER` for none): before
                it a rank is not missing.
            complete: bool[256], columns that most ranks posted and of which nothing is on its way any more.
        """
        self.widen(len(joined))
        known = np.full(self.cells.shape[1], NEVER, np.int64)
        known[: len(joined)] = joined
        marked = False
        for column in np.flatnonzero(complete & (self.cells.min(axis=1) == 0)).tolist():
            lacking = (known <= steps[column]) & (self.cells[column] == 0)
            if lacking.any():
                self.cells[column][lacking] = MISSING
                marked = True
        return marked

    def quarter(self, child: "Block", which: int) -> None:
        """Take the columns of one of the four blocks below, `which` of them."""
        self.widen(child.cells.shape[1])
        width, ranks = COLUMNS // FACTOR, child.cells.shape[1]
        part = slice(which * width, (which + 1) * width)
        self.cells[part, :ranks] = child.cells.reshape(width, FACTOR, ranks).max(axis=1)
        self.shared[part] = child.shared.reshape(width, FACTOR).max(axis=1)
        self.clock[part] = child.clock.reshape(width, FACTOR).max(axis=1)

    def stored(self) -> tuple[bytes, bytes, bytes, bytes]:
        """Return the three forms and the columns, as they are stored."""
        eight = fold(self.cells, 8)
        packer = zstandard.ZstdCompressor(level=1)
        forms = (self.cells, eight, fold(eight, 8))
        cells, by_8, by_64 = (packer.compress(np.ascontiguousarray(form).data) for form in forms)
        return cells, by_8, by_64, packer.compress(self.shared.tobytes() + self.clock.astype("<i8").tobytes())


def earliest(one: NDArray[np.int64], other: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the earlier of two times, where 0 is not known."""
    both = np.minimum(np.where(one == 0, NEVER, one), np.where(other == 0, NEVER, other))
    return np.where(both == NEVER, 0, both)


def fold(plane: Plane, ranks: int) -> Plane:
    """Return the worst of each `ranks` (a power of two) neighbouring ranks, which end at the plane's edge."""
    wide = plane.shape[1]
    if wide and plane.min() == (top := plane.max()):
        return np.full((plane.shape[0], -(-wide // ranks)), top, np.uint8)
    if wide % ranks:
        plane = np.pad(plane, ((0, 0), (0, ranks - wide % ranks)))
    # One pass of pairs after the other: over an axis of 8 numpy has no fast maximum.
    while ranks > 1:
        plane = np.maximum(plane[:, 0::2], plane[:, 1::2])
        ranks //= 2
    return plane


def read_cells(stored: bytes) -> Plane:
    """Return one stored form, uint8[256, rows]."""
    raw = zstandard.ZstdDecompressor().decompress(stored)
    return np.frombuffer(raw, np.uint8).reshape(COLUMNS, -1)


def read_columns(stored: bytes) -> tuple[Plane, NDArray[np.int64]]:
    """Return the shared states and the clock."""
    raw = zstandard.ZstdDecompressor().decompress(stored)
    return np.frombuffer(raw, np.uint8, COLUMNS), np.frombuffer(raw, "<i8", COLUMNS, COLUMNS).astype(np.int64)


def steps_of(level: int) -> int:
    """Return how many steps a column of `level` is."""
    return 1 << 2 * level


def number_of(step: int, level: int) -> int:
    """Return the number of the block of `level` that holds `step`."""
    return step // (COLUMNS * steps_of(level))
