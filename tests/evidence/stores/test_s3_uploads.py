"""Uploads hold no more in memory than they may, and go by what the probe saw the store check."""

import hashlib
import os
import threading
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import EndpointConnectionError

from andon import hashing
from andon.hashing import PART_BYTES
from evidence.sources import FileSource
from evidence.stores import s3_upload
from evidence.stores.probe import probe_and_record
from evidence.stores.s3 import S3Vault
from evidence.stores.s3_parts import Memory, in_flight
from evidence.stores.s3_upload import MEMORY_BYTES, Window
from evidence.vault import BytesDiffer, VaultError, vault
from tests.evidence.s3calls import before, calls_of
from tests.evidence.stores.test_stores import Bytes, put, sha, uploads, versions

pytestmark = pytest.mark.django_db(transaction=True)
MIB = 1 << 20


@pytest.fixture
def peak_bytes() -> Iterator[Any]:
    """What Python allocated at most since the test began."""
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()


@pytest.fixture
def two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every object have two parts at most: 64 MiB have parts of 32, as 5 TB have parts of 583."""
    monkeypatch.setattr(hashing, "MOST_PARTS", 2)


def file_of(directory: Path, size: int) -> tuple[FileSource, str]:
    path = directory / "shard"
    with path.open("wb") as file:
        for _ in range(size // MIB):
            file.write(os.urandom(MIB))
    with path.open("rb") as file:
        return FileSource(path, size), hashlib.file_digest(file, "sha256").hexdigest()


def store_file(source: FileSource, sha256: str) -> Any:
    return vault().store(
        "evidence/d/1/x", source, sha256=sha256, lock="none", until=None, progress=lambda _: None
    )


def test_large_parts_are_streamed_and_never_in_memory(
    vault_s3: str, tmp_path: Path, two_parts: None, peak_bytes: Any
) -> None:
    probe_and_record()
    source, sha256 = file_of(tmp_path, 64 * MIB)
    with calls_of("UploadPart") as sent:
        stored = store_file(source, sha256)
    assert len(sent) == 2
    assert stored.part_bytes == 32 * MIB
    assert peak_bytes() < 16 * MIB, "a part of 32 MiB was in memory"
    hasher = hashing.PartHasher(stored.part_bytes)
    for data in hashing.chunks(vault().open(stored.key, stored.version_id)):
        hasher.update(data)
    assert (hasher.sha256, hasher.parts) == (sha256, stored.part_sha256)


def test_a_streamed_part_that_changes_while_it_is_sent_is_refused(
    vault_s3: str, tmp_path: Path, two_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe_and_record()
    source, sha256 = file_of(tmp_path, 32 * MIB)
    opened = Window.__enter__

    def change(window: Window) -> Any:
        with source.path.open("r+b") as file:
            file.seek(window.start + 5 * MIB)  # of this part, which was hashed before it is sent
            file.write(b"changed after it was hashed")
        return opened(window)

    monkeypatch.setattr(Window, "__enter__", change)
    with pytest.raises(VaultError) as failed:
        store_file(source, sha256)
    assert not failed.value.permanent
    with pytest.raises(BytesDiffer):
        store_file(source, sha256)
    assert versions("evidence/d/1/x") == []
    assert uploads() == []


def test_a_streamed_upload_goes_on_with_the_parts_it_has(
    vault_s3: str, tmp_path: Path, two_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, sha256 = file_of(tmp_path, 32 * MIB)
    read = Window.read

    def broken(window: Window, size: int = -1) -> bytes:
        if window.start:
            raise OSError(5, "Input/output error")
        return read(window, size)

    monkeypatch.setattr(s3_upload, "PARTS_AT_ONCE", 1)
    with monkeypatch.context() as patch:
        patch.setattr(Window, "read", broken)
        with pytest.raises(OSError, match="Input/output"):
            store_file(source, sha256)
    with calls_of("UploadPart") as sent:
        store_file(source, sha256)
    assert len(sent) == 1


def test_many_uploads_at_once_share_one_memory(vault_s3: str, peak_bytes: Any) -> None:
    probe_and_record()
    body = os.urandom(6 * MIB)
    begun = peak_bytes()
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda n: put(body, f"evidence/d/1/{n}", Bytes(body), "none"), range(16)))
    # The sources hand out copies of their own.
    assert peak_bytes() - begun < 2 * MEMORY_BYTES + 16 * MIB


def test_a_failed_upload_gives_its_memory_back(vault_s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = vault()
    assert isinstance(store, S3Vault)

    def cut(name: str, url: str) -> None:
        raise EndpointConnectionError(endpoint_url=url)

    with ThreadPoolExecutor(1) as pool:  # the parts behind the first one have not begun when it fails
        monkeypatch.setattr(store.uploads, "pool", pool)
        with before(cut, "UploadPart"), pytest.raises(VaultError):
            put(os.urandom(4 * PART_BYTES))
    assert store.uploads.memory._used == 0


def test_memory_is_given_in_turn_and_never_beyond_its_size() -> None:
    memory, most, used = Memory(10), [0], [0]
    lock = threading.Lock()

    def use(size: int) -> None:
        memory.take(size)
        with lock:
            used[0] += size
            most[0] = max(most[0], used[0])
        with lock:
            used[0] -= size
        memory.give_back(size)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, [3, 4, 7, 10, 1] * 40))
    assert 0 < most[0] <= 10
    memory.take(11)  # more than there is, when nothing is used
    memory.give_back(11)


def test_calls_in_flight_are_bounded_and_a_failure_waits_for_the_others() -> None:
    running, most, ended = [0], [0], [0]
    lock = threading.Lock()

    def call(number: int) -> int:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        threading.Event().wait(0.002)
        with lock:
            running[0] -= 1
            ended[0] += 1
        if number == 7:
            raise ValueError("seven")
        return number

    with ThreadPoolExecutor(8) as pool:
        calls = [partial(call, number) for number in range(7)]
        assert sorted(in_flight(pool, calls, 3)) == list(range(7))
        assert most[0] <= 3
        with pytest.raises(ValueError, match="seven"):
            list(in_flight(pool, [partial(call, number) for number in range(20)], 3))
        assert running[0] == 0
        assert ended[0] < 27, "nothing more is begun after a failure"


@pytest.mark.parametrize(
    ("seen", "md5"), [({}, True), ({"content_md5": True}, True), ({"signed_payload": True}, False)]
)
def test_content_md5_is_sent_unless_signatures_are_checked(
    vault_s3: str, monkeypatch: pytest.MonkeyPatch, seen: dict[str, bool], md5: bool
) -> None:
    store = vault()
    assert isinstance(store, S3Vault)
    monkeypatch.setattr(store.uploads, "enforces", lambda name: seen.get(name, False))
    headers: list[bool] = []

    def look(params: dict[str, Any], **_: Any) -> None:
        headers.append("Content-MD5" in params["headers"])

    store.client.meta.events.register("before-call.s3.PutObject", look, unique_id="look")
    try:
        with calls_of("GetObject") as read_back:
            put(b"x")
    finally:
        store.client.meta.events.unregister("before-call.s3.PutObject", unique_id="look")
    assert headers == [md5]
    assert bool(read_back) is not bool(seen), "what nobody was seen to check is read back"


def test_if_none_match_finds_what_another_worker_stored_meanwhile(
    s3_endpoint: Any, vault_s3: str, settings: Any
) -> None:
    from tests.evidence.conftest import s3_url

    settings.VAULT_URL = s3_url(s3_endpoint, s3_endpoint.new_bucket(locked=False))
    assert probe_and_record().result["enforces"]["if_none_match"] is True
    first = put(b"x", lock="none")
    with calls_of("PutObject") as sent:
        again = vault().store(
            first.key,
            Bytes(b"x"),
            sha256=sha(b"x"),
            lock="none",
            until=None,
            progress=lambda _: None,
            first=True,
        )
    assert len(sent) == 1
    assert again == first
