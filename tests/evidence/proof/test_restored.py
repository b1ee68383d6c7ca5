"""After a restore from a backup the rows and the chains are true again, and what is strange is listed."""

import io
import json
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from django.conf import LazySettings
from django.core.management import CommandError, call_command
from django.test import Client
from django.utils import timezone

from andon.policy import EvidenceRule, Policy
from evidence.custody import verify_custody
from evidence.models import Dossier, Item, Reconciliation, StoredObject, UnknownVersion, VaultRequest
from evidence.proof.restored import RESTORED, reconcile
from evidence.retention import dates, two_people
from evidence.vault import KEYS, vault
from runs.models import Event, Person, Run, Work
from runs.work import run_due
from tests.evidence import backup, world
from tests.evidence.conftest import s3_url
from tests.pages.words import text_of
from tests.servers import S3

pytestmark = pytest.mark.django_db(transaction=True)

NOTHING = {
    "unknown": 0,
    "left_over": 0,
    "lacking": 0,
    "copied_again": 0,
    "kept_longer": 0,
    "lost_locks": 0,
    "requests_declined": 0,
}


@pytest.fixture(params=["directory", "radosgw"])
def store(request: pytest.FixtureRequest, tmp_path: Path, settings: LazySettings, sources: Path) -> str:
    """A vault of each kind."""
    settings.DATA_DIR = tmp_path / "data"
    settings.VAULT_URL = f"file://{tmp_path}/vault"
    if request.param == "radosgw":
        endpoint: S3 = request.getfixturevalue("s3_endpoint")
        settings.VAULT_URL = s3_url(endpoint, endpoint.new_bucket(locked=True))
    return str(request.param)


def sealed(run: Run, *kinds: str) -> Dossier:
    if not Event.objects.filter(run_id=run.pk, type="step").exists():
        world.post(run, "step", 1000, data={"loss": 2.1})
    made = world.open_dossier(run, rules=world.policy(*kinds))
    Dossier.objects.filter(pk=made.pk).update(url="")
    world.work(made)
    assert {item.state for item in made.items.all()} == {"sealed"}
    return made


def versions(dossier: Dossier) -> set[tuple[str, str]]:
    return {(one.key, one.version_id) for one in vault().listed(f"{KEYS}{dossier.uid}/")}


def restored(dossier: Dossier) -> dict:
    return dossier.custody.get(what=RESTORED).data


def command() -> dict:
    out = io.StringIO()
    call_command("restored", stdout=out)
    return json.loads(out.getvalue())


def test_where_nothing_was_lost_it_says_so_once(store: str) -> None:
    dossier = sealed(world.make_run(), "topology")
    found = command()["vault"]
    assert found == NOTHING | {"dossiers": 1, "versions": 1}
    row = dossier.custody.get(what=RESTORED)
    assert (row.data["versions"], row.data["last_seal"]) == (1, dossier.seals.get().digest)
    assert command()["vault"] == found
    assert dossier.custody.filter(what=RESTORED).count() == 1
    assert verify_custody(dossier) == []


def test_what_was_stored_after_the_backup_is_listed_and_never_mistaken_for_something_new(
    store: str, as_bob: Client
) -> None:
    run = world.make_run()
    kept = sealed(run, "topology")
    saved = backup.save()
    lost = sealed(run, "topology", "event_log")
    named = versions(lost)
    numbers = [int(key.split("/")[2]) for key, _ in named]
    backup.restore(saved)
    assert not Dossier.objects.filter(uid=lost.uid).exists()
    found = command()["vault"]
    assert found == NOTHING | {"dossiers": 1, "versions": 1 + len(named), "unknown": len(named)}
    rows = UnknownVersion.objects.all()
    assert {(one.key, one.version_id) for one in rows} == named
    locked = [bool(one.protected_by.get("legal_hold")) for one in rows]
    assert locked == [store == "radosgw"] * len(named)
    assert versions(lost) == named, "nobody deletes what no row knows"
    page = text_of(as_bob.get("/vault"))
    assert f"{len(named)} that no row knows" in page
    assert str(lost.uid) in page
    # Items that are made from now on have other numbers, so that keys of before are never taken for theirs.
    again = sealed(run, "topology", "event_log")
    assert min(item.pk for item in again.items.all()) > max(numbers)
    assert verify_custody(kept) == verify_custody(again) == []


def test_an_item_that_was_sealed_after_the_backup_is_sealed_again_from_what_the_vault_has(
    store: str, sources: Path
) -> None:
    run = world.make_run()
    world.on_disk(run, sources, 900)
    dossier = world.open_dossier(run, rules=world.policy("last_good_checkpoint", "topology"))
    saved = backup.save()
    world.work(dossier)
    assert {item.state for item in dossier.items.all()} == {"sealed"}
    before, digest = versions(dossier), dossier.items.get(kind="last_good_checkpoint").digest
    backup.restore(saved)
    assert set(dossier.items.values_list("state", flat=True)) == {"planned"}
    found = reconcile().result
    assert (found["unknown"], found["left_over"]) == (0, 0)
    world.work(dossier, rounds=8)
    assert {item.state for item in dossier.items.all()} == {"sealed"}
    assert dossier.items.get(kind="last_good_checkpoint").digest == digest
    checkpoint = {one for one in before if f"/{dossier.items.get(kind='last_good_checkpoint').pk}/" in one[0]}
    assert checkpoint <= versions(dossier)
    names = set(StoredObject.objects.filter(item__dossier=dossier).values_list("key", "version_id"))
    assert checkpoint <= names, "what was there was taken up, not stored a second time"
    assert verify_custody(dossier) == []


