"""Scalars of a TensorBoard event file, without TensorBoard: TFRecords of `Event` protobufs.

A record is its length (8 bytes, little endian), a checksum of it, the bytes and their checksum
(tensorflow/core/lib/io/record_writer.h). The checksums (CRC-32C) are not looked at: a torn end is cut off,
and what is no scalar is passed over. A value may stand in `simple_value` or in a tensor of one float
(tensorflow/core/framework/summary.proto, tensor.proto). Lightning's `hp_metric` is a placeholder, no metric.
"""

import math
import struct
from collections.abc import Iterator

from andon.readers.protobuf import BYTES, FIXED32, FIXED64, VARINT, fields, varint
from andon.readers.scalars import Scalar

_HEADER = struct.Struct("<QI")
_FOOTER_BYTES = 4
_MAX_RECORD_BYTES = 64 << 20
_DT_FLOAT, _DT_DOUBLE = 1, 2
_PLACEHOLDERS = frozenset({"hp_metric"})


def is_events(body: bytes) -> bool:
    """Return whether bytes begin as an event file does: with a record that names its version."""
    return b"brain.Event:" in body[:64]


def read(body: bytes) -> list[Scalar]:
    """Return the scalars of an event file in their order; what a write cut short is left out.

    Raises:
        ValueError: it is no event file.
    """
    if not is_events(body):
        raise ValueError("it does not begin with an event file's version")
    found: list[Scalar] = []
    for record in _records(body):
        try:
            found += _scalars(record)
        except (ValueError, struct.error):  # one record that is damaged does not cost the others
            continue
    return [one for one in found if one.tag not in _PLACEHOLDERS]


def _records(body: bytes) -> Iterator[bytes]:
    at = 0
    while at + _HEADER.size <= len(body):
        length, _ = _HEADER.unpack_from(body, at)
        at += _HEADER.size
        if length > _MAX_RECORD_BYTES or at + length + _FOOTER_BYTES > len(body):
            return
        yield body[at : at + length]
        at += length + _FOOTER_BYTES


def _scalars(record: bytes) -> list[Scalar]:
    wall_time, step, found = 0.0, 0, []
    for number, kind, data in fields(record):
        if (number, kind) == (1, FIXED64):
            wall_time = struct.unpack("<d", data)[0]
        elif (number, kind) == (2, VARINT):
            step = varint(data, 0)[0]
        elif (number, kind) == (5, BYTES):
            for inner, inner_kind, value in fields(data):
                if (inner, inner_kind) == (1, BYTES):
                    found.append(_value(value))
    if not math.isfinite(wall_time) or not 0 <= step < 2**63:
        return []
    return [Scalar(wall_time, step, tag, value) for tag, value in found if tag and value is not None]


def _value(message: bytes) -> tuple[str, float | None]:
    tag, value = "", None
    for number, kind, data in fields(message):
        if (number, kind) == (1, BYTES):
            tag = data.decode("utf-8", "replace")[:400]
        elif (number, kind) == (2, FIXED32):
            value = float(struct.unpack("<f", data)[0])
        elif (number, kind) == (8, BYTES):
            value = _tensor(data)
    return tag, value


def _tensor(message: bytes) -> float | None:
    """Return the value of a tensor of one float, None of any other."""
    dtype, values = 0, b""
    for number, kind, data in fields(message):
        if (number, kind) == (1, VARINT):
            dtype = varint(data, 0)[0]
        elif (number, kind) in ((4, BYTES), (5, BYTES), (6, BYTES), (5, FIXED32), (6, FIXED64)):
            values = data  # tensor_content, float_val, double_val
    if dtype == _DT_FLOAT and len(values) == 4:
        return float(struct.unpack("<f", values)[0])
    if dtype == _DT_DOUBLE and len(values) == 8:
        return float(struct.unpack("<d", values)[0])
    return None
