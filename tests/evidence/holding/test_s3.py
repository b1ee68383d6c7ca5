"""Legal holds on what a commit manifest names, in a real bucket with Object Lock."""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from botocore.exceptions import ClientError
from django.conf import LazySettings

from andon.policy import EvidenceRule, Policy
from evidence.custody import verify_custody
from evidence.holding.held_before import foreign
from evidence.holding.s3 import FEW, hold_versions
from evidence.models import Dossier, Item
from evidence.retention.dates import close_dossier
from evidence.retention.release import approve_release, request_release
from evidence.sources import SourceError
from evidence.stores import s3_client
from evidence.stores.s3_legal_hold import LegalHolds
from evidence.stores.s3_lock import Locks
from runs.models import Person, Work
from runs.work import run_due, run_one
from tests.evidence import world
from tests.evidence.conftest import Clock, s3_url
from tests.evidence.s3calls import before, calls_of
from tests.faults.store_proxy import How, StoreProxy
from tests.servers import S3

pytestmark = pytest.mark.django_db(transaction=True)


def save(store: S3, bucket: str, *, count: int = FEW + 4, prefix: str = "step-900") -> list[dict[str, Any]]:
    """Save a checkpoint as a trainer does; returns its commit manifest."""
    table = []
    for number in range(count):
        body = os.urandom(100 + number)
        store.client().put_object(Bucket=bucket, Key=f"{prefix}/shard-{number:02d}", Body=body)
        table.append(
            {
                "path": f"shard-{number:02d}",
                "bytes": len(body),
                "sha256": hashlib.sha256(body).hexdigest(),
            }
        )
    store.client().put_object(Bucket=bucket, Key=f"{prefix}/commit.json", Body=json.dumps(table).encode())
    return table


def holds(store: S3, bucket: str, prefix: str, table: list[dict[str, Any]]) -> set[str]:
    """Return the states of the legal holds of these versions, as the store tells them."""
    client = store.client()
    return {
        client.get_object_legal_hold(
            Bucket=bucket, Key=f"{prefix}/{one['path']}", VersionId=one["version_id"]
        )["LegalHold"].get("Status", "none")
        for one in table
    }


@pytest.fixture
def bucket(s3_endpoint: S3, vault_s3: str) -> str:
    """A trainer's bucket with Object Lock in the store of the vault."""
    return s3_endpoint.new_bucket(locked=True)


@pytest.mark.parametrize("count", [2, FEW + 4], ids=["asked one by one", "listed"])
def test_every_version_of_the_manifest_is_held_and_a_sample_read_back(
    s3_endpoint: S3, bucket: str, count: int
) -> None:
    files = save(s3_endpoint, bucket, count=count)
    save(s3_endpoint, bucket, prefix="step-900-other", count=1)
    table, by = hold_versions(f"s3://{bucket}/step-900", files)
    assert [(one["path"], one["bytes"], one["sha256"]) for one in table] == [
        (one["path"], one["bytes"], one["sha256"]) for one in files
    ]
    assert (by["how"], by["read_back"]) == ("legal_hold", count)
    assert holds(s3_endpoint, bucket, "step-900", table) == {"ON"}
    other = s3_endpoint.client().list_object_versions(Bucket=bucket, Prefix="step-900-other")["Versions"][0]
    s3_endpoint.client().delete_object(Bucket=bucket, Key=other["Key"], VersionId=other["VersionId"])


def test_a_delete_marker_and_a_newer_version_of_another_size_hide_nothing(
    s3_endpoint: S3, bucket: str
) -> None:
    files = save(s3_endpoint, bucket)
    client = s3_endpoint.client()
    client.delete_object(Bucket=bucket, Key="step-900/shard-00")
    client.put_object(Bucket=bucket, Key="step-900/shard-01", Body=b"overwritten")
    table, by = hold_versions(f"s3://{bucket}/step-900", files)
    assert by["how"] == "legal_hold"
    for one in table[:2]:
        body = client.get_object(Bucket=bucket, Key=f"step-900/{one['path']}", VersionId=one["version_id"])[
            "Body"
        ].read()
        assert hashlib.sha256(body).hexdigest() == one["sha256"]
        with pytest.raises(ClientError, match="AccessDenied"):
            client.delete_object(Bucket=bucket, Key=f"step-900/{one['path']}", VersionId=one["version_id"])