def test_what_the_vault_no_longer_has_is_said_and_paged(
    store: str, alarms: list[tuple[str, str]], as_bob: Client
) -> None:
    dossier = sealed(world.make_run(), "topology", "event_log")
    saved = backup.save()
    one = StoredObject.objects.get(item__kind="event_log")
    Item.objects.update(lock="none")
    vault().let_go(one.key, one.version_id)
    if store == "radosgw":
        delete_past_governance(one)
    else:
        vault().delete(one.key, one.version_id)
    backup.restore(saved)
    found = reconcile().result
    assert (found["lacking"], found["unknown"]) == (1, 0)
    one.refresh_from_db()
    assert one.mismatch == "it is gone from the vault"
    assert [what for what, _ in alarms] == ["fixity mismatch"]
    assert restored(dossier)["lacking"] == 1
    assert "1 object that rows name and the vault lacks" in text_of(as_bob.get("/vault"))
    page = text_of(as_bob.get(f"/vault/{dossier.pk}"))
    assert "restored from a backup" in page
    assert "The vault lacks 1 object" in page
    assert verify_custody(dossier) == []


def delete_past_governance(one: StoredObject) -> None:
    """Delete a version as the store's owner can under GOVERNANCE, once its legal hold is off."""
    from evidence.stores.s3 import S3Vault

    store = vault()
    assert isinstance(store, S3Vault)
    store.client.delete_object(
        Bucket=store.place.bucket, Key=one.key, VersionId=one.version_id, BypassGovernanceRetention=True
    )


def test_a_row_of_an_open_item_whose_object_is_gone_is_not_counted_on(vault_dir: Path, sources: Path) -> None:
    run = world.make_run()
    world.on_disk(run, sources, 900)
    dossier = world.open_dossier(run, rules=world.policy("last_good_checkpoint"))
    world.work(dossier)
    item = dossier.items.get()
    item.state, item.sealed_at = Item.State.COLLECTING, None
    item.save()
    one = StoredObject.objects.order_by("path").first()
    assert one is not None
    vault().delete(one.key, one.version_id)
    assert reconcile().result["copied_again"] == 1
    assert not StoredObject.objects.filter(pk=one.pk).exists()
    world.work(dossier, rounds=8)
    item.refresh_from_db()
    assert item.state == "sealed"
    with vault().open(one.key, "") as file:
        assert len(file.read()) == one.bytes_total


def test_a_later_date_that_the_store_has_is_never_forgotten(vault_s3: str, alice: Person) -> None:
    rules = Policy(evidence=(EvidenceRule("topology", retain_days=30),))
    dossier = world.open_dossier(world.make_run(), rules=rules)
    Dossier.objects.filter(pk=dossier.pk).update(url="")
    world.work(dossier)
    saved = backup.save()
    before = dossier.items.get().retain_until
    until = timezone.now() + timedelta(days=90)
    dates.extend_retention(dossier=dossier, person=alice, until=until, why="an audit")
    run_due()
    backup.restore(saved)
    assert dossier.items.get().retain_until == before
    assert reconcile().result["kept_longer"] == 1
    now = dossier.items.get().retain_until
    assert now is not None
    assert abs(now - until) <= timedelta(seconds=1)  # stores keep whole seconds
    (told,) = restored(dossier)["kept_until"]
    assert datetime.fromisoformat(told["until"]) == now
    assert reconcile().result["kept_longer"] == 0


def test_what_waited_for_a_second_person_has_to_be_asked_again(vault_dir: Path, bob: Person) -> None:
    dossier = sealed(world.make_run(), "topology")
    asked = two_people.ask(
        dossier=dossier,
        kind=VaultRequest.Kind.RELEASE,
        person=bob,
        why="space",
        judge=lambda _: None,
        subject=lambda _: {},
    )
    assert reconcile().result["requests_declined"] == 1
    asked.refresh_from_db()
    assert (asked.state, asked.decided_by) == ("declined", "")
    assert restored(dossier)["requests_declined"] == ["release"]


def test_a_vault_that_is_away_is_said_and_nothing_is_claimed(
    vault_dir: Path, settings: LazySettings, tmp_path: Path
) -> None:
    sealed(world.make_run(), "topology")
    (tmp_path / "file").write_text("in the way")
    settings.VAULT_URL = f"file://{tmp_path}/file/vault"
    with pytest.raises(CommandError, match=r"the vault was not compared: .*Run it again"):
        call_command("restored")
    assert not Reconciliation.objects.exists()
    assert StoredObject.objects.get().mismatch == ""


def test_a_worker_that_was_killed_before_the_backup_leaves_work_that_goes_on(
    vault_dir: Path, sources: Path
) -> None:
    dossier = world.open_dossier(world.make_run(), rules=world.policy("topology"))
    Work.objects.all().delete()
    reconcile()
    world.work(dossier)
    assert dossier.items.get().state == "sealed"
