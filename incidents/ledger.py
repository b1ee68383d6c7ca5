"""The ledger: every automatic action and every decision about a run, chained and append-only.

A row is complete or it is refused: a field that has no value says why it has none. Rows of one run
form a chain: each names the digest of the row before it and is covered by its own, so that a row
taken out, put in or edited later is found by anybody who recomputes the chain.
"""

import hashlib
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from django.db import connection
from django.utils import timezone

from incidents.canonical import canonical_bytes
from incidents.models import Incident, LedgerRow
from runs.models import Run

SCHEMA = "andon.ledger/1"
POSITIONS = ("loader_position", "consumed_samples", "optimizer_step", "schedule_position")
REQUIRED = ("step", "ranks", "before", "after", "checkpoint")
# What a row of this action is worthless without, beside what every row needs.
ALSO_REQUIRED: dict[str, tuple[str, ...]] = {
    "hold": ("detector",),
    "skip": ("samples_skipped",),
    "rollback": ("steps_lost", "gpu_hours_lost"),
}
# Advisory locks share one number space with `runs.locks`; this key names "the ledger of a run".
_LEDGER_LOCK = 0x0A11
# In this order, each length-prefixed. Database ids are left out: a chain must outlive a restore.
_CHAINED = (
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
)


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
    budget: dict[str, Any] | None = None,
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
        budget: {"used", "of"} of this action today, where the policy caps it.

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
        budget=budget,
        incident=incident,
    )
    missing = missing_fields(row)
    if missing:
        raise Incomplete(
            f"ledger row {action!r} of {run.slug} is not complete: {', '.join(missing)}: "
            "give it, or say in none_because why there is none"
        )
    _lock_chain(run.pk)
    newest = LedgerRow.objects.filter(run=run).order_by("-seq").values_list("seq", "digest").first()
    seq, row.previous = newest or (0, "")
    row.seq = seq + 1
    row.digest = row_digest(row, run.slug)
    row.save(force_insert=True)
    return row


def missing_fields(row: LedgerRow) -> list[str]:
    """Return the fields that have neither a value nor a reason why they have none."""
    reasons: dict[str, str] = row.none_because
    missing = [name for name in ("action", "decided_by", "why") if not getattr(row, name)]
    for name in REQUIRED + ALSO_REQUIRED.get(row.action, ()):
        value = getattr(row, name)
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


def row_digest(row: LedgerRow, run_slug: str) -> str:
    """Return the SHA-256 of a row: each part as name and canonical value, both length-prefixed."""
    parts: list[tuple[str, Any]] = [
        ("schema", SCHEMA),
        ("run", run_slug),
        ("seq", row.seq),
        ("previous", row.previous),
    ]
    for name in _CHAINED:
        value = getattr(row, name)
        parts.append((name, value.isoformat() if isinstance(value, datetime) else value))
    # An incident's number is its public name (it stands in URLs and on pages), not a private key.
    parts.append(("incident", None if row.incident_id is None else str(row.incident_id)))
    total = hashlib.sha256()
    for name, value in parts:
        for piece in (name.encode(), canonical_bytes(value)):
            total.update(len(piece).to_bytes(8, "big"))
            total.update(piece)
    return total.hexdigest()


def verify(run: Run) -> list[str]:
    """Recompute the chain of `run`; returns one sentence per row that does not fit, [] when all do."""
    wrong: list[str] = []
    previous, expected = "", 1
    for row in LedgerRow.objects.filter(run=run).order_by("seq").iterator(chunk_size=500):
        if row.seq != expected:
            wrong.append(f"row {expected} is missing: the next one found is row {row.seq}")
        if row.previous != previous and row.seq == expected:
            wrong.append(f"row {row.seq} names another row before it than row {row.seq - 1}")
        if row.digest != row_digest(row, run.slug):
            wrong.append(f"row {row.seq} was changed after it was written: its digest does not fit")
        previous, expected = row.digest, row.seq + 1
    return wrong


def document(row: LedgerRow, run_slug: str) -> dict[str, Any]:
    """Return a row as JSON-ready data, for exports and the read API."""
    return {
        "schema": SCHEMA,
        "run": run_slug,
        "seq": row.seq,
        "at": row.at.isoformat().replace("+00:00", "Z"),
        **{name: getattr(row, name) for name in _CHAINED if name != "at"},
        "incident": None if row.incident_id is None else str(row.incident_id),
        "previous": row.previous,
        "digest": row.digest,
    }


def used_today(run: Run, action: str, now: datetime | None = None) -> int:
    """Return how many rows of `action` the run has on this UTC day: what a daily cap counts."""
    midnight = (now or timezone.now()).replace(hour=0, minute=0, second=0, microsecond=0)
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM incidents_ledgerrow WHERE run_id = %s AND action = %s AND at >= %s",
            [run.pk, action, midnight],
        )
        return int(cursor.fetchone()[0])


def _four(positions: Mapping[str, int | None] | None) -> dict[str, int | None] | None:
    if positions is None or all(positions.get(name) is None for name in POSITIONS):
        return None
    return {name: positions.get(name) for name in POSITIONS}


def _lock_chain(run_id: int) -> None:
    """Take the chain's head until the transaction ends: two appends never get one number."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s, %s)", [_LEDGER_LOCK, run_id & 0x7FFFFFFF])
