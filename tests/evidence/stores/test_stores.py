"""Both vaults keep what they are given, once, and say truly what protects it."""

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import pytest
from botocore.exceptions import ClientError
from django.conf import LazySettings
from django.core.management import call_command

from config.embedded.valkey import free_port
from evidence.hashing import PART_BYTES, PartHasher, part_bytes_for
from evidence.models import StoreProbe
from evidence.stores import s3_client
from evidence.stores.directory import DirectoryVault
from evidence.stores.probe import probe_and_record
from evidence.stores.probed import newest_result
from evidence.stores.s3 import S3Vault
from evidence.vault import BytesDiffer, VaultError, ready, vault
from tests.evidence.conftest import s3_url
from tests.servers import S3

pytestmark = pytest.mark.django_db(transaction=True)
UNTIL = datetime.now(UTC) + timedelta(days=14)


@dataclass
class Bytes:
    """A source in memory that can be made to stop or lie."""

    body: bytes
    stop_at: int | None = None
    opened: int = 0

    @property
    def bytes_total(self) -> int:
        return len(self.body)

    def open(self, start: int = 0) -> IO[bytes]:
        self.opened += 1
        if self.stop_at is not None:
            return _Stopping(self.body[start : self.stop_at])
        return BytesIO(self.body[start:])


class _Stopping(BytesIO):
    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        if not data:
            raise OSError(5, "Input/output error")
        return data


class Lying(Bytes):
    def open(self, start: int = 0) -> IO[bytes]:
        return BytesIO(self.body[start:-1] + bytes([self.body[-1] ^ 1]))


