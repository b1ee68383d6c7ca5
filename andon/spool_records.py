"""What the spool keeps: posts, and how one lies in a segment file."""

import struct
import zlib
from typing import Any

import msgspec

_HEADER = struct.Struct("<4sIII")  # magic, length of the description, length of the body, CRC-32 of both
HEADER_BYTES = _HEADER.size
_MAGIC = b"ANR1"
_MAX_DESCRIPTION_BYTES = 64 * 1024
_MAX_BODY_BYTES = 64 * 1024 * 1024


# What comes again with the next step. All else happens once (an action, a verdict, an artifact, an
# acknowledgement, a checkpoint) and is never given up for want of room.
TELEMETRY = {"step", "heartbeat", "batch.seen", "loader.position"}


def must_arrive(events: list[dict[str, Any]]) -> bool:
    """Whether a post of these events is kept, however long the server is away."""
    return any(str(event.get("type")).removeprefix("andon.") not in TELEMETRY for event in events)


class Post(msgspec.Struct):
    """One request that must reach the server. `path` is below the server's address.

    `kept`: never given up for want of room (an action, a finding, an artifact, …), as telemetry is.
    """

    id: str
    path: str
    content_type: str
    body: bytes = b""
    encoding: str = ""
    created_s: float = 0.0
    events: int = 0
    kept: bool = False


class Gap(msgspec.Struct):
    """What was given up and why: sent as a `gap` event as soon as there is somebody to tell."""

    posts: int = 0
    events: int = 0
    from_s: float = 0.0
    to_s: float = 0.0
    reasons: dict[str, int] = {}

    def take_in(self, other: "Gap") -> None:
        """Count what another counted."""
        self.posts += other.posts
        self.events += other.events
        self.from_s = min(self.from_s or other.from_s, other.from_s)
        self.to_s = max(self.to_s, other.to_s)
        for reason, posts in other.reasons.items():
            self.reasons[reason] = self.reasons.get(reason, 0) + posts

    def add(self, post: Post, reason: str) -> None:
        """Count one lost post."""
        self.posts += 1
        self.events += post.events
        self.from_s = min(self.from_s or post.created_s, post.created_s)
        self.to_s = max(self.to_s, post.created_s)
        self.reasons[reason] = self.reasons.get(reason, 0) + 1


def encode_record(post: Post) -> bytes:
    """Return the bytes of one record: header, description (the post without its body), body."""
    description = msgspec.json.encode(msgspec.structs.replace(post, body=b""))
    crc = zlib.crc32(post.body, zlib.crc32(description))
    return _HEADER.pack(_MAGIC, len(description), len(post.body), crc) + description + post.body


def is_cut(header: bytes, left_bytes: int) -> bool:
    """Whether `left_bytes` that begin so are one record cut while it was written, not damage."""
    if len(header) < HEADER_BYTES:
        return True
    magic, description, body, _ = _HEADER.unpack(header)
    return bool(magic == _MAGIC and description + body > left_bytes - HEADER_BYTES)


def read_record(file: Any) -> tuple[Post, int] | None:
    """Return the post at the file's place and its length in bytes; None when no whole one is there."""
    header = file.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        return None
    magic, description_bytes, body_bytes, crc = _HEADER.unpack(header)
    if magic != _MAGIC or description_bytes > _MAX_DESCRIPTION_BYTES or body_bytes > _MAX_BODY_BYTES:
        return None
    description, body = file.read(description_bytes), file.read(body_bytes)
    if len(body) < body_bytes or zlib.crc32(body, zlib.crc32(description)) != crc:
        return None
    try:
        post = msgspec.json.decode(description, type=Post)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None
    post.body = body
    return post, HEADER_BYTES + description_bytes + body_bytes
