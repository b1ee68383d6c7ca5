"""Dates move later, at close-out and while a dossier is open, and the store is told and asked."""

import hashlib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.conf import LazySettings
from django.db import connection, transaction
from django.utils import timezone

from andon.policy import EvidenceRule, Policy, VaultRules
from evidence.custody import verify_custody
from evidence.models import Dossier, Item, StoredObject
from evidence.pages.listing import item_lines
from evidence.refused import Refused
from evidence.retention import overdue
from evidence.retention.compliance import confirm_compliance, gb_days_used, request_compliance
from evidence.retention.dates import close_dossier, close_out, extend_retention, renew_open
from evidence.retention.overdue import overdue_items
from evidence.retention.release import approve_deletion, approve_release, request_deletion, request_release
from evidence.vault import vault
from runs.directives import set_directive
from runs.locks import lock_run
from runs.models import Person, Run, Work
from runs.policies import set_policy
from runs.work import run_due
from tests.evidence import world
from tests.evidence.conftest import Clock, s3_url
from tests.evidence.s3calls import before
from tests.servers import S3

pytestmark = pytest.mark.django_db(transaction=True)


def sealed(
    run: Run, *, days: int = 30, lock: Any = "governance", kinds: tuple[str, ...] = ("topology",)
) -> Dossier:
    rules = Policy(evidence=tuple(EvidenceRule(kind, retain_days=days, lock=lock) for kind in kinds))
    dossier = world.open_dossier(run, rules=rules)
    Dossier.objects.filter(pk=dossier.pk).update(url="")
    world.work(dossier)
    assert {item.state for item in dossier.items.all()} == {"sealed"}
    return dossier


def closed(dossier: Dossier, why: str = "incident 7 resolved") -> Dossier:
    with transaction.atomic():
        lock_run(dossier.run_id)
        close_out(dossier, why=why)
    run_due()
    return dossier


def days_left(item: Item) -> float:
    assert item.retain_until is not None
    return (item.retain_until - timezone.now()) / timedelta(days=1)


def locked_until(one: StoredObject) -> datetime:
    return datetime.fromisoformat(str(vault().protection(one.key, one.version_id)["until"]))


def test_a_lock_is_short_at_first_and_extended_at_close_out(vault_s3: str) -> None:
    dossier = sealed(world.make_run(), days=60)
    item = dossier.items.get()
    one = item.stored_objects.get()
    assert 13.9 < days_left(item) < 14.1
    assert timedelta(days=13) < locked_until(one) - datetime.now(UTC) < timedelta(days=14, minutes=1)
    closed(dossier)
    item.refresh_from_db()
    one.refresh_from_db()
    assert 59.9 < days_left(item) < 60.1
    assert locked_until(one) - datetime.now(UTC) > timedelta(days=59)
    assert one.protected_by == vault().protection(one.key, one.version_id), "as read back, not as asked"
    row = dossier.custody.get(what="lock extended")
    assert (row.item_name, row.data["objects"]) == (item.name, 1)
    assert list(row.data["store_says"]) == [one.protected_by["says"]]
    assert dossier.custody.get(what="closed").data["kept_until"][0]["item"] == item.name
    assert verify_custody(dossier) == []
    before = dossier.custody.count()
    closed(dossier)
    assert dossier.custody.count() == before, "closing twice changes nothing"


def test_a_store_without_lock_is_told_and_the_answer_is_written_down(
    s3_endpoint: S3, vault_s3: str, settings: LazySettings
) -> None:
    settings.VAULT_URL = s3_url(s3_endpoint, s3_endpoint.new_bucket(locked=False))
    dossier = closed(sealed(world.make_run()))
    row = dossier.custody.get(what="lock extended")
    assert row.data["store_says"] == {"not locked: this bucket has no Object Lock": 1}


def test_what_would_expire_while_its_dossier_is_open_is_extended(vault_dir: Path, clock: Clock) -> None:
    dossier = sealed(world.make_run())
    other = closed(sealed(world.make_run("other"), days=5))
    clock.pass_days(9)
    assert renew_open() == 0
    clock.pass_days(2)
    assert renew_open() == 1
    assert renew_open() == 0, "a second sweep finds nothing to do"
    assert 13.9 < days_left(dossier.items.get()) < 14.1
    assert days_left(other.items.get()) < 0
    row = dossier.custody.filter(what="extended").get()
    assert (row.who, row.data["why"]) == ("andon", "its dossier is still open")


