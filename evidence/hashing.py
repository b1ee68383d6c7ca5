"""Digests of a source."""

from collections.abc import Callable

from andon.hashing import MOST_PARTS, PART_BYTES, PartHasher, chunks, part_bytes_for
from evidence.sources import Source

__all__ = ["MOST_PARTS", "PART_BYTES", "PartHasher", "chunks", "digest_of", "part_bytes_for"]


def digest_of(source: Source, progress: Callable[[int], None] | None = None) -> PartHasher:
    """Read a source once and return its digests. `progress` is told the bytes of each chunk."""
    hasher = PartHasher(part_bytes_for(source.bytes_total))
    with source.open() as file:
        for data in chunks(file, source.bytes_total):
            hasher.update(data)
            if progress is not None:
                progress(len(data))
    return hasher
