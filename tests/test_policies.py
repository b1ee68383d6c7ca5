"""The policy documents against the calls that the server really makes on a real store."""

import hashlib
import http.client
import json
import os
from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.conf import LazySettings
from django.utils import timezone

from evidence import agents, s3client
from evidence.intake import Part, intake
from evidence.models import AgentTask
from evidence.sources import NodeSource
from evidence.vault import vault
from evidence.vault_probe import probe_and_record
from tests.evidence import world
from tests.evidence.conftest import s3_url
from tests.servers import S3

pytestmark = pytest.mark.django_db(transaction=True)
PLACE = Path(__file__).resolve().parent.parent / "docs" / "policies"
ROLES = ("vault", "trainer", "agent")
ARN = "arn:aws:s3:::"
# Nobody that Andon knows may do these, on any bucket.
NEVER = {
    "s3:BypassGovernanceRetention",
    "s3:PutBucketVersioning",
    "s3:PutBucketObjectLockConfiguration",
    "s3:PutBucketPolicy",
    "s3:PutLifecycleConfiguration",
    "s3:DeleteBucket",
}
# Operation of the SDK → the rights it needs. Source: AWS, Service Authorization Reference, Amazon S3.
NEEDS = {
    "AbortMultipartUpload": {"s3:AbortMultipartUpload"},
    "CompleteMultipartUpload": {"s3:PutObject"},
    "CopyObject": {"s3:PutObject"},
    "CreateMultipartUpload": {"s3:PutObject"},
    "GetBucketVersioning": {"s3:GetBucketVersioning"},
    "GetObjectLegalHold": {"s3:GetObjectLegalHold"},
    "GetObjectLockConfiguration": {"s3:GetBucketObjectLockConfiguration"},
    "GetObjectRetention": {"s3:GetObjectRetention"},
    "HeadBucket": {"s3:ListBucket"},
    "ListMultipartUploads": {"s3:ListBucketMultipartUploads"},
    "ListObjectVersions": {"s3:ListBucketVersions"},
    "ListObjectsV2": {"s3:ListBucket"},
    "ListParts": {"s3:ListMultipartUploadParts"},
    "PutBucketVersioning": {"s3:PutBucketVersioning"},
    "PutObject": {"s3:PutObject"},
    "PutObjectLegalHold": {"s3:PutObjectLegalHold"},
    "PutObjectRetention": {"s3:PutObjectRetention"},
    "UploadPart": {"s3:PutObject"},
    "UploadPartCopy": {"s3:PutObject"},
}
# What the probe does in order to be refused.
TRIED = {"s3:PutBucketVersioning", "s3:BypassGovernanceRetention"}


def policy(role: str) -> list[dict[str, Any]]:
    document = json.loads((PLACE / f"{role}.json").read_text("utf-8"))
    assert document["Version"] == "2012-10-17"
    statements: list[dict[str, Any]] = document["Statement"]
    return statements


def listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def says(statements: list[dict[str, Any]], effect: str, action: str, resource: str) -> bool:
    return any(
        one["Effect"] == effect
        and "Condition" not in one
        and any(fnmatchcase(action, pattern) for pattern in listed(one["Action"]))
        and any(fnmatchcase(resource, pattern) for pattern in listed(one["Resource"]))
        for one in statements
    )


def is_allowed(role: str, action: str, resource: str) -> bool:
    statements = policy(role)
    return says(statements, "Allow", action, resource) and not says(statements, "Deny", action, resource)


class Watch:
    """Every call of the server's own clients: rights, by the resource they were used on."""

    def __init__(self, buckets: dict[str, str]) -> None:
        self.buckets = buckets
        self.used: dict[str, set[str]] = defaultdict(set)

    def on(self, client: Any) -> Any:
        client.meta.events.register("before-parameter-build.s3", self._note)
        return client

    def _note(self, params: dict[str, Any], model: Any, **_: Any) -> None:
        bucket = self.buckets.get(params["Bucket"])
        if bucket is None:
            return
        key = params.get("Key", "")
        resource = f"{ARN}{bucket}/{key}" if key else f"{ARN}{bucket}"
        for action in self._actions(model.name, params):
            self.used[resource].add(action)
        copied = params.get("CopySource")
        if isinstance(copied, dict):
            where = f"{ARN}{self.buckets[copied['Bucket']]}/{copied['Key']}"
            self.used[where].add("s3:GetObjectVersion" if copied.get("VersionId") else "s3:GetObject")

    def _actions(self, operation: str, params: dict[str, Any]) -> set[str]:
        versioned = bool(params.get("VersionId"))
        if operation in {"GetObject", "HeadObject"}:
            return {"s3:GetObjectVersion" if versioned else "s3:GetObject"}
        if operation == "DeleteObject":
            return {"s3:DeleteObjectVersion" if versioned else "s3:DeleteObject"}
        found = set(NEEDS[operation])
        if params.get("BypassGovernanceRetention"):
            found.add("s3:BypassGovernanceRetention")
        if params.get("ObjectLockMode"):
            found.add("s3:PutObjectRetention")
        if params.get("ObjectLockLegalHoldStatus"):
            found.add("s3:PutObjectLegalHold")
        return found


@pytest.fixture
def watch(s3_endpoint: S3, tmp_path: Path, settings: LazySettings, monkeypatch: Any) -> Iterator[Watch]:
    """A vault and a trainer's bucket in a real store, and an eye on every call to them."""
    kept, source = s3_endpoint.new_bucket(locked=True), s3_endpoint.new_bucket(locked=True)
    settings.VAULT_URL = s3_url(s3_endpoint, kept)
    settings.DATA_DIR = tmp_path
    settings.SOURCE_ROOTS = []
    made = Watch({kept: "VAULT_BUCKET", source: "CHECKPOINT_BUCKET"})
    make = s3client.make
    monkeypatch.setattr(s3client, "make", lambda place, **how: made.on(make(place, **how)))
    s3client.client.cache_clear()
    yield made
    s3client.client.cache_clear()


