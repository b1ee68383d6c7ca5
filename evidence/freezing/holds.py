"""Hold rows: what the deletion gate refuses from the moment a freeze plan commits."""

from collections.abc import Iterable
from datetime import datetime

from django.utils import timezone

from evidence.models import Dossier, Hold, Item
from evidence.uris import UnusableUri, normalise
from runs.models import Checkpoint

MANY_FILES = 256  # offered files of one item, above which their directories are held


def hold(dossier: Dossier, items: Iterable[Item], undecided: Iterable[Checkpoint], now: datetime) -> None:
    """Write the hold rows of these items' sources, and of checkpoints that are still being verified.

    The run lock is held by the caller; the deletion gate sees the rows from the commit on.
    """
    Hold.objects.bulk_create(rows_of(dossier, items, undecided, now), ignore_conflicts=True)


def rows_of(
    dossier: Dossier, items: Iterable[Item], undecided: Iterable[Checkpoint], now: datetime
) -> list[Hold]:
    """Return the hold rows (not saved) of these items' sources and of these checkpoints, one for each URI."""
    rows: dict[str, Hold] = {}
    for item in items:
        if item.state in {Item.State.NOT_APPLICABLE, Item.State.MISSING}:
            continue
        for uri in _normal(_uris(item)):
            rows.setdefault(
                uri, Hold(dossier=dossier, run_id=dossier.run_id, uri=uri, item=item, placed_at=now)
            )
    for checkpoint in undecided:
        for uri in _normal([checkpoint.uri]):
            rows.setdefault(uri, Hold(dossier=dossier, run_id=dossier.run_id, uri=uri, placed_at=now))
    return list(rows.values())


def hold_uris(dossier: Dossier, item: Item) -> None:
    """Hold what an item came to name after the plan was made; the run lock is held by the caller."""
    if dossier.released_at is None:
        hold(dossier, [item], (), timezone.now())


def by_directory_when_many(item: Item) -> None:
    """Hold the directories of very many offered files instead of each file.

    The logs of 16,384 ranks would be as many rows in the transaction that a trainer's post waits for;
    collecting finds the files themselves again.
    """
    uris = [str(entry["uri"]) for entry in item.source.get("artifacts", [])]
    if len(uris) > MANY_FILES:
        item.source = {name: value for name, value in item.source.items() if name != "artifacts"}
        item.source["directories"] = _directories(uris)


def _uris(item: Item) -> list[str]:
    found = [item.source["uri"]] if "uri" in item.source else []
    found += item.source.get("directories", [])
    offered = [str(entry["uri"]) for entry in item.source.get("artifacts", [])]
    return found + (_directories(offered) if len(offered) > MANY_FILES else offered)


def _directories(uris: Iterable[str]) -> list[str]:
    return sorted({uri.rstrip("/").rpartition("/")[0] or uri for uri in uris})


def _normal(uris: Iterable[str]) -> list[str]:
    names: dict[str, None] = {}
    for uri in uris:
        try:
            names[normalise(uri)] = None
        except UnusableUri:
            continue  # no deletion of it can be asked for either; collecting says what is wrong with it
    return list(names)