@pytest.mark.parametrize("how", ["by hand", "by policy"])
def test_a_date_that_moves_while_bytes_are_copied_is_the_date_of_every_object(
    vault_s3: str, sources: Path, bob: Person, how: str
) -> None:
    run = world.make_run()
    world.on_disk(run, sources, 900)
    kind = "last_good_checkpoint"
    rules = Policy(evidence=(EvidenceRule(kind, retain_days=90),))
    dossier = world.open_dossier(run, rules=rules)
    Dossier.objects.filter(pk=dossier.pk).update(url="")
    later = timezone.now() + timedelta(days=60)
    put: list[str] = []

    def move(name: str, url: str) -> None:
        if "/evidence/" not in url:
            return  # the probe's
        put.append(url)
        if len(put) != 2:
            return
        # Some objects lie there under the first date, this one is on its way, others are to come.
        if how == "by hand":
            extend_retention(dossier=dossier, person=bob, until=later, why="an audit")
        else:
            close_dossier(dossier=dossier, person=bob, why="its policy keeps it for 90 days from here on")
        connection.close()

    with before(move, "PutObject"):
        world.work(dossier)
    item = dossier.items.get(kind=kind)
    assert (item.state, len(put)) == ("sealed", 4)
    assert item.retain_until is not None
    assert item.retain_until >= later
    for one in item.stored_objects.all():
        assert locked_until(one) >= item.retain_until.replace(microsecond=0)
        assert datetime.fromisoformat(one.protected_by["until"]) == locked_until(one)
    assert verify_custody(dossier) == []


def test_a_person_may_keep_it_longer_and_never_shorter(
    vault_dir: Path, alice: Person, bob: Person, charlie: Person
) -> None:
    dossier = sealed(world.make_run())
    later = timezone.now() + timedelta(days=100)

    def extend(person: Person, until: datetime, why: str = "an audit") -> str:
        try:
            extend_retention(dossier=dossier, person=person, until=until, why=why)
        except Refused as refused:
            return refused.code
        return "done"

    assert extend(charlie, later) == "not-allowed"
    assert extend(bob, later, "") == "reason-needed"
    assert extend(bob, timezone.now() + timedelta(days=3700)) == "too-far"
    assert extend(bob, later) == "done"
    assert dossier.items.get().retain_until == later
    assert extend(alice, later) == "not-later"
    assert extend(alice, later - timedelta(days=50)) == "not-later"
    assert dossier.items.get().retain_until == later


def test_a_dossier_by_hand_is_closed_by_hand_and_one_of_an_incident_is_not(
    vault_dir: Path, bob: Person, charlie: Person
) -> None:
    dossier = sealed(world.make_run())
    with pytest.raises(Refused, match="Only a member"):
        close_dossier(dossier=dossier, person=charlie, why="done")
    close_dossier(dossier=dossier, person=bob, why="done")
    assert dossier.closed_at is not None
    with pytest.raises(Refused, match="It was closed"):
        close_dossier(dossier=dossier, person=bob, why="done")
    other = world.open_dossier(world.make_run("other"), rules=world.policy("topology"))
    with pytest.raises(Refused, match="belongs to incident 7"):
        close_dossier(dossier=other, person=bob, why="done")


# --- holds in the store are counted


def on_s3(run: Run, endpoint: S3, bucket: str) -> dict[str, str]:
    """Commit a checkpoint of step 900 in a bucket with Object Lock; returns key → version."""
    client = endpoint.client()
    table, versions = [], {}
    for name in ("a", "b"):
        body = name.encode() * 100
        version = client.put_object(Bucket=bucket, Key=f"run/step-900/{name}", Body=body)["VersionId"]
        versions[f"run/step-900/{name}"] = version
        table.append(
            {"path": name, "bytes": 100, "sha256": hashlib.sha256(body).hexdigest(), "version_id": version}
        )
    world.commit(run, 900, f"s3://{bucket}/run/step-900", table, manifest="")
    run.checkpoints.update(verification={})
    return versions


