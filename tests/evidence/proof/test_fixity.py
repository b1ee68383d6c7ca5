"""What the sweep finds: damaged, grown, cut and lost objects, and locks that are no longer there."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.conf import LazySettings
from django.core.management import CommandError, call_command
from django.test import Client
from django.utils import timezone

from config.embedded.valkey import free_port
from evidence.custody import verify_custody
from evidence.hashing import PartHasher
from evidence.models import Dossier, StoredObject
from evidence.pages import listing
from evidence.proof import fixity
from evidence.retention.dates import extend_retention
from evidence.stores.probe import probe_and_record
from evidence.stores.s3 import S3Vault
from evidence.vault import VaultError, vault
from runs.models import Person, Work
from runs.work import run_due
from tests.evidence import world
from tests.evidence.collecting.test_faults import child
from tests.evidence.conftest import s3_url
from tests.servers import S3

pytestmark = pytest.mark.django_db(transaction=True)


def make_dossier(sources: Path) -> Dossier:
    """A sealed checkpoint of three files and its manifest, under a lock where the store has any."""
    run = world.make_run()
    world.on_disk(run, sources, 900)
    dossier = world.open_dossier(run, rules=world.policy("last_good_checkpoint"))
    world.work(dossier)
    assert dossier.items.get().state == "sealed"
    return dossier


@pytest.fixture
def dossier(sources: Path, vault_dir: Path) -> Dossier:
    return make_dossier(sources)


def sweep(budget: int = 1 << 40) -> fixity.Swept:
    return fixity.sweep(timezone.now(), budget_bytes=budget)


def stored(dossier: Dossier, number: int = 0) -> StoredObject:
    return StoredObject.objects.filter(item__dossier=dossier).order_by("path")[number]


def damage(vault_dir: Path, one: StoredObject, change: Any) -> None:
    file = vault_dir / "objects" / one.key
    raw = file.read_bytes()
    file.chmod(0o644)
    file.write_bytes(change(raw))
    file.chmod(0o440)


def rows(dossier: Dossier, what: str) -> list[Any]:
    return list(dossier.custody.filter(what=what).order_by("seq"))


def test_what_is_as_it_was_is_noted_as_checked_and_no_more(dossier: Dossier, alarms: list[Any]) -> None:
    before = dossier.custody.count()
    done = sweep()
    assert (done.objects, done.locks, done.mismatches, done.lost) == (4, 4, 0, 0)
    assert done.bytes_read == sum(StoredObject.objects.values_list("bytes_total", flat=True))
    assert not StoredObject.objects.filter(checked_at=None).exists()
    assert (dossier.custody.count(), alarms) == (before, [])
    assert fixity.health().unchecked == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda raw: raw[:7] + bytes([raw[7] ^ 1]) + raw[8:], "are not those that were stored"),
        (lambda raw: raw[:-1], "it has"),
        (lambda raw: raw + b"?", "more than"),
        (lambda raw: b"", "it has 0 of"),
    ],
)
def test_a_changed_object_is_a_custody_row_and_an_alarm_once(
    change: Any,
    says: str,
    dossier: Dossier,
    vault_dir: Path,
    alarms: list[tuple[str, str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = stored(dossier, 1)
    original = (vault_dir / "objects" / one.key).read_bytes()
    damage(vault_dir, one, change)
    assert sweep().mismatches == 1
    assert sweep().mismatches == 1
    found = rows(dossier, "fixity mismatch")
    assert [(row.object_sha256, row.data["path"]) for row in found] == [(one.sha256, one.path)]
    assert says in found[0].data["says"]
    assert [what for what, _ in alarms] == ["fixity mismatch"]
    assert any(record.levelno == logging.ERROR and one.path in record.message for record in caplog.records)
    assert verify_custody(dossier) == []
    damage(vault_dir, one, lambda _: original)
    assert sweep().mismatches == 0
    assert len(rows(dossier, "fixity restored")) == 1
    one.refresh_from_db()
    assert one.mismatch == ""


def test_a_lost_object_is_one_too(dossier: Dossier, vault_dir: Path, alarms: list[tuple[str, str]]) -> None:
    one = stored(dossier)
    (vault_dir / "objects" / one.key).unlink()
    assert sweep().mismatches == 1
    assert rows(dossier, "fixity mismatch")[0].data["says"] == "it is gone from the vault"
    assert len(alarms) == 1


def test_pages_say_it(dossier: Dossier, vault_dir: Path, as_alice: Client) -> None:
    assert b"Fixity" in as_alice.get("/system").content
    one = stored(dossier)
    damage(vault_dir, one, lambda raw: raw[:-1])
    sweep()
    for url in (f"/vault/{dossier.pk}", f"/vault/{dossier.pk}/items", "/vault", "/system"):
        assert b"mismatch in 1" in as_alice.get(url).content, url
    line = listing.item_lines(dossier)[0]
    assert line.damaged == "fixity: mismatch in 1\xa0file of 4"


def test_damaged_ranges_are_named_by_part() -> None:
    body = os.urandom(100)
    was, now = PartHasher(16), PartHasher(16)
    was.update(body)
    now.update(body[:17] + b"\0\0" + body[19:98] + b"\0\0")
    one = StoredObject(bytes_total=100, sha256=was.sha256, part_bytes=16, part_sha256=list(was.parts))
    assert fixity.difference(one, was) == ""
    assert fixity.difference(one, now) == "bytes 16–31, 96–99 are not those that were stored"
    one.part_sha256 = list(now.parts)
    assert "do not have the digest" in fixity.difference(one, now)


def test_the_budget_is_kept_and_the_longest_unchecked_go_first(dossier: Dossier) -> None:
    ids = list(StoredObject.objects.order_by("-pk").values_list("pk", flat=True))
    for age, pk in enumerate(ids[1:], start=1):
        StoredObject.objects.filter(pk=pk).update(checked_at=timezone.now() - timedelta(days=age))
    began = timezone.now()
    order = []
    for budget in (1, 2, 3, 4):
        # A night's budget covers what was read since it began; the object begun last is read to its end.
        spent = sum(StoredObject.objects.filter(pk__in=order).values_list("bytes_total", flat=True))
        assert fixity.sweep(began, budget_bytes=spent).objects == 0
        assert fixity.sweep(began, budget_bytes=spent + budget).objects == 1
        order.append(StoredObject.objects.order_by("-checked_at").first().pk)
    assert order == [ids[0], *reversed(ids[1:])]
    assert fixity.sweep(began, budget_bytes=1 << 40).objects == 0


def test_it_is_asked_for_once_a_night_and_done_by_a_worker(dossier: Dossier) -> None:
    for _ in range(3):
        fixity.ask()
    run_due()
    fixity.ask()
    work = Work.objects.get(kind=fixity.SWEEP)
    assert (work.state, work.key) == ("done", timezone.now().date().isoformat())
    assert not StoredObject.objects.filter(checked_at=None).exists()
    assert fixity.health().swept_at is not None


def test_a_killed_sweep_is_continued_where_it_was(dossier: Dossier) -> None:
    fixity.ask()
    worker = child(
        "import time\n"
        "from evidence.proof import fixity\n"
        "from runs.work import run_due\n"
        "record, n = fixity._record, []\n"
        "def stop(*args):\n"
        "    if len(n) == 2:\n"
        "        print('here', flush=True)\n"
        "        time.sleep(60)\n"
        "    n.append(record(*args))\n"
        "fixity._record = stop\n"
        "run_due()\n"
    )
    assert worker.stdout is not None
    assert worker.stdout.readline() == "here\n"
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    worker.stdout.close()
    done = {one.pk: one.checked_at for one in StoredObject.objects.exclude(checked_at=None)}
    assert len(done) == 2
    Work.objects.filter(kind=fixity.SWEEP).update(lease_until=timezone.now())
    run_due()
    assert Work.objects.get(kind=fixity.SWEEP).state == "done"
    assert not StoredObject.objects.filter(checked_at=None).exists()
    assert {one.pk: one.checked_at for one in StoredObject.objects.filter(pk__in=done)} == done


def test_a_store_that_is_away_is_neither_good_nor_bad(dossier: Dossier, settings: LazySettings) -> None:
    settings.VAULT_URL = f"s3+http://a:b@127.0.0.1:{free_port()}/gone"
    with pytest.raises(VaultError):
        sweep()
    fixity.ask()
    run_due()
    assert Work.objects.get(kind=fixity.SWEEP).state == "due"
    assert not StoredObject.objects.exclude(checked_at=None, mismatch="").exists()


def test_the_command_prints_what_was_done_and_fails_on_damage(
    dossier: Dossier, vault_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call_command("sweep_fixity")
    assert '"objects": 4' in capsys.readouterr().out
    damage(vault_dir, stored(dossier), lambda raw: raw[1:])
    with pytest.raises(CommandError, match="damaged"):
        call_command("sweep_fixity")


# --- locks


def test_a_file_that_was_made_writable_is_noticed(
    dossier: Dossier, vault_dir: Path, alarms: list[tuple[str, str]]
) -> None:
    one = stored(dossier)
    (vault_dir / "objects" / one.key).chmod(0o644)
    assert (sweep().lost, sweep().lost) == (1, 0)
    row = rows(dossier, "protection lost")[0]
    assert (row.data["paths"], row.data["now"]) == ([one.path], "not protected: the file was made writable")
    one.refresh_from_db()
    assert one.protected_by["mode"] == "none"
    assert [what for what, _ in alarms] == ["protection lost"]
    assert verify_custody(dossier) == []


def test_a_lock_that_was_lifted_is_noticed_and_shown_until_it_is_locked_again(
    sources: Path,
    vault_s3: str,
    alarms: list[tuple[str, str]],
    as_alice: Client,
    as_charlie: Client,
    alice: Person,
) -> None:
    dossier = make_dossier(sources)
    assert sweep().lost == 0
    assert listing.lock_sentences(dossier)[0].startswith("Locked until")
    assert "none was lost" in as_alice.get("/system").content.decode()
    one, store = stored(dossier), vault()
    assert isinstance(store, S3Vault)
    place = {"Bucket": vault_s3, "Key": one.key, "VersionId": one.version_id}
    store.client.put_object_legal_hold(**place, LegalHold={"Status": "OFF"})
    assert sweep().lost == 1
    ends = timezone.now() + timedelta(seconds=3)
    store.client.put_object_retention(
        **place,
        Retention={"Mode": "GOVERNANCE", "RetainUntilDate": ends},
        BypassGovernanceRetention=True,
    )
    assert sweep().lost == 1
    assert [row.data["objects"] for row in rows(dossier, "protection lost")] == [1, 1]
    one.refresh_from_db()
    assert one.lock_lost_at is not None
    told = as_alice.get("/system/probe.json").json()["lost_locks"]
    assert (told["objects"], told["dossiers"], told["since"]) == (1, 1, one.lock_lost_at.isoformat())
    assert (told["first"][0]["path"], told["first"][0]["dossier"]) == (one.path, str(dossier.pk))
    assert told["what_to_do"]
    # How many is everybody's to know, which of them only the project's.
    told = as_charlie.get("/system/probe.json").json()["lost_locks"]
    assert (told["objects"], told["first"]) == (1, [])
    page = as_alice.get("/system").content.decode()
    assert f"dossier {dossier.pk}." in page
    assert "Keep it longer" in page
    assert f"dossier {dossier.pk}" not in as_charlie.get("/system").content.decode()
    assert "lock lost: 1\xa0file of 4" in as_alice.get(f"/vault/{dossier.pk}").content.decode()
    assert "its lock is not what it was" in as_alice.get(f"/vault/objects/{one.sha256}").content.decode()
    assert f"/vault/{dossier.pk}" in as_alice.get("/vault?only=lock+lost").content.decode()
    time.sleep(max(0.0, (ends - timezone.now()).total_seconds()))  # the store's own clock ends the lock
    says, locked = listing.lock_sentences(dossier)
    assert not locked
    assert says.startswith("1\xa0object of 4 not locked any more")
    assert len(alarms) == 2
    later = timezone.now() + timedelta(days=90)
    extend_retention(dossier=dossier, person=alice, until=later, why="somebody lifted a hold")
    run_due()
    one.refresh_from_db()
    assert (one.lock_lost_at, one.protected_by["legal_hold"], sweep().lost) == (None, True, 0)
    assert as_alice.get("/system/probe.json").json()["lost_locks"]["objects"] == 0


def test_what_lies_over_a_version_is_noticed_and_the_version_still_read(
    sources: Path, vault_s3: str, alarms: list[tuple[str, str]]
) -> None:
    dossier = make_dossier(sources)
    store = vault()
    assert isinstance(store, S3Vault)
    client, (hidden, replaced, again) = store.client, [stored(dossier, number) for number in range(3)]
    client.delete_object(Bucket=vault_s3, Key=hidden.key)
    client.put_object(Bucket=vault_s3, Key=replaced.key, Body=b"other bytes")
    body = store.open(again.key, again.version_id).read()
    client.put_object(Bucket=vault_s3, Key=again.key, Body=body)  # the same bytes twice cover nothing
    done = sweep()
    assert (done.objects, done.mismatches, done.lost) == (4, 0, 0)
    row = rows(dossier, "covered")[0]
    assert sorted(row.data["paths"]) == [hidden.path, replaced.path]
    assert [what for what, _ in alarms] == ["covered"]
    hidden.refresh_from_db()
    assert hidden.protected_by["over"] == "a delete marker"
    assert hidden.protected_by["legal_hold"] is True
    sweep()
    assert len(rows(dossier, "covered")) == 1
    client.delete_object(
        Bucket=vault_s3,
        Key=hidden.key,
        VersionId=client.list_object_versions(Bucket=vault_s3, Prefix=hidden.key)["DeleteMarkers"][0][
            "VersionId"
        ],
    )
    sweep()
    hidden.refresh_from_db()
    assert "over" not in hidden.protected_by


def test_after_two_people_released_it_locks_may_go(sources: Path, vault_s3: str) -> None:
    dossier = make_dossier(sources)
    Dossier.objects.filter(pk=dossier.pk).update(released_at=timezone.now())
    one, store = stored(dossier), vault()
    assert isinstance(store, S3Vault)
    place = {"Bucket": vault_s3, "Key": one.key, "VersionId": one.version_id}
    store.client.put_object_legal_hold(**place, LegalHold={"Status": "OFF"})
    assert sweep().lost == 0
    one.refresh_from_db()
    assert one.protected_by["legal_hold"] is False


@contextlib.contextmanager
def ministack(port: int, home: Path) -> Iterator[S3]:
    """A store that keeps objects and versions over a restart, and forgets every lock."""
    process = subprocess.Popen(
        [sys.executable, "-m", "ministack"],
        env=os.environ
        | {"GATEWAY_PORT": str(port), "S3_PERSIST": "1", "PERSIST_STATE": "1"}
        | {"S3_DATA_DIR": str(home / "s3"), "STATE_DIR": str(home / "state")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=home,
    )
    endpoint = S3(f"http://127.0.0.1:{port}", "test", "testsecret")
    try:
        for _ in range(300):
            with contextlib.suppress(Exception):
                endpoint.client().list_buckets()
                break
            time.sleep(0.1)
        yield endpoint
    finally:
        process.terminate()
        process.wait(20)


def test_a_store_that_forgets_its_locks_in_a_restart_is_found_out(
    sources: Path, tmp_path: Path, settings: LazySettings, as_alice: Client, alarms: list[tuple[str, str]]
) -> None:
    settings.DATA_DIR = tmp_path / "data"
    port, home = free_port(), tmp_path / "store"
    home.mkdir()
    with ministack(port, home) as endpoint:
        settings.VAULT_URL = s3_url(endpoint, endpoint.new_bucket(locked=True))
        dossier = make_dossier(sources)
        assert stored(dossier).protected_by["legal_hold"] is True
        assert b"Locked until" in as_alice.get(f"/vault/{dossier.pk}").content
    with ministack(port, home):
        done = sweep()
        assert (done.lost, done.mismatches, done.unreadable) == (4, 0, 0)
        page = as_alice.get(f"/vault/{dossier.pk}").content
        assert b"Locked until" not in page
        assert b"Not locked" in page
    assert rows(dossier, "protection lost")[0].data["objects"] == 4
    assert [what for what, _ in alarms] == ["protection lost"]
    assert as_alice.get("/system/probe.json").json()["lost_locks"]["objects"] == 4
    assert verify_custody(dossier) == []
    # At the same address a bucket that locks nothing: the probe says so, once.
    (tmp_path / "other").mkdir()
    with ministack(port, tmp_path / "other") as endpoint:
        endpoint.client().create_bucket(Bucket=settings.VAULT_URL.rpartition("/")[2])
        assert [probe_and_record().result["says"] for _ in range(2)] == [
            "not locked: this bucket has no Object Lock"
        ] * 2
    assert [what for what, _ in alarms] == ["protection lost", "store does not lock"]
