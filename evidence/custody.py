"""The chain of custody of a dossier: who did what to which object, when."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from django.db import connection, transaction
from django.utils import timezone

from andon import chain
from evidence.models import CustodyRow, Dossier

ANDON = "andon"  # who, when no person did it
# Advisory locks share one number space (see runs.locks): the first key names the use.
_CHAIN = 0x0E01


def stamp(moment: datetime) -> str:
    """Return a time as the chain writes it: RFC 3339, UTC, always with microseconds."""
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def append(
    dossier: Dossier,
    what: str,
    *,
    who: str = ANDON,
    item_name: str = "",
    object_sha256: str = "",
    data: Mapping[str, Any] | None = None,
) -> CustodyRow:
    """Add one row to the chain, inside the caller's transaction.

    Appends of one dossier queue behind each other on the chain head's lock (the last one in the lock
    order) until they commit, so the chain cannot fork.

    Args:
        what: the act in one word or two ("opened", "held", "stored", "sealed").
        who: opaque id of a person; Andon itself when nobody did it.
        data: whole numbers, text, lists and objects only: it is hashed in its canonical form.

    Raises:
        ValueError: `data` has no canonical form.
        TransactionManagementError: outside a transaction.
    """
    _lock_head(dossier)
    last = CustodyRow.objects.filter(dossier=dossier).order_by("-seq").first()
    row = _link(dossier, last, what, who, item_name, object_sha256, data)
    row.save(force_insert=True)
    return row


def first(dossier: Dossier, what: str, *, who: str, data: Mapping[str, Any]) -> CustodyRow:
    """Return the first row (not saved) of a dossier that is being made: nobody else can append to it yet."""
    return _link(dossier, None, what, who, "", "", data)


def _link(
    dossier: Dossier,
    last: CustodyRow | None,
    what: str,
    who: str,
    item_name: str,
    object_sha256: str,
    data: Mapping[str, Any] | None,
) -> CustodyRow:
    row = CustodyRow(
        dossier=dossier,
        seq=1 if last is None else last.seq + 1,
        at=timezone.now(),
        who=who,
        what=what,
        item_name=item_name,
        object_sha256=object_sha256,
        data=dict(data or {}),
        previous="" if last is None else last.digest,
    )
    row.digest = chain.row_digest(document(row, dossier))
    return row


def _lock_head(dossier: Dossier) -> None:
    if not connection.in_atomic_block:
        raise transaction.TransactionManagementError("custody rows are appended inside a transaction")
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s, %s)", [_CHAIN, dossier.pk & 0x7FFFFFFF])


def document(row: CustodyRow, dossier: Dossier) -> dict[str, Any]:
    """Return a row as the chain hashes and exports it, its digest included."""
    return {
        "dossier": str(dossier.uid),
        "seq": row.seq,
        "at": stamp(row.at),
        "who": row.who,
        "what": row.what,
        "item": row.item_name,
        "object_sha256": row.object_sha256,
        "data": row.data,
        "previous": row.previous,
        "digest": row.digest,
    }


def verify_custody(dossier: Dossier) -> list[str]:
    """Check the dossier's whole chain and its seals; return what is wrong, an empty list if nothing is."""
    from evidence.proof.seals import verify_seals  # the seals name chain rows, and are named by them

    rows = [document(row, dossier) for row in CustodyRow.objects.filter(dossier=dossier).order_by("seq")]
    wrong = chain.verify_rows(rows, str(dossier.uid))
    if not rows:
        wrong.append("custody: the chain has no row, not even the opening")
    return wrong + verify_seals(dossier, rows)
