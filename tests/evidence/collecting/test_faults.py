"""Workers die, race, and find sources changed: no item is falsely held or sealed, nothing is doubled."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from django.conf import LazySettings
from django.conf import settings as configured
from django.db import DatabaseError, connection, transaction
from django.utils import timezone

from evidence.collecting import to_sealed
from evidence.custody import verify_custody
from evidence.gates import may_delete, resume_gate
from evidence.models import Dossier, Item, StoredObject
from evidence.queries import last_good
from evidence.stores import s3_client
from evidence.vault import vault
from runs.models import Checkpoint, Work
from runs.work import run_due, run_one
from tests.evidence import world

pytestmark = pytest.mark.django_db(transaction=True)
ROOT = Path(__file__).resolve().parents[3]


def rules() -> Any:
    return world.policy("last_good_checkpoint")


def due_again() -> None:
    """Let every lease run out and every wait end, as time would."""
    past = timezone.now()
    Work.objects.filter(state="claimed").update(lease_until=past)
    Work.objects.filter(state="due").update(not_before=past)


def child(source: str, **more: str) -> "subprocess.Popen[str]":
    """Run a worker in a process of its own, on this test's database and vault."""
    base = configured.DATABASES["default"]
    code = (
        "import os, django\n"
        "from django.conf import settings\n"
        "from pathlib import Path\n"
        "import tests.settings\n"
        "django.setup()\n"
        "from django.db import connections\n"
        "connections.settings['default']['NAME'] = os.environ['TEST_NAME']\n"
        "settings.VAULT_URL = os.environ['TEST_VAULT']\n"
        "settings.DATA_DIR = Path(os.environ['TEST_DATA'])\n"
        "settings.SOURCE_ROOTS = [Path(os.environ['TEST_ROOT'])]\n" + source
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        env=os.environ
        | {
            "DJANGO_SETTINGS_MODULE": "tests.settings",
            "TEST_NAME": str(base["NAME"]),
            "TEST_VAULT": configured.VAULT_URL,
            "TEST_DATA": str(configured.DATA_DIR),
            "TEST_ROOT": str(configured.SOURCE_ROOTS[0]),
        }
        | more,
    )


