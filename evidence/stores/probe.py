"""What a store truly enforces: tried, not believed.

A probe writes a few bytes under `probe/`, locks them, and then tries everything that must not work.
What it saw is a `StoreProbe` row; the pages and the uploads go by the newest one.
"""

import base64
import hashlib
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from botocore.exceptions import BotoCoreError, ClientError
from django.utils import timezone

from evidence.alarms import alarm
from evidence.models import StoreProbe
from evidence.stores.probed import NEVER_ENABLED, PROBE, forget
from evidence.stores.s3_lock import error_code
from evidence.vault import Vault, VaultError, vault
from runs.work import Lease, Payload, Retry, handler

if TYPE_CHECKING:
    from evidence.stores.directory import DirectoryVault
    from evidence.stores.s3 import S3Vault

SCHEMA = "andon.store-probe/1"
PREFIX = "probe/"
LOCKS_HOLD = "locks hold"
# Long enough that no clock difference ends it while we try to break it, short enough to clean up after.
RETENTION = timedelta(seconds=90)


def probe_and_record(store: Vault | None = None) -> StoreProbe:
    """Probe the vault, keep what was seen as a row, and return it.

    Raises:
        VaultError: the store could not be asked at all.
    """
    asked = store or vault()
    asked.check()
    result = asked.probe()
    before = StoreProbe.objects.filter(store=asked.name[:300]).order_by("-probed_at").first()
    row = StoreProbe.objects.create(store=asked.name[:300], probed_at=timezone.now(), result=result)
    forget(asked.name)
    if before is not None and before.result.get("says") == LOCKS_HOLD != result["says"]:
        says = f"{asked.name}: {result['says']}. On {before.probed_at:%d %b %Y %H:%M} UTC its locks held"
        alarm(None, "store does not lock", says)
    return row


@handler(PROBE)
def probe_work(payload: Payload, lease: Lease) -> None:
    """Probe the vault and keep what was seen."""
    try:
        probe_and_record()
    except VaultError as error:
        raise Retry(None, error.says) from error


