"""Uploads: bytes pass through us once, in parts, each checked by the store as it arrives."""

import base64
import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import IO, Any

from botocore.exceptions import ClientError

from evidence.hashing import PART_BYTES, PartHasher, chunks, part_bytes_for
from evidence.sources import Source
from evidence.stores.s3_lock import error_code
from evidence.stores.s3_parts import Job, Made, Memory, Multipart, in_flight, version_of
from evidence.vault import BytesDiffer

# Held in memory by all uploads of a process together: a worker weighs 150 MB before it begins, and two parts
# under way keep two cores and a fast store busy.
MEMORY_BYTES = 2 * PART_BYTES
PARTS_AT_ONCE = 2
# A larger part (of an object above 70 GB, which has no more than 10,000) is read again while it is sent.
BUFFERED_UP_TO_BYTES = PART_BYTES


class KeyTaken(Exception):
    """The store refused to overwrite: somebody stored something under the key meanwhile."""


class Uploads:
    """Uploads to one bucket. `enforces` says what the newest probe saw the store enforce."""

    def __init__(self, client: Any, bucket: str, pool: Executor, enforces: Callable[[str], bool]) -> None:
        self.client = client
        self.bucket = bucket
        self.pool = pool
        self.enforces = enforces
        self.memory = Memory(MEMORY_BYTES)

    def are_checked(self, bytes_total: int) -> bool:
        """Return whether the store was seen to refuse a part that is not what we read and hashed."""
        if self.enforces("content_md5"):
            return True
        # The signed hash of a part in memory is that of the bytes we hashed. One that is read again is
        # signed as it was read then: only its Content-MD5 ties it to our digest.
        return self.enforces("signed_payload") and part_bytes_for(bytes_total) <= BUFFERED_UP_TO_BYTES

    def upload(self, job: Job, *, overwrite: bool = False) -> Made:
        """Send the object.

        Raises:
            BytesDiffer: the source gave other bytes than promised; nothing is left under the key.
            KeyTaken: unless `overwrite`.
        """
        hasher = PartHasher(part_bytes_for(job.source.bytes_total))
        if job.source.bytes_total <= BUFFERED_UP_TO_BYTES:
            return Made(self._put(job, hasher, overwrite), hasher)
        with job.source.open() as file:  # first: where there is nothing to send no upload is begun
            upload = Multipart(self.client, self.bucket, job.key, job.headers)
            with upload.kept_for_a_retry():
                etags = self._send_parts(job, upload, hasher, file)
                compare(job, hasher)
        return Made(upload.complete(etags), hasher)

    def _put(self, job: Job, hasher: PartHasher, overwrite: bool) -> str:
        size = job.source.bytes_total
        self.memory.take(size)
        try:
            with job.source.open() as file:
                body = _read(file, size)
            hasher.update(body)
            compare(job, hasher)
            conditional = not overwrite and self.enforces("if_none_match")
            answer = self.client.put_object(
                Bucket=self.bucket,
                Key=job.key,
                Body=body,
                **_checks(body, signed=self.enforces("signed_payload")),
                **job.headers,
                **({"IfNoneMatch": "*"} if conditional else {}),
            )
        except ClientError as error:
            if error_code(error) in {"PreconditionFailed", "ConditionalRequestConflict", "412"}:
                raise KeyTaken(job.key) from error
            raise
        finally:
            self.memory.give_back(size)
        job.progress(size)
        return version_of(answer)

    def _send_parts(self, job: Job, upload: Multipart, hasher: PartHasher, file: IO[bytes]) -> dict[int, str]:
        """Send every part that the upload does not have yet; returns the ETag of each."""
        etags: dict[int, str] = {}
        calls = self._calls(job, upload, hasher, file)
        for number, etag, size in in_flight(self.pool, calls, PARTS_AT_ONCE):
            etags[number] = etag
            job.progress(size)
        return etags

    def _calls(
        self, job: Job, upload: Multipart, hasher: PartHasher, file: IO[bytes]
    ) -> Iterator[Callable[[], tuple[int, str, int]]]:
        """Read and hash the parts in order; what is yielded sends one of them."""
        part_bytes = hasher.part_bytes
        read = self._buffered if part_bytes <= BUFFERED_UP_TO_BYTES else self._streamed
        for number, start in enumerate(range(0, job.source.bytes_total, part_bytes), start=1):
            size = min(part_bytes, job.source.bytes_total - start)
            yield read(job.source, upload, hasher, file, number, start, size)

    def _buffered(
        self,
        source: Source,
        upload: Multipart,
        hasher: PartHasher,
        file: IO[bytes],
        number: int,
        start: int,
        size: int,
    ) -> Callable[[], tuple[int, str, int]]:
        self.memory.take(size)
        try:
            body = _read(file, size)
            hasher.update(body)
            # Asked here and not by the thread that sends: the answer may come from the database.
            signed = self.enforces("signed_payload")
        except BaseException:
            self.memory.give_back(size)
            raise

        def send() -> tuple[int, str, int]:
            try:
                there = upload.have.get(number)
                if there is None or there.etag != hashlib.md5(body, usedforsecurity=False).hexdigest():
                    return number, upload.upload(number, body, **_checks(body, signed=signed)), len(body)
                return number, there.etag, len(body)
            finally:
                self.memory.give_back(size)

        return send

    def _streamed(
        self,
        source: Source,
        upload: Multipart,
        hasher: PartHasher,
        file: IO[bytes],
        number: int,
        start: int,
        size: int,
    ) -> Callable[[], tuple[int, str, int]]:
        md5 = hashlib.md5(usedforsecurity=False)
        for data in chunks(file, size):
            hasher.update(data)
            md5.update(data)

        def send() -> tuple[int, str, int]:
            there = upload.have.get(number)
            if there is not None and there.etag == md5.hexdigest():
                return number, there.etag, size
            with Window(source, start, size) as body:
                return number, upload.upload(number, body, ContentMD5=_base64(md5.digest())), size

        return send


