"""Tensors of a safetensors file, without the library: a JSON header of names, types and places, then bytes.

The first eight bytes are the header's length (huggingface/safetensors README, "Format"). Values are mapped,
not
read: a checkpoint is larger than memory. Types that are no float, and the 4- to 8-bit floats, which have
scales elsewhere, are passed over.
"""

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100 << 20  # the library's own limit
_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_CHUNK = 1 << 22  # values looked at together


class SafetensorsError(ValueError):
    """The file is no safetensors file, or is cut; the message says where."""


def chunks(path: Path) -> Iterator[tuple[str, NDArray[np.floating[Any]]]]:
    """Yield (tensor's name, some of its values as a float array), every float tensor in pieces.

    Raises:
        SafetensorsError: the header cannot be read, or a tensor lies outside the file.
        OSError: the file cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        header, start = _header(file.read(_LENGTH.size), file.read, size)
    if size == start:
        return
    data = np.memmap(path, np.uint8, "r", offset=start)
    for name, told in header.items():
        if name == "__metadata__":
            continue
        kind, begin, end = _place(name, told, len(data))
        if kind not in _FLOATS:
            continue
        values = data[begin:end].view(_FLOATS[kind])
        for at in range(0, len(values), _CHUNK):
            part = np.asarray(values[at : at + _CHUNK])
            if kind == "BF16":  # the upper half of a float32
                part = (part.astype(np.uint32) << 16).view(np.float32)
            yield name, part


def _header(length: bytes, read: Any, size: int) -> tuple[dict[str, Any], int]:
    if len(length) < _LENGTH.size:
        raise SafetensorsError(f"{len(length)} bytes: shorter than the header's length")
    (count,) = _LENGTH.unpack(length)
    if count > min(_MAX_HEADER_BYTES, size - _LENGTH.size):
        raise SafetensorsError(f"byte 0: a header of {count} bytes in a file of {size}")
    try:
        header = json.loads(read(count))
    except (ValueError, RecursionError) as error:
        raise SafetensorsError(f"byte {_LENGTH.size}: the header is no JSON ({error})") from error
    if not isinstance(header, dict):
        raise SafetensorsError(f"byte {_LENGTH.size}: the header is no object")
    return header, _LENGTH.size + count


def _place(name: str, told: Any, size: int) -> tuple[str, int, int]:
    told = told if isinstance(told, dict) else {}
    kind, shape, offsets = told.get("dtype"), told.get("shape"), told.get("data_offsets")
    whole = [
        one
        for one in (shape, offsets)
        if isinstance(one, list) and all(type(n) is int and n >= 0 for n in one)
    ]
    if not isinstance(kind, str) or len(whole) != 2 or len(whole[1]) != 2:
        raise SafetensorsError(f"{name[:80]}: no dtype, shape and data_offsets")
    (begin, end), count = whole[1], math.prod(whole[0])
    if not begin <= end <= size:
        raise SafetensorsError(f"{name[:80]}: bytes {begin} to {end} of {size}")
    if kind in _FLOATS and end - begin != count * np.dtype(_FLOATS[kind]).itemsize:
        raise SafetensorsError(f"{name[:80]}: {end - begin} bytes for {count} values of {kind}")
    return kind, begin, end