def test_a_version_that_the_manifest_names_is_held_and_no_other(s3_endpoint: S3, bucket: str) -> None:
    files = save(s3_endpoint, bucket)
    client = s3_endpoint.client()
    versions = client.list_object_versions(Bucket=bucket, Prefix="step-900/shard-00")["Versions"]
    newer = client.put_object(Bucket=bucket, Key="step-900/shard-00", Body=os.urandom(100))["VersionId"]
    files[0] |= {"version_id": versions[0]["VersionId"]}
    table, _ = hold_versions(f"s3://{bucket}/step-900", files)
    assert table[0]["version_id"] == versions[0]["VersionId"]
    client.delete_object(Bucket=bucket, Key="step-900/shard-00", VersionId=newer)


@pytest.mark.parametrize("count", [2, FEW + 4], ids=["asked one by one", "listed"])
def test_what_is_gone_or_of_another_size_is_said_for_good(s3_endpoint: S3, bucket: str, count: int) -> None:
    files = save(s3_endpoint, bucket, count=count)
    uri = f"s3://{bucket}/step-900"
    for wrong, says in (
        ({"bytes": 7}, "committed with 7"),
        ({"path": "shard-99"}, "missing|404"),
        ({"version_id": "no-such-version"}, "gone|404|NoSuch|400"),
    ):
        with pytest.raises(SourceError, match=says):
            hold_versions(uri, [files[0] | wrong, *files[1:]])


def test_a_bucket_without_lock_is_not_safe_until_copied(s3_endpoint: S3, vault_s3: str) -> None:
    bucket = s3_endpoint.new_bucket(locked=False)
    files = save(s3_endpoint, bucket)
    table, by = hold_versions(f"s3://{bucket}/step-900", files)
    assert by["how"] == "none"
    assert by["says"] == "not safe until copied: the bucket it lies in has no Object Lock"
    assert {one["version_id"] for one in table} == {""}


def test_what_this_server_may_not_see_is_unknown_and_not_unlocked(
    s3_endpoint: S3, vault_s3: str, bucket: str
) -> None:
    files = save(s3_endpoint, bucket)

    def deny(name: str, url: str) -> None:
        raise ClientError({"Error": {"Code": "AccessDenied"}}, name)

    with before(deny, "GetObjectLockConfiguration"):
        locks = Locks(s3_client.source_client(), bucket, "s3://t")
        table, by = hold_versions(f"s3://{bucket}/step-900", files)
        assert by["how"] == "legal_hold", "holds are tried where nobody said that there are none"
        key, version = f"step-900/{table[0]['path']}", table[0]["version_id"]
        assert locks.read(key, version)["legal_hold"] is True
        with before(deny, "HeadObject", "GetObjectLegalHold", "GetObjectRetention"):
            seen = locks.read(key, version)
    assert (seen["legal_hold"], seen["says"]) == (None, "unknown: this server may not read the lock")


def test_small_files_without_a_digest_are_read_once_they_are_held(s3_endpoint: S3, bucket: str) -> None:
    files = save(s3_endpoint, bucket)
    table, _ = hold_versions(f"s3://{bucket}/step-900", [{"path": one["path"]} for one in files])
    assert [one["sha256"] for one in table] == [one["sha256"] for one in files]


def test_a_checkpoint_under_rotation_is_held_copied_by_the_store_and_sealed(
    s3_endpoint: S3, bucket: str
) -> None:
    files = save(s3_endpoint, bucket)
    run = world.make_run()
    world.commit(run, 900, f"s3://{bucket}/step-900", files)
    dossier = world.open_dossier(run, rules=world.policy("last_good_checkpoint"))
    for path in ("commit.json", *(one["path"] for one in files)):
        s3_endpoint.client().delete_object(Bucket=bucket, Key=f"step-900/{path}")
    with calls_of("PutObject", "CopyObject") as sent:
        world.work(dossier)
    item = dossier.items.get()
    assert item.state == "sealed", [item.why, *dossier.custody.values_list("what", "data")]
    assert {one.protected_by["legal_hold"] for one in item.stored_objects.all()} == {True}
    assert {one["sha256"] for one in files} < {one.sha256 for one in item.stored_objects.all()}
    stored = [name for name, url in sent if "/evidence/" in url]
    assert stored == ["CopyObject"] * (len(files) + 1), "no byte of it passes through this server"


