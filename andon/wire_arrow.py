"""Frames as Arrow IPC streams, read so that a stranger's bytes cannot kill the process.

Arrow's C++ trusts the lengths in a record batch until `validate` is called, and some are used to
allocate before that. So the framing, the sizes and every buffer's place are checked here first, on
the metadata alone; then the schema; only then does pyarrow read the batch, and nothing in it is
touched before `validate(full=True)`.

Source: Apache Arrow Columnar Format 1.5, "Encapsulated message format" and "IPC Streaming Format".
"""

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from andon.wire_flatbuffer import Table
from andon.wire_frames import ARROW_TYPE, Column, Frame, build, check_name, check_size
from andon.wire_frames import VIEWS as VIEW_NAMES
from andon.wire_values import WireError, undecodable, unprocessable
from andon.wire_version import VERSION

try:
    import pyarrow
    import pyarrow.ipc
except ImportError:  # an optional part: the JSON form does the same
    pyarrow = None

_CONTINUATION = 0xFFFFFFFF
_MAX_METADATA_BYTES = 1024 * 1024  # 512 columns with names and metadata need a tenth of it
_SCHEMA, _RECORD_BATCH = 1, 3  # of the union MessageHeader
_BYTES_WIDE = {"int8": 1, "int16": 2, "int32": 4, "int64": 8, "float": 4, "double": 8}


def available() -> bool:
    """Return whether pyarrow is installed."""
    return pyarrow is not None


def decode_arrow(body: bytes) -> Frame:
    """Read one frame from an Arrow IPC stream with one record batch. Raises as `decode_frame`."""
    if pyarrow is None:
        raise WireError(
            415, "unsupported-media-type", "this server has no pyarrow; send the JSON form", "content-type"
        )
    try:
        schema_end = _schema_end(body)
        schema = pyarrow.ipc.read_schema(pyarrow.py_buffer(body[:schema_end]))
        widths = _check_schema(schema)
        batch_end, header, body_length = _batch(body, schema_end)
        _check_batch(header, body_length, schema, widths)
        batch = pyarrow.ipc.read_record_batch(pyarrow.py_buffer(body[schema_end:batch_end]), schema)
        batch.validate(full=True)
    except (pyarrow.ArrowException, ValueError, OSError, NotImplementedError, struct.error) as error:
        raise undecodable(f"not a readable Arrow IPC stream: {_short(error)}") from None
    metadata = _metadata(schema.metadata, "schema metadata")
    if "andon.stream" not in metadata:
        raise unprocessable("the schema metadata must hold andon.stream", "stream")
    columns, views, groups = {}, {}, {}
    for index, field in enumerate(schema):
        columns[field.name] = _column(batch.column(index))
        own = _metadata(field.metadata, f"columns.{field.name}")
        if "andon.view" in own:
            if own["andon.view"] not in VIEW_NAMES:
                raise unprocessable("andon.view must be local, shard or reduced", f"columns.{field.name}")
            views[field.name] = own["andon.view"]
        if "andon.group" in own:
            groups[field.name] = check_name(own["andon.group"], f"columns.{field.name}")
    return build(
        stream=metadata["andon.stream"],
        attempt=metadata.get("andon.attempt"),
        node=metadata.get("andon.node"),
        schema=metadata.get("andon.schema"),
        columns=columns,
        views=views,
        groups=groups,
    )


def _short(error: BaseException) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


def _metadata(raw: dict[bytes, bytes] | None, where: str) -> dict[str, str]:
    """Return the andon.* entries as text."""
    found = {}
    for key, value in (raw or {}).items():
        if key == b"ARROW:extension:name":
            raise unprocessable("extension types are not taken", where)
        if key.startswith(b"andon."):
            try:
                found[key.decode()] = value.decode()
            except UnicodeDecodeError:
                raise unprocessable("metadata must be UTF-8", where) from None
    return found


# --- before pyarrow -----------------------------------------------------------------------------------


def _message(body: bytes, at: int) -> tuple[int, int, Table | None]:
    """Return (start of the metadata, start of the message body, its table), table None at the end."""
    if at == len(body):
        return at, at, None
    marker, size = struct.unpack_from("<II", body, at)
    if marker != _CONTINUATION:
        raise ValueError(f"no message at byte {at} (streams of Arrow before 0.15 are not taken)")
    if size == 0:
        return at + 8, at + 8, None
    if size > _MAX_METADATA_BYTES:
        raise ValueError(f"message metadata of {size} bytes at byte {at}")
    if at + 8 + size > len(body):
        raise ValueError("it is cut off inside a message's metadata")
    return at + 8, at + 8 + size, Table.root(body[at + 8 : at + 8 + size])


def _schema_end(body: bytes) -> int:
    """Return where the schema message, which must come first, ends."""
    _, end, table = _message(body, 0)
    if table is None:
        raise ValueError("it holds no schema")
    if table.byte(1) != _SCHEMA or table.long(3) != 0:
        raise ValueError("its first message is not a schema")
    # Arrow would swap the bytes of big-endian buffers before anybody could validate them.
    if table.table(2).short(0) != 0:
        raise ValueError("big-endian data is not taken")
    return end


