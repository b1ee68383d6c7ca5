"""What an image is, by its bytes."""

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.images import MOST_BYTES, Image, identify


def png(width=3, height=2):
    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + b"\x80" * width for _ in range(height)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


JPEG = b"\xff\xd8\xff\xe0\0\x04ab\xff\xff\xdb\0\x03x\xff\xc2\0\x0b\x08\0\x07\0\x09\x01\x01\x11\0\xff\xd9"
GIF = b"GIF89a" + struct.pack("<HH", 5, 4) + b"\0\0\0;"
WEBP_VP8X = b"RIFF\0\0\0\0WEBPVP8X" + struct.pack("<I", 10) + b"\0\0\0\0" + b"\x0f\0\0" + b"\x1f\0\0"
WEBP_VP8L = b"RIFF\0\0\0\0WEBPVP8L" + struct.pack("<I", 5) + b"\x2f" + struct.pack("<I", 6 | (8 << 14))
WEBP_VP8 = (
    b"RIFF\0\0\0\0WEBPVP8 " + struct.pack("<I", 10) + b"\0\0\0\x9d\x01\x2a" + struct.pack("<HH", 11, 12)
)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (png(), Image("image/png", 3, 2)),
        (JPEG, Image("image/jpeg", 9, 7)),
        (GIF, Image("image/gif", 5, 4)),
        (WEBP_VP8X, Image("image/webp", 16, 32)),
        (WEBP_VP8L, Image("image/webp", 7, 9)),
        (WEBP_VP8, Image("image/webp", 11, 12)),
    ],
)
def test_the_four_kinds_with_their_size(body, found):
    assert identify(body) == found


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "empty"),
        (b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>", "no PNG, JPEG, GIF or WebP"),
        (b"<html><script>", "no PNG"),
        (b"GIF87a", "begins like an image and is none"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 40, "begins like an image and is none"),
        (b"\xff\xd8\xff\xda\0\0", "begins like an image and is none"),
        (b"RIFF\0\0\0\0WEBPxxxx", "begins like an image and is none"),
        (png(60_000, 60_000)[:60], "pixels, at most"),
        (png(0, 3)[:60], "0 × 3 pixels"),
        (png() + b"\0" * MOST_BYTES, "bytes, at most"),
    ],
)
def test_anything_else_is_refused_in_words(body, says):
    with pytest.raises(ValueError, match=says):
        identify(body)


@given(
    st.sampled_from([png(), JPEG, GIF, WEBP_VP8X, WEBP_VP8L, WEBP_VP8, b"\xff\xd8\xff"]),
    st.binary(max_size=64),
    st.integers(0, 64),
)
def test_no_bytes_are_a_problem(start, rest, cut):
    try:
        found = identify(start[:cut] + rest)
    except ValueError:
        return
    assert found.width * found.height > 0