class _Tries:
    """Collects what was tried and what came of it."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.enforces: dict[str, bool | None] = {}

    def allowed(self, name: str, what: str, call: Callable[[], object]) -> bool:
        """Try something that should work; `enforces[name]` is whether it did."""
        worked, says = _attempt(call)
        return self._note(name, what, worked, "works" if worked else f"does not work: {says}")

    def refused(self, name: str, what: str, call: Callable[[], object]) -> bool:
        """Try something that must not work; `enforces[name]` is whether it was refused."""
        worked, says = _attempt(call)
        return self._note(name, what, not worked, "was allowed" if worked else f"refused: {says}")

    def untried(self, name: str, what: str, why: str) -> None:
        self.enforces[name] = None
        self.rows.append({"name": name, "what": what, "enforced": None, "says": why})

    def _note(self, name: str, what: str, holds: bool, says: str) -> bool:
        self.enforces[name] = holds
        self.rows.append({"name": name, "what": what, "enforced": holds, "says": says})
        return holds


def _attempt(call: Callable[[], object]) -> tuple[bool, str]:
    try:
        result = call()
    except ClientError as error:
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return False, f"{status} {error_code(error)}".strip()
    except BotoCoreError as error:
        return False, type(error).__name__
    return (False, "it did not take effect") if result is False else (True, "")


def probe_directory(store: "DirectoryVault") -> dict[str, Any]:
    """Return what a directory vault does and, plainly, what it cannot."""
    from evidence.sources import FileSource

    store._make(store.root / "incoming")
    spare = store.root / "incoming" / f"probe-{uuid.uuid4().hex}"
    spare.write_bytes(b"andon probe")
    tries = _Tries()
    try:
        key = f"{PREFIX}{uuid.uuid4().hex}"
        digest = hashlib.sha256(b"andon probe").hexdigest()

        def write() -> bool:
            made = store.store(
                key, FileSource(spare, 11), sha256=digest, lock="none", until=None, progress=lambda _: None
            )
            return made.sha256 == digest

        tries.allowed("durable_write", "write, sync and link a file", write)
        mode = store.protection(key, "")["mode"]
        tries.allowed("read_only", "the stored file is read-only", lambda: mode == "read-only")
        store._path(key).unlink()
    finally:
        spare.unlink(missing_ok=True)
    for name, what in (
        ("legal_hold", "a legal hold"),
        ("governance_delete", "deleting a locked object is refused"),
        ("overwrite", "overwriting by root is refused"),
    ):
        tries.untried(name, what, "a directory cannot enforce this")
    return _result(store.name, "directory", tries, {}, "not locked: a directory cannot enforce a lock")


def probe_s3(store: "S3Vault") -> dict[str, Any]:
    """Return what an S3 store enforces on this bucket. Leaves at most a few bytes under a 90 s lock."""
    tries = _Tries()
    bucket = _bucket_facts(store)
    _clean_up(store)
    store.abort_abandoned()
    _try_checksums(store, tries)
    _try_conditions(store, tries)
    if bucket["object_lock"]:
        _try_locks(store, tries)
        _try_suspending(store, tries)
        held = all(tries.enforces.get(name) for name in ("governance_delete", "legal_hold_delete"))
        says = LOCKS_HOLD if held else "not locked: this store accepts Object Lock and does not enforce it"
    else:
        for name in ("governance_delete", "legal_hold_delete", "shorten", "downgrade"):
            tries.untried(name, f"{name.replace('_', ' ')} is refused", "the bucket has no Object Lock")
        says = "not locked: this bucket has no Object Lock"
    return _result(store.name, "s3", tries, bucket, says)


def _result(name: str, kind: str, tries: _Tries, bucket: dict[str, Any], says: str) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "store": name,
        "kind": kind,
        "at": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "bucket": bucket,
        "enforces": tries.enforces,
        "tries": tries.rows,
        "says": says,
    }


def _bucket_facts(store: "S3Vault") -> dict[str, Any]:
    bucket, client = store.place.bucket, store.client
    facts: dict[str, Any] = {"object_lock": False, "default_retention": None, "versioning": None}
    try:
        found = client.get_object_lock_configuration(Bucket=bucket)["ObjectLockConfiguration"]
        facts["object_lock"] = found.get("ObjectLockEnabled") == "Enabled"
        facts["default_retention"] = found.get("Rule", {}).get("DefaultRetention")
    except ClientError:
        pass
    try:
        facts["versioning"] = client.get_bucket_versioning(Bucket=bucket).get("Status") or NEVER_ENABLED
    except ClientError as error:
        facts["versioning"] = f"unknown: {error_code(error)}"
    return facts


def _put(store: "S3Vault", **more: Any) -> tuple[str, str]:
    key = f"{PREFIX}{uuid.uuid4().hex}"
    body = more.pop("Body", b"andon probe")
    more.setdefault(
        "ContentMD5", base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
    )
    answer = store.client.put_object(Bucket=store.place.bucket, Key=key, Body=body, **more)
    return key, str(answer.get("VersionId", ""))


def _try_checksums(store: "S3Vault", tries: _Tries) -> None:
    wrong_md5 = base64.b64encode(hashlib.md5(b"other", usedforsecurity=False).digest()).decode()
    tries.refused("content_md5", "a wrong Content-MD5 is refused", lambda: _put(store, ContentMD5=wrong_md5))
    wrong_sha = base64.b64encode(hashlib.sha256(b"other").digest()).decode()
    tries.refused(
        "checksum_sha256",
        "a wrong SHA-256 checksum is refused",
        lambda: _put(store, ChecksumSHA256=wrong_sha),
    )
    tries.refused(
        "signed_payload", "a body other than the signed one is refused", lambda: _altered_body(store)
    )


def _altered_body(store: "S3Vault") -> object:
    """Send other bytes than were signed (same length), as a fault on the way would."""

    def alter(request: Any, **_: Any) -> None:
        request.body = b"andon PROBE"

    events = store.client.meta.events
    # Unique, so that a put of another thread meanwhile is not altered: the handler looks at the key.
    key = f"{PREFIX}altered-{uuid.uuid4().hex}"

    def only_ours(request: Any, **more: Any) -> None:
        if key in request.url:
            alter(request, **more)

    events.register("before-send.s3.PutObject", only_ours)
    try:
        return store.client.put_object(Bucket=store.place.bucket, Key=key, Body=b"andon probe")
    finally:
        events.unregister("before-send.s3.PutObject", only_ours)


def _try_conditions(store: "S3Vault", tries: _Tries) -> None:
    key, _ = _put(store)
    tries.refused(
        "if_none_match",
        "If-None-Match: * on a key that exists is refused",
        lambda: store.client.put_object(Bucket=store.place.bucket, Key=key, Body=b"again", IfNoneMatch="*"),
    )


def _try_locks(store: "S3Vault", tries: _Tries) -> None:
    client, bucket = store.client, store.place.bucket
    until = datetime.now(UTC) + RETENTION

    def retain(key: str, version: str, mode: str, date: datetime, *, bypass: bool = False) -> object:
        return client.put_object_retention(
            Bucket=bucket,
            Key=key,
            VersionId=version,
            Retention={"Mode": mode, "RetainUntilDate": date},
            **({"BypassGovernanceRetention": True} if bypass else {}),
        )

    def delete(key: str, version: str) -> object:
        return client.delete_object(Bucket=bucket, Key=key, VersionId=version)

    key, version = _put(store)
    tries.allowed(
        "governance", "a governance lock can be set", lambda: retain(key, version, "GOVERNANCE", until)
    )
    tries.refused("governance_delete", "deleting a locked version is refused", lambda: delete(key, version))
    tries.refused(
        "governance_shorten",
        "shortening a governance lock is refused",
        lambda: retain(key, version, "GOVERNANCE", until - timedelta(seconds=60)),
    )
    newer = client.put_object(Bucket=bucket, Key=key, Body=b"overwritten")
    tries.allowed(
        "overwrite",
        "overwriting makes a new version and keeps the locked one",
        lambda: (
            newer.get("VersionId") != version
            and client.get_object(Bucket=bucket, Key=key, VersionId=version)["Body"].read() == b"andon probe"
        ),
    )
    held, held_version = _put(store)
    tries.allowed("legal_hold", "a legal hold can be set", lambda: store.locks.hold(held, held_version))
    tries.refused(
        "legal_hold_delete",
        "deleting a version under a legal hold is refused",
        lambda: delete(held, held_version),
    )
    _try_lock_headers(store, tries, until)
    _try_compliance(tries, _put(store), retain, until)
    _release(store, held, held_version)


def _try_lock_headers(store: "S3Vault", tries: _Tries, until: datetime) -> None:
    headers = {
        "ObjectLockMode": "GOVERNANCE",
        "ObjectLockRetainUntilDate": until,
        "ObjectLockLegalHoldStatus": "ON",
    }
    key, version = _put(store, **headers)
    seen = store.locks.read(key, version)
    tries.allowed(
        "lock_on_put", "lock headers of a put take effect", lambda: bool(seen["until"] and seen["legal_hold"])
    )
    _release(store, key, version)
    client, bucket = store.client, store.place.bucket
    key = f"{PREFIX}{uuid.uuid4().hex}"
    upload = client.create_multipart_upload(Bucket=bucket, Key=key, **headers)["UploadId"]
    etag = client.upload_part(Bucket=bucket, Key=key, UploadId=upload, PartNumber=1, Body=b"andon probe")[
        "ETag"
    ]
    made = client.complete_multipart_upload(
        Bucket=bucket, Key=key, UploadId=upload, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": etag}]}
    )
    version = str(made.get("VersionId", ""))
    multipart = store.locks.read(key, version)
    tries.allowed(
        "lock_on_multipart",
        "lock headers of a multipart upload take effect",
        lambda: bool(multipart["until"]),
    )
    _release(store, key, version)


def _try_compliance(
    tries: _Tries, object_: tuple[str, str], retain: Callable[..., object], until: datetime
) -> None:
    key, version = object_
    if not tries.allowed(
        "compliance", "a compliance lock can be set", lambda: retain(key, version, "COMPLIANCE", until)
    ):
        return
    tries.refused(
        "shorten",
        "shortening a compliance lock is refused",
        lambda: retain(key, version, "COMPLIANCE", until - timedelta(seconds=60), bypass=True),
    )
    tries.refused(
        "downgrade",
        "turning compliance into governance is refused",
        lambda: retain(key, version, "GOVERNANCE", until + timedelta(seconds=60), bypass=True),
    )


def _try_suspending(store: "S3Vault", tries: _Tries) -> None:
    def set_versioning(status: str) -> object:
        return store.client.put_bucket_versioning(
            Bucket=store.place.bucket, VersioningConfiguration={"Status": status}
        )

    if not tries.refused("suspend", "suspending versioning is refused", lambda: set_versioning("Suspended")):
        set_versioning("Enabled")  # at once: it was only a question


def _release(store: "S3Vault", key: str, version: str) -> None:
    """Lift the probe's own legal hold, so that the object can go once its 90 s are over."""
    if version:
        _attempt(
            lambda: store.client.put_object_legal_hold(
                Bucket=store.place.bucket, Key=key, VersionId=version, LegalHold={"Status": "OFF"}
            )
        )


def _clean_up(store: "S3Vault") -> None:
    """Delete what earlier probes left; what is still locked stays for the next one."""
    pages = store.client.get_paginator("list_object_versions").paginate(
        Bucket=store.place.bucket, Prefix=PREFIX
    )
    for page in pages:
        for row in [*page.get("Versions", []), *page.get("DeleteMarkers", [])]:
            key, version = row["Key"], row["VersionId"]
            _attempt(
                lambda key=key, version=version: store.client.delete_object(  # type: ignore[misc]
                    Bucket=store.place.bucket, Key=key, VersionId=version
                )
            )
