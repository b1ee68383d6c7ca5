"""The ledger's rows and their chain, as anybody can check them without the server.

A row is a JSON object. Its `digest` is the SHA-256 over the RFC 8785 form of all its other fields, one of
which is `previous`, the digest of the row before it; so a row taken out, put in or edited later is found
by whoever recomputes the chain. Only rows cut off at the end leave a chain that fits: for these the
newest digest, which the server's page and API show, is compared (`head`).
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from andon.canonical import sha256

SCHEMA = "andon.ledger/1"
POSITIONS = ("loader_position", "consumed_samples", "optimizer_step", "schedule_position")

# A row has exactly these, in this order in an export.
FIELDS = (
    "schema",
    "run",
    "seq",
    "at",
    "attempt",
    "action",
    "step",
    "ranks",
    "before",
    "after",
    "checkpoint",
    "detector",
    "samples_skipped",
    "steps_lost",
    "gpu_hours_lost",
    "decided_by",
    "why",
    "none_because",
    "budget",
    "incident",
    "previous",
    "digest",
)
WHOLE = ("seq", "attempt", "step", "samples_skipped", "steps_lost")
NESTED = ("ranks", "before", "after", "checkpoint", "detector", "none_because", "budget")

REQUIRED = ("step", "ranks", "before", "after", "checkpoint")
# What a row of this action is worthless without, beside what every row needs.
ALSO_REQUIRED: dict[str, tuple[str, ...]] = {
    "hold": ("detector",),
    "skip": ("samples_skipped",),
    "rollback": ("steps_lost", "gpu_hours_lost"),
    "watch_end": ("detector",),
}


def missing_fields(row: Mapping[str, Any]) -> list[str]:
    """Return the fields that have neither a value nor a reason in `none_because` why they have none."""
    reasons: Mapping[str, str] = row.get("none_because") or {}
    missing = [name for name in ("action", "decided_by", "why") if not row.get(name)]
    for name in REQUIRED + ALSO_REQUIRED.get(str(row.get("action")), ()):
        value = row.get(name)
        if name in ("before", "after") and value is not None:
            if name not in reasons:
                missing += [
                    f"{name}.{position}"
                    for position in POSITIONS
                    if value.get(position) is None and f"{name}.{position}" not in reasons
                ]
        elif value is None and name not in reasons:
            missing.append(name)
    return missing


def row_digest(row: Mapping[str, Any]) -> str:
    """Return the digest of a row: lower-case hex, over all of its fields but `digest`."""
    return sha256({name: value for name, value in row.items() if name != "digest"})


CHANGED = "row {} was changed after it was written: its digest does not fit"


class Chain:
    """A chain that is checked row by row, in the order of `seq`.

    Attributes:
        rows: how many were taken in.
        head: digest of the newest; "" before the first.
        wrong: one sentence per row that does not fit; [] while all do.
    """

    def __init__(self, rows: int = 0, head: str = "") -> None:
        """Begin before the first row, or after `rows` that were checked already and end in `head`."""
        self.rows = rows
        self.head = head
        self.wrong: list[str] = []
        self._next = rows + 1
        self._run: object = None

    def take(self, row: Mapping[str, Any]) -> None:
        """Check one row against itself and against the one before it."""
        seq, digest = row.get("seq"), row.get("digest")
        where = f"row {seq}"
        if set(row) != set(FIELDS):
            names = ", ".join(sorted(map(str, set(row) ^ set(FIELDS))))
            self.wrong.append(f"{where} has not exactly the fields of a row: {names}")
        if row.get("schema") != SCHEMA:
            self.wrong.append(f"{where} is of schema {row.get('schema')!r}, not {SCHEMA!r}")
        if self._run is not None and row.get("run") != self._run:
            self.wrong.append(f"{where} belongs to another run")
        self._run = row.get("run") if self._run is None else self._run
        if seq != self._next:
            self.wrong.append(f"row {self._next} is missing: the next one found is row {seq}")
        elif row.get("previous") != self.head:
            self.wrong.append(f"{where} names another row before it than row {self._next - 1}")
        if digest != row_digest(row):
            self.wrong.append(CHANGED.format(seq))
        self.rows += 1
        self.head = str(digest)
        self._next = seq + 1 if isinstance(seq, int) else self._next + 1


def checked(rows: Iterable[Mapping[str, Any]], chain: Chain) -> Iterator[Mapping[str, Any]]:
    """Pass rows on, each checked by `chain`."""
    for row in rows:
        chain.take(row)
        yield row


def verify(rows: Iterable[Mapping[str, Any]], *, head: str | None = None) -> list[str]:
    """Return what is wrong with a whole chain, a sentence each; [] when nothing is.

    Args:
        head: the digest the newest row must have, as the server showed it; None: not compared.
    """
    chain = Chain()
    for row in rows:
        chain.take(row)
    if head is not None and chain.head != head:
        return [*chain.wrong, f"the newest row is {chain.head or 'none'}, not {head}: rows are cut off"]
    return chain.wrong
