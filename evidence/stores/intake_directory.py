"""Uploads into a directory vault: parts go through the server, by URLs that it signed."""

import errno
import hashlib
import io
import os
import shutil
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from django.core import signing

from andon.signing import fsync_directory
from evidence.models import AgentTask
from evidence.sources import CHUNK_BYTES
from evidence.stores.directory import DirectoryVault
from evidence.stores.intake import URL_VALID_S, Part, PartUrl, UploadGone, key_of, put
from evidence.vault import BytesDiffer, Stored, VaultError

_SALT = "andon.upload-part"


class DirectoryIntake:
    """Parts as files below `incoming/uploads`, put there through the server."""

    def __init__(self, store: DirectoryVault) -> None:
        self.store = store

    def begin(self, task: AgentTask) -> str:
        """See `Intake.begin`."""
        name = uuid.uuid4().hex
        try:
            self._directory(name).mkdir(parents=True, mode=0o750)
        except OSError as error:
            raise self._error(error) from error
        return name

    def have(self, task: AgentTask, parts: Sequence[Part]) -> set[int]:
        """See `Intake.have`."""
        if not self._directory(task.store_upload).is_dir():
            raise UploadGone(f"{self.store.root}: upload {task.store_upload} is not there any more")
        return {part.n for part in parts if self._size(task, part) == part.bytes_total}

    def urls(self, task: AgentTask, parts: Sequence[Part]) -> list[PartUrl]:
        """See `Intake.urls`. The address is relative: the agent knows where the server is."""
        made = []
        for part in parts:
            token = signing.dumps(
                [task.pk, task.store_upload, part.n, part.bytes_total, part.sha256], salt=_SALT
            )
            url = f"/api/v1/runs/{task.run.slug}/uploads/{task.pk}/parts/{part.n}?token={token}"
            made.append(PartUrl(part.n, url, {}))
        return made

    def read_token(self, token: str) -> tuple[int, str, Part] | None:
        """Return task id, upload and part that a token promises; None for one that is not ours, or old."""
        try:
            task_id, upload, n, bytes_total, sha256 = signing.loads(token, salt=_SALT, max_age=URL_VALID_S)
        except (signing.BadSignature, ValueError, TypeError):
            return None
        return int(task_id), str(upload), Part(int(n), int(bytes_total), str(sha256), "")

    def put(self, task: AgentTask, part: Part, read: Callable[[int], bytes]) -> None:
        """Write one part from a stream.

        Raises:
            BytesDiffer: the stream gave fewer, more or other bytes than the token promises.
        """
        target = self._file(task, part)
        temporary = target.with_name(f"{target.name}.{uuid.uuid4().hex}")
        digest, left = hashlib.sha256(), part.bytes_total
        try:
            with temporary.open("xb") as out:
                while left and (data := read(min(left, CHUNK_BYTES))):
                    out.write(data)
                    digest.update(data)
                    left -= len(data)
                out.flush()
                os.fsync(out.fileno())
            if left or read(1) or digest.hexdigest() != part.sha256:
                raise BytesDiffer(f"part {part.n}: other bytes arrived than were announced; send it again")
            temporary.rename(target)
            fsync_directory(target.parent)
        except OSError as error:
            raise self._error(error) from error
        finally:
            temporary.unlink(missing_ok=True)

    def take(self, task: AgentTask, parts: Sequence[Part]) -> Stored:
        """See `Intake.take`."""
        if task.bytes_total:
            lacking = [part.n for part in parts if self._size(task, part) != part.bytes_total]
            # After a worker that was killed when the object was made already, no part is needed any more.
            if lacking and not self.store.has(key_of(task)):
                raise BytesDiffer(f"{key_of(task)}: part {lacking[0]} is not there")
        files = tuple(self._file(task, part) for part in parts)
        return put(self.store, task, _Joined(int(task.bytes_total or 0), files))

    def forget(self, task: AgentTask) -> None:
        """See `Intake.forget`."""
        if task.store_upload:
            shutil.rmtree(self._directory(task.store_upload), ignore_errors=True)

    def _directory(self, upload: str) -> Path:
        return self.store.root / "incoming" / "uploads" / upload

    def _file(self, task: AgentTask, part: Part) -> Path:
        return self._directory(task.store_upload) / f"{part.n:05d}-{part.sha256}"

    def _size(self, task: AgentTask, part: Part) -> int:
        try:
            return self._file(task, part).stat().st_size
        except OSError:
            return -1

    def _error(self, error: OSError) -> VaultError:
        full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        return VaultError(f"{self.store.root}: {'the disk is full' if full else error.strerror}")


@dataclass(frozen=True)
class _Joined:
    """Part files read one after another as one source."""

    bytes_total: int
    files: tuple[Path, ...]

    def open(self, start: int = 0) -> IO[bytes]:
        assert start == 0  # a directory vault reads a source once, from its beginning
        return io.BufferedReader(_Chain(self.files), CHUNK_BYTES)


class _Chain(io.RawIOBase):
    """A raw stream over several files."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._left = list(files)
        self._file: IO[bytes] | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            if self._file is None:
                if not self._left:
                    return 0
                self._file = self._left.pop(0).open("rb", buffering=0)
            count = self._file.readinto(buffer)  # type: ignore[attr-defined]
            if count:
                return int(count)
            self._file.close()
            self._file = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        super().close()
