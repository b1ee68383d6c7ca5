"""A vault in a directory: for one machine, and honest about what a directory cannot enforce."""

import contextlib
import errno
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from andon.signing import fsync_directory
from evidence.hashing import PartHasher, chunks, part_bytes_for
from evidence.sources import FileSource, Source
from evidence.vault import BytesDiffer, Listed, Progress, Stored, VaultError

# Said wherever the protection of such an object is shown.
SAYS = "not locked: read-only files in a directory; root and the owner of the directory can still delete them"
PROTECTION: dict[str, Any] = {"mode": "read-only", "until": None, "legal_hold": None, "says": SAYS}
_READ_ONLY = 0o440
ABANDONED_AFTER_S = 7 * 86_400.0


class DirectoryVault:
    """Objects are files below `root/objects`, written whole, synced, linked once and made read-only."""

    at_once = 4  # a disk is not made faster by more

    def __init__(self, root: Path) -> None:
        self.root = root
        self.name = f"file://{root}"

    def store(
        self,
        key: str,
        source: Source,
        *,
        sha256: str,
        lock: str,
        until: datetime | None,
        progress: Progress,
        first: bool = False,
    ) -> Stored:
        """See `Vault.store`. A directory has no locks: `lock` and `until` change nothing here, and looking
        whether the file is there costs nothing, so `first` does not either."""
        target = self._path(key)
        if target.exists():
            return self._adopt(key, target, sha256, source.bytes_total, progress)
        incoming = self.root / "incoming"
        temporary = incoming / uuid.uuid4().hex
        try:
            for directory in (incoming, target.parent):
                self._make(directory)
            hasher = self._write(temporary, source, progress)
            if hasher.bytes_total != source.bytes_total or hasher.sha256 != sha256:
                raise BytesDiffer(
                    f"{key}: read {hasher.bytes_total} bytes with SHA-256 {hasher.sha256}, promised were "
                    f"{source.bytes_total} with {sha256}"
                )
            temporary.chmod(_READ_ONLY)
            try:
                # A link never replaces: of two writers of one key, one makes it and the other adopts it.
                os.link(temporary, target)
            except FileExistsError:
                return self._adopt(key, target, sha256, source.bytes_total, lambda _: None)
            fsync_directory(target.parent)
        except OSError as error:
            raise self._error(error) from error
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()
        return Stored(key, "", hasher.bytes_total, sha256, hasher.part_bytes, hasher.parts, dict(PROTECTION))

    def _write(self, temporary: Path, source: Source, progress: Progress) -> PartHasher:
        hasher = PartHasher(part_bytes_for(source.bytes_total))
        with source.open() as file, temporary.open("xb") as out:
            for data in chunks(file, source.bytes_total):
                out.write(data)
                hasher.update(data)
                progress(len(data))
            out.flush()
            os.fsync(out.fileno())
        return hasher

    def _adopt(self, key: str, target: Path, sha256: str, bytes_total: int, progress: Progress) -> Stored:
        hasher = PartHasher(part_bytes_for(bytes_total))
        try:
            with target.open("rb") as file:
                for data in chunks(file):
                    hasher.update(data)
                    progress(len(data))
        except OSError as error:
            raise self._error(error) from error
        if hasher.bytes_total != bytes_total or hasher.sha256 != sha256:
            raise VaultError(
                f"{key}: holds other bytes than its name says; somebody changed the vault", permanent=True
            )
        return Stored(key, "", bytes_total, sha256, hasher.part_bytes, hasher.parts, dict(PROTECTION))

    def open(self, key: str, version_id: str, start: int = 0) -> IO[bytes]:
        """See `Vault.open`."""
        path = self._path(key)
        try:
            file = path.open("rb")
            file.seek(start)
        except OSError as error:
            raise self._error(error) from error
        return file

    def protection(self, key: str, version_id: str) -> dict[str, Any]:
        """See `Vault.protection`."""
        try:
            mode = self._path(key).stat().st_mode
        except OSError as error:
            raise self._error(error) from error
        if mode & 0o222:
            return PROTECTION | {"mode": "none", "says": "not protected: the file was made writable"}
        return dict(PROTECTION)

    def covered(self, key: str, version_id: str) -> str:
        """See `Vault.covered`. A directory has no versions: other bytes are a mismatch."""
        return ""

    def extend(self, key: str, version_id: str, lock: str, until: datetime) -> dict[str, Any]:
        """See `Vault.extend`. A directory keeps no dates; Andon's own rows do."""
        return self.protection(key, version_id)

    def let_go(self, key: str, version_id: str) -> dict[str, Any]:
        """See `Vault.let_go`. A directory has no holds."""
        return self.protection(key, version_id)

    def delete(self, key: str, version_id: str) -> None:
        """See `Vault.delete`."""
        path = self._path(key)
        try:
            path.unlink(missing_ok=True)
            if path.parent.is_dir():
                fsync_directory(path.parent)
        except OSError as error:
            raise self._error(error) from error

    def listed(self, prefix: str) -> Iterator[Listed]:
        """See `Vault.listed`."""
        try:
            for file in sorted(self._path(prefix).rglob("*")):
                if file.is_file():
                    about = file.stat()
                    key = str(file.relative_to(self.root / "objects"))
                    yield Listed(key, "", about.st_size, datetime.fromtimestamp(about.st_mtime, UTC))
        except OSError as error:
            raise self._error(error) from error

    def uri(self, key: str, version_id: str) -> str:
        """See `Vault.uri`."""
        return self._path(key).as_uri()

    def check(self) -> None:
        """See `Vault.check`."""
        try:
            self._make(self.root)
            if not os.access(self.root, os.W_OK | os.X_OK):
                raise VaultError(f"{self.root}: may not be written")
        except OSError as error:
            raise self._error(error) from error

    def probe(self) -> dict[str, Any]:
        """See `Vault.probe`."""
        from evidence.stores.probe import probe_directory

        return probe_directory(self)

    def abort_abandoned(self) -> None:
        """Remove what killed workers and agents that never came back left half written, after a week."""
        before_s = time.time() - ABANDONED_AFTER_S
        for left in [*(self.root / "incoming").glob("*"), *(self.root / "incoming" / "uploads").glob("*")]:
            # A part that arrives renews its directory; who comes back later still begins anew.
            with contextlib.suppress(OSError):
                if left.name == "uploads" or left.stat().st_mtime > before_s:
                    continue
                shutil.rmtree(left) if left.is_dir() else left.unlink()

    def has(self, key: str) -> bool:
        """Return whether there is an object under a key."""
        return self._path(key).exists()

    def source(self, key: str) -> FileSource:
        """Return an object as a source."""
        path = self._path(key)
        return FileSource(path, path.stat().st_size)

    def _path(self, key: str) -> Path:
        if key.startswith("/") or ".." in key.split("/"):
            raise VaultError(f"{key}: is no key", permanent=True)
        return self.root / "objects" / key

    def _make(self, directory: Path) -> None:
        if directory.is_dir():
            return
        directory.mkdir(parents=True, exist_ok=True, mode=0o750)
        # Every new name on the way must survive a power cut, not only the last one.
        for one in (directory, *directory.parents):
            if one == self.root.parent:
                break
            fsync_directory(one)

    def _error(self, error: OSError) -> VaultError:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            return VaultError(f"{self.root}: the disk is full")
        return VaultError(f"{error.filename or self.root}: {error.strerror}")