def sha(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def put(body: bytes, key: str = "evidence/d/1/x", source: Any = None, lock: str = "governance") -> Any:
    seen: list[int] = []
    stored = vault().store(
        key, source or Bytes(body), sha256=sha(body), lock=lock, until=UNTIL, progress=seen.append
    )
    assert sum(seen) == len(body)
    return stored


@pytest.fixture(params=["directory", "s3"])
def either(request: pytest.FixtureRequest) -> str:
    """Each vault in turn."""
    request.getfixturevalue("vault_dir" if request.param == "directory" else "vault_s3")
    return str(request.param)


BIG = os.urandom(PART_BYTES + 5)


@pytest.mark.parametrize("body", [b"", b"x", BIG], ids=["empty", "one byte", "two parts"])
def test_what_is_stored_is_read_back(either: str, body: bytes) -> None:
    stored = put(body)
    assert stored.sha256 == sha(body)
    assert vault().open(stored.key, stored.version_id).read() == body
    assert vault().open(stored.key, stored.version_id, 3).read() == body[3:] if len(body) > 3 else True
    parts = [body[at : at + PART_BYTES] for at in range(0, len(body), PART_BYTES)]
    assert list(stored.part_sha256) == [sha(part) for part in parts]


def test_storing_again_adopts_what_is_there(either: str) -> None:
    assert put(BIG) == put(BIG)
    if either == "s3":
        assert len(versions("evidence/d/1/x")) == 1


def test_two_writers_of_one_key_end_with_the_same_bytes(either: str) -> None:
    made: list[Any] = []
    barrier = threading.Barrier(2)

    def write() -> None:
        barrier.wait()
        made.append(put(b"the same bytes"))

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 2
    for stored in made:
        assert vault().open(stored.key, stored.version_id).read() == b"the same bytes"


def test_other_bytes_than_promised_are_refused_and_leave_nothing(either: str) -> None:
    for body in (b"small", BIG):
        with pytest.raises(BytesDiffer):
            put(body, source=Lying(body))
    if either == "s3":
        assert versions("evidence/d/1/x") == []
        assert uploads() == []
    else:
        root = Path(vault().name.removeprefix("file://"))
        assert [path for path in root.rglob("*") if path.is_file()] == []


def test_the_vault_is_ready_and_says_when_it_is_not(
    either: str, settings: LazySettings, tmp_path: Path
) -> None:
    assert ready()
    if either == "s3":
        settings.VAULT_URL += "-absent"
    else:
        (tmp_path / "file").write_text("")
        settings.VAULT_URL = f"file://{tmp_path}/file"
    assert not ready()
    settings.VAULT_URL = "ftp://x"
    assert not ready()


# --- directory


def test_a_directory_vault_keeps_read_only_files_and_says_what_it_cannot(vault_dir: Path) -> None:
    stored = put(b"x")
    file = vault_dir / "objects" / stored.key
    assert file.stat().st_mode & 0o222 == 0
    assert stored.protected_by["legal_hold"] is None
    assert stored.protected_by["says"].startswith("not locked")
    file.chmod(0o644)
    assert vault().protection(stored.key, "")["says"] == "not protected: the file was made writable"
    assert vault().uri(stored.key, "") == file.as_uri()


def test_a_directory_vault_notices_that_somebody_changed_an_object(vault_dir: Path) -> None:
    stored = put(b"x")
    file = vault_dir / "objects" / stored.key
    file.chmod(0o644)
    file.write_bytes(b"y")
    with pytest.raises(VaultError, match="somebody changed the vault"):
        put(b"x")


def test_a_full_disk_is_said_and_is_not_permanent(tmp_path: Path, settings: LazySettings) -> None:
    # /dev/full takes the open and refuses every byte: the real error of a full disk.
    store = DirectoryVault(tmp_path / "v")
    store._make(tmp_path / "v" / "incoming")
    before = Path.open

    def full(path: Path, mode: str = "r", *more: Any, **options: Any) -> Any:
        if "x" in mode:
            return before(Path("/dev/full"), "wb", buffering=0)
        return before(path, mode, *more, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", full)
        with pytest.raises(VaultError, match="disk is full") as failed:
            store.store(
                "k/x", Bytes(b"abc"), sha256=sha(b"abc"), lock="none", until=None, progress=lambda _: None
            )
    assert not failed.value.permanent
    assert not (tmp_path / "v" / "objects" / "k" / "x").exists()


# --- S3


def versions(key: str) -> list[Any]:
    store = vault()
    assert isinstance(store, S3Vault)
    return store._versions(key)


def uploads() -> list[Any]:
    store = vault()
    assert isinstance(store, S3Vault)
    found: list[Any] = store.client.list_multipart_uploads(Bucket=store.place.bucket).get("Uploads", [])
    return found


@pytest.mark.parametrize("body", [b"small", BIG], ids=["put", "multipart"])
def test_an_s3_object_is_locked_by_version_and_cannot_be_deleted(vault_s3: str, body: bytes) -> None:
    stored = put(body)
    assert stored.version_id
    assert stored.protected_by["mode"] == "GOVERNANCE"
    assert stored.protected_by["legal_hold"] is True
    assert stored.protected_by["says"].startswith(f"locked until {UNTIL:%Y-%m-%d}")
    store = vault()
    assert isinstance(store, S3Vault)
    with pytest.raises(ClientError):
        store.client.delete_object(Bucket=vault_s3, Key=stored.key, VersionId=stored.version_id)
    # A delete marker and a newer version do not hide it: reads are by version.
    store.client.delete_object(Bucket=vault_s3, Key=stored.key)
    store.client.put_object(Bucket=vault_s3, Key=stored.key, Body=b"newer")
    assert store.open(stored.key, stored.version_id).read() == body
    assert put(body).version_id == stored.version_id


def test_a_lock_is_extended_and_never_shortened(vault_s3: str) -> None:
    stored = put(b"x")
    store = vault()
    assert isinstance(store, S3Vault)
    store.locks.apply(stored.key, stored.version_id, "governance", UNTIL - timedelta(days=5))
    assert store.protection(stored.key, stored.version_id)["until"] == stored.protected_by["until"]
    store.locks.apply(stored.key, stored.version_id, "governance", UNTIL + timedelta(days=5))
    later = datetime.fromisoformat(store.protection(stored.key, stored.version_id)["until"])
    assert later > UNTIL + timedelta(days=4)


def test_what_may_be_unlocked_is_not_locked(vault_s3: str) -> None:
    stored = put(b"x", lock="none")
    assert (stored.protected_by["mode"], stored.protected_by["says"]) == (None, "not locked")


def test_a_bucket_without_lock_is_used_and_said(
    s3_endpoint: S3, vault_s3: str, settings: LazySettings
) -> None:
    bucket = s3_endpoint.new_bucket(locked=False)
    settings.VAULT_URL = s3_url(s3_endpoint, bucket)
    stored = put(BIG)
    assert stored.protected_by["says"] == "not locked: this bucket has no Object Lock"
    assert vault().open(stored.key, stored.version_id).read() == BIG
    assert probe_and_record().result["says"] == "not locked: this bucket has no Object Lock"


def test_an_upload_that_was_cut_goes_on_with_the_parts_it_has(vault_s3: str) -> None:
    body = os.urandom(4 * PART_BYTES)
    with pytest.raises(OSError, match="Input/output"):
        put(body, source=Bytes(body, stop_at=3 * PART_BYTES))
    assert len(uploads()) == 1
    store = vault()
    assert isinstance(store, S3Vault)
    sent: list[int] = []

    def note(params: dict[str, Any], **_: Any) -> None:
        sent.append(params["PartNumber"])

    store.client.meta.events.register("before-parameter-build.s3.UploadPart", note)
    try:
        stored = put(body)
    finally:
        store.client.meta.events.unregister("before-parameter-build.s3.UploadPart", note)
    assert 4 in sent
    assert 1 not in sent, "a part that was sent before is not sent again"
    assert uploads() == []
    assert store.open(stored.key, stored.version_id).read() == body


def test_the_probe_says_what_radosgw_enforces(vault_s3: str) -> None:
    result = probe_and_record().result
    enforces = result["enforces"]
    wanted = (
        "content_md5",
        "signed_payload",
        "governance_delete",
        "legal_hold_delete",
        "shorten",
        "downgrade",
        "suspend",
    )
    assert {name: enforces[name] for name in wanted} == dict.fromkeys(wanted, True)
    # Its gaps, as known: conditional puts on a lock bucket, and lock headers of a multipart upload.
    assert (enforces["if_none_match"], enforces["lock_on_multipart"]) == (False, False)
    assert result["says"] == "locks hold"
    assert newest_result(vault().name)["enforces"]["content_md5"] is True
    store = vault()
    assert isinstance(store, S3Vault)
    assert store.client.get_bucket_versioning(Bucket=vault_s3)["Status"] == "Enabled"


def test_once_the_store_was_seen_to_check_parts_nothing_is_read_back(vault_s3: str) -> None:
    probe_and_record()
    store = vault()
    assert isinstance(store, S3Vault)
    assert store.uploads.are_checked(len(BIG))


def test_the_command_prints_the_probe(either: str, capsys: pytest.CaptureFixture[str]) -> None:
    call_command("vault_probe")
    printed = json.loads(capsys.readouterr().out)
    assert printed["kind"] == either
    assert StoreProbe.objects.get().result == printed


@pytest.fixture
def ministack(settings: LazySettings, tmp_path: Path) -> Iterator[S3]:
    """A store that does not keep all it promises."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "ministack"],
        env=os.environ | {"GATEWAY_PORT": str(port), "MINISTACK_PORT": str(port), "PORT": str(port)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=tmp_path,
    )
    endpoint = S3(f"http://127.0.0.1:{port}", "test", "testsecret")
    try:
        for _ in range(200):
            try:
                endpoint.client().list_buckets()
                break
            except Exception:
                time.sleep(0.1)
        yield endpoint
    finally:
        process.terminate()
        process.wait(10)


def test_a_store_that_ignores_part_of_object_lock_is_found_out(
    ministack: S3, settings: LazySettings, tmp_path: Path
) -> None:
    settings.DATA_DIR = tmp_path / "data"
    settings.VAULT_URL = s3_url(ministack, ministack.new_bucket(locked=True))
    result = probe_and_record().result
    assert result["enforces"]["suspend"] is False
    store = vault()
    assert isinstance(store, S3Vault)
    assert store.client.get_bucket_versioning(Bucket=store.place.bucket)["Status"] == "Enabled"
    stored = put(b"kept all the same")
    assert store.open(stored.key, stored.version_id).read() == b"kept all the same"


# --- the rest


@pytest.mark.parametrize(
    ("url", "bucket", "endpoint", "key"),
    [
        ("s3://b?endpoint=http://h:1&region=eu-1", "b", "http://h:1", None),
        ("s3+https://K:S%2F@h:9/b", "b", "https://h:9", "K"),
        ("s3://b", "b", None, None),
    ],
)
def test_vault_urls_are_read(url: str, bucket: str, endpoint: str | None, key: str | None) -> None:
    place = s3_client.parse(url)
    assert (place.bucket, place.endpoint, place.access_key) == (bucket, endpoint, key)


@pytest.mark.parametrize("url", ["s3://", "s3://b?colour=red", "http://b", "s3+http://h/", "s3+http://h/a/b"])
def test_wrong_vault_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="ANDON_VAULT_URL"):
        s3_client.parse(url)


def test_part_sizes_stay_within_ten_thousand_parts() -> None:
    for total in (0, 1, 10**9, 5 * 2**40):
        size = part_bytes_for(total)
        assert size >= PART_BYTES
        assert -(-total // size) <= 10_000


def test_part_digests_do_not_depend_on_how_bytes_arrive() -> None:
    body = os.urandom(100)
    one, many = PartHasher(7), PartHasher(7)
    one.update(body)
    for at in range(0, 100, 3):
        many.update(body[at : at + 3])
    assert (one.sha256, one.parts) == (many.sha256, many.parts)
    assert one.parts == tuple(sha(body[at : at + 7]) for at in range(0, 100, 7))