def held(endpoint: S3, bucket: str, versions: dict[str, str]) -> set[str]:
    client = endpoint.client()
    return {
        client.get_object_legal_hold(Bucket=bucket, Key=key, VersionId=version)["LegalHold"]["Status"]
        for key, version in versions.items()
    }


def release(dossier: Dossier, one: Person, two: Person) -> None:
    approve_release(request=request_release(dossier=dossier, person=one, why="done"), person=two)
    Work.objects.filter(state="due").update(not_before=timezone.now())
    run_due()


def test_the_last_dossier_that_lets_go_takes_the_legal_hold_off(
    s3_endpoint: S3, vault_s3: str, clock: Clock, alice: Person, bob: Person
) -> None:
    run = world.make_run()
    bucket = s3_endpoint.new_bucket(locked=True)
    versions = on_s3(run, s3_endpoint, bucket)
    kinds = ("last_good_checkpoint",)
    one, two = closed(sealed(run, kinds=kinds)), closed(sealed(run, kinds=kinds))
    assert held(s3_endpoint, bucket, versions) == {"ON"}
    clock.pass_days(31)
    release(one, alice, bob)
    assert held(s3_endpoint, bucket, versions) == {"ON"}, "the other dossier counts on it"
    assert one.custody.get(what="released").data["kept_for_others"] == 2
    release(two, bob, alice)
    assert held(s3_endpoint, bucket, versions) == {"OFF"}
    assert two.custody.get(what="released").data["legal_holds_off"] == 4, "its own two and the first's two"


def test_the_stores_own_date_has_the_last_word_on_deletion(
    vault_s3: str, clock: Clock, alice: Person, bob: Person
) -> None:
    dossier = closed(sealed(world.make_run()))
    one = StoredObject.objects.get(item__dossier=dossier)
    clock.pass_days(31)  # for Andon, not for the store
    release(dossier, alice, bob)
    one.refresh_from_db()
    assert one.protected_by["legal_hold"] is False
    assert one.protected_by["mode"] == "GOVERNANCE"
    approve_deletion(request=request_deletion(dossier=dossier, person=bob, why="space"), person=alice)
    run_due()
    one.refresh_from_db()
    assert one.deleted_at is None
    assert vault().open(one.key, one.version_id).read()
    work = Work.objects.get(kind="evidence.delete")
    assert (work.state, "AccessDenied" in work.error) == ("due", True)


def test_an_object_without_a_lock_is_deleted_by_version(
    vault_s3: str, clock: Clock, alice: Person, bob: Person
) -> None:
    dossier = closed(sealed(world.make_run(), lock="none"))
    one = StoredObject.objects.get(item__dossier=dossier)
    clock.pass_days(31)
    release(dossier, alice, bob)
    approve_deletion(request=request_deletion(dossier=dossier, person=bob, why="space"), person=alice)
    run_due()
    one.refresh_from_db()
    assert one.deleted_at is not None
    with pytest.raises(Exception, match=r"NoSuchVersion|NoSuchKey"):
        vault().open(one.key, one.version_id)
    assert verify_custody(dossier) == []


# --- COMPLIANCE


def test_compliance_is_locked_in_by_two_people_once_the_dates_are_final(
    vault_s3: str, alice: Person, bob: Person, charlie: Person
) -> None:
    dossier = sealed(world.make_run(), lock="compliance")
    item = dossier.items.get()
    one = item.stored_objects.get()
    assert one.protected_by["says"] == "locked by a legal hold"
    with pytest.raises(Refused, match="its dates are not final"):
        request_compliance(dossier=dossier, person=alice, why="the regulator asks")
    closed(dossier)
    assert vault().protection(one.key, one.version_id)["mode"] is None, "nobody confirmed anything"
    request = request_compliance(dossier=dossier, person=alice, why="the regulator asks")
    assert request.subject["bytes"] == one.bytes_total
    assert request.subject["gb_days"] == 1, "rounded up"
    assert request.subject["cost_per_month"] == "0.00 USD"
    for person, code in ((alice, "not-you"), (charlie, "not-allowed")):
        with pytest.raises(Refused) as refused:
            confirm_compliance(request=request, person=person)
        assert refused.value.code == code
    confirm_compliance(request=request, person=bob)
    run_due()
    one.refresh_from_db()
    item.refresh_from_db()
    found = vault().protection(one.key, one.version_id)
    assert (found["mode"], found["legal_hold"]) == ("COMPLIANCE", True)
    assert one.protected_by == found
    assert item.retain_until is not None
    assert abs(locked_until(one) - item.retain_until) < timedelta(seconds=1)
    assert gb_days_used(dossier) == 1
    rows = list(dossier.custody.values_list("what", "who"))[-3:]
    assert rows == [
        ("compliance requested", str(alice.opaque_id)),
        ("compliance agreed", str(bob.opaque_id)),
        ("lock extended", "andon"),
    ]
    for again in (request_compliance, extend_retention):
        more = {"until": timezone.now() + timedelta(days=90)} if again is extend_retention else {}
        with pytest.raises(Refused):
            again(dossier=dossier, person=alice, why="again", **more)
    assert abs(locked_until(one) - item.retain_until) < timedelta(seconds=1)


