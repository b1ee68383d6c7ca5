"""State planes at rest: one small code per cell with its axes, compressed.

Layout before compression (zstd): two little-endian uint32, the numbers s of steps and l of lanes; the
steps as int64 first value and differences; the lanes as int32 likewise (positions in the frame's
list of names for text lanes); then s × l codes, uint8, step by step. Differences, because a dense axis
then compresses to nothing.
"""

import struct

import numpy as np
import zstandard
from numpy.typing import NDArray

_HEAD = struct.Struct("<II")
MAX_BYTES = 64 << 20


def pack(steps: NDArray[np.int64], lanes: NDArray[np.int32], codes: NDArray[np.uint8]) -> bytes:
    """Return the stored form of a plane: codes uint8[steps, lanes], both axes ascending."""
    parts = [
        _HEAD.pack(len(steps), len(lanes)),
        np.diff(steps, prepend=0).astype("<i8").tobytes(),
        np.diff(lanes, prepend=0).astype("<i4").tobytes(),
        np.ascontiguousarray(codes).tobytes(),
    ]
    return zstandard.ZstdCompressor(level=1).compress(b"".join(parts))


def unpack(stored: bytes) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.uint8]]:
    """Return steps int64[s], lanes int32[l] and codes uint8[s, l] of a stored plane.

    Raises:
        ValueError: the bytes are no plane.
    """
    try:
        raw = zstandard.ZstdDecompressor().decompress(stored, max_output_size=MAX_BYTES)
        s, n = _HEAD.unpack_from(raw)
        at = _HEAD.size
        steps = np.cumsum(np.frombuffer(raw, "<i8", s, at), dtype=np.int64)
        at += 8 * s
        lanes = np.cumsum(np.frombuffer(raw, "<i4", n, at), dtype=np.int32)
        at += 4 * n
        codes = np.frombuffer(raw, np.uint8, s * n, at).reshape(s, n)
    except (zstandard.ZstdError, struct.error) as error:
        raise ValueError(f"no state plane: {error}") from error
    return steps, lanes, codes