def _batch(body: bytes, schema_end: int) -> tuple[int, Table, int]:
    """Return where the one record batch ends, its header, and the length of its body."""
    _, start, table = _message(body, schema_end)
    if table is None:
        raise ValueError("it holds no record batch")
    if table.byte(1) != _RECORD_BATCH:
        raise ValueError("its second message is not a record batch")
    length = table.long(3)
    if not 0 <= length <= len(body) - start:
        raise ValueError("it is cut off inside the record batch")
    after, _, more = _message(body, start + length)
    if more is not None:
        raise unprocessable("a frame is one record batch; this stream holds more", "body")
    if after != len(body):
        raise ValueError("something follows the end of the stream")
    return start + length, table.table(2), length


def _check_schema(schema: Any) -> list[int]:
    """Return each column's width in bytes (0 for bool, −1 for utf8); refuse any other type."""
    if len(schema) != len(set(schema.names)):
        twice = next(name for name in schema.names if schema.names.count(name) > 1)
        raise unprocessable("appears twice", f"columns.{twice[:200]}")
    widths = []
    for field in schema:
        name = check_name(field.name, "columns")
        kind = str(field.type)
        if (field.metadata or {}).get(b"ARROW:extension:name") is not None:
            raise unprocessable("extension types are not taken", f"columns.{name}")
        if kind in _BYTES_WIDE:
            widths.append(_BYTES_WIDE[kind])
        elif kind == "bool":
            widths.append(0)
        elif kind == "string" and name == "lane":
            widths.append(-1)
        else:
            raise unprocessable(
                f"type {kind[:60]} is not taken: int8 to int64, float32, float64, bool, and utf8 for lane",
                f"columns.{name}",
            )
    return widths


def _check_batch(header: Table, body_length: int, schema: Any, widths: list[int]) -> None:
    """Check a record batch's header against its body, so that no buffer is shorter than its rows."""
    if header.has(3):
        raise unprocessable(
            "buffers compressed inside the stream are not taken; use Content-Encoding", "body"
        )
    rows, nodes, buffers = header.long(0), header.pairs(1), header.pairs(2)
    if rows < 0:
        raise ValueError("negative number of rows")
    check_size(rows, len(widths))
    if len(nodes) != len(widths) or len(buffers) != sum(3 if width < 0 else 2 for width in widths):
        raise ValueError("its buffers do not fit its schema")
    remaining = iter(buffers)
    for field, width, (length, nulls) in zip(schema, widths, nodes, strict=True):
        where = f"column {field.name!r}"
        if length != rows or not 0 <= nulls <= rows:
            raise ValueError(f"{where}: row or null count is wrong")
        needed = [(rows + 7) // 8 if nulls else 0]
        if width < 0:
            needed += [(rows + 1) * 4, 0]
        else:
            needed.append(rows * width if width else (rows + 7) // 8)
        for least in needed:
            offset, size = next(remaining)
            if offset < 0 or offset % 8 or size < 0 or offset + size > body_length:
                raise ValueError(f"{where}: a buffer lies outside the message")
            # A validity bitmap may be left out when nothing is null, but never be too short.
            if size < least or (size == 0 < least):
                raise ValueError(f"{where}: a buffer is shorter than its rows")


# --- after validate(full=True) ----------------------------------------------------------------------


def _column(array: Any) -> Column:
    rows, offset = len(array), array.offset
    if str(array.type) == "string":
        return Column(text=array.to_pylist())
    validity, data = array.buffers()
    null = None
    if array.null_count and validity is not None:
        null = ~_bits(validity, offset, rows)
    if str(array.type) == "bool":
        return Column(values=_bits(data, offset, rows), null=null)
    # A copy: aligned, writable, and free of the request's body.
    values = np.frombuffer(data, array.type.to_pandas_dtype(), count=rows + offset)[offset:].copy()
    return Column(values=values, null=null)


def _bits(buffer: Any, offset: int, rows: int) -> NDArray[np.bool_]:
    packed = np.frombuffer(buffer, np.uint8, count=(rows + offset + 7) // 8)
    return np.unpackbits(packed, count=rows + offset, bitorder="little")[offset:].astype(np.bool_)


# --- writing ----------------------------------------------------------------------------------------


def encode_arrow(frame: Frame) -> bytes:
    """Return the frame as an Arrow IPC stream of one uncompressed batch."""
    fields, arrays = [], []

    def add(name: str, values: Any, kind: Any = None, metadata: dict[str, str] | None = None) -> None:
        array = pyarrow.array(values, type=kind, mask=frame.missing.get(name))
        fields.append(pyarrow.field(name, array.type, metadata=metadata or None))
        arrays.append(array)

    add("step", frame.step, pyarrow.int64())
    names = isinstance(frame.lane, list)
    add("lane", frame.lane, pyarrow.utf8() if names else pyarrow.int32())
    for name, values, kind in (
        ("time_ns", frame.time_ns, pyarrow.int64()),
        ("micro_batch", frame.micro_batch, pyarrow.int16()),
        ("rank", frame.rank, pyarrow.int32()),
    ):
        if values is not None:
            add(name, values, kind)
    for name, values in frame.metrics.items():
        metadata = {}
        if name in frame.views:
            metadata["andon.view"] = frame.views[name]
        if name in frame.groups:
            metadata["andon.group"] = frame.groups[name]
        add(name, values, metadata=metadata)
    metadata = {"andon.stream": frame.stream, "andon.attempt": str(frame.attempt), "andon.wire": VERSION}
    if frame.node is not None:
        metadata["andon.node"] = frame.node
    if frame.schema is not None:
        metadata["andon.schema"] = frame.schema
    schema = pyarrow.schema(fields, metadata=metadata)
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pyarrow.record_batch(arrays, schema=schema))
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


__all__ = ["ARROW_TYPE", "available", "decode_arrow", "encode_arrow"]
