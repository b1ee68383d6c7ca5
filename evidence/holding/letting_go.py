"""Taking off what a hold put on: in the bucket or directory a checkpoint lies in, on nodes, and in the vault.

Holds are counted by dossier: a version that another dossier still holds keeps its legal hold.
"""

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from botocore.exceptions import BotoCoreError, ClientError
from django.db import connection, transaction

from andon import held_tree, tree_removal
from andon.held_tree import HoldError
from evidence import sources as places
from evidence.agents import node_trees
from evidence.gates import holds_touching
from evidence.holding import held_before
from evidence.models import Dossier, Hold, Item, Leftover, StoredObject
from evidence.sources import child
from evidence.stores import s3_client
from evidence.stores.s3_lock import Locks, error_code
from evidence.uris import covers, normalise, s3_place
from evidence.vault import VaultError, vault
from runs.work import Retry

log = logging.getLogger(__name__)

_THREADS = 16
Kept = TypeVar("Kept", StoredObject, Leftover)
_GONE = {"NoSuchKey", "NoSuchVersion", "404", "NoSuchBucket"}


def sources(dossier: Dossier) -> dict[str, Any]:
    """Let go of a released dossier's sources; returns what was done, in numbers.

    Also of what earlier released dossiers had to leave because this one still counted on it.

    Raises:
        Retry: a store did not answer.
    """
    mine = Hold.objects.filter(dossier=dossier).values("uri")
    items = Item.objects.filter(holds__uri__in=mine, dossier__released_at__isnull=False).distinct()
    seen = {"legal_holds_off": 0, "kept_for_others": 0, "trees_removed": 0, "trees_not_removed": 0}
    for item in items.select_related("dossier"):
        match item.protected_by.get("how"):
            case "legal_hold" if not item.protected_by.get("let_go"):
                off, kept, left = _legal_holds(item)
                seen["legal_holds_off"] += off
                seen["kept_for_others"] += kept
                seen |= {"left_as_found": seen.get("left_as_found", 0) + left} if left else {}
            case "links" | "reflinks" if item.protected_by.get("tree"):
                removed = _remove_tree(item)
                seen["trees_removed" if removed else "trees_not_removed"] += 1
    # A node may be away for long: its trees go when it is back, each with a row of its own.
    return seen | {"trees_asked_of_nodes": node_trees.let_go_all(dossier)}


def stored(dossier: Dossier) -> dict[str, Any]:
    """Take the legal holds off all that lies in the vault for a released dossier; its dates stay as they are.

    Raises:
        Retry: the vault did not answer.
    """
    store = vault()
    objects = list(
        StoredObject.objects.filter(item__dossier=dossier, deleted_at=None).exclude(item__lock="none")
    )
    left_over = list(Leftover.objects.filter(item__dossier=dossier, deleted_at=None))

    def let_go(one: Kept) -> Kept:
        try:
            one.protected_by = store.let_go(one.key, one.version_id)
        finally:
            connection.close()
        return one

    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            done = list(pool.map(let_go, objects))
            also = list(pool.map(let_go, left_over))
    except VaultError as error:
        raise Retry(None, error.says) from error
    with transaction.atomic():
        StoredObject.objects.bulk_update(done, ["protected_by"], batch_size=500)
        Leftover.objects.bulk_update(also, ["protected_by"], batch_size=500)
    return {"vault_objects": len(done)} | ({"left_over": len(also)} if also else {})


def _legal_holds(item: Item) -> tuple[int, int, int]:
    """Return how many versions were let go, how many another dossier still holds, and how many stay.

    A hold that was on a version before ours stays: whoever put it there counts on it.
    """
    uri = str(item.source["uri"])
    bucket, _ = s3_place(uri)
    locks = Locks(s3_client.source_client(), bucket, f"s3://{bucket}")
    named = {
        (str(entry["path"]), str(entry["version_id"])) for entry in item.files if entry.get("version_id")
    }
    theirs = named & held_before.foreign(item.protected_by.get("held_before") or {})
    versions = [
        (normalise(where), s3_place(where)[1], version_id)
        for path, version_id in sorted(named - theirs)
        for where in [child(uri, path)]
    ]
    names = {name for name, _, _ in versions}
    others = _held_by_others(names)

    def turn(one: tuple[str, str, str], *, off: bool) -> bool:
        _, key, version_id = one
        try:
            if off:
                locks.let_go(key, version_id)
            else:
                locks.hold(key, version_id)
        except ClientError as error:
            if error_code(error) not in _GONE:
                raise
        return off

    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(lambda one: turn(one, off=one[0] not in others), versions))
            # A dossier opened between the look and the turn may have found its hold "on" already, and lost
            # it to us: whoever is there now gets it back. The deletion gate said no all the while.
            late = _held_by_others(names) - others
            list(pool.map(lambda one: turn(one, off=False), [one for one in versions if one[0] in late]))
    except (BotoCoreError, ClientError) as error:
        raise Retry(None, f"{uri}: {type(error).__name__} {error}") from error
    kept = sum(name in others | late for name, _, _ in versions)
    if not kept:
        # From here on a hold on these versions is somebody else's (see `evidence.holding.held_before`).
        Item.objects.filter(pk=item.pk).update(protected_by=item.protected_by | {"let_go": True})
    return len(versions) - kept, kept, len(theirs)


def _held_by_others(names: set[str]) -> set[str]:
    """Return those of the normalised URIs that a dossier which is not released holds."""
    holds = [hold.uri for hold in holds_touching(names)]
    return {name for name in names if any(covers(uri, name) for uri in holds)}


def _remove_tree(item: Item) -> bool:
    """Remove an item's own hard links; the files keep every other name they have.

    False where this server may not touch anything any more, and when something that is not ours lies there.
    """
    tree = Path(str(item.protected_by["tree"]))
    root = places.root_of(tree)
    named = tree.parts[-3:-1] == (held_tree.TREES, str(item.dossier.uid))
    mine = named and tree.name.partition("-")[0] == str(item.pk)
    if not mine or root is None or root not in tree.parents:
        return False
    base_name = Path(str(item.source.get("uri", ""))).name
    ours = {str(entry["path"]) or base_name: entry.get("inode") for entry in item.files}
    try:
        return not tree_removal.remove(tree, root, ours).left
    except HoldError as error:
        log.warning("item %s: its held tree stays: %s", item.pk, error.says)
        return False
