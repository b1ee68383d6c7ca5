"""Files that a trainer or an agent offers (`artifact.available`), sorted to the items that want them."""

import json
from collections.abc import Iterable
from typing import Any

from evidence.kinds import ARTIFACT_KINDS
from evidence.models import Dossier, Item
from runs.models import Event
from runs.rows import raw_cursor

# One entry per rank of the largest fleets and then some; more than this is a sender gone wrong.
MAX_ARTIFACTS = 50_000


def attach(item: Item, dossier: Dossier) -> bool:
    """Give `item` (not saved here) the offered files of its kind; returns whether any is new.

    Each entry is `{"uri", "rank", "node", "bytes", "sha256"}`; the newest offer of a URI wins.
    """
    known = {entry["uri"]: entry for entry in item.source.get("artifacts", [])}
    before = set(known)
    for entry in offered(dossier, item.kind):
        known[entry["uri"]] = entry
    if known:
        item.source = item.source | {"artifacts": list(known.values())}
    return set(known) != before


def offered(dossier: Dossier, kind: str) -> list[dict[str, Any]]:
    """Return what was offered of an item kind in the dossier's attempt."""
    cached = getattr(dossier, "_offered", None)
    if cached is None:
        cached = _read(dossier)
        dossier._offered = cached  # type: ignore[attr-defined]  # one query per plan, not one per item
    return [entry for entry in cached if entry["kind"] == kind]


def refresh(dossier: Dossier) -> None:
    """Forget what `offered` read before."""
    dossier._offered = None  # type: ignore[attr-defined]


def _read(dossier: Dossier) -> list[dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = {}
    for rank, node, data in _events(dossier):
        kind = ARTIFACT_KINDS.get(str(data.get("kind", "")))
        uri = data.get("uri")
        if kind is None or not isinstance(uri, str) or not uri:
            continue
        entries[uri] = {
            "kind": kind,
            "uri": uri,
            "rank": _whole(data.get("rank", rank)),
            "node": str(data.get("node") or node or ""),
            "bytes": _whole(data.get("bytes")),
            "sha256": _sha256(data.get("sha256")),
        }
    return list(entries.values())


def _events(dossier: Dossier) -> Iterable[tuple[int | None, str, dict[str, Any]]]:
    if dossier.attempt is None:
        rows = Event.objects.filter(run_id=dossier.run_id, type="artifact.available").order_by("id")
        return rows.values_list("rank", "node", "data")[:MAX_ARTIFACTS]
    with raw_cursor() as cursor:
        cursor.execute(_OFFERED, (dossier.run_id, dossier.attempt, MAX_ARTIFACTS))
        return [(rank, node, json.loads(data)) for rank, node, data in cursor.fetchall()]


# A freeze plan asks this while a trainer waits: its plan is kept, see `runs.sql_ingest`.
_OFFERED = """
SELECT rank, node, data FROM andon_events_of(%s, %s, ARRAY['artifact.available']) ORDER BY id LIMIT %s
"""


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _sha256(value: object) -> str:
    text = str(value or "").lower()
    return text if len(text) == 64 and all(character in "0123456789abcdef" for character in text) else ""
