"""The directive: what the server currently orders a run to do, and who may believe it.

A directive is data signed with the server's Ed25519 key. It is never an authority to resume:
`resume` and `rollback` only name the permit that is (andon/permit.py).
"""

from collections.abc import Collection, Mapping
from typing import Any, Literal

import msgspec

from andon import keys
from andon.signing import SignatureError, SigningKey, sign_document, verify_document

SCHEMA = "andon.directive/1"

Kind = Literal["continue", "hold", "rollback", "resume"]
HoldMode = Literal["in_place", "exit"]


class Directive(msgspec.Struct, frozen=True, kw_only=True):
    """One order.

    `seq` grows by one at every change and is per run. `deadline` and `since` are RFC 3339 UTC.
    `plan` is the approved plan as JSON, `permit` the permit's id; both only with `resume` and
    `rollback`. `mode` and `deadline` say how ranks wait under `hold`.
    """

    kind: Kind
    seq: int
    run: str
    attempt: int
    mode: HoldMode = "in_place"
    deadline: str | None = None
    incident: str | None = None
    since: str | None = None
    plan: dict[str, Any] | None = None
    permit: str | None = None
    schema: str = SCHEMA

    def to_document(self) -> dict[str, Any]:
        """Return the directive as JSON-ready data, unsigned."""
        return msgspec.to_builtins(self)  # type: ignore[no-any-return]

    def sign(self, key: SigningKey) -> dict[str, Any]:
        """Return the signed document that goes into answers and into `andon-hold.json`."""
        return sign_document(self.to_document(), key)


def from_document(document: object) -> Directive:
    """Read a directive, signed or not; unknown keys are ignored so that later servers may add some.

    Raises:
        ValueError: a field is missing or has the wrong type, or the schema is another one.
    """
    if not isinstance(document, Mapping):
        raise ValueError("directive: must be a JSON object")
    if document.get("schema") != SCHEMA:
        raise ValueError(f"directive.schema: expected {SCHEMA!r}, got {document.get('schema')!r}")
    try:
        directive = msgspec.convert(dict(document), Directive)
    except msgspec.ValidationError as error:
        raise ValueError(f"directive: {error}") from error
    if directive.seq < 0 or directive.attempt < 0:
        raise ValueError("directive: seq and attempt must not be negative")
    return directive


class Follower:
    """Keeps the newest directive of one run, as every client must.

    A directive counts only if its `seq` is above the highest seen, it is of this run (and of this
    attempt, once the attempt is known), and, with pinned keys, its signature verifies. Everything
    else is ignored and counted in `ignored`.
    """

    def __init__(
        self, run: str, *, attempt: int | None = None, trusted: Collection[str] | None = None
    ) -> None:
        self.run = run
        self.attempt = attempt
        # What was pinned; `learn` may add keys that the pinned ones handed over to.
        self.trusted = trusted if trusted is None or isinstance(trusted, keys.KeyRing) else frozenset(trusted)
        self.document: dict[str, Any] | None = None
        self.seq = -1
        self.ignored = 0

    def knows_key_of(self, document: object) -> bool:
        """Return whether nothing need be asked about the key of `document`: it is trusted, or it names
        none, or nothing is pinned."""
        named = document.get("key_id") if isinstance(document, Mapping) else None
        return self.trusted is None or named is None or named in self.trusted

    def learn(self, published: object) -> None:
        """Also trust what the pinned keys handed over to, by a published key document."""
        if self.trusted is not None:
            self.trusted = keys.follow(published, self.trusted)

    def offer(self, document: object) -> bool:
        """Look at a directive from an answer; return whether it is now the newest."""
        try:
            directive = from_document(document)
            if self.trusted is not None:
                verify_document(document, self.trusted)
                keys.check_time(self.trusted, document, directive.since or "1970-01-01T00:00:00Z")
        except (ValueError, SignatureError):
            self.ignored += 1
            return False
        other_attempt = self.attempt is not None and directive.attempt != self.attempt
        if directive.run != self.run or other_attempt or directive.seq <= self.seq:
            # The same directive comes with every answer; only a strange one is worth counting.
            self.ignored += directive.run != self.run or other_attempt
            return False
        assert isinstance(document, Mapping)
        self.document, self.seq = dict(document), directive.seq
        return True
