"""Every version in the vault has a row that says why it is there, and goes with its dossier's release."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
from django.db import transaction
from django.test import Client
from django.utils import timezone

from andon.policy import EvidenceRule, Policy
from evidence.custody import verify_custody
from evidence.models import Dossier, Item, Leftover, StoredObject
from evidence.plan import reconsider
from evidence.proof import leftovers
from evidence.retention.dates import close_dossier
from evidence.retention.release import (
    approve_deletion,
    approve_release,
    held,
    request_deletion,
    request_release,
)
from evidence.sources import FileSource
from evidence.vault import KEYS, key_for, vault
from runs.locks import lock_run
from runs.models import Person
from runs.work import run_due
from tests.evidence import world
from tests.evidence.conftest import Clock

pytestmark = pytest.mark.django_db(transaction=True)

LAST_GOOD = "last_good_checkpoint"
BODY = b"written by a try that was cut"


def store(item: Item, path: Path, body: bytes) -> str:
    """Store bytes for an item as a worker does that is killed before it can note them; returns the key."""
    path.write_bytes(body)
    sha256 = hashlib.sha256(body).hexdigest()
    key = key_for(item.dossier.uid, item.pk, sha256)
    vault().store(
        key,
        FileSource(path, len(body)),
        sha256=sha256,
        lock=item.lock,
        until=item.retain_until,
        progress=lambda _: None,
    )
    return key


def unnamed(dossier: Dossier) -> set[tuple[str, str]]:
    """Return the versions in the store that no row of any kind names."""
    rows: set[tuple[str, str]] = set()
    for kind in (StoredObject, Leftover):
        rows |= set(kind.objects.filter(item__dossier=dossier).values_list("key", "version_id"))
    there = {(one.key, one.version_id) for one in vault().listed(f"{KEYS}{dossier.uid}/")}
    return there - rows


def work(dossier: Dossier) -> None:
    world.work(dossier, rounds=8)


def cut_and_sealed(sources: Path, person: Person) -> Dossier:
    """A closed dossier, in whose item's place a killed worker left a version that it could not note."""
    rules = Policy(evidence=(EvidenceRule("topology", retain_days=1),))
    dossier = world.open_dossier(world.make_run(), rules=rules)
    Dossier.objects.filter(pk=dossier.pk).update(url="")
    key = store(dossier.items.get(), sources / "cut", BODY)
    assert leftovers.find(dossier) == 0, "its item is not final: it may just not be noted yet"
    work(dossier)
    assert unnamed(dossier) == set()
    assert Leftover.objects.get().key == key
    dossier.refresh_from_db()
    return close_dossier(dossier=dossier, person=person, why="looked at")


def released(dossier: Dossier, clock: Clock, one: Person, two: Person) -> None:
    clock.pass_days(1.1)
    approve_release(request=request_release(dossier=dossier, person=one, why="done"), person=two)
    run_due()
    dossier.refresh_from_db()


def test_what_a_killed_worker_left_has_a_row_and_its_hold_goes_with_the_release(
    sources: Path, vault_s3: str, clock: Clock, alice: Person, bob: Person, client: Client
) -> None:
    dossier = cut_and_sealed(sources, bob)
    one = Leftover.objects.get()
    assert (one.item, one.bytes_total) == (dossier.items.get(), len(BODY))
    assert one.why.endswith("or gathered anew with other bytes: the item is sealed without it")
    assert one.protected_by["legal_hold"] is True
    assert leftovers.find(dossier) == 0
    (also,) = leftovers.also_kept(dossier)
    assert (also.objects, also.bytes_total, also.until) == (1, len(BODY), one.item.retain_until)
    client.force_login(bob)
    assert "gathered anew with other bytes" in client.get(f"/vault/{dossier.pk}").content.decode()
    assert "1 left over" in client.get("/vault").content.decode()
    before = held(dossier)
    assert (before["objects"], before["bytes"] - len(BODY)) == (2, StoredObject.objects.get().bytes_total)
    released(dossier, clock, bob, alice)
    assert dossier.custody.get(what="released").data["left_over"] == 1
    one.refresh_from_db()
    assert one.protected_by["legal_hold"] is False
    assert vault().protection(one.key, one.version_id)["legal_hold"] is False
    assert verify_custody(dossier) == []


def test_a_deletion_takes_what_is_left_over_too(
    sources: Path, vault_dir: Path, clock: Clock, alice: Person, bob: Person
) -> None:
    dossier = cut_and_sealed(sources, bob)
    released(dossier, clock, bob, alice)
    # Left by a worker that was taken for dead, and found only now.
    store(dossier.items.get(), sources / "late", b"late")
    approve_deletion(request=request_deletion(dossier=dossier, person=bob, why="space"), person=alice)
    run_due()
    assert Leftover.objects.exclude(deleted_at=None).count() == 2
    assert list(vault().listed(f"{KEYS}{dossier.uid}/")) == []
    assert dossier.custody.get(what="objects deleted").data["objects"] == 3
    assert verify_custody(dossier) == []


def test_a_second_upload_of_the_same_bytes_is_found_as_a_version(sources: Path, vault_s3: str) -> None:
    dossier = world.open_dossier(world.make_run(), rules=world.policy("topology"))
    work(dossier)
    kept = StoredObject.objects.get()
    store_: Any = vault()
    body = store_.open(kept.key, kept.version_id).read()
    store_.client.put_object(Bucket=store_.place.bucket, Key=kept.key, Body=body)
    assert leftovers.find(dossier) == 1
    one = Leftover.objects.get()
    assert (one.key, one.version_id != kept.version_id) == (kept.key, True)
    assert one.why.startswith("a second upload of bytes that the item has")


def no_links(*_: Any, **__: Any) -> None:
    raise PermissionError(1, "Operation not permitted")


def test_objects_of_a_last_good_that_gave_way_keep_their_rows(
    sources: Path, vault_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not held (no links here), partly copied; then b moves earlier, to a checkpoint of the same names."""
    monkeypatch.setattr("os.link", no_links)  # the kernel's word where a rule forbids links to others' files
    run = world.make_run()
    for step in (800, 900):
        world.on_disk(run, sources, step)
    dossier = world.open_dossier(run, rules=world.policy(LAST_GOOD))
    run_due()
    item = dossier.items.get()
    assert (item.held_at, item.protected_by["how"]) == (None, "none")
    monkeypatch.undo()
    file = sources / "step-00000900" / "shard-00000.bin"
    entry = next(one for one in item.files if one["path"] == "shard-00000.bin")
    stored = vault().store(
        key_for(dossier.uid, item.pk, entry["sha256"]),
        FileSource(file, entry["bytes"]),
        sha256=entry["sha256"],
        lock=item.lock,
        until=item.retain_until,
        progress=lambda _: None,
    )
    StoredObject.objects.create(item=item, path="shard-00000.bin", **stored.row(timezone.now()))
    with transaction.atomic():
        lock_run(run.pk)
        reconsider(dossier, first_bad_step=850)
    work(dossier)
    assert unnamed(dossier) == set()
    old = StoredObject.objects.get(sha256=entry["sha256"]).item
    assert (old.kind, old.required) == ("checkpoint_ladder", False)
    assert old.name == "no longer last good: last good checkpoint, step 900"
    assert old.retain_until is not None
    new = dossier.items.get(kind=LAST_GOOD)
    assert (new.source["step"], new.state) == (800, "sealed")
    assert verify_custody(dossier) == []
