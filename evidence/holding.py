"""Holds in the store: after one of these, neither the trainer nor its rotation can lose the bytes."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from andon import held_tree
from andon.held_tree import HoldError
from evidence import s3client, sources
from evidence.models import Dossier, Item
from evidence.sources import SourceError, child, s3_error
from evidence.uris import normalise, s3_place
from evidence.vault_s3_lock import Locks

S3_THREADS = 16


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


def hold_tree(item: Item, dossier: Dossier, uri: str, files: list[dict[str, Any]]) -> Held:
    """Hold the files of a checkpoint (or other directory) below `uri`.

    Args:
        files: of the commit manifest, `{"path", "bytes", "sha256", "version_id"?}`; what is there must
            have these sizes.

    Raises:
        SourceError: a file is missing or has another size (permanent), or the source does not answer.
    """
    if normalise(uri).startswith("s3://"):
        return _hold_s3(uri, files)
    return _hold_links(item, dossier, uri, files)


# --- POSIX


def _hold_links(item: Item, dossier: Dossier, uri: str, files: list[dict[str, Any]]) -> Held:
    base = sources.allowed_path(uri)
    root = sources.root_of(base)
    assert root is not None
    try:
        tree = held_tree.hold_tree(base, root, f"{dossier.uid}/{item.pk}", files)
    except HoldError as error:
        raise SourceError(error.says, permanent=error.permanent) from error
    if not tree.is_safe:
        return Held(tree.files, {"how": "none", "says": tree.says})
    return Held(tree.files, {"how": tree.how, "says": tree.says, "tree": tree.tree})


def changed_since(item: Item) -> list[str]:
    """Return the held files whose inode or content stamp is no longer what was linked."""
    tree = item.protected_by.get("tree")
    if not tree:
        return []
    return held_tree.changed(tree, Path(item.source.get("uri", "")).name, item.files)


# --- S3


def _hold_s3(uri: str, files: list[dict[str, Any]]) -> Held:
    bucket, _ = s3_place(uri)
    client = s3client.source_client()
    locks = Locks(client, bucket, f"s3://{bucket}")
    locked = locks.enabled

    def hold(entry: dict[str, Any]) -> dict[str, Any]:
        where = child(uri, str(entry["path"]))
        source = sources.open_uri(
            where, version_id=str(entry.get("version_id") or ""), expected_bytes=entry.get("bytes")
        )
        assert isinstance(source, sources.S3Source)
        if locked and source.version_id:
            try:
                locks.hold(source.key, source.version_id)
            except (BotoCoreError, ClientError) as error:
                raise s3_error(where, error) from error
        return {
            "path": entry["path"],
            "bytes": source.bytes_total,
            "sha256": str(entry.get("sha256") or ""),
            "version_id": source.version_id,
        }

    with ThreadPoolExecutor(S3_THREADS) as pool:
        table = list(pool.map(hold, files))
    if locked and all(entry["version_id"] for entry in table):
        return Held(table, {"how": "legal_hold", "says": "held by a legal hold on each version"})
    says = "not safe until copied: the bucket it lies in has no Object Lock"
    return Held(table, {"how": "none", "says": says})