class Window:
    """A part of a source as a file that can be read more than once, for bodies too large for memory."""

    def __init__(self, source: Source, start: int, size: int) -> None:
        self.source = source
        self.start = start
        self.size = size
        self._at = 0
        self._file: IO[bytes] | None = None

    def read(self, size: int = -1) -> bytes:
        """Return at most `size` bytes, b"" at the end."""
        left = self.size - self._at
        if left <= 0:
            return b""
        if self._file is None:
            self._file = self.source.open(self.start + self._at)
        data = self._file.read(left if size < 0 else min(size, left))
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move, as in any file."""
        base = {0: 0, 1: self._at, 2: self.size}[whence]
        if base + offset != self._at:
            self.close()
            self._at = base + offset
        return self._at

    def tell(self) -> int:
        """Return the position within the part."""
        return self._at

    def close(self) -> None:
        """Close the source; reading opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> IO[bytes]:
        return self  # type: ignore[return-value]  # boto3 asks for no more than is here

    def __exit__(self, *_: object) -> None:
        self.close()


def compare(job: Job, hasher: PartHasher) -> None:
    """Raise BytesDiffer unless the digests are those that were promised."""
    expected = job.source.bytes_total
    if hasher.bytes_total != expected or hasher.sha256 != job.sha256:
        raise BytesDiffer(
            f"{job.key}: read {hasher.bytes_total} bytes with SHA-256 {hasher.sha256}, promised were "
            f"{expected} with {job.sha256}"
        )


def _read(file: IO[bytes], size: int) -> bytes:
    """Return the next `size` bytes, fewer only at the end; one whole read needs no second buffer."""
    body = file.read(size)
    while len(body) < size and (more := file.read(size - len(body))):
        body += more
    return body


def _checks(body: bytes, *, signed: bool) -> dict[str, str]:
    """Return what lets the store check a body. `signed`: it checks the SHA-256 in each signature anyway."""
    return {} if signed else {"ContentMD5": _base64(hashlib.md5(body, usedforsecurity=False).digest())}


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode("ascii")
