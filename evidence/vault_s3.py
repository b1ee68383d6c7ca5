"""A vault in an S3 bucket: own multipart loop, reads by version, locks read back after they were set."""

import base64
import hashlib
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import datetime
from typing import IO, Any

from botocore.exceptions import BotoCoreError, ClientError

from evidence import s3client
from evidence.hashing import PartHasher, chunks, part_bytes_for
from evidence.sources import Source
from evidence.vault import BytesDiffer, Progress, Stored, VaultError
from evidence.vault_s3_lock import Locks

IN_FLIGHT_BYTES = 64 << 20  # parts waiting in memory, so that memory does not grow with the object
MOST_IN_FLIGHT = 4


@dataclass(frozen=True)
class _Copy:
    """One copy to be made: which bytes to which key, under which lock headers."""

    key: str
    source: Source
    sha256: str
    headers: dict[str, Any]
    progress: Progress


class S3Vault:
    """Objects are versions of keys in one bucket."""

    def __init__(self, url: str) -> None:
        self.place = s3client.parse(url)
        endpoint = f" at {self.place.endpoint}" if self.place.endpoint else ""
        self.name = f"s3://{self.place.bucket}{endpoint}"
        self.client: Any = s3client.client(self.place)
        self.locks = Locks(self.client, self.place.bucket, self.name)

    def store(
        self, key: str, source: Source, *, sha256: str, lock: str, until: datetime | None, progress: Progress
    ) -> Stored:
        """See `Vault.store`."""
        try:
            found = self._find(key, source.bytes_total, sha256, progress)
            if found is None:
                found = self._upload(_Copy(key, source, sha256, self.locks.headers(lock, until), progress))
            self.locks.apply(key, found.version_id, lock, until)
            return self._with_protection(found)
        except (BotoCoreError, ClientError) as error:
            raise self._error(key, error) from error

    # --- what is there already

    def _find(self, key: str, bytes_total: int, sha256: str, progress: Progress) -> Stored | None:
        """Return the oldest version of the right size and digest; a retry adopts it.

        Nothing relies on If-None-Match: stores honour it differently on buckets with locks.
        """
        for version in self._versions(key):
            if version["Size"] != bytes_total:
                continue
            version_id = _version(version)
            hasher = self._read_back(key, version_id, bytes_total)
            if hasher.sha256 == sha256:
                progress(bytes_total)
                return Stored(key, version_id, bytes_total, sha256, hasher.part_bytes, hasher.parts)
        return None

    def _versions(self, key: str) -> list[dict[str, Any]]:
        """Return all versions of exactly this key, oldest first; delete markers are none."""
        pages = self.client.get_paginator("list_object_versions").paginate(
            Bucket=self.place.bucket, Prefix=key
        )
        rows = [row for page in pages for row in page.get("Versions", []) if row["Key"] == key]
        return sorted(rows, key=lambda row: row["LastModified"])

    def _read_back(self, key: str, version_id: str, bytes_total: int) -> PartHasher:
        hasher = PartHasher(part_bytes_for(bytes_total))
        with self.open(key, version_id) as body:
            for data in chunks(body):
                hasher.update(data)
        return hasher

    # --- uploading

    def _upload(self, copy: _Copy) -> Stored:
        key, total = copy.key, copy.source.bytes_total
        hasher = PartHasher(part_bytes_for(total))
        if total <= hasher.part_bytes:
            version_id = self._put(copy, hasher)
            copy.progress(total)
        else:
            version_id = self._multipart(copy, hasher)
        if not self.locks.checks_parts:
            # Nobody has shown that this store looks at what it receives: look ourselves.
            again = self._read_back(key, version_id, total)
            if again.sha256 != copy.sha256:
                raise VaultError(
                    f"{key}: the store keeps other bytes than it was sent (version {version_id})"
                )
        return Stored(key, version_id, total, copy.sha256, hasher.part_bytes, hasher.parts)

    def _put(self, copy: _Copy, hasher: PartHasher) -> str:
        with copy.source.open() as file:
            body = b"".join(chunks(file, copy.source.bytes_total))
        hasher.update(body)
        _compare(copy, hasher)
        answer = self.client.put_object(
            Bucket=self.place.bucket, Key=copy.key, Body=body, ContentMD5=_md5(body), **copy.headers
        )
        return str(answer.get("VersionId", ""))

    def _multipart(self, copy: _Copy, hasher: PartHasher) -> str:
        key, bucket = copy.key, self.place.bucket
        upload_id, have = self._resume(key)
        if upload_id is None:
            started = self.client.create_multipart_upload(Bucket=bucket, Key=key, **copy.headers)
            upload_id = str(started["UploadId"])
        etags = self._send_parts(copy, hasher, upload_id, have)
        try:
            _compare(copy, hasher)
        except BytesDiffer:
            self.client.abort_multipart_upload(Bucket=bucket, Key=key, UploadId=upload_id)
            raise
        answer = self.client.complete_multipart_upload(
            Bucket=bucket,
            Key=key,
            UploadId=upload_id,
            MultipartUpload={"Parts": [{"PartNumber": n, "ETag": etags[n]} for n in sorted(etags)]},
        )
        return str(answer.get("VersionId") or self._newest(key, copy.source.bytes_total))

    def _send_parts(
        self, copy: _Copy, hasher: PartHasher, upload_id: str, have: dict[int, str]
    ) -> dict[int, str]:
        """Send every part that the upload does not have yet; returns the ETag of each."""
        in_flight = max(1, min(MOST_IN_FLIGHT, IN_FLIGHT_BYTES // hasher.part_bytes))
        etags: dict[int, str] = {}
        with copy.source.open() as file, ThreadPoolExecutor(in_flight) as pool:
            waiting: set[Future[tuple[int, str, int]]] = set()

            def settle(futures: set[Future[tuple[int, str, int]]]) -> None:
                for future in futures:
                    number, etag, size = future.result()
                    etags[number] = etag
                    copy.progress(size)

            try:
                for number, body in enumerate(
                    _parts(file, copy.source.bytes_total, hasher.part_bytes), start=1
                ):
                    hasher.update(body)
                    if have.get(number) == _plain_etag(body):
                        etags[number] = f'"{have[number]}"'
                        copy.progress(len(body))
                        continue
                    if len(waiting) >= in_flight:
                        done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                        settle(done)
                    waiting.add(pool.submit(self._part, copy.key, upload_id, number, body))
                settle(waiting)
            except BaseException:
                for future in waiting:
                    future.cancel()
                raise
        return etags

    def _part(self, key: str, upload_id: str, number: int, body: bytes) -> tuple[int, str, int]:
        answer = self.client.upload_part(
            Bucket=self.place.bucket,
            Key=key,
            UploadId=upload_id,
            PartNumber=number,
            Body=body,
            ContentMD5=_md5(body),
        )
        return number, str(answer["ETag"]), len(body)

    def _resume(self, key: str) -> tuple[str | None, dict[int, str]]:
        """Return an unfinished upload of this key and the plain MD5 of each of its parts."""
        rows = self.client.list_multipart_uploads(Bucket=self.place.bucket, Prefix=key).get("Uploads", [])
        mine = sorted((row for row in rows if row["Key"] == key), key=lambda row: row["Initiated"])
        if not mine:
            return None, {}
        upload_id = str(mine[-1]["UploadId"])
        pages = self.client.get_paginator("list_parts").paginate(
            Bucket=self.place.bucket, Key=key, UploadId=upload_id
        )
        return upload_id, {
            int(part["PartNumber"]): str(part["ETag"]).strip('"')
            for page in pages
            for part in page.get("Parts", [])
        }

    def _newest(self, key: str, bytes_total: int) -> str:
        # Some stores do not say which version completing made.
        rows = [row for row in self._versions(key) if row["Size"] == bytes_total]
        return _version(rows[-1]) if rows else ""

    # --- reading, protection, health

    def open(self, key: str, version_id: str, start: int = 0) -> IO[bytes]:
        """See `Vault.open`."""
        wanted: dict[str, Any] = {"Bucket": self.place.bucket, "Key": key}
        wanted |= {"VersionId": version_id} if version_id else {}
        wanted |= {"Range": f"bytes={start}-"} if start else {}
        try:
            body: IO[bytes] = self.client.get_object(**wanted)["Body"]
        except (BotoCoreError, ClientError) as error:
            raise self._error(key, error) from error
        return body

    def protection(self, key: str, version_id: str) -> dict[str, Any]:
        """See `Vault.protection`."""
        try:
            return self.locks.read(key, version_id)
        except (BotoCoreError, ClientError) as error:
            raise self._error(key, error) from error

    def extend(self, key: str, version_id: str, lock: str, until: datetime) -> dict[str, Any]:
        """See `Vault.extend`."""
        try:
            self.locks.apply(key, version_id, lock, until)
            return self.locks.read(key, version_id)
        except (BotoCoreError, ClientError) as error:
            raise self._error(key, error) from error

    def let_go(self, key: str, version_id: str) -> dict[str, Any]:
        """See `Vault.let_go`."""
        try:
            self.locks.let_go(key, version_id)
            return self.locks.read(key, version_id)
        except (BotoCoreError, ClientError) as error:
            raise self._error(key, error) from error

    def delete(self, key: str, version_id: str) -> None:
        """See `Vault.delete`."""
        try:
            self.locks.delete(key, version_id)
        except (BotoCoreError, ClientError) as error:
            raise self._error(key, error) from error

    def _with_protection(self, stored: Stored) -> Stored:
        protected_by = self.locks.read(stored.key, stored.version_id)
        return Stored(
            stored.key,
            stored.version_id,
            stored.bytes_total,
            stored.sha256,
            stored.part_bytes,
            stored.part_sha256,
            protected_by,
        )

    def uri(self, key: str, version_id: str) -> str:
        """See `Vault.uri`."""
        version = f"?versionId={version_id}" if version_id else ""
        return f"s3://{self.place.bucket}/{key}{version}"

    def check(self) -> None:
        """See `Vault.check`."""
        try:
            s3client.client(self.place, quick=True).head_bucket(Bucket=self.place.bucket)
        except (BotoCoreError, ClientError) as error:
            raise self._error("", error) from error

    def probe(self) -> dict[str, Any]:
        """See `Vault.probe`."""
        from evidence.vault_probe import probe_s3

        return probe_s3(self)

    def _error(self, key: str, error: Exception) -> VaultError:
        where = self.uri(key, "")
        if isinstance(error, ClientError):
            code = error.response.get("Error", {}).get("Code", "")
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            permanent = 400 <= status < 500 and code not in {"RequestTimeout", "SlowDown", "429"}
            # A lost upload or an expired clock is not the object's fault: the retry begins afresh.
            permanent = permanent and code not in {"NoSuchUpload", "RequestTimeTooSkewed", "BadDigest"}
            return VaultError(
                f"{where}: {code} {error.response.get('Error', {}).get('Message', '')}".strip(),
                permanent=permanent,
            )
        return VaultError(f"{where}: {type(error).__name__}")


def _version(row: dict[str, Any]) -> str:
    found = str(row.get("VersionId") or "")
    return "" if found == "null" else found


def _compare(copy: _Copy, hasher: PartHasher) -> None:
    expected = copy.source.bytes_total
    if hasher.bytes_total != expected or hasher.sha256 != copy.sha256:
        raise BytesDiffer(
            f"{copy.key}: read {hasher.bytes_total} bytes with SHA-256 {hasher.sha256}, promised were "
            f"{expected} with {copy.sha256}"
        )


def _parts(file: IO[bytes], bytes_total: int, part_bytes: int) -> Iterator[bytes]:
    left = bytes_total
    while left > 0:
        body = b"".join(chunks(file, min(part_bytes, left)))
        if not body:
            return
        left -= len(body)
        yield body


def _md5_raw(body: bytes) -> bytes:
    return hashlib.md5(body, usedforsecurity=False).digest()


def _md5(body: bytes) -> str:
    return base64.b64encode(_md5_raw(body)).decode("ascii")


def _plain_etag(body: bytes) -> str:
    return _md5_raw(body).hex()