def test_last_good_is_held_before_the_ladder(s3_endpoint: S3, bucket: str) -> None:
    run = world.make_run()
    for step in (700, 800, 900):
        files = save(s3_endpoint, bucket, count=2, prefix=f"step-{step}")
        world.commit(run, step, f"s3://{bucket}/step-{step}", files)
    dossier = world.open_dossier(run, rules=world.policy("checkpoint_ladder", "last_good_checkpoint"))
    run_one(Work.objects.get(kind="evidence.start").pk)
    run_due()
    held = list(dossier.custody.filter(what="held").order_by("seq").values_list("item_name", flat=True))
    assert len(held) == 3
    assert held[0] == Item.objects.get(dossier=dossier, kind="last_good_checkpoint").name


# --- holds that somebody else had put on before


@pytest.fixture
def proxy(s3_endpoint: S3, bucket: str, vault_s3: str, settings: LazySettings) -> Iterator[StoreProxy]:
    """A store that fails when told to, between this server and the real one."""
    made = StoreProxy(int(s3_endpoint.url.rpartition(":")[2]))
    settings.VAULT_URL = s3_url(replace(s3_endpoint, url=made.url), vault_s3)
    yield made
    made.close()


def put_holds(store: S3, bucket: str, *paths: str) -> None:
    for path in paths:
        store.client().put_object_legal_hold(
            Bucket=bucket, Key=f"step-900/{path}", LegalHold={"Status": "ON"}
        )


def held_paths(store: S3, bucket: str, item: Item) -> set[str]:
    """Return the paths whose versions have a legal hold now."""
    return {one["path"] for one in item.files if holds(store, bucket, "step-900", [one]) == {"ON"}}


def test_a_hold_that_was_there_before_ours_stays_when_the_last_dossier_lets_go(
    s3_endpoint: S3, bucket: str, proxy: StoreProxy, clock: Clock, alice: Person, bob: Person
) -> None:
    files = save(s3_endpoint, bucket, count=FEW)
    put_holds(s3_endpoint, bucket, "shard-03")
    run = world.make_run()
    world.commit(run, 900, f"s3://{bucket}/step-900", files)
    rules = Policy(evidence=(EvidenceRule("last_good_checkpoint", retain_days=5),))

    def sealed(dossier: Dossier, *held_by_others: str) -> Item:
        """Seal and close a dossier that found these paths held by somebody else."""
        world.work(dossier)
        Dossier.objects.filter(pk=dossier.pk).update(url="")
        close_dossier(dossier=dossier, person=alice, why="looked at")
        item = dossier.items.get()
        assert [path for path, _ in item.protected_by["held_before"]["held"]] == list(held_by_others)
        assert (
            f"{len(held_by_others)} of {FEW + 1} had one before"
            in dossier.custody.get(what="held").data["by"]
        )
        return item

    def released(dossier: Dossier) -> dict[str, Any]:
        request = request_release(dossier=dossier, person=bob, why="space")
        approve_release(request=request, person=alice)
        run_due()
        assert verify_custody(dossier) == []
        told: dict[str, Any] = dossier.custody.get(what="released").data
        return told

    # The first try is cut while it puts its holds on: what the next one sees is partly its own.
    one = world.open_dossier(run, rules=rules)
    proxy.fail(How.RESET, f"PUT /{bucket}/", "legal-hold", skip=5, times=1_000)
    run_due()
    proxy.heal()
    assert one.items.get().state == "planned"
    item = sealed(one, "shard-03")
    two = world.open_dossier(run, rules=rules)
    sealed(two, "shard-03")
    clock.pass_days(15)
    every = held_paths(s3_endpoint, bucket, item)
    assert len(every) == len(item.files) == FEW + 1
    assert released(one) | {"kept_for_others": FEW, "left_as_found": 1, "legal_holds_off": 0} == (
        one.custody.get(what="released").data
    )
    assert held_paths(s3_endpoint, bucket, item) == every
    # The last one also lets go what the first had to leave: the items of both.
    assert released(two)["left_as_found"] == 2
    assert held_paths(s3_endpoint, bucket, item) == {"shard-03"}
    # A hold that somebody puts on now is theirs, although items of ours once held the same version.
    put_holds(s3_endpoint, bucket, "shard-05")
    three = world.open_dossier(run, rules=rules)
    sealed(three, "shard-03", "shard-05")
    clock.pass_days(15)
    assert released(three)["left_as_found"] == 2
    assert held_paths(s3_endpoint, bucket, item) == {"shard-03", "shard-05"}