# Stage boundaries of an item's work: the process stops in front of each and is killed there.
STAGES = {
    "before the hold": "to_held.hold_tree",
    "after the links, before the row": "to_held.custody.append",
    "before copying": "to_sealed._begin",
    "before the first byte is stored": "to_sealed._store_all",
    "after a file is stored, before its row": "to_sealed._record",
    "before sealing": "to_sealed._finish",
    "between sealed and its seal": "to_sealed.seals.seal",
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_worker_killed_at_a_stage_boundary_is_followed_by_another(
    stage: str, sources: Path, vault_dir: Path
) -> None:
    run = world.make_run()
    world.on_disk(run, sources, 900)
    dossier = world.open_dossier(run, rules=rules())
    worker = child(
        "import sys, time\n"
        "from evidence.collecting import to_held, to_sealed\n"
        "from runs.work import run_due\n"
        f"*path, name = {STAGES[stage]!r}.split('.')[1:]\n"
        f"where = {STAGES[stage].partition('.')[0]}\n"
        "for part in path:\n"
        "    where = getattr(where, part)\n"
        "def stop(*_, **__):\n"
        "    print('here', flush=True)\n"
        "    time.sleep(60)\n"
        "setattr(where, name, stop)\n"
        "run_due()\n"
    )
    assert worker.stdout is not None
    assert worker.stdout.readline() == "here\n"
    item = dossier.items.get()
    assert item.state != "sealed"
    assert not resume_gate(dossier).open
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    worker.stdout.close()
    due_again()
    world.work(dossier)
    item.refresh_from_db()
    assert (item.state, item.why) == ("sealed", "")
    assert item.stored_objects.count() == 4  # three shards and the commit manifest
    assert dossier.seals.count() == 1
    assert verify_custody(dossier) == []
    kept = [path for path in vault_dir.rglob("*") if path.is_file() and "objects" in path.parts]
    assert len(kept) == 4


def test_a_worker_killed_in_the_middle_of_a_copy_to_s3_is_followed_by_another(
    sources: Path, vault_s3: str
) -> None:
    run = world.make_run()
    directory, table = world.write_checkpoint(sources, 900, size=40 << 20, files=1)
    world.commit(run, 900, directory.as_uri(), table)
    dossier = world.open_dossier(run, rules=rules())
    worker = child(
        "from evidence.stores.s3_parts import Multipart\n"
        "from runs.work import run_due\n"
        "part = Multipart.upload\n"
        "def tell(self, number, body, **checks):\n"
        "    done = part(self, number, body, **checks)\n"
        "    print('part', number, flush=True)\n"
        "    if number == 2:\n"
        "        import time; time.sleep(60)\n"
        "    return done\n"
        "Multipart.upload = tell\n"
        "run_due()\n"
    )
    assert worker.stdout is not None
    seen = {worker.stdout.readline(), worker.stdout.readline()}
    assert "part 2\n" in seen or "part 1\n" in seen
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    worker.stdout.close()
    due_again()
    world.work(dossier)
    item = dossier.items.get()
    assert item.state == "sealed", item.why
    stored = item.stored_objects.get(path="shard-00000.bin")
    assert stored.sha256 == table[0]["sha256"]
    assert stored.protected_by["legal_hold"] is True
    store: Any = vault()
    assert len(store._versions(stored.key)) == 1
    assert verify_custody(dossier) == []


def test_two_workers_on_one_item_seal_it_once(sources: Path, vault_s3: str) -> None:
    run = world.make_run()
    world.on_disk(run, sources, 900)
    dossier = world.open_dossier(run, rules=rules())
    run_one(Work.objects.get(kind="evidence.start").pk)
    item = dossier.items.get()
    works = list(
        Work.objects.filter(kind__in=("evidence.item", "evidence.hold"), state="due").values_list(
            "pk", flat=True
        )
    )

    def do(work_id: int) -> None:
        try:
            run_one(work_id)
        finally:
            connection.close()

    threads = [threading.Thread(target=do, args=(work_id,)) for work_id in works * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    world.work(dossier)
    item.refresh_from_db()
    assert item.state == "sealed", item.why
    assert dossier.custody.filter(what="sealed").count() == 1
    assert dossier.custody.filter(what="held").count() == 1
    store: Any = vault()
    assert item.stored_objects.count() == 4  # three shards and the commit manifest
    for stored in item.stored_objects.all():
        assert len(store._versions(stored.key)) == 1
    assert verify_custody(dossier) == []


def test_a_worker_that_lost_its_lease_writes_nothing(
    sources: Path, vault_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = world.make_run()
    world.on_disk(run, sources, 900)
    dossier = world.open_dossier(run, rules=rules())
    run_one(Work.objects.get(kind="evidence.start").pk)
    work = Work.objects.get(kind="evidence.item", state="due")
    store_all = to_sealed._store_all

    def overtaken(*args: Any) -> None:
        store_all(*args)
        # Another worker finished meanwhile: this one's lease had run out.
        Work.objects.filter(pk=work.pk).update(lease_until=timezone.now())
        monkeypatch.setattr(to_sealed, "_store_all", store_all)
        assert run_one(work.pk)

    monkeypatch.setattr(to_sealed, "_store_all", overtaken)
    run_one(work.pk)
    assert dossier.items.get().state == "sealed"
    assert dossier.custody.filter(what="sealed").count() == 1
    assert dossier.seals.count() == 1
    assert verify_custody(dossier) == []


def test_rotation_after_the_hold_takes_nothing(sources: Path, vault_dir: Path) -> None:
    run = world.make_run()
    checkpoint = world.on_disk(run, sources, 900)
    dossier = world.open_dossier(run, rules=rules())
    run_one(Work.objects.get(kind="evidence.start").pk)
    run_one(Work.objects.get(kind="evidence.hold").pk)
    item = dossier.items.get()
    assert item.state == "held"
    assert item.digest
    assert item.protected_by["how"] == "links"
    shutil.rmtree(sources / "step-00000900")
    world.work(dossier)
    item.refresh_from_db()
    assert item.state == "sealed"
    stored = {one.path: one.sha256 for one in item.stored_objects.all()}
    assert stored.pop("commit.json")
    assert stored == {entry["path"]: entry["sha256"] for entry in checkpoint.files}


def test_a_checkpoint_that_vanished_before_the_hold_gives_way_to_the_one_before(
    sources: Path, vault_dir: Path
) -> None:
    run = world.make_run()
    world.on_disk(run, sources, 800)
    world.on_disk(run, sources, 900)
    dossier = world.open_dossier(run, rules=rules())
    shutil.rmtree(sources / "step-00000900")
    world.work(dossier)
    good = last_good(dossier)
    assert good is not None
    assert good.step == 800
    assert [item.state for item in dossier.items.filter(kind="last_good_checkpoint")] == ["sealed"]
    assert Checkpoint.objects.get(step=900).state == "bad"
    assert verify_custody(dossier) == []


def test_a_shard_changed_in_place_after_the_hold_is_found_and_gives_way(
    sources: Path, vault_dir: Path
) -> None:
    run = world.make_run()
    world.on_disk(run, sources, 800)
    world.on_disk(run, sources, 900)
    dossier = world.open_dossier(run, rules=rules())
    run_one(Work.objects.get(kind="evidence.start").pk)
    run_one(Work.objects.get(kind="evidence.hold").pk)
    shard = sources / "step-00000900" / "shard-00001.bin"
    shard.chmod(0o644)
    body = bytearray(shard.read_bytes())
    body[7] ^= 1
    with shard.open("r+b") as file:
        file.write(body)
    world.work(dossier)
    good = last_good(dossier)
    assert good is not None
    assert good.step == 800
    old = dossier.items.get(kind="checkpoint_ladder")
    assert old.state == "missing"
    assert "not those that were committed" in old.why
    assert resume_gate(dossier).open
    assert verify_custody(dossier) == []


def test_a_source_that_does_not_answer_is_retried_and_said(
    sources: Path,
    vault_dir: Path,
    settings: LazySettings,
    alarms: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(s3_client, "ATTEMPTS", 1)  # boto3 waits between its own
    run = world.make_run()
    # An S3 source whose endpoint nobody listens on.
    world.commit(run, 900, "s3://ckpt/step-900", [{"path": "a", "bytes": 1, "sha256": "0" * 64}])
    settings.VAULT_URL = "s3+http://k:s@127.0.0.1:9/asked-once"
    dossier = world.open_dossier(run, rules=rules())
    run_due()
    item = dossier.items.get()
    assert item.state == "planned"
    assert item.silent_since is not None
    assert "silent since" in resume_gate(dossier).lines[0].says
    assert not may_delete(run=run, uris=["s3://ckpt/step-900/a"])[0]["allow"]
    assert alarms == []
    Item.objects.update(deadline=timezone.now())
    due_again()
    run_due()
    item.refresh_from_db()
    assert item.state == "missing"
    assert "did not answer" in item.why
    assert [what for what, _ in alarms] == ["deadline passed"]


def test_a_vault_that_is_down_makes_nothing_missing(
    sources: Path, vault_dir: Path, settings: LazySettings
) -> None:
    run = world.make_run()
    world.on_disk(run, sources, 900)
    dossier = world.open_dossier(run, rules=rules())
    good = settings.VAULT_URL
    settings.VAULT_URL = f"file://{sources}/step-00000900/commit.json/no"
    run_due()
    item = dossier.items.get()
    assert item.state == "collecting"
    assert item.held_at is not None
    assert item.why.startswith("vault:")
    settings.VAULT_URL = good
    due_again()
    world.work(dossier)
    item.refresh_from_db()
    assert (item.state, item.why) == ("sealed", "")


def test_a_source_in_a_locked_bucket_is_held_by_version(s3_endpoint: Any, vault_s3: str) -> None:
    bucket = s3_endpoint.new_bucket(locked=True)
    client = s3_endpoint.client()
    body = os.urandom(4000)
    client.put_object(Bucket=bucket, Key="step-900/a.bin", Body=body)
    run = world.make_run()
    table = [{"path": "a.bin", "bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}]
    world.commit(run, 900, f"s3://{bucket}/step-900", table, manifest="")
    Checkpoint.objects.update(verification={})
    dossier = world.open_dossier(run, rules=rules())
    run_one(Work.objects.get(kind="evidence.start").pk)
    run_one(Work.objects.get(kind="evidence.hold").pk)
    item = dossier.items.get()
    assert item.protected_by["how"] == "legal_hold"
    # Rotation deletes: a marker only, and the held version is copied all the same.
    client.delete_object(Bucket=bucket, Key="step-900/a.bin")
    with pytest.raises(Exception, match="AccessDenied"):
        client.delete_object(Bucket=bucket, Key="step-900/a.bin", VersionId=item.files[0]["version_id"])
    world.work(dossier)
    item.refresh_from_db()
    assert item.state == "sealed", item.why
    assert item.stored_objects.get().protected_by["legal_hold"] is True


def test_the_application_role_cannot_change_the_chain(sources: Path, vault_dir: Path) -> None:
    run = world.make_run()
    dossier: Dossier = world.open_dossier(run, rules=world.policy("topology"))
    world.work(dossier)
    for statement in (
        "UPDATE evidence_custodyrow SET who = 'x'",
        "DELETE FROM evidence_custodyrow",
        "TRUNCATE evidence_custodyrow",
        "UPDATE evidence_seal SET previous = 'x'",
        "DELETE FROM evidence_seal",
    ):
        with (
            pytest.raises(DatabaseError, match="append-only"),
            transaction.atomic(),
            connection.cursor() as cursor,
        ):
            cursor.execute(statement)
    with connection.cursor() as cursor:
        for table in ("evidence_custodyrow", "evidence_seal"):
            for right in ("UPDATE", "DELETE", "TRUNCATE"):
                cursor.execute("SELECT has_table_privilege('andon_app', %s, %s)", [table, right])
                assert cursor.fetchone() == (False,)


def test_tampering_with_rows_behind_the_triggers_is_found(sources: Path, vault_dir: Path) -> None:
    run = world.make_run()
    world.on_disk(run, sources, 900)
    dossier = world.open_dossier(run, rules=world.policy("topology", "last_good_checkpoint"))
    world.work(dossier)
    assert verify_custody(dossier) == []
    some = StoredObject.objects.filter(item__dossier=dossier).first()
    assert some is not None
    StoredObject.objects.filter(pk=some.pk).update(sha256="0" * 64)
    assert any("not stored as it was sealed" in one for one in verify_custody(dossier))
    StoredObject.objects.filter(pk=some.pk).update(sha256=some.sha256)
    with connection.cursor() as cursor:
        for statement in (
            "UPDATE evidence_custodyrow SET who = 'somebody' WHERE seq = 2",
            "DELETE FROM evidence_custodyrow WHERE seq = 2",
            "DELETE FROM evidence_seal WHERE number = 1",
        ):
            cursor.execute("BEGIN")
            cursor.execute("ALTER TABLE evidence_custodyrow DISABLE TRIGGER append_only")
            cursor.execute("ALTER TABLE evidence_seal DISABLE TRIGGER append_only")
            cursor.execute(statement)
            assert verify_custody(dossier), statement
            cursor.execute("ROLLBACK")
    assert verify_custody(dossier) == []
