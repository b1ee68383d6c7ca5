"""One multipart upload of one key: found again after a crash, filled by parts, ended or given up."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass
from typing import IO, Any, TypeVar

from botocore.exceptions import BotoCoreError, ClientError

from evidence.hashing import PartHasher
from evidence.sources import Source, SourceError
from evidence.vault import BytesDiffer, Progress

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """One object to be made: which bytes at which key, under which lock headers."""

    key: str
    source: Source
    sha256: str
    headers: dict[str, Any]
    progress: Progress


@dataclass(frozen=True)
class Made:
    """What was made. `digests` are of the bytes that we sent; None when the store copied them itself.
    `resumed`: parts of an earlier try are in it."""

    version_id: str
    digests: PartHasher | None
    resumed: bool = False


@dataclass(frozen=True)
class Part:
    """A part that the store has: its size and its ETag, without quotes."""

    size: int
    etag: str


class Multipart:
    """An unfinished upload of `key`: the newest one that an earlier try left, else a new one."""

    def __init__(self, client: Any, bucket: str, key: str, headers: dict[str, Any]) -> None:
        self.client = client
        self.key = key
        self._at = {"Bucket": bucket, "Key": key}
        left = unfinished(client, bucket, key)
        self.resumed = bool(left)
        if left:
            self.upload_id = left[-1]
        else:
            self.upload_id = str(client.create_multipart_upload(**self._at, **headers)["UploadId"])
        self.have = self._parts() if left else {}

    def _parts(self) -> dict[int, Part]:
        pages = self.client.get_paginator("list_parts").paginate(**self._at, UploadId=self.upload_id)
        return {
            int(part["PartNumber"]): Part(int(part["Size"]), str(part["ETag"]).strip('"'))
            for page in pages
            for part in page.get("Parts", [])
        }

    def upload(self, number: int, body: "bytes | IO[bytes]", **checks: str) -> str:
        """Send one part; returns its ETag."""
        answer = self.client.upload_part(
            **self._at, UploadId=self.upload_id, PartNumber=number, Body=body, **checks
        )
        return str(answer["ETag"]).strip('"')

    def copy(self, number: int, **source: Any) -> str:
        """Have the store copy one part; returns its ETag."""
        answer = self.client.upload_part_copy(
            **self._at, UploadId=self.upload_id, PartNumber=number, **source
        )
        return str(answer["CopyPartResult"]["ETag"]).strip('"')

    def complete(self, etags: dict[int, str]) -> str:
        """Make the object of these parts; returns its version, "" where the store does not say."""
        answer = self.client.complete_multipart_upload(
            **self._at,
            UploadId=self.upload_id,
            MultipartUpload={"Parts": [{"PartNumber": n, "ETag": f'"{etags[n]}"'} for n in sorted(etags)]},
        )
        return version_of(answer)

    def abort(self) -> None:
        """Give the upload and its parts up."""
        abort(self.client, self._at["Bucket"], self.key, self.upload_id)

    @contextlib.contextmanager
    def kept_for_a_retry(self) -> Iterator[None]:
        """Leave the parts for the next try when the block fails, unless no try can succeed."""
        try:
            yield
        except (BytesDiffer, SourceError) as error:
            if error.permanent:
                self.abort()
            raise


def unfinished(client: Any, bucket: str, key: str) -> list[str]:
    """Return the ids of the unfinished uploads of exactly this key, oldest first."""
    rows = client.list_multipart_uploads(Bucket=bucket, Prefix=key).get("Uploads", [])
    mine = sorted((row for row in rows if row["Key"] == key), key=lambda row: row["Initiated"])
    return [str(row["UploadId"]) for row in mine]


def abort(client: Any, bucket: str, key: str, upload_id: str) -> None:
    """Give an upload up. Should it fail, the daily clean-up (`S3Vault.abort_abandoned`) does it."""
    with contextlib.suppress(BotoCoreError, ClientError):
        client.abort_multipart_upload(Bucket=bucket, Key=key, UploadId=upload_id)


def version_of(row: dict[str, Any]) -> str:
    """Return the version id of an answer, "" where there are no versions."""
    found = str(row.get("VersionId") or "")
    return "" if found == "null" else found


def in_flight(pool: Executor, calls: Iterable[Callable[[], T]], most: int) -> Iterator[T]:
    """Yield the results of `calls` as they end, at most `most` of them under way at a time.

    When one fails, or the caller stops, those under way end first: nothing runs on behind its back. They
    are not cancelled, since a call that never runs would not give back what it was made with.
    """
    waiting: set[Future[T]] = set()
    try:
        for call in calls:
            waiting.add(pool.submit(call))
            if len(waiting) >= most:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
    finally:
        wait(waiting)


class Memory:
    """Bytes that all uploads of this process together may hold; whoever wants more waits."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._used = 0
        self._changed = threading.Condition()

    def take(self, size: int) -> None:
        """Wait until `size` bytes are free; more than there are in all are given when nothing is used."""
        with self._changed:
            self._changed.wait_for(lambda: self._used == 0 or self._used + size <= self.most_bytes)
            self._used += size

    def give_back(self, size: int) -> None:
        """Return what was taken."""
        with self._changed:
            self._used -= size
            self._changed.notify_all()
