"""Holds in the store: after one of these, neither the trainer nor its rotation can lose the bytes."""

import contextlib
import hashlib
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from andon.signing import fsync_directory
from evidence import s3client, sources
from evidence.hashing import chunks
from evidence.models import Dossier, Item
from evidence.sources import SourceError, child, s3_error
from evidence.uris import normalise, s3_place
from evidence.vault_s3_lock import Locks

HOLDS = ".andon-holds"  # beside the checkpoints, in the same file system
S3_THREADS = 16
# A file without a save-time digest is hashed while holding only up to this size: holds never wait.
HASH_AT_ONCE_BYTES = 1 << 20


@dataclass(frozen=True)
class Held:
    """What a hold achieved. `files` is `[{"path", "bytes", "sha256", …}]`; `by` is what protects them:
    `{"how": "links" | "legal_hold" | "none", "says", …}`."""

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
    tree = root / HOLDS / str(dossier.uid) / str(item.pk)
    try:
        table = [_link(base, tree, entry) for entry in files]
        _freeze(tree)
    except SourceError:
        raise
    except OSError as error:
        # Another file system, a protected-hardlinks rule, a read-only mount: then the copy is the hold.
        _drop(tree)
        why = error.strerror or type(error).__name__
        says = f"not safe until copied: no hard links could be made beside it ({why})"
        return Held([_look(base, entry) for entry in files], {"how": "none", "says": says})
    says = "held by read-only hard links in the same file system; root can still change them"
    return Held(table, {"how": "links", "says": says, "tree": str(tree)})


def _link(base: Path, tree: Path, entry: dict[str, Any]) -> dict[str, Any]:
    path = str(entry["path"])
    source = Path(child(str(base), path))
    target = Path(child(str(tree), path or base.name))
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target, follow_symlinks=False)
    except FileExistsError:
        pass  # an earlier try, or another worker, linked it; what it is, is checked below
    except FileNotFoundError as error:
        if not target.exists():
            raise SourceError(f"{source}: missing", permanent=True) from error
    about = target.lstat()
    if entry.get("bytes") is not None and about.st_size != entry["bytes"]:
        raise SourceError(f"{source}: {about.st_size} bytes, committed with {entry['bytes']}", permanent=True)
    # Where the file is not ours to change, the link still outlives a deletion.
    with contextlib.suppress(PermissionError):
        target.chmod(0o444)
    known = str(entry.get("sha256") or "") or _small_digest(target, about.st_size)
    return {
        "path": path,
        "bytes": about.st_size,
        "sha256": known,
        "inode": about.st_ino,
        "mtime_ns": about.st_mtime_ns,
    }


def _look(base: Path, entry: dict[str, Any]) -> dict[str, Any]:
    path = str(entry["path"])
    source = Path(child(str(base), path))
    try:
        size = source.stat().st_size
    except OSError as error:
        raise SourceError(f"{source}: {error.strerror}", permanent=sources.is_gone(error)) from error
    if entry.get("bytes") is not None and size != entry["bytes"]:
        raise SourceError(f"{source}: {size} bytes, committed with {entry['bytes']}", permanent=True)
    return {
        "path": path,
        "bytes": size,
        "sha256": str(entry.get("sha256") or "") or _small_digest(source, size),
    }


def _small_digest(path: Path, size: int) -> str:
    if size > HASH_AT_ONCE_BYTES:
        return ""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for data in chunks(file):
            digest.update(data)
    return digest.hexdigest()


def _freeze(tree: Path) -> None:
    for directory, _, _ in os.walk(tree, topdown=False):
        fsync_directory(directory)
        os.chmod(directory, 0o555)  # noqa: S103  (readable by the trainer's own people, writable by none)


def _drop(tree: Path) -> None:
    for directory, _, _ in os.walk(tree):
        os.chmod(directory, 0o700)
    shutil.rmtree(tree, ignore_errors=True)


def changed_since(item: Item) -> list[str]:
    """Return the held files whose inode or content stamp is no longer what was linked."""
    tree = item.protected_by.get("tree")
    if not tree:
        return []
    changed = []
    for entry in item.files:
        path = Path(tree) / (entry["path"] or Path(item.source.get("uri", "")).name)
        try:
            about = path.lstat()
        except OSError:
            changed.append(f"{entry['path']}: its held link is gone")
            continue
        if (about.st_ino, about.st_size) != (entry.get("inode"), entry["bytes"]) or (
            about.st_mtime_ns != entry.get("mtime_ns")
        ):
            changed.append(f"{entry['path']}: was changed in place after it was held")
    return changed


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
