"""Digests of a stream: of the whole, and of each part, in one pass. Server and agents cut alike."""

import hashlib
from collections.abc import Iterator
from typing import IO

CHUNK_BYTES = 1 << 20
PART_BYTES = 8 << 20
# S3 takes 10,000 parts; a margin keeps the arithmetic away from the edge.
MOST_PARTS = 9_000


def part_bytes_for(bytes_total: int) -> int:
    """Return the part size for an object: 8 MiB, or as much as keeps it within S3's number of parts."""
    smallest = -(-bytes_total // MOST_PARTS)
    return max(PART_BYTES, -(-smallest // (1 << 20)) * (1 << 20))


class PartHasher:
    """Feeds bytes in order; `parts` is the SHA-256 of each part of `part_bytes`, the last one shorter."""

    def __init__(self, part_bytes: int) -> None:
        self.part_bytes = part_bytes
        self.bytes_total = 0
        # Until the first part is full it is the whole: most objects have no more, and are hashed once.
        self._whole: hashlib._Hash | None = None
        self._part = hashlib.sha256()
        self._in_part = 0
        self._parts: list[str] = []

    def update(self, data: bytes) -> None:
        """Take the next bytes."""
        view = memoryview(data)
        self.bytes_total += len(view)
        while view:
            take = view[: self.part_bytes - self._in_part]
            self._part.update(take)
            if self._whole is not None:
                self._whole.update(take)
            self._in_part += len(take)
            view = view[len(take) :]
            if self._in_part == self.part_bytes:
                self._end_part()

    def _end_part(self) -> None:
        if self._whole is None:
            self._whole = self._part.copy()
        self._parts.append(self._part.hexdigest())
        self._part = hashlib.sha256()
        self._in_part = 0

    @property
    def sha256(self) -> str:
        """Return the digest of everything fed so far, lower-case hex."""
        return (self._whole or self._part).hexdigest()

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the digests of the parts so far."""
        return (*self._parts, self._part.hexdigest()) if self._in_part else tuple(self._parts)


def chunks(file: IO[bytes], limit: int | None = None, size: int = CHUNK_BYTES) -> Iterator[bytes]:
    """Yield the bytes of a stream, at most `limit` of them."""
    left = limit
    while left is None or left > 0:
        data = file.read(size if left is None else min(size, left))
        if not data:
            return
        if left is not None:
            left -= len(data)
        yield data
