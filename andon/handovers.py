"""What one signing key says of the next. Standard library only: the offline verifier reads these too.

Both keys sign one handover, "from this key to that one, at this time". A stolen key signs none: the new
key alone says until when the stolen one was the server's.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from andon.wire_times import parse_time

SCHEMA = "andon.key-handover/1"
# A process that read the old key just before the handover may sign a moment after it.
GRACE_S = 300


@dataclass(frozen=True)
class Handover:
    """From the key `old` to the key `new`, by fingerprint, at `at_ns` nanoseconds since 1970 UTC."""

    old: str
    new: str
    at_ns: int
    is_stolen: bool


def read(signed: list[Any], content_of: Callable[[Any], Mapping[str, Any]]) -> Handover:
    """Return what one or two signed documents say together.

    Args:
        content_of: checks the signature of one document and returns its content.

    Raises:
        ValueError, KeyError, TypeError: no handover, or not signed by the keys it names; and whatever
            `content_of` raises.
    """
    contents = [content_of(one) for one in signed]
    content = contents[0]
    is_stolen = content.get("stolen") is True
    by = [content["to"]] if is_stolen else [content["from"], content["to"]]
    if any(one != content for one in contents) or [one["key_id"] for one in signed] != by:
        raise ValueError("is not signed by the keys it names")
    if content.get("schema") != SCHEMA or not all(isinstance(key, str) for key in by):
        raise ValueError("is no handover")
    return Handover(str(content["from"]), content["to"], parse_time(content["at"])[0], is_stolen)


def successors(handovers: Iterable[Handover], key_id: str) -> list[str]:
    """Return the keys that `key_id` and its successors handed over to, one after the other.

    A stolen key names no successor, and two handovers from one key contradict each other.
    """
    after: dict[str, set[str]] = {}
    for one in handovers:
        if not one.is_stolen:
            after.setdefault(one.old, set()).add(one.new)
    found: list[str] = []
    while len(after.get(key_id, ())) == 1:
        (key_id,) = after.pop(key_id)
        found.append(key_id)
    return found
