"""Server-side copies: source and vault are one store, and the bytes never pass through us."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import Any

from botocore.exceptions import ClientError

from evidence.hashing import part_bytes_for
from evidence.sources import S3Source, Source, s3_error
from evidence.stores.s3_lock import error_code
from evidence.stores.s3_parts import Job, Made, Multipart, in_flight, version_of

# One request copies up to this, which many stores do by reference; more is copied in parts at the same time,
# so that no request takes minutes.
WHOLE_UP_TO_BYTES = 1 << 30
PART_BYTES = 64 << 20
PARTS_AT_ONCE = 8
# By these a store says that it does not copy, or that we may not have it copy; reading may work all the same.
_REFUSED = {"NotImplemented", "XNotImplemented", "MethodNotAllowed", "AccessDenied", "Forbidden", "403"}
_SOURCE = {"NoSuchKey", "NoSuchVersion", "PreconditionFailed", "404", "412"}


class Copies:
    """Copies within the store of one client. What they make must be read back: nobody hashed it yet."""

    def __init__(self, client: Any, bucket: str, pool: Executor) -> None:
        self.client = client
        self.bucket = bucket
        self.pool = pool

    def can(self, source: Source) -> bool:
        """Return whether the source lies in the same store, reached with the same credentials."""
        # There is one client for each endpoint and credentials (`s3client.client`).
        return isinstance(source, S3Source) and source.client is self.client

    def copy(self, job: Job) -> Made | None:
        """Have the object copied; None when this store will not. No lock is put on it: it is not verified.

        Raises:
            SourceError: the source is gone or was overwritten; no part is left behind.
        """
        source = job.source
        assert isinstance(source, S3Source)
        where: dict[str, Any] = {"CopySource": {"Bucket": source.bucket, "Key": source.key}}
        if source.version_id:
            where["CopySource"]["VersionId"] = source.version_id
        elif source.etag:
            where["CopySourceIfMatch"] = source.etag
        try:
            if source.bytes_total <= WHOLE_UP_TO_BYTES:
                return self._whole(job.key, where)
            return self._parts(job, source, where)
        except ClientError as error:
            if error_code(error) in _REFUSED:
                return None
            raise

    def _whole(self, key: str, where: dict[str, Any]) -> Made:
        # Nothing of the source's metadata and tags comes along: it is the trainer's, and needs other rights.
        with _source_errors(where):
            answer = self.client.copy_object(
                Bucket=self.bucket, Key=key, MetadataDirective="REPLACE", TaggingDirective="REPLACE", **where
            )
        return Made(version_of(answer), None)

    def _parts(self, job: Job, source: S3Source, where: dict[str, Any]) -> Made:
        upload = Multipart(self.client, self.bucket, job.key, {})
        part_bytes = max(PART_BYTES, part_bytes_for(source.bytes_total))

        def calls() -> Iterator[Callable[[], tuple[int, str]]]:
            for number, start in enumerate(range(0, source.bytes_total, part_bytes), start=1):
                end = min(start + part_bytes, source.bytes_total)
                yield lambda number=number, start=start, end=end: one(number, start, end)  # type: ignore[misc]

        def one(number: int, start: int, end: int) -> tuple[int, str]:
            there = upload.have.get(number)
            # Whose bytes these are nobody knows; the read-back decides, and then begins afresh.
            if there is not None and there.size == end - start:
                return number, there.etag
            with _source_errors(where):
                return number, upload.copy(number, CopySourceRange=f"bytes={start}-{end - 1}", **where)

        etags: dict[int, str] = {}
        with upload.kept_for_a_retry():
            for number, etag in in_flight(self.pool, calls(), PARTS_AT_ONCE):
                etags[number] = etag
                job.progress(0)
        return Made(upload.complete(etags), None, resumed=bool(upload.have))


@contextlib.contextmanager
def _source_errors(where: dict[str, Any]) -> Iterator[None]:
    """Tell apart that the source is gone or changed from trouble of the vault."""
    try:
        yield
    except ClientError as error:
        if error_code(error) in _SOURCE:
            source = where["CopySource"]
            raise s3_error(f"s3://{source['Bucket']}/{source['Key']}", error) from error
        raise
