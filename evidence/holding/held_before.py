"""Legal holds that somebody else had put on a version before we did: they are not ours to take off.

A store does not tell who put a hold on. So what is there is looked at and written down before our own hold
goes on, and the first such note counts: whoever looks later, after a crash or for another dossier, sees
holds of ours too, and asks the rows about them.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from evidence.models import Item
from evidence.sources import S3Source
from evidence.stores.s3_legal_hold import LegalHolds
from evidence.uris import normalise


def look(
    holds: LegalHolds, uri: str, paths: Sequence[str], found: Sequence[S3Source], pool: ThreadPoolExecutor
) -> dict[str, Any]:
    """Return which versions have a hold now: `{"uri", "of", "held", "unknown"}`.

    Every one is asked about: a hold on a single file is as much somebody's as one on all. `held` and
    `unknown` (we may not look) are lists of `[path, version id]`.
    """
    seen = list(pool.map(lambda source: holds.is_held(source.key, source.version_id), found))
    at = [[path, source.version_id] for path, source in zip(paths, found, strict=True)]
    return {
        "uri": normalise(uri),
        "of": len(at),
        "held": [one for one, hold in zip(at, seen, strict=True) if hold is True],
        "unknown": [one for one, hold in zip(at, seen, strict=True) if hold is None],
    }


def note_of(item: Item, uri: str) -> dict[str, Any] | None:
    """Return what was noted of this source before an item's own holds, None when nothing was yet."""
    noted: dict[str, Any] = item.protected_by.get("held_before") or {}
    return noted if noted.get("uri") == normalise(uri) else None


def without_ours(item: Item, seen: dict[str, Any]) -> dict[str, Any]:
    """Return what was seen without the holds that other items of ours have put on the same versions."""
    ours: set[tuple[str, str]] = set()
    others = Item.objects.filter(holds__uri=seen["uri"]).exclude(pk=item.pk).distinct()
    for other in others if seen["held"] or seen["unknown"] else ():
        noted = note_of(other, seen["uri"])
        holds = noted is not None or other.protected_by.get("how") == "legal_hold"
        if not holds or other.protected_by.get("let_go"):
            continue
        # Nothing is in its file table yet when it is only about to hold: then it may hold any of them.
        named = {(str(entry["path"]), str(entry.get("version_id", ""))) for entry in other.files}
        now = {(path, version) for path, version in seen["held"] + seen["unknown"]}
        ours |= (now & named if named else now) - foreign(noted or {})
    return seen | {
        kind: [one for one in seen[kind] if tuple(one) not in ours] for kind in ("held", "unknown")
    }


def foreign(noted: dict[str, Any]) -> set[tuple[str, str]]:
    """Return path and version of what had a hold before ours, or may have had one."""
    return {(path, version) for path, version in noted.get("held", []) + noted.get("unknown", [])}


def says(noted: dict[str, Any]) -> str:
    """Return that as words behind "held by a legal hold on each version", "" when there is nothing to say."""
    parts = []
    if noted["held"]:
        parts.append(f"{len(noted['held'])} of {noted['of']} had one before, which stays when ours goes")
    if noted["unknown"]:
        parts.append(f"{len(noted['unknown'])} may have had one before, which this server may not see")
    return "".join(f"; {part}" for part in parts)
