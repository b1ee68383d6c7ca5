"""The vault: one interface, behind it a directory or an S3 bucket with Object Lock."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import IO, Any, Protocol
from urllib.parse import urlsplit

from django.conf import settings

from evidence.sources import Source

Progress = Callable[[int], None]
KEYS = "evidence/"  # the prefix of every key


class VaultError(Exception):
    """The vault did not do what was asked. `permanent`: asking again will not help."""

    def __init__(self, says: str, *, permanent: bool = False) -> None:
        super().__init__(says)
        self.says = says
        self.permanent = permanent


class BytesDiffer(VaultError):
    """What was read is not what was promised: the source changed, or a part was damaged on the way."""

    def __init__(self, says: str) -> None:
        super().__init__(says, permanent=True)


@dataclass(frozen=True)
class Stored:
    """One object in the vault, by version. `protected_by` is as read back from the store, never as asked:
    `{"mode", "until", "legal_hold", "says"}`."""

    key: str
    version_id: str
    bytes_total: int
    sha256: str
    part_bytes: int
    part_sha256: tuple[str, ...]
    protected_by: dict[str, Any] = field(default_factory=dict)

    def row(self, at: datetime) -> dict[str, Any]:
        """Return the fields of the `StoredObject` that says so."""
        return {
            "key": self.key,
            "version_id": self.version_id,
            "bytes_total": self.bytes_total,
            "sha256": self.sha256,
            "part_bytes": self.part_bytes,
            "part_sha256": list(self.part_sha256),
            "protected_by": self.protected_by,
            "stored_at": at,
        }


@dataclass(frozen=True)
class Listed:
    """One version as a listing of the store names it."""

    key: str
    version_id: str
    bytes_total: int
    stored_at: datetime


class Vault(Protocol):
    """Where evidence is kept. Keys hold the dossier, the item and the SHA-256; reads are by version."""

    name: str  # the address without credentials
    at_once: int  # how many objects are best stored at the same time

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
        """Copy `source` to `key` and return what lies there, verified and protected.

        Safe to repeat and to run twice at once: an object of the right size and digest that is there
        already is adopted, and an upload that was cut goes on. A source in the vault's own store is
        copied by the store; until the copy was read back once this does not return.

        Args:
            sha256: digest the bytes must have.
            lock: "none" or "governance" (with a legal hold, where the store has locks).
            until: first date of the lock; it is extended later, never shortened.
            progress: told of bytes as they are stored and verified; an exception from it ends the copy.
            first: no earlier try can have stored anything, so nothing is looked for.

        Raises:
            BytesDiffer: the source gave other bytes; nothing is left under the key by this call.
            VaultError: the store refused or did not answer.
            SourceError: the source did.
        """
        ...

    def open(self, key: str, version_id: str, start: int = 0) -> IO[bytes]:
        """Return a stream of one version from offset `start`. Raises VaultError."""
        ...

    def protection(self, key: str, version_id: str) -> dict[str, Any]:
        """Return what protects a version, as read back from the store now. Raises VaultError."""
        ...

    def covered(self, key: str, version_id: str) -> str:
        """Return what lies over a version ("a delete marker", "a newer version …"), "" when nothing does.

        Raises VaultError.
        """
        ...

    def extend(self, key: str, version_id: str, lock: str, until: datetime) -> dict[str, Any]:
        """Lock a version until at least `until`, and return what protects it then, as read back.

        An earlier date or a weaker mode than it has is never sent. Raises VaultError.
        """
        ...

    def let_go(self, key: str, version_id: str) -> dict[str, Any]:
        """Take the legal hold off a version, never its date; return what still protects it.

        Raises VaultError.
        """
        ...

    def delete(self, key: str, version_id: str) -> None:
        """Delete one version for good, or do nothing when it is not there.

        Raises:
            VaultError: permanent while a date or a hold still protects it; no lock is ever bypassed.
        """
        ...

    def listed(self, prefix: str) -> Iterator[Listed]:
        """Yield every version whose key begins with `prefix`. Raises VaultError, also while iterating."""
        ...

    def uri(self, key: str, version_id: str) -> str:
        """Return the absolute URI of a version."""
        ...

    def check(self) -> None:
        """Raise VaultError unless the store answers and may be written."""
        ...

    def probe(self) -> dict[str, Any]:
        """Try what the store enforces and return what was seen (see `evidence.stores.probe`)."""
        ...


@cache
def _vault(url: str) -> Vault:
    from evidence.stores.directory import DirectoryVault
    from evidence.stores.s3 import S3Vault

    parts = urlsplit(url)
    if parts.scheme == "file" and parts.path.startswith("/") and parts.netloc in {"", "localhost"}:
        return DirectoryVault(Path(parts.path))
    return S3Vault(url)


def vault() -> Vault:
    """Return the vault of `ANDON_VAULT_URL`.

    Raises:
        ValueError: the URL is neither file:///dir nor s3://bucket.
    """
    return _vault(settings.VAULT_URL)


def ready() -> bool:
    """Return whether the vault answers and can be written; never raises."""
    try:
        vault().check()
    except Exception:
        return False
    return True


def key_for(dossier_uid: object, item_id: int, sha256: str) -> str:
    """Return the key of an object: it names the dossier, the item and the content."""
    return f"{KEYS}{dossier_uid}/{item_id}/{sha256}"
