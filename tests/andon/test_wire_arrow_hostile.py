"""Altered Arrow streams, read in another process: refused or read, never a crash, never much memory."""

import io
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from andon.wire import ARROW_TYPE, WireError, decode_frame
from andon.wire_flatbuffer import Table
from tests.andon.test_wire_frames import META, axes, stream

# The child lives or dies by what it reads. Its address space is capped, so that an allocation of the
# size an altered length asks for fails there; what it reads back is touched, value by value.
_CHILD = """
import resource, struct, sys
import numpy as np
from andon.wire import ARROW_TYPE, WireError, decode_frame
import pyarrow
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]) * 2**20,) * 2)
raw, at, counts = sys.stdin.buffer.read(), 0, {}
while at < len(raw):
    (size,) = struct.unpack_from("<I", raw, at)
    body, at = raw[at + 4 : at + 4 + size], at + 4 + size
    try:
        frame = decode_frame(body, ARROW_TYPE)
    except WireError as error:
        counts[error.status] = counts.get(error.status, 0) + 1
        assert error.field
    else:
        counts[200] = counts.get(200, 0) + 1
        for name, values in frame.metrics.items():
            repr((values.sum(), frame.nonfinite(name).sum(), frame.measured(name).sum()))
        repr((frame.step.sum(), list(frame.lane)))
print(counts)
"""


def outcomes(bodies: list[bytes], memory_mib: int = 2000) -> dict[int, int]:
    joined = b"".join(len(body).to_bytes(4, "little") + body for body in bodies)
    child = subprocess.run(
        [sys.executable, "-c", _CHILD, str(memory_mib)],
        input=joined,
        capture_output=True,
        timeout=240,
        check=False,
    )
    assert child.returncode == 0, child.stderr.decode()[-2000:]
    counts: dict[int, int] = eval(child.stdout)
    assert sum(counts.values()) == len(bodies)
    return counts


@pytest.fixture(scope="module")
def whole() -> bytes:
    return stream(
        {
            "step": pa.array(range(9), pa.int64()),
            "lane": pa.array([f"layer.{i}" for i in range(9)]),
            "loss": pa.array([1.0, None, 3.0] * 3, pa.float32()),
            "ok": pa.array([True, False, None] * 3),
        },
        {**META, "andon.stream": "layer"},
        fields={"loss": {"andon.view": "local"}},
    )


def test_a_stream_cut_anywhere_is_400(whole):
    end = len(whole) - 8  # without its end mark a stream is complete, by the format
    counts = outcomes([whole[:n] for n in range(end)] + [whole[:end], whole])
    assert counts == {400: end, 200: 2}


def test_no_altered_byte_kills_the_reader(whole):
    bodies = []
    for position in range(len(whole)):
        for change in (0x01, 0x80, 0xFF):
            body = bytearray(whole)
            body[position] ^= change
            bodies.append(bytes(body))
    counts = outcomes(bodies)
    assert counts[400] > 500
    assert set(counts) <= {200, 400, 413, 422}


def test_no_altered_word_kills_the_reader(whole):
    bodies = []
    for position in range(0, len(whole) - 8, 4):
        for word in (
            b"\xff\xff\xff\x7f",
            b"\x00\x00\x00\x80",
            b"\x00\x00\x00\x00",
            b"\xff" * 8,
            b"\x00\x00\x00\x60\x00\x00\x00\x00",
        ):
            body = bytearray(whole)
            body[position : position + len(word)] = word
            bodies.append(bytes(body))
    assert set(outcomes(bodies)) <= {200, 400, 413, 422}


def test_no_random_damage_kills_the_reader(whole):
    generator = np.random.default_rng(7)
    bodies = []
    for _ in range(4000):
        body = np.frombuffer(whole, np.uint8).copy()
        places = generator.integers(0, len(body), generator.integers(1, 9))
        body[places] = generator.integers(0, 256, len(places))
        bodies.append(body.tobytes())
    assert set(outcomes(bodies)) <= {200, 400, 413, 422}


def test_an_altered_text_offset_is_400(whole):
    offsets = np.cumsum([0] + [7] * 9, dtype="<i4").tobytes()
    at = whole.index(offsets)
    for row, value in ((5, 2**31 - 1), (5, -1), (9, 10**6), (3, 60)):
        body = bytearray(whole)
        body[at + 4 * row : at + 4 * row + 4] = (value % 2**32).to_bytes(4, "little")
        assert outcomes([bytes(body)]) == {400: 1}


def test_text_that_is_not_utf8_is_400(whole):
    assert outcomes([whole.replace(b"layer.3", b"layer\xff3")]) == {400: 1}


def test_a_small_body_cannot_allocate_gigabytes():
    # Compressed buffers and dictionary indices are the two ways by which 48 KB became 1.6 GB.
    n = 1_300_000
    zeros = {
        "step": pa.array(np.zeros(n, np.int64)),
        "lane": pa.array(np.zeros(n, np.int32)),
        "x": pa.array(np.zeros(n)),
    }
    squeezed = stream(zeros, options=pa.ipc.IpcWriteOptions(compression="zstd"))
    assert len(squeezed) < 48_000
    schema = pa.schema(
        [("step", pa.int64()), ("lane", pa.int32()), ("x", pa.dictionary(pa.int32(), pa.utf8()))],
        metadata=META,
    )
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, schema) as writer:
        rows = [pa.array([1]), pa.array([1], pa.int32()), pa.array(["a" * 40_000]).dictionary_encode()]
        writer.write_batch(pa.record_batch(rows, schema=schema))
    assert outcomes([squeezed, sink.getvalue()], memory_mib=1200) == {422: 2}


def test_rows_that_no_buffer_holds_are_refused():
    body = stream({**axes(3), "x": pa.array([1, 2, 3], pa.int8())})
    three = (3).to_bytes(8, "little")
    changed = [rows.to_bytes(8, "little") for rows in (1000, 10**6, 2**40, 2**63 - 1, 2**64 - 1)]
    places = [at for at in range(len(body)) if body.startswith(three, at)]
    bodies = [body[:at] + rows + body[at + 8 :] for at in places for rows in changed]
    # Row counts that agree with each other, over buffers that are too short for them.
    bodies += [body.replace(three, rows) for rows in changed]
    assert len(places) >= 5
    assert 200 not in outcomes(bodies)


def test_big_endian_data_is_refused_before_arrow_swaps_it(whole):
    # No writer here makes it: the absent field `endianness` of the schema is pointed at a 1.
    size = int.from_bytes(whole[4:8], "little")
    metadata = bytearray(whole[8 : 8 + size])
    schema = Table.root(bytes(metadata)).table(2)._position
    vtable = schema - int.from_bytes(metadata[schema : schema + 4], "little", signed=True)
    one = next(at for at in range(schema + 4, size, 2) if metadata[at : at + 2] == b"\x01\x00")
    metadata[vtable + 4 : vtable + 6] = (one - schema).to_bytes(2, "little")
    with pytest.raises(WireError, match="big-endian") as raised:
        decode_frame(whole[:8] + bytes(metadata) + whole[8 + size :], ARROW_TYPE)
    assert raised.value.status == 400
