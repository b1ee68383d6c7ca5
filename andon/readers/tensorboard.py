"""Scalars of a TensorBoard event file, without TensorBoard: TFRecords of `Event` protobufs.

A record is its length (8 bytes, little endian), a checksum of it, the bytes and their checksum
(tensorflow/core/lib/io/record_writer.h). The checksums (CRC-32C) are not looked at: a torn end is cut off,
and what is no scalar is passed over. A value may stand in `simple_value` or in a tensor of one float
(tensorflow/core/framework/summary.proto, tensor.proto). Lightning's `hp_metric` is a placeholder, no metric.
"""

import math
import struct
from collections.abc import Iterator, Sequence

import msgspec

from andon.detect.series import Row, Series, SeriesError

_HEADER = struct.Struct("<QI")
_FOOTER_BYTES = 4
_MAX_RECORD_BYTES = 64 << 20
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_DT_FLOAT, _DT_DOUBLE = 1, 2
_PLACEHOLDERS = frozenset({"hp_metric"})
# In the order in which they are looked for, by their last part: "train/loss", "Loss/train", "lm loss".
_LOSSES = (
    "train_loss",
    "training_loss",
    "lm_loss",
    "reduced_train_loss",
    "train_ce_loss",
    "loss_train",
    "loss",
)
_NORMS = ("grad_norm", "train_grad_norm", "gradient_norm", "optim_total_grad_norm")


class Scalar(msgspec.Struct, frozen=True):
    """One value as written: wall clock in seconds since 1970, step, tag, value (also nonfinite)."""

    wall_time: float
    step: int
    tag: str
    value: float


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


def series(scalars: Sequence[Scalar]) -> Series:
    """Return the training curve among scalars.

    Raises:
        SeriesError: there is no scalar, or none that is a training loss.
    """
    if not scalars:
        raise SeriesError("the file holds no scalar: the run ended before it logged any")
    by_name: dict[str, list[Scalar]] = {}
    for one in scalars:
        name = "".join(letter if letter.isalnum() else "_" for letter in one.tag.lower())
        by_name.setdefault(name, []).append(one)
    loss = next((by_name[name] for name in _LOSSES if name in by_name), None)
    loss = loss or next((by_name[name] for name in by_name if name.endswith(("train_loss", "lm_loss"))), None)
    if loss is None:
        tags = ", ".join(sorted({one.tag for one in scalars})[:12])
        raise SeriesError(f"no training loss among {tags}")
    norms = {one.step: one.value for name in _NORMS for one in by_name.get(name, ())}
    # A tag written twice at one step, as by a train and a validation writer: the last is the value.
    last = {one.step: one.value for one in loss}
    rows = [Row(number, step, value, norms.get(step)) for number, (step, value) in enumerate(last.items(), 1)]
    return Series(rows, bool(norms), [f"TensorBoard: {loss[0].tag}, {len(rows)} values"])


def _records(body: bytes) -> Iterator[bytes]:
    at = 0
    while at + _HEADER.size <= len(body):
        length, _ = _HEADER.unpack_from(body, at)
        at += _HEADER.size
        if length > _MAX_RECORD_BYTES or at + length + _FOOTER_BYTES > len(body):
            return
        yield body[at : at + length]
        at += length + _FOOTER_BYTES


def _fields(message: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield (field number, wire type, bytes) of a protobuf message. Raises ValueError where it is torn."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            start = at
            _, at = _varint(message, at)
            yield number, kind, message[start:at]
            continue
        if kind == _BYTES:
            size, at = _varint(message, at)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"wire type {kind}")
        if size > len(message) - at:
            raise ValueError("a field is longer than its message")
        yield number, kind, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            break
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number is torn")


def _scalars(record: bytes) -> list[Scalar]:
    wall_time, step, found = 0.0, 0, []
    for number, kind, data in _fields(record):
        if (number, kind) == (1, _FIXED64):
            wall_time = struct.unpack("<d", data)[0]
        elif (number, kind) == (2, _VARINT):
            step = _varint(data, 0)[0]
        elif (number, kind) == (5, _BYTES):
            for inner, inner_kind, value in _fields(data):
                if (inner, inner_kind) == (1, _BYTES):
                    found.append(_value(value))
    if not math.isfinite(wall_time) or not 0 <= step < 2**63:
        return []
    return [Scalar(wall_time, step, tag, value) for tag, value in found if tag and value is not None]


def _value(message: bytes) -> tuple[str, float | None]:
    tag, value = "", None
    for number, kind, data in _fields(message):
        if (number, kind) == (1, _BYTES):
            tag = data.decode("utf-8", "replace")[:400]
        elif (number, kind) == (2, _FIXED32):
            value = float(struct.unpack("<f", data)[0])
        elif (number, kind) == (8, _BYTES):
            value = _tensor(data)
    return tag, value


def _tensor(message: bytes) -> float | None:
    """Return the value of a tensor of one float, None of any other."""
    dtype, values = 0, b""
    for number, kind, data in _fields(message):
        if (number, kind) == (1, _VARINT):
            dtype = _varint(data, 0)[0]
        elif (number, kind) in ((4, _BYTES), (5, _BYTES), (6, _BYTES), (5, _FIXED32), (6, _FIXED64)):
            values = data  # tensor_content, float_val, double_val
    if dtype == _DT_FLOAT and len(values) == 4:
        return float(struct.unpack("<f", values)[0])
    if dtype == _DT_DOUBLE and len(values) == 8:
        return float(struct.unpack("<d", values)[0])
    return None
