"""Content-Encoding with a hard cap: gzip and zstd, several members or frames, never more than asked."""

import os
import zlib
from io import BytesIO

import zstandard

from andon.wire_values import WireError, undecodable

_STEP_BYTES = 64 * 1024
# Members are legal (append to a .gz) but each costs a fresh inflate state; a body needs a handful.
_MAX_MEMBERS = 1024
# A frame may ask the decoder for a window; none needs more than the largest body that is allowed.
_MAX_WINDOW_BYTES = 64 * 1024 * 1024


def decompress(body: bytes, encoding: str | None, cap_bytes: int) -> bytes:
    """Undo Content-Encoding; memory stays below the cap plus one step whatever the body says.

    Raises:
        WireError: 400 truncated or corrupt, 413 more than `cap_bytes`, 415 unknown encoding.
    """
    name = (encoding or "").strip().lower()
    if name in ("", "identity"):
        if len(body) > cap_bytes:
            raise _too_large(cap_bytes)
        return body
    if name in ("gzip", "x-gzip"):
        return _gunzip(body, cap_bytes)
    if name == "zstd":
        return _unzstd(body, cap_bytes)
    shown = name[:40].encode("ascii", "replace").decode()
    raise WireError(
        415,
        "unsupported-encoding",
        f"unknown Content-Encoding {shown!r}; use gzip or zstd",
        "content-encoding",
    )


def _too_large(cap_bytes: int) -> WireError:
    return WireError(413, "too-large", f"the body decompresses to more than {cap_bytes} bytes", "body")


def _gunzip(body: bytes, cap_bytes: int) -> bytes:
    out: list[bytes] = []
    room = cap_bytes
    stream = zlib.decompressobj(wbits=31)
    members, view, position, pending = 1, memoryview(body), 0, b""
    try:
        while True:
            if not pending:
                pending = bytes(view[position : position + _STEP_BYTES])
                position += len(pending)
                if not pending:
                    break
            if stream.eof:
                members += 1
                if members > _MAX_MEMBERS:
                    raise undecodable(f"gzip body has more than {_MAX_MEMBERS} members")
                stream = zlib.decompressobj(wbits=31)
            # One byte more than allowed is asked for, so that exactly the cap still passes.
            part = stream.decompress(pending, room + 1)
            room -= len(part)
            if room < 0:
                raise _too_large(cap_bytes)
            out.append(part)
            pending = stream.unused_data if stream.eof else stream.unconsumed_tail
    except zlib.error as error:
        raise undecodable(f"not readable as gzip: {error}") from None
    if not stream.eof:
        raise undecodable("the gzip body is cut off")
    return b"".join(out)


def _sentinel_frame() -> tuple[bytes, bytes]:
    sentinel = os.urandom(16)
    return sentinel, zstandard.ZstdCompressor(write_checksum=True).compress(sentinel)


# The streaming reader ends silently where a body was cut. So a frame of our own, unknown to any
# sender, follows the body: only after a complete body does it come out as it went in. (Swallowed as
# the raw tail of a cut block it would end in its checksum, not in the sentinel.)
_SENTINEL, _SENTINEL_FRAME = _sentinel_frame()


def _unzstd(body: bytes, cap_bytes: int) -> bytes:
    if not body:
        raise undecodable("the zstd body is empty")
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
    out: list[bytes] = []
    room = cap_bytes + len(_SENTINEL)
    try:
        with decompressor.stream_reader(BytesIO(body + _SENTINEL_FRAME), read_across_frames=True) as reader:
            while part := reader.read(min(1024 * 1024, room + 1)):
                room -= len(part)
                if room < 0:
                    raise _too_large(cap_bytes)
                out.append(part)
    except zstandard.ZstdError as error:
        raise undecodable(f"not readable as zstd, or cut off: {error}") from None
    whole = b"".join(out)
    if not whole.endswith(_SENTINEL):
        raise undecodable("the zstd body is cut off")
    return whole[: -len(_SENTINEL)]
