"""Content-Encoding: bodies that are whole, cut, corrupt, or bombs."""

import gzip
import subprocess
import sys
import zlib

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from andon.wire import WireError, decompress

CAP = 100_000
PACK = {"gzip": gzip.compress, "zstd": zstandard.ZstdCompressor(write_checksum=True).compress}


def refused(body: bytes, encoding: str, cap: int = CAP) -> WireError:
    with pytest.raises(WireError) as raised:
        decompress(body, encoding, cap)
    return raised.value


@given(st.binary(max_size=3000), st.sampled_from(["gzip", "zstd", "x-gzip", "identity", "", " GZIP "]))
def test_a_whole_body_comes_out_as_it_went_in(body, encoding):
    pack = PACK.get(encoding.strip().lower().removeprefix("x-"), bytes)
    assert decompress(pack(body), encoding, CAP) == body


@pytest.mark.parametrize("encoding", PACK)
def test_members_one_after_the_other_are_one_body(encoding):
    pack = PACK[encoding]
    parts = [b"a" * 70_000, b"", b"b", bytes(range(256)) * 100]
    assert decompress(b"".join(map(pack, parts)), encoding, CAP) == b"".join(parts)


@pytest.mark.parametrize("encoding", ["gzip", "zstd", "identity"])
def test_exactly_the_cap_passes_and_one_byte_more_is_413(encoding):
    pack = PACK.get(encoding, bytes)
    assert len(decompress(pack(b"x" * CAP), encoding, CAP)) == CAP
    assert refused(pack(b"x" * (CAP + 1)), encoding).status == 413


@pytest.mark.parametrize("encoding", PACK)
@pytest.mark.parametrize("body", [b"hello", b"x" * 5000, bytes(range(256)) * 20])
def test_a_body_cut_anywhere_is_400(encoding, body):
    packed = PACK[encoding](body)
    for end in range(len(packed)):
        error = refused(packed[:end], encoding)
        assert (error.status, error.field) == (400, "body"), end


def test_a_frame_cut_inside_a_raw_block_is_400_also_without_checksum():
    packed = zstandard.ZstdCompressor().compress(bytes(range(256)) * 4)
    for end in range(len(packed)):
        assert refused(packed[:end], "zstd").status == 400


@pytest.mark.parametrize("encoding", PACK)
def test_garbage_behind_the_body_is_400(encoding):
    assert refused(PACK[encoding](b"hello") + b"garbage", encoding).status == 400


def test_a_wrong_checksum_is_400():
    packed = bytearray(gzip.compress(b"hello"))
    packed[-5] ^= 1
    assert refused(bytes(packed), "gzip").status == 400


@pytest.mark.parametrize("encoding", ["br", "deflate", "gzip, gzip", "zstd;q=1", "\x00ü"])
def test_another_encoding_is_415(encoding):
    error = refused(b"x", encoding)
    assert (error.status, error.field) == (415, "content-encoding")


@given(st.binary(max_size=400), st.sampled_from(["gzip", "zstd"]))
def test_no_bytes_make_anything_but_a_wire_error(body, encoding):
    assert refused(body, encoding).status in (400, 413)


@given(st.data(), st.sampled_from(["gzip", "zstd"]))
def test_no_flipped_byte_makes_anything_but_a_wire_error(data, encoding):
    whole = b"some body " * 50
    packed = bytearray(PACK[encoding](whole))
    packed[data.draw(st.integers(0, len(packed) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        out = decompress(bytes(packed), encoding, CAP)
    except WireError:
        return
    assert out == whole  # a byte that carries no meaning, such as the time in a gzip header


def test_thousands_of_tiny_members_are_refused_quickly():
    assert refused(gzip.compress(b"", 1) * 100_000, "gzip").status == 400


_BOMB = """
import resource, sys
from andon.wire import WireError, decompress
resource.setrlimit(resource.RLIMIT_AS, (700 * 2**20,) * 2)
body = sys.stdin.buffer.read()
try:
    decompress(body, sys.argv[1], 16 * 2**20)
except WireError as error:
    print(error.status)
"""


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_a_gigabyte_of_zeros_is_413_without_the_memory(encoding):
    if encoding == "gzip":
        squeezer = zlib.compressobj(9, wbits=31)
        body = b"".join(squeezer.compress(bytes(2**20)) for _ in range(1024)) + squeezer.flush()
    else:
        stream = zstandard.ZstdCompressor(level=3).compressobj()
        body = b"".join(stream.compress(bytes(2**20)) for _ in range(1024)) + stream.flush()
    assert len(body) < 2 * 2**20
    shown = subprocess.run(
        [sys.executable, "-c", _BOMB, encoding], input=body, capture_output=True, timeout=60, check=True
    )
    assert shown.stdout.strip() == b"413"
