"""Protobuf messages without their schema: fields by number (protobuf.dev, "Encoding"). Groups, which nobody
writes any more, are refused."""

from collections.abc import Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def fields(message: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield (field number, wire type, bytes) of a protobuf message. Raises ValueError where it is torn."""
    at = 0
    while at < len(message):
        key, at = varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            start = at
            _, at = varint(message, at)
            yield number, kind, message[start:at]
            continue
        if kind == BYTES:
            size, at = varint(message, at)
        elif kind in (FIXED32, FIXED64):
            size = 4 if kind == FIXED32 else 8
        else:
            raise ValueError(f"wire type {kind}")
        if size > len(message) - at:
            raise ValueError("a field is longer than its message")
        yield number, kind, message[at : at + size]
        at += size


def varint(message: bytes, at: int) -> tuple[int, int]:
    """Return a number and where the next begins. Raises ValueError where it is torn."""
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