def test_a_lone_hold_among_many_is_found_before_ours(s3_endpoint: S3, bucket: str) -> None:
    files = save(s3_endpoint, bucket, count=40)
    put_holds(s3_endpoint, bucket, "shard-07")
    noted: dict[str, Any] = {}

    def keep(seen: dict[str, Any]) -> dict[str, Any]:
        assert not noted
        noted.update(seen)
        assert held_now() == {"shard-07"}, "it is written down before any hold of ours"
        return seen

    def held_now() -> set[str]:
        rows = s3_endpoint.client().list_object_versions(Bucket=bucket, Prefix="step-900/shard")["Versions"]
        locks = Locks(s3_endpoint.client(), bucket, "s3://t")
        return {row["Key"].split("/")[1] for row in rows if locks.is_held(row["Key"], row["VersionId"])}

    table, by = hold_versions(f"s3://{bucket}/step-900", files, None, keep)
    assert foreign(noted) == {("shard-07", table[7]["version_id"])}
    assert by["held_before"] == noted
    assert "; 1 of 40 had one before, which stays when ours goes" in by["says"]
    assert holds(s3_endpoint, bucket, "step-900", table) == {"ON"}


@pytest.mark.parametrize("key", ["plain", "a b+c/ü~(1)*'!.bin", "x?y=1&z#%2F//end"])
def test_any_key_is_asked_and_held_without_the_clients_weight(s3_endpoint: S3, bucket: str, key: str) -> None:
    client = s3_endpoint.client()
    version = client.put_object(Bucket=bucket, Key=key, Body=b"x")["VersionId"]
    holds = LegalHolds(Locks(s3_client.source_client(), bucket, "s3://t"))
    with calls_of("GetObjectLegalHold", "PutObjectLegalHold") as by_the_client:
        assert holds.is_held(key, version) is False
        holds.hold(key, version)
        assert holds.is_held(key, version) is True
        client.put_object_legal_hold(Bucket=bucket, Key=key, VersionId=version, LegalHold={"Status": "OFF"})
        assert holds.is_held(key, version) is False
    assert by_the_client == []


@pytest.mark.parametrize("how", [How.BUSY, How.RESET, How.NO_ANSWER, How.FLIP])
def test_what_is_no_plain_answer_is_asked_again_by_the_client(
    s3_endpoint: S3, bucket: str, proxy: StoreProxy, how: How
) -> None:
    client = s3_endpoint.client()
    version = client.put_object(Bucket=bucket, Key="x", Body=b"x")["VersionId"]
    holds = LegalHolds(Locks(s3_client.source_client(), bucket, "s3://t"))
    proxy.fail(how, "PUT", "legal-hold").go.set()
    holds.hold("x", version)
    if how != How.FLIP:  # a question has no body
        proxy.fail(how, "GET", "legal-hold").go.set()
    assert holds.is_held("x", version) is True
    assert client.get_object_legal_hold(Bucket=bucket, Key="x", VersionId=version)["LegalHold"] == {
        "Status": "ON"
    }


def test_a_version_that_is_gone_or_may_not_be_seen_is_neither_held_nor_free(
    s3_endpoint: S3, bucket: str
) -> None:
    holds = LegalHolds(Locks(s3_client.source_client(), bucket, "s3://t"))
    with pytest.raises(ClientError, match="NoSuch"):
        holds.is_held("never", "there")
    with pytest.raises(ClientError, match="NoSuch"):
        holds.hold("never", "there")
    other = s3_endpoint.new_bucket(locked=False)
    made = s3_endpoint.client().put_object(Bucket=other, Key="x", Body=b"x")
    bare = LegalHolds(Locks(s3_client.source_client(), other, "s3://t"))
    assert bare.is_held("x", made.get("VersionId", "null")) is False