def test_what_was_confirmed_is_what_was_shown(vault_dir: Path, alice: Person, bob: Person) -> None:
    dossier = closed(sealed(world.make_run(), lock="compliance"))
    request = request_compliance(dossier=dossier, person=alice, why="the regulator asks")
    later = timezone.now() + timedelta(days=90)
    extend_retention(dossier=dossier, person=alice, until=later, why="an audit")
    with pytest.raises(Refused) as refused:
        confirm_compliance(request=request, person=bob)
    assert refused.value.code == "changed", "its date is another one now"


def test_compliance_beyond_the_budget_or_not_asked_by_policy_is_refused(
    vault_dir: Path, alice: Person, bob: Person
) -> None:
    run = world.make_run()
    dossier = closed(sealed(run, lock="compliance"))
    rules = Policy(vault=VaultRules(compliance_gb_days=0))
    set_policy(run=run, document=rules.document(), person=alice, why="nothing for good")
    with pytest.raises(Refused, match="It needs 1 GB × days; 0 of the run's 0 are used"):
        request_compliance(dossier=dossier, person=alice, why="the regulator asks")
    plain = closed(sealed(world.make_run("plain")))
    with pytest.raises(Refused, match="No sealed item"):
        request_compliance(dossier=plain, person=alice, why="the regulator asks")


# --- held at resume, sealed within a day


@pytest.mark.parametrize(
    ("resumed", "hours", "fields", "late"),
    [
        (True, 23.9, {}, False),
        (True, 24.1, {}, True),
        (False, 100.0, {}, False),
        (True, 24.1, {"state": "collecting"}, True),
        (True, 24.1, {"state": "missing", "why": "its bytes differ"}, True),
        (True, 24.1, {"required": False}, False),
        (True, 24.1, {"state": "sealed", "sealed_at": timezone.now(), "digest": "a" * 64}, False),
        (True, 24.1, {"waived_at": timezone.now(), "waived_why": "known"}, False),
    ],
)
def test_what_was_only_held_at_resume_is_overdue_after_a_day(
    clock: Clock,
    resumed: bool,
    hours: float,
    fields: dict[str, Any],
    late: bool,
    alarms: list[tuple[str, str]],
) -> None:
    run = world.make_run()
    world.commit(run, 900, "s3://ckpt/step-900", [])
    dossier = world.open_dossier(run, rules=world.policy("last_good_checkpoint"))
    Item.objects.update(**({"state": "held", "held_at": timezone.now()} | fields))
    if resumed:
        with transaction.atomic():
            lock_run(run.pk)
            set_directive(run=run, kind="rollback", incident="7")
    clock.pass_days(hours / 24)
    found = overdue_items()
    assert bool(found) is late
    assert [one.item.pk for one in overdue_items(dossier)] == [one.item.pk for one in found]
    assert overdue.sweep() == overdue.sweep() == len(found)
    assert dossier.custody.filter(what="sealing overdue").count() == len(found), "once"
    assert alarms == [("sealing overdue", one.says) for one in found], "and people are told once"
    shown = "".join(line.reason for line in item_lines(dossier))
    assert ("had to be sealed by" in shown) is late, "and the dossier's page says so"
    if late:
        assert "had to be sealed by" in found[0].says
