"""Where the parts of an agent's upload go until they are an object of the vault.

S3 takes them itself, by presigned URLs that bind each part's digest: the store refuses other bytes. A
directory vault takes them through the server, by URLs that carry the same promise, signed by it.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Protocol

from evidence.models import AgentTask
from evidence.sources import Source, SourceError
from evidence.vault import Stored, Vault, VaultError, key_for, vault

URL_VALID_S = 3600


@dataclass(frozen=True)
class Part:
    """One part as the agent announces it: number from 1, size, hex digests."""

    n: int
    bytes_total: int
    sha256: str
    md5: str


@dataclass(frozen=True)
class PartUrl:
    """Where a part is PUT, and the headers it must come with."""

    n: int
    url: str
    headers: Mapping[str, str]


class UploadGone(VaultError):
    """The store no longer knows the upload: it must begin again."""


class Intake(Protocol):
    """One vault's side of uploads. All methods raise VaultError."""

    def begin(self, task: AgentTask) -> str:
        """Return the store's name of a new upload of a task whose size and digest are announced."""
        ...

    def have(self, task: AgentTask, parts: Sequence[Part]) -> set[int]:
        """Return which of these parts are there, whole and with these bytes. Raises UploadGone."""
        ...

    def urls(self, task: AgentTask, parts: Sequence[Part]) -> list[PartUrl]:
        """Return where to put parts; valid for an hour."""
        ...

    def take(self, task: AgentTask, parts: Sequence[Part]) -> Stored:
        """Make the parts an object of the vault: read back, of the announced digest, and protected.

        Raises:
            BytesDiffer: a part is missing, or the whole is not what was announced: send it again.
        """
        ...

    def forget(self, task: AgentTask) -> None:
        """Drop what is left of an upload."""
        ...


def intake() -> Intake:
    """Return the intake of the configured vault."""
    from evidence.stores.directory import DirectoryVault
    from evidence.stores.intake_directory import DirectoryIntake
    from evidence.stores.intake_s3 import S3Intake
    from evidence.stores.s3 import S3Vault

    store = vault()
    if isinstance(store, S3Vault):
        return S3Intake(store)
    assert isinstance(store, DirectoryVault)
    return DirectoryIntake(store)


def key_of(task: AgentTask) -> str:
    """Return the key under which a task's bytes are kept."""
    return key_for(task.item.dossier.uid, task.item_id, task.sha256)


def put(store: Vault, task: AgentTask, source: Source) -> Stored:
    """Store a source as a task's object, by the same way as everything else in the vault."""
    item = task.item
    return store.store(
        key_of(task),
        source,
        sha256=task.sha256,
        lock=item.lock,
        until=item.retain_until,
        progress=lambda _: None,
    )


@dataclass(frozen=True)
class Elsewhere:
    """The source of an upload whose bytes should be in the store already, and of an empty file."""

    bytes_total: int

    def open(self, start: int = 0) -> IO[bytes]:
        if self.bytes_total:
            raise SourceError("the parts are not in the store")
        return open(os.devnull, "rb")
