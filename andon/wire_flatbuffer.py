"""Just enough FlatBuffers to look at an Arrow message before Arrow does.

Every offset is checked against the bytes that are there, so hostile metadata can only raise
`ValueError`. Source: Apache Arrow format/Message.fbs and format/Schema.fbs; FlatBuffers internals.
"""

import struct

_U16, _U32, _I32, _I64 = struct.Struct("<H"), struct.Struct("<I"), struct.Struct("<i"), struct.Struct("<q")
_I64_PAIR = struct.Struct("<qq")


class Table:
    """One FlatBuffers table at `position` in `raw`."""

    __slots__ = ("_fields", "_position", "_raw")

    def __init__(self, raw: bytes, position: int) -> None:
        vtable = position - _read(_I32, raw, position)
        size = _read(_U16, raw, vtable)
        if size < 4 or size % 2 or vtable + size > len(raw):
            raise ValueError("table layout out of range")
        self._raw = raw
        self._position = position
        self._fields = struct.unpack_from(f"<{(size - 4) // 2}H", raw, vtable + 4)

    @classmethod
    def root(cls, raw: bytes) -> "Table":
        """Return the root table of a buffer."""
        return cls(raw, _read(_U32, raw, 0))

    def _at(self, field: int) -> int | None:
        offset: int = self._fields[field] if field < len(self._fields) else 0
        return self._position + offset if offset else None

    def has(self, field: int) -> bool:
        """Return whether the field is present."""
        return self._at(field) is not None

    def byte(self, field: int) -> int:
        """Return an unsigned byte, 0 when absent."""
        at = self._at(field)
        if at is None:
            return 0
        if not 0 <= at < len(self._raw):
            raise ValueError("field out of range")
        return self._raw[at]

    def short(self, field: int) -> int:
        """Return an unsigned 16-bit number, 0 when absent."""
        at = self._at(field)
        return 0 if at is None else _read(_U16, self._raw, at)

    def long(self, field: int) -> int:
        """Return a signed 64-bit number, 0 when absent."""
        at = self._at(field)
        return 0 if at is None else _read(_I64, self._raw, at)

    def table(self, field: int) -> "Table":
        """Return a table (or the table of a union)."""
        at = self._at(field)
        if at is None:
            raise ValueError("a required part is missing")
        return Table(self._raw, at + _read(_U32, self._raw, at))

    def pairs(self, field: int) -> list[tuple[int, int]]:
        """Return a vector of structs of two 64-bit numbers (FieldNode, Buffer)."""
        at = self._at(field)
        if at is None:
            return []
        start = at + _read(_U32, self._raw, at)
        count = _read(_U32, self._raw, start)
        end = start + 4 + count * _I64_PAIR.size
        if end > len(self._raw):
            raise ValueError("vector out of range")
        return list(_I64_PAIR.iter_unpack(memoryview(self._raw)[start + 4 : end]))


def _read(form: struct.Struct, raw: bytes, at: int) -> int:
    if not 0 <= at <= len(raw) - form.size:
        raise ValueError("offset out of range")
    value: int = form.unpack_from(raw, at)[0]
    return value
