"""The ledger: every automatic action and every decision about a run, chained and append-only.

A row is complete or it is refused: a field that has no value says why it has none. Rows of one run
form a chain (see `andon.ledger`): each names the digest of the row before it and is covered by its own,
so that a row taken out, put in or edited later is found by anybody who recomputes the chain.

What is capped counts itself: the number of rows of its action on its UTC day, people's decisions left
out, is taken under the lock that orders the chain, so two at once are never both the last one allowed.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from django.db import connection
from django.utils import timezone

from andon import ledger as chain
from andon.ledger import POSITIONS, REQUIRED, SCHEMA
from andon.ledger_files import rfc3339
from incidents.models import Incident, LedgerRow
from runs.inserting import insert
from runs.models import Run
from runs.rows import raw_cursor

# Database ids are left out of a row's document: a chain must outlive a restore.
_PLAIN = tuple(
    name for name in chain.FIELDS if name not in ("schema", "run", "at", "incident", "previous", "digest")
)
_ROWS_AT_ONCE = 500


class Incomplete(ValueError):
    """A row was refused: a field is missing and nobody said why there is none."""


def append(
    *,
    run: Run,
    action: str,
    why: str,
    decided_by: str,
    attempt: int | None = None,
    step: int | None = None,
    ranks: list[int] | None = None,
    before: Mapping[str, int | None] | None = None,
    after: Mapping[str, int | None] | None = None,
    checkpoint: dict[str, Any] | None = None,
    detector: dict[str, Any] | None = None,
    samples_skipped: int | None = None,
    steps_lost: int | None = None,
    gpu_hours_lost: float | None = None,
    none_because: Mapping[str, str] | None = None,
    cap: int | None = None,
    incident: Incident | None = None,
    at: datetime | None = None,
) -> LedgerRow:
    """Append one row to the chain of `run`, inside the caller's transaction.

    Args:
        action: hold, skip, rollback, resume, restart, reset, permit, ... (a stable name).
        decided_by: opaque id of a person, or rule and version ("nonfinite v1").
        step: the optimizer step it took effect at.
        ranks: whom it was about; [] is not allowed, an unknown set is None with a reason.
        before, after: the four positions by name. A position that is None needs a reason under
            "before.NAME" or "after.NAME"; the whole of it under "before" or "after".
        checkpoint: {"step", "uri", "digest", ...}.
        detector: {"name", "version", "policy", "numbers", ...}.
        none_because: field → why this row has none.
        cap: how often the run may do this automatically in a day; the row then says the how-manieth it is,
            and `past_cap` whether that is one too many. None: a person decided, or nothing caps it.

    Raises:
        Incomplete: a required field is missing and `none_because` does not say why.
    """
    reasons = {name: text for name, text in (none_because or {}).items() if text.strip()}
    row = LedgerRow(
        run=run,
        at=at or timezone.now(),
        attempt=attempt,
        action=action,
        step=step,
        ranks=sorted(set(ranks)) if ranks else None,
        before=_four(before),
        after=_four(after),
        checkpoint=checkpoint or None,
        detector=detector or None,
        samples_skipped=samples_skipped,
        steps_lost=steps_lost,
        gpu_hours_lost=gpu_hours_lost,
        decided_by=decided_by,
        why=why,
        none_because=reasons,
        incident=incident,
    )
    missing = chain.missing_fields({name: getattr(row, name) for name in _PLAIN})
    if missing:
        raise Incomplete(
            f"ledger row {action!r} of {run.slug} is not complete: {', '.join(missing)}: "
            "give it, or say in none_because why there is none"
        )
    with raw_cursor() as cursor:
        # Under the chain's lock until the transaction ends: two appends never get one number.
        cursor.execute(_HEAD, (run.pk, run.pk & 0x7FFFFFFF, action, _midnight(row.at)))
        seq, row.previous, used = cursor.fetchone() or (0, "", 0)
    if cap is not None:
        row.budget = {"used": used + 1, "of": cap}
    row.seq = seq + 1
    row.digest = chain.row_digest(document(row, run.slug))
    insert(row)
    return row


def past_cap(row: LedgerRow) -> bool:
    """Return whether an automatic action was one more than its day allows."""
    return row.budget is not None and row.budget["used"] > row.budget["of"]


def verify(run: Run) -> list[str]:
    """Recompute the chain of `run`; returns one sentence per row that does not fit, [] when all do."""
    return chain.verify(documents(run))


@dataclass(frozen=True, slots=True)
class Checked:
    """What was found of a chain: a sentence for each row that does not fit, and when the whole was read."""

    wrong: list[str]
    at: datetime
    rows: int
    head: str


WHOLE_EVERY = timedelta(
    hours=1
)  # ten thousand rows take seconds to read, and all the night they are the same
_checked: dict[int, Checked] = {}  # in this process, by run


def checked(run: Run, newest: LedgerRow | None, shown: Iterable[LedgerRow]) -> Checked:
    """Check the chain of `run` as far as a page needs it: what was added since, and what it shows.

    The whole is read once an hour, and whenever it does not go on where it ended; an export always reads it.

    Args:
        newest: the newest row, None when there is none.
        shown: rows that are shown: each must be as it was written.
    """
    known = _checked.get(run.pk)
    if (
        known is None
        or known.wrong
        or timezone.now() - known.at >= WHOLE_EVERY
        or not _goes_on(known, newest)
    ):
        links = chain.Chain()
        for row in documents(run):
            links.take(row)
        known = Checked(links.wrong, timezone.now(), links.rows, links.head)
    elif newest is not None and newest.seq > known.rows:
        links = chain.Chain(known.rows, known.head)
        for row in documents(run, after=known.rows):
            links.take(row)
        known = Checked(links.wrong, known.at, links.rows, links.head)
    _checked[run.pk] = known
    told = (document(row, run.slug) for row in shown)
    changed = [chain.CHANGED.format(row["seq"]) for row in told if row["digest"] != chain.row_digest(row)]
    return replace(known, wrong=[*known.wrong, *(one for one in changed if one not in known.wrong)])


def _goes_on(known: Checked, newest: LedgerRow | None) -> bool:
    """Whether a chain that was checked still ends where it did, or beyond."""
    seq, digest = (newest.seq, newest.digest) if newest is not None else (0, "")
    return seq > known.rows or (seq, digest) == (known.rows, known.head)


def documents(run: Run, *, after: int = 0, until: int | None = None) -> Iterator[dict[str, Any]]:
    """Return the chain of `run` as documents, oldest first, read a few hundred at a time.

    By number, not by a cursor of the server: an export is read as slowly as its reader, and no transaction
    stays open meanwhile. Rows are only ever added, so the chain up to `until` is the same all along.
    """
    seq = after
    while True:
        found = LedgerRow.objects.filter(run=run, seq__gt=seq)
        if until is not None:
            found = found.filter(seq__lte=until)
        some = list(found.order_by("seq")[:_ROWS_AT_ONCE])
        for row in some:
            yield document(row, run.slug)
        if len(some) < _ROWS_AT_ONCE:
            return
        seq = some[-1].seq


def document(row: LedgerRow, run_slug: str) -> dict[str, Any]:
    """Return a row as JSON-ready data: what its digest covers, and the digest."""
    made = {
        "schema": SCHEMA,
        "run": run_slug,
        "at": rfc3339(row.at),
        # An incident's number is its public name (it stands in URLs and on pages), not a private key.
        "incident": None if row.incident_id is None else str(row.incident_id),
        "previous": row.previous,
        "digest": row.digest,
        **{name: getattr(row, name) for name in _PLAIN},
    }
    return {name: made[name] for name in chain.FIELDS}


def used_today(run: Run, action: str, now: datetime | None = None) -> int:
    """Return how many automatic actions of this kind the run has on this UTC day: what a cap counts."""
    midnight = _midnight(now or timezone.now())
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM incidents_ledgerrow"
            " WHERE run_id = %s AND action = %s AND at >= %s AND budget IS NOT NULL",
            [run.pk, action, midnight],
        )
        return int(cursor.fetchone()[0])


def _four(positions: Mapping[str, int | None] | None) -> dict[str, int | None] | None:
    if positions is None or all(positions.get(name) is None for name in POSITIONS):
        return None
    return {name: positions.get(name) for name in POSITIONS}


_HEAD = "SELECT seq, digest, used FROM incidents_ledger_head(%s, %s, %s, %s)"


def _midnight(moment: datetime) -> datetime:
    return moment.replace(hour=0, minute=0, second=0, microsecond=0)


__all__ = ["POSITIONS", "REQUIRED", "SCHEMA", "Incomplete", "append", "document", "documents", "past_cap"]
