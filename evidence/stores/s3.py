"""A vault in an S3 bucket: uploads or server-side copies, reads by version, locks read back once set."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import IO, Any

from botocore.exceptions import BotoCoreError, ClientError

from evidence.hashing import PartHasher, chunks, part_bytes_for
from evidence.sources import Source
from evidence.stores import s3_client
from evidence.stores.probed import NEVER_ENABLED, newest_result
from evidence.stores.s3_copy import Copies
from evidence.stores.s3_lock import Locks
from evidence.stores.s3_parts import Job, Made, abort, unfinished, version_of
from evidence.stores.s3_upload import KeyTaken, Uploads
from evidence.vault import KEYS, BytesDiffer, Listed, Progress, Stored, VaultError

# Most of a small object's time is the store's: more than these are no faster, and each keeps a connection
# and its buffers. What they hold of the objects themselves is bounded elsewhere.
OBJECTS_AT_ONCE = 16
PARTS_AT_ONCE = 8
# Reading back in small pieces: that many readers must not add up.
READ_BYTES = 256 << 10
# No copy takes that long; what is older was left by a dossier that went another way.
ABANDONED_AFTER = timedelta(days=7)


class S3Vault:
    """Objects are versions of keys in one bucket."""

    at_once = OBJECTS_AT_ONCE

    def __init__(self, url: str) -> None:
        self.place = s3_client.parse(url)
        endpoint = f" at {self.place.endpoint}" if self.place.endpoint else ""
        self.name = f"s3://{self.place.bucket}{endpoint}"
        self.client: Any = s3_client.client(self.place)
        self.locks = Locks(self.client, self.place.bucket, self.name)
        pool = ThreadPoolExecutor(PARTS_AT_ONCE, thread_name_prefix="vault-parts")
        self.uploads = Uploads(self.client, self.place.bucket, pool, self._enforces)
        self.copies = Copies(self.client, self.place.bucket, pool)

    def _enforces(self, check: str) -> bool:
        """Return whether the newest probe saw the store enforce something."""
        return bool(self._probed().get("enforces", {}).get(check))

    def _probed(self) -> dict[str, Any]:
        return newest_result(self.name)

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
        """See `Vault.store`. From the same store the bytes are copied there, and then read back once."""
        try:
            job = Job(key, source, sha256, self.locks.headers(lock, until), progress)
            found = None if first else self._find(job)
            if found is None:
                try:
                    found = self._make(job)
                except KeyTaken:
                    found = self._find(job) or self._make(job, overwrite=True)
            return replace(found, protected_by=self.locks.apply(key, found.version_id, lock, until))
        except (BotoCoreError, ClientError) as error:
            raise self._error(key, error) from error

    # --- what is there already

    def _find(self, job: Job) -> Stored | None:
        """Return the oldest version of the right size and digest; a retry adopts it.

        Nothing relies on If-None-Match: stores honour it differently on buckets with locks.
        """
        for version in self._versions(job.key):
            if version["Size"] != job.source.bytes_total:
                continue
            read = self._read_back(job, version_of(version))
            if read.sha256 == job.sha256:
                for upload_id in unfinished(self.client, self.place.bucket, job.key):
                    abort(self.client, self.place.bucket, job.key, upload_id)
                job.progress(job.source.bytes_total)
                return _stored(job, version_of(version), read)
        return None

    def _versions(self, key: str) -> list[dict[str, Any]]:
        """Return all versions of exactly this key, oldest first; delete markers are none."""
        pages = self.client.get_paginator("list_object_versions").paginate(
            Bucket=self.place.bucket, Prefix=key
        )
        rows = [row for page in pages for row in page.get("Versions", []) if row["Key"] == key]
        return sorted(rows, key=lambda row: row["LastModified"])

    def _read_back(self, job: Job, version_id: str) -> PartHasher:
        """Read a version and return its digests; a stream that breaks is taken up where it broke."""
        total = job.source.bytes_total
        hasher = PartHasher(part_bytes_for(total))
        while True:
            at = hasher.bytes_total
            try:
                with self.open(job.key, version_id, at) as body:
                    for data in chunks(body, size=READ_BYTES):
                        hasher.update(data)
                        job.progress(0)  # so that it can be stopped
                return hasher
            except BotoCoreError:
                if hasher.bytes_total == at:
                    raise

    # --- making it

    def _make(self, job: Job, *, overwrite: bool = False) -> Stored:
        if self.copies.can(job.source):
            copied = self.copies.copy(job)
            if copied is not None:
                return self._verified(job, copied)
        made = self.uploads.upload(job, overwrite=overwrite)
        if made.digests is not None and self.uploads.are_checked(job.source.bytes_total):
            return _stored(job, made.version_id or self._newest(job), made.digests)
        # Nobody has shown that this store looks at what it receives: look ourselves.
        return self._verified(job, made)

    def _verified(self, job: Job, made: Made) -> Stored:
        """Read back what was made, once; what has other bytes than promised is removed.

        Raises:
            BytesDiffer: the source has other bytes.
            VaultError: the vault has, and trying again may help.
        """
        version_id = made.version_id or self._newest(job)
        read = self._read_back(job, version_id)
        if (read.bytes_total, read.sha256) == (job.source.bytes_total, job.sha256):
            if made.digests is None:
                job.progress(read.bytes_total)
            return _stored(job, version_id, read)
        says = (
            f"{job.key}: version {version_id} was read back as {read.bytes_total} bytes with SHA-256 "
            f"{read.sha256}, promised were {job.source.bytes_total} with {job.sha256}"
        )
        says += "; it was removed" if self._remove(job.key, version_id) else "; it could not be removed"
        if made.digests is not None:
            raise VaultError(f"{says}. The store keeps other bytes than it was sent")
        if made.resumed:
            raise VaultError(f"{says}. Parts of an earlier try are in it: it is copied afresh")
        raise BytesDiffer(says)

    def _remove(self, key: str, version_id: str) -> bool:
        """Remove a version that nothing refers to; without versions another worker's might be meant."""
        if not version_id:
            return False
        try:
            self.client.delete_object(Bucket=self.place.bucket, Key=key, VersionId=version_id)
        except ClientError:
            return False  # the bucket's default retention holds it for now
        return True

    def _newest(self, job: Job) -> str:
        """Return the version just made, where the store did not say: some do not when an upload is completed.

        Asking costs a listing, several times what storing a small object does; not where there are none.
        """
        if self._probed().get("bucket", {}).get("versioning") == NEVER_ENABLED:
            return ""
        rows = [row for row in self._versions(job.key) if row["Size"] == job.source.bytes_total]
        return version_of(rows[-1]) if rows else ""

    def abort_abandoned(self) -> None:
        """Give up the uploads that nobody finished for a week."""
        before = datetime.now(UTC) - ABANDONED_AFTER
        pages = self.client.get_paginator("list_multipart_uploads").paginate(
            Bucket=self.place.bucket, Prefix=KEYS
        )
        for row in [row for page in pages for row in page.get("Uploads", [])]:
            if row["Initiated"] < before:
                abort(self.client, self.place.bucket, row["Key"], row["UploadId"])

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

    def covered(self, key: str, version_id: str) -> str:
        """See `Vault.covered`. A second upload of the same bytes covers nothing."""
        try:
            pages = list(
                self.client.get_paginator("list_object_versions").paginate(
                    Bucket=self.place.bucket, Prefix=key
                )
            )
        except (BotoCoreError, ClientError) as error:
            raise self._error(key, error) from error
        markers = [row for page in pages for row in page.get("DeleteMarkers", []) if row["Key"] == key]
        if any(row["IsLatest"] for row in markers):
            return "a delete marker"
        rows = [row for page in pages for row in page.get("Versions", []) if row["Key"] == key]
        ours = next((row for row in rows if version_of(row) == version_id), None)
        newest = next((row for row in rows if row["IsLatest"]), ours)
        if newest is None or ours is None or (newest["Size"], newest["ETag"]) == (ours["Size"], ours["ETag"]):
            return ""
        return f"a newer version ({version_of(newest)})"

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

    def listed(self, prefix: str) -> Iterator[Listed]:
        """See `Vault.listed`. Delete markers are no versions."""
        pages = self.client.get_paginator("list_object_versions").paginate(
            Bucket=self.place.bucket, Prefix=prefix
        )
        try:
            for row in (row for page in pages for row in page.get("Versions", [])):
                yield Listed(row["Key"], version_of(row), row["Size"], row["LastModified"])
        except (BotoCoreError, ClientError) as error:
            raise self._error(prefix, error) from error

    def uri(self, key: str, version_id: str) -> str:
        """See `Vault.uri`."""
        version = f"?versionId={version_id}" if version_id else ""
        return f"s3://{self.place.bucket}/{key}{version}"

    def check(self) -> None:
        """See `Vault.check`."""
        try:
            s3_client.client(self.place, quick=True).head_bucket(Bucket=self.place.bucket)
        except (BotoCoreError, ClientError) as error:
            raise self._error("", error) from error

    def probe(self) -> dict[str, Any]:
        """See `Vault.probe`."""
        from evidence.stores.probe import probe_s3

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


def _stored(job: Job, version_id: str, digests: PartHasher) -> Stored:
    return Stored(job.key, version_id, digests.bytes_total, digests.sha256, digests.part_bytes, digests.parts)
