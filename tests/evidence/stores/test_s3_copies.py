"""Server-side copies on a real store: nothing counts until it was read back, nothing is left behind."""

import hashlib
import os
from datetime import timedelta
from typing import Any

import pytest
from botocore.exceptions import EndpointConnectionError

from evidence import sources
from evidence.sources import S3Source, SourceError
from evidence.stores import s3 as vault_module
from evidence.stores import s3_copy
from evidence.stores.s3 import S3Vault
from evidence.vault import BytesDiffer, VaultError, vault
from tests.evidence.s3calls import before, calls_of
from tests.evidence.stores.test_stores import UNTIL, uploads, versions
from tests.servers import S3

pytestmark = pytest.mark.django_db(transaction=True)

KEY = "evidence/d/1/x"
PART = 5 << 20  # the smallest that S3 takes
BODY = os.urandom(2 * PART + 7)
WAYS = ("CopyObject", "UploadPartCopy", "PutObject", "UploadPart")


def sha(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


@pytest.fixture(params=["whole", "parts"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Copy by one request, and by parts."""
    if request.param == "parts":
        by_parts(monkeypatch)
    return str(request.param)


def by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_copy, "WHOLE_UP_TO_BYTES", PART)
    monkeypatch.setattr(s3_copy, "PART_BYTES", PART)
    monkeypatch.setattr(s3_copy, "part_bytes_for", lambda _: PART)


@pytest.fixture(params=["versions", "no versions"])
def trainer(request: pytest.FixtureRequest, s3_endpoint: S3, vault_s3: str) -> str:
    """A trainer's bucket in the store of the vault."""
    return s3_endpoint.new_bucket(locked=request.param == "versions")


def save(store: S3, bucket: str, body: bytes = BODY) -> S3Source:
    """Put an object and look at it as a collector does."""
    store.client().put_object(Bucket=bucket, Key="step-1/shard", Body=body)
    source = sources.open_uri(f"s3://{bucket}/step-1/shard")
    assert isinstance(source, S3Source)
    return source


def store_it(source: S3Source, body: bytes = BODY, **more: Any) -> Any:
    seen: list[int] = []
    stored = vault().store(
        KEY, source, sha256=sha(body), lock="governance", until=UNTIL, progress=seen.append, **more
    )
    assert sum(seen) == len(body)
    return stored


def the_vault() -> S3Vault:
    store = vault()
    assert isinstance(store, S3Vault)
    return store


def test_the_store_copies_and_the_copy_is_read_back_before_it_is_locked(
    s3_endpoint: S3, trainer: str, way: str
) -> None:
    source = save(s3_endpoint, trainer)
    order = (*WAYS, "GetObject", "PutObjectLegalHold", "CompleteMultipartUpload")
    with calls_of(*order) as sent:
        stored = store_it(source)
    names = [name for name, _ in sent]
    copied = ["CopyObject"] if way == "whole" else ["UploadPartCopy"] * 3 + ["CompleteMultipartUpload"]
    assert names == [*copied, "GetObject", "PutObjectLegalHold"]
    assert vault().open(KEY, stored.version_id).read() == BODY
    assert stored.protected_by["legal_hold"] is True
    assert stored.protected_by["mode"] == "GOVERNANCE"
    assert (stored.sha256, stored.bytes_total) == (sha(BODY), len(BODY))
    assert len(stored.part_sha256) == -(-len(BODY) // stored.part_bytes)
    assert uploads() == []


def test_an_empty_and_a_one_byte_object_are_copied(s3_endpoint: S3, trainer: str) -> None:
    for body in (b"", b"x"):
        stored = vault().store(
            f"{KEY}{len(body)}",
            save(s3_endpoint, trainer, body),
            sha256=sha(body),
            lock="none",
            until=None,
            progress=lambda _: None,
        )
        assert vault().open(stored.key, stored.version_id).read() == body


def test_a_retry_adopts_the_copy_that_is_there(s3_endpoint: S3, trainer: str, way: str) -> None:
    source = save(s3_endpoint, trainer)
    first = store_it(source)
    with calls_of(*WAYS) as sent:
        assert store_it(source) == first
    assert sent == []
    assert len(versions(KEY)) == 1


def test_a_version_is_copied_though_it_was_overwritten_and_deleted_since(
    s3_endpoint: S3, vault_s3: str, way: str
) -> None:
    bucket = s3_endpoint.new_bucket(locked=True)
    source = save(s3_endpoint, bucket)
    s3_endpoint.client().put_object(Bucket=bucket, Key=source.key, Body=b"newer")
    s3_endpoint.client().delete_object(Bucket=bucket, Key=source.key)
    assert vault().open(KEY, store_it(source).version_id).read() == BODY


def test_an_object_without_versions_that_was_overwritten_is_not_copied(
    s3_endpoint: S3, vault_s3: str, way: str
) -> None:
    bucket = s3_endpoint.new_bucket(locked=False)
    source = save(s3_endpoint, bucket)
    other = os.urandom(len(BODY))
    s3_endpoint.client().put_object(Bucket=bucket, Key=source.key, Body=other)
    with pytest.raises(BytesDiffer):  # this gateway ignores the condition on a copy: the read-back does not
        store_it(source)
    assert versions(KEY) == []
    assert uploads() == []
    with pytest.raises(SourceError, match="overwritten"):
        source.open()


def test_a_source_deleted_in_the_middle_leaves_nothing(
    s3_endpoint: S3, trainer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_parts(monkeypatch)
    monkeypatch.setattr(s3_copy, "PARTS_AT_ONCE", 1)
    source = save(s3_endpoint, trainer)
    parts: list[str] = []

    def rotate(name: str, url: str) -> None:
        parts.append(url)
        if len(parts) == 2:
            more = {"VersionId": source.version_id} if source.version_id else {}
            s3_endpoint.client().delete_object(Bucket=trainer, Key=source.key, **more)

    with before(rotate, "UploadPartCopy"), pytest.raises(SourceError) as failed:
        store_it(source)
    assert failed.value.permanent
    assert len(parts) == 2
    assert versions(KEY) == []
    assert uploads() == []


def test_a_copy_that_was_cut_goes_on_with_the_parts_it_has(
    s3_endpoint: S3, trainer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_parts(monkeypatch)
    monkeypatch.setattr(s3_copy, "PARTS_AT_ONCE", 1)
    source = save(s3_endpoint, trainer)
    cut_after(2, source)
    assert len(uploads()) == 1
    with calls_of("UploadPartCopy") as sent:
        stored = store_it(source)
    assert len(sent) == 1
    assert vault().open(KEY, stored.version_id).read() == BODY
    assert uploads() == []


def cut_after(parts: int, source: S3Source) -> None:
    """Lose the connection to the store after so many parts."""
    left = [parts]

    def cut(name: str, url: str) -> None:
        if left[0] == 0:
            raise EndpointConnectionError(endpoint_url=url)
        left[0] -= 1

    with before(cut, "UploadPartCopy"), pytest.raises(VaultError) as failed:
        store_it(source)
    assert not failed.value.permanent


def test_other_bytes_than_promised_are_removed_and_never_returned(
    s3_endpoint: S3, trainer: str, way: str
) -> None:
    source = save(s3_endpoint, trainer)
    with pytest.raises(BytesDiffer, match="it was removed"):
        store_it(source, BODY[:-1] + bytes([BODY[-1] ^ 1]))
    assert versions(KEY) == []
    assert uploads() == []


def test_parts_of_another_try_are_not_held_against_the_source(
    s3_endpoint: S3, trainer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_parts(monkeypatch)
    monkeypatch.setattr(s3_copy, "PARTS_AT_ONCE", 1)
    cut_after(1, save(s3_endpoint, trainer, os.urandom(len(BODY))))
    source = save(s3_endpoint, trainer)
    with pytest.raises(VaultError, match="copied afresh") as failed:
        store_it(source)
    assert not failed.value.permanent
    assert versions(KEY) == []
    assert vault().open(KEY, store_it(source).version_id).read() == BODY


def test_a_store_that_does_not_copy_is_uploaded_to(
    s3_endpoint: S3, trainer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(s3_endpoint, trainer)
    monkeypatch.setattr(s3_copy.Copies, "copy", lambda *_: None)
    with calls_of(*WAYS) as sent:
        stored = store_it(source)
    assert {name for name, _ in sent} == {"UploadPart"}
    assert vault().open(KEY, stored.version_id).read() == BODY


def test_only_the_vaults_own_store_is_asked_to_copy(s3_endpoint: S3, trainer: str) -> None:
    here = save(s3_endpoint, trainer)
    elsewhere = S3Source(
        s3_endpoint.client(), here.bucket, here.key, here.version_id, here.bytes_total, here.etag
    )
    assert the_vault().copies.can(here)
    assert not the_vault().copies.can(elsewhere)
    with calls_of("CopyObject", "UploadPartCopy") as sent:
        store_it(elsewhere)
    assert sent == []


def test_uploads_that_nobody_finished_are_given_up_in_time(
    s3_endpoint: S3, vault_s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = s3_endpoint.client()
    client.create_multipart_upload(Bucket=vault_s3, Key=KEY)
    client.create_multipart_upload(Bucket=vault_s3, Key="somebody-elses")
    the_vault().abort_abandoned()
    assert len(uploads()) == 2
    monkeypatch.setattr(vault_module, "ABANDONED_AFTER", timedelta(seconds=-60))
    the_vault().abort_abandoned()
    assert [row["Key"] for row in uploads()] == ["somebody-elses"]
