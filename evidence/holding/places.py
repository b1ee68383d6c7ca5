"""Holds in the store: after one of these, neither the trainer nor its rotation can lose the bytes."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from andon import held_tree
from andon.held_tree import HoldError
from evidence import sources
from evidence.holding import held_before
from evidence.holding.s3 import hold_versions
from evidence.models import Dossier, Item
from evidence.sources import SourceError
from evidence.uris import normalise


@dataclass(frozen=True)
class Held:
    """What a hold achieved. `files` is `[{"path", "bytes", "sha256", …}]`; `by` is what protects them:
    `{"how": "links" | "reflinks" | "legal_hold" | "none", "says", …}`."""

    files: list[dict[str, Any]]
    by: dict[str, Any]

    @property
    def is_safe(self) -> bool:
        """Return whether the source's bytes can no longer be lost."""
        return bool(self.by["how"] != "none")


def hold_tree(
    item: Item,
    dossier: Dossier,
    uri: str,
    files: list[dict[str, Any]],
    keep: Callable[[dict[str, Any]], dict[str, Any]] = lambda seen: seen,
) -> Held:
    """Hold the files of a checkpoint (or other directory) below `uri`.

    Args:
        files: of the commit manifest, `{"path", "bytes", "sha256", "version_id"?}`; what is there must
            have these sizes.
        keep: see `holding_s3.hold_versions`.

    Raises:
        SourceError: a file is missing or has another size (permanent), or the source does not answer.
    """
    if normalise(uri).startswith("s3://"):
        return Held(*hold_versions(uri, files, held_before.note_of(item, uri), keep))
    return _hold_links(item, dossier, uri, files)


def _hold_links(item: Item, dossier: Dossier, uri: str, files: list[dict[str, Any]]) -> Held:
    base = sources.allowed_path(uri)
    root = sources.root_of(base)
    assert root is not None
    try:
        tree = held_tree.hold_tree(base, root, tree_name(item, dossier), files)
    except HoldError as error:
        raise SourceError(error.says, permanent=error.permanent) from error
    if not tree.is_safe:
        return Held(tree.files, {"how": "none", "says": tree.says})
    return Held(tree.files, {"how": tree.how, "says": tree.says, "tree": tree.tree})


def tree_name(item: Item, dossier: Dossier) -> str:
    """Return the name of an item's tree: another one for each checkpoint that it comes to name.

    Files of two checkpoints have the same names and sizes, so one must not be found in the tree of another.
    """
    return f"{dossier.uid}/{item.pk}-c{item.source.get('checkpoint', 0)}"


def changed_since(item: Item) -> list[str]:
    """Return the held files whose inode or content stamp is no longer what was linked."""
    tree = item.protected_by.get("tree")
    if not tree:
        return []
    return held_tree.changed(tree, Path(item.source.get("uri", "")).name, item.files)
