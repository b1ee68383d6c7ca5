"""The server's signing keys over time: whom to trust after a rotation, decided from pinned keys alone.

A trainer pins a fingerprint when it is launched. When the server changes its key, both keys sign one
handover, "from this key to that one, at this time", and `/.well-known/andon-keys.json` publishes it.
`follow` walks such handovers from the pinned keys, in both directions:

- forward, so that a job launched before the rotation believes directives and permits made after it;
- backward, so that one launched after it believes those made before, and no later than the handover.

Nothing else widens trust: a key that is only listed is not trusted. Two handovers from one key, or two
to one, are a contradiction and count for nothing.

A stolen key names no successor: whatever it signs, the thief can sign too. The new key alone says until
when the stolen one was the server's. That makes seals of before verifiable and nothing else: directives
and permits of a stolen key are believed by nobody who pins the new one, and jobs that pinned the stolen
one are pinned anew (docs/operate.md).
"""

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from andon import handovers
from andon.handovers import GRACE_S, Handover
from andon.signing import SignatureError, SigningKey, sign_document, verify_document
from andon.wire_times import format_time, parse_time

PATH = "/.well-known/andon-keys.json"
SCHEMA = "andon.keys/1"
HANDOVER_SCHEMA = handovers.SCHEMA
_MOST_KEYS = 1000


@dataclass(frozen=True)
class PublicKey:
    """One key as it is published. Times are RFC 3339 UTC; `until` is None for the key in use."""

    key_id: str
    public_key: str  # base64
    since: str
    until: str | None = None
    handover: list[dict[str, Any]] | None = None  # from the key before it, signed by both
    is_stolen: bool = False


class KeyRing(Collection[str]):
    """Fingerprints that are trusted, and until when each one signed."""

    def __init__(self, until_ns: Mapping[str, int | None]) -> None:
        self._until_ns = dict(until_ns)

    @property
    def until_ns(self) -> dict[str, int | None]:
        """Return a copy: until when each key signed, None for one that was not handed over."""
        return dict(self._until_ns)

    def __contains__(self, key_id: object) -> bool:
        return key_id in self._until_ns

    def __iter__(self) -> Iterator[str]:
        return iter(self._until_ns)

    def __len__(self) -> int:
        return len(self._until_ns)

    def check_time(self, key_id: str, at_ns: int) -> None:
        """Raise SignatureError when something says that it was signed after its key was handed over."""
        until_ns = self._until_ns.get(key_id)
        if until_ns is not None and at_ns > until_ns + GRACE_S * 10**9:
            raise SignatureError(
                f"key_id: {key_id} signed until {format_time(until_ns)}, this says {format_time(at_ns)}"
            )


def check_time(trusted: Collection[str] | None, document: object, at: str) -> None:
    """Check that `document`, which verified, was signed while its key was in use.

    Fingerprints without times (pinned by hand) are not limited.

    Raises:
        SignatureError: it says a time after its key was handed over.
    """
    if isinstance(trusted, KeyRing) and isinstance(document, Mapping):
        trusted.check_time(str(document.get("key_id")), parse_time(at)[0])


def handover(old: SigningKey, new: SigningKey, at: str) -> list[dict[str, Any]]:
    """Return the handover from one key to the next, signed by both. `at` is RFC 3339 UTC."""
    content = {"schema": HANDOVER_SCHEMA, "from": old.key_id, "to": new.key_id, "at": at}
    return [sign_document(content, old), sign_document(content, new)]


def given_up(stolen: str, new: SigningKey, at: str) -> list[dict[str, Any]]:
    """Return what takes the place of a handover from a stolen key, named by its fingerprint."""
    content = {"schema": HANDOVER_SCHEMA, "from": stolen, "to": new.key_id, "at": at, "stolen": True}
    return [sign_document(content, new)]


def document(keys: Iterable[PublicKey]) -> dict[str, Any]:
    """Return `/.well-known/andon-keys.json`: the key in use first, then old ones, the newest first."""
    return {
        "schema": SCHEMA,
        "keys": [
            {
                "key_id": key.key_id,
                "algorithm": "Ed25519",
                "public_key": key.public_key,
                "current": key.until is None,
                "from": key.since,
                "until": key.until,
                "stolen": key.is_stolen,
                "handover": key.handover,
            }
            for key in keys
        ],
    }


def follow(published: object, pinned: Collection[str], *, for_evidence: bool = False) -> KeyRing:
    """Return the keys to trust: the pinned ones, and those that handovers lead to.

    Args:
        published: decoded `/.well-known/andon-keys.json`, from anybody; anything malformed is passed over.
        pinned: fingerprints known by another way, or the ring of an earlier look, which never shrinks.
        for_evidence: also trust keys that were stolen later, for what they sealed until then.
    """
    after: dict[str, list[Handover]] = {}
    before: dict[str, list[Handover]] = {}
    for one in _handovers(published):
        before.setdefault(one.new, []).append(one)
        if not one.is_stolen:
            after.setdefault(one.old, []).append(one)
    until_ns = pinned.until_ns if isinstance(pinned, KeyRing) else dict.fromkeys(pinned)
    closed: set[str] = set()  # stolen keys: nothing leads on from them, not even what else they signed
    todo = list(until_ns)
    while todo:
        key_id = todo.pop()
        found = []
        if key_id not in closed and len(after.get(key_id, [])) == 1:
            found += [(after[key_id][0], after[key_id][0].new)]
        if len(before.get(key_id, [])) == 1 and (for_evidence or not before[key_id][0].is_stolen):
            found += [(before[key_id][0], before[key_id][0].old)]
        for one, other in found:
            if one.is_stolen:
                closed.add(other)
            if other not in until_ns:
                until_ns[other] = None
                todo.append(other)
            known = until_ns[one.old]
            until_ns[one.old] = one.at_ns if known is None else min(known, one.at_ns)
    return KeyRing(until_ns)


def _handovers(published: object) -> set[Handover]:
    rows = published.get("keys") if isinstance(published, Mapping) else None
    found = set()
    for row in rows[:_MOST_KEYS] if isinstance(rows, list) else []:
        signed = row.get("handover") if isinstance(row, Mapping) else None
        if isinstance(signed, list) and 1 <= len(signed) <= 2:
            with contextlib.suppress(SignatureError, ValueError, KeyError, TypeError):
                found.add(handovers.read(signed, lambda one: verify_document(one, None)))
    return found
