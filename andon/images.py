"""What an image is, by its bytes: PNG, JPEG, GIF or WebP, with its size in pixels.

A name or a declared type says nothing. SVG is no image here: it is a document that may hold scripts.
"""

import struct
from dataclasses import dataclass

MOST_BYTES = 5 << 20
MOST_PIXELS = 40_000_000  # a browser unpacks four bytes for each


@dataclass(frozen=True, slots=True)
class Image:
    """What was found: the media type and the size in pixels."""

    media_type: str
    width: int
    height: int

    @property
    def suffix(self) -> str:
        """Return the usual ending of a file of this type, with its dot."""
        return {"image/jpeg": ".jpg"}.get(self.media_type, f".{self.media_type.removeprefix('image/')}")


def identify(body: bytes) -> Image:
    """Return what `body` is.

    Raises:
        ValueError: empty, too large in bytes or pixels, or none of the four; the text is for people.
    """
    if not body:
        raise ValueError("the file is empty")
    if len(body) > MOST_BYTES:
        raise ValueError(f"the file has {len(body):,} bytes, at most {MOST_BYTES:,} are taken")
    try:
        found = _png(body) or _gif(body) or _webp(body) or _jpeg(body)
    except (struct.error, IndexError):
        raise ValueError("the file begins like an image and is none") from None
    if found is None:
        raise ValueError("the file is no PNG, JPEG, GIF or WebP image")
    if not (found.width and found.height) or found.width * found.height > MOST_PIXELS:
        raise ValueError(
            f"the image has {found.width} × {found.height} pixels, at most {MOST_PIXELS:,} are taken"
        )
    return found


def _png(body: bytes) -> Image | None:
    if not body.startswith(b"\x89PNG\r\n\x1a\n"):
        return None
    if body[12:16] != b"IHDR":
        raise IndexError
    width, height = struct.unpack(">II", body[16:24])
    return Image("image/png", width, height)


def _gif(body: bytes) -> Image | None:
    if body[:6] not in (b"GIF87a", b"GIF89a"):
        return None
    width, height = struct.unpack("<HH", body[6:10])
    return Image("image/gif", width, height)


def _webp(body: bytes) -> Image | None:
    if body[:4] != b"RIFF" or body[8:12] != b"WEBP":
        return None
    match body[12:16]:
        case b"VP8X":
            width, height = (int.from_bytes(body[at : at + 3], "little") + 1 for at in (24, 27))
            if len(body) < 30:
                raise IndexError
        case b"VP8L":
            bits = struct.unpack("<I", body[21:25])[0]
            width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8 ":
            width, height = (value & 0x3FFF for value in struct.unpack("<HH", body[26:30]))
        case _:
            raise IndexError
    return Image("image/webp", width, height)


# Frame headers (SOF0 to SOF15 without DHT, JPG and DAC) hold the size; these come before the pixels.
_SOF = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


def _jpeg(body: bytes) -> Image | None:
    if not body.startswith(b"\xff\xd8\xff"):
        return None
    at = 2
    while True:
        while body[at] == 0xFF and body[at + 1] == 0xFF:
            at += 1  # fill bytes
        if body[at] != 0xFF or body[at + 1] in (0xD9, 0xDA):
            raise IndexError
        marker = body[at + 1]
        length = struct.unpack(">H", body[at + 2 : at + 4])[0]
        if marker in _SOF:
            height, width = struct.unpack(">HH", body[at + 5 : at + 9])
            return Image("image/jpeg", width, height)
        at += 2 + max(2, length)
