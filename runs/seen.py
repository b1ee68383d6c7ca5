"""The first and the last step that each rank of an attempt ever posted."""

import numpy as np
import zstandard
from numpy.typing import NDArray

from runs.blocks import NEVER


class Seen:
    """`first` and `last`, int64 per rank: `NEVER` and −1 for a rank that posted nothing."""

    def __init__(self, stored: bytes = b"") -> None:
        """Read the stored form; b"" is nobody."""
        raw = zstandard.ZstdDecompressor().decompress(stored) if stored else b""
        both = np.frombuffer(raw, "<i8").astype(np.int64).reshape(2, -1)
        self.first, self.last = both[0].copy(), both[1].copy()

    def stored(self) -> bytes:
        """Return the stored form."""
        raw = self.first.astype("<i8").tobytes() + self.last.astype("<i8").tobytes()
        return zstandard.ZstdCompressor(level=1).compress(raw)

    def take(self, ranks: NDArray[np.int64], first: NDArray[np.int64], last: NDArray[np.int64]) -> None:
        """Take in that `ranks` posted from `first` to `last`; a rank may come more than once."""
        if not len(ranks):
            return
        more = int(ranks.max()) + 1 - len(self.first)
        if more > 0:
            self.first = np.concatenate([self.first, np.full(more, NEVER, np.int64)])
            self.last = np.concatenate([self.last, np.full(more, -1, np.int64)])
        np.minimum.at(self.first, ranks, first)
        np.maximum.at(self.last, ranks, last)