def live_a_vaults_life(watch: Watch, endpoint: S3) -> None:
    """Probe, freeze a checkpoint in S3, take an agent's upload, extend, release, delete."""
    source = next(name for name, shown in watch.buckets.items() if shown == "CHECKPOINT_BUCKET")
    probe_and_record()
    run = world.make_run()
    table = []
    for name, size in (("small.bin", 4000), ("large.bin", 20 << 20)):
        body = os.urandom(size)
        endpoint.client().put_object(Bucket=source, Key=f"step-900/{name}", Body=body)
        table.append({"path": name, "bytes": size, "sha256": hashlib.sha256(body).hexdigest()})
    world.commit(run, 900, f"s3://{source}/step-900", table, manifest="")
    listed_only = world.commit(run, 800, f"s3://{source}/step-900", [], attempt=2)
    assert listed_only.files == []
    dossier = world.open_dossier(run, rules=world.policy("last_good_checkpoint", "topology"))
    world.work(dossier)
    states = {item.kind: (item.state, item.why) for item in dossier.items.all()}
    assert {state for state, _ in states.values()} == {"sealed"}, states
    _upload(dossier)
    store = vault()
    store.check()
    for item in dossier.items.all():
        for one in item.stored_objects.all():
            store.protection(one.key, one.version_id)
    one = dossier.items.first().stored_objects.first()
    store.extend(one.key, one.version_id, "governance", timezone.now() + timedelta(days=30))
    store.let_go(one.key, one.version_id)
    with pytest.raises(Exception, match="AccessDenied"):
        store.delete(one.key, one.version_id)  # the date still holds it


def _upload(dossier: Any) -> None:
    body = os.urandom(3000)
    item = dossier.items.first()
    agents.ask(item, [("rank.log", NodeSource("file:///x/rank.log", "n1", masked=True), "")])
    AgentTask.objects.update(bytes_total=3000, sha256=hashlib.sha256(body).hexdigest(), part_bytes=8 << 20)
    task = AgentTask.objects.select_related("item__dossier", "run").get()
    store = intake()
    task.store_upload = store.begin(task)
    store.forget(task)
    task.store_upload = store.begin(task)
    md5 = hashlib.md5(body, usedforsecurity=False).hexdigest()
    part = Part(1, 3000, task.sha256, md5)
    (url,) = store.urls(task, [part])
    where = urlsplit(url.url)
    connection = http.client.HTTPConnection(where.netloc, timeout=30)
    connection.request("PUT", f"{where.path}?{where.query}", body=body, headers=dict(url.headers))
    assert connection.getresponse().status == 200
    connection.close()
    assert store.have(task, [part]) == {1}
    store.take(task, [part])


def test_the_servers_policy_allows_what_it_calls_and_nothing_else(watch: Watch, s3_endpoint: S3) -> None:
    live_a_vaults_life(watch, s3_endpoint)
    lacking = {
        (action, resource)
        for resource, actions in watch.used.items()
        for action in actions - TRIED
        if not is_allowed("vault", action, resource)
    }
    assert lacking == set()
    for action in TRIED & {action for actions in watch.used.values() for action in actions}:
        assert not is_allowed("vault", action, f"{ARN}VAULT_BUCKET")
    for statement in policy("vault"):
        if statement["Effect"] == "Deny":
            continue
        patterns = listed(statement["Resource"])
        used = {
            action
            for resource, actions in watch.used.items()
            if any(fnmatchcase(resource, pattern) for pattern in patterns)
            for action in actions
        }
        assert set(statement["Action"]) - used == set(), statement["Sid"]


@pytest.mark.parametrize("role", ROLES)
def test_no_role_may_bypass_a_lock_or_change_a_bucket(role: str) -> None:
    for bucket in ("VAULT_BUCKET", "CHECKPOINT_BUCKET"):
        for action in NEVER:
            for resource in (f"{ARN}{bucket}", f"{ARN}{bucket}/evidence/x"):
                assert not is_allowed(role, action, resource)
        on_bucket = NEVER - {"s3:BypassGovernanceRetention"}
        assert all(says(policy(role), "Deny", action, f"{ARN}{bucket}") for action in on_bucket)
        assert says(policy(role), "Deny", "s3:BypassGovernanceRetention", f"{ARN}{bucket}/step-900/x")


@pytest.mark.parametrize("role", ROLES)
def test_nothing_is_allowed_by_a_pattern(role: str) -> None:
    for statement in policy(role):
        assert set(statement) <= {"Sid", "Effect", "Action", "Resource", "Condition"}
        if statement["Effect"] == "Allow":
            assert not any("*" in action for action in listed(statement["Action"]))
        for resource in listed(statement["Resource"]):
            assert resource.removeprefix(ARN).split("/")[0] in {"VAULT_BUCKET", "CHECKPOINT_BUCKET"}


def test_the_trainer_may_rotate_and_never_destroy_and_the_agent_may_nothing() -> None:
    shard, evidence = f"{ARN}CHECKPOINT_BUCKET/step-900/x", f"{ARN}VAULT_BUCKET/evidence/x"
    assert is_allowed("trainer", "s3:DeleteObject", shard)
    for action in ("s3:DeleteObjectVersion", "s3:PutObjectLegalHold", "s3:PutObjectRetention"):
        assert says(policy("trainer"), "Deny", action, shard)
    for action in ("s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:ListBucket"):
        assert says(policy("trainer"), "Deny", action, evidence)
        for resource in (shard, evidence):
            assert says(policy("agent"), "Deny", action, resource)
