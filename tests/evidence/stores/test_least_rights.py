"""The policy documents in force: a real store applies them while everything is done, and refuses the rest.

radosgw enforces the documents as policies of its users. Every call that is really sent is written down and
judged by its role's document too, since a store may ask for fewer rights than AWS does.
"""

import hashlib
import http.client
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from boto3.s3.transfer import TransferConfig
from botocore.exceptions import ClientError
from django.conf import LazySettings
from django.utils import timezone

from andon.policy import EvidenceRule, Policy
from evidence.custody import verify_custody
from evidence.freezing.verify_checkpoints import ask as verify_checkpoint
from evidence.models import AgentTask, Dossier
from evidence.proof import fixity
from evidence.proof.exporting import export_bag
from evidence.retention.dates import close_dossier, extend_retention
from evidence.retention.release import approve_deletion, approve_release, request_deletion, request_release
from evidence.stores import s3_client
from evidence.stores.intake import Part, intake
from evidence.stores.probe import probe_and_record
from evidence.stores.s3_lock import error_code
from evidence.vault import vault
from runs.models import Attempt, Person
from runs.work import enqueue, run_due
from tests.evidence import world
from tests.evidence.conftest import Clock, s3_url
from tests.servers import S3
from tests.test_policies import ARN, PLACE, TRIED, is_allowed

pytestmark = pytest.mark.django_db(transaction=True)
ROLES = ("vault", "trainer", "agent")
ALLOW_ALL = json.dumps(
    {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": f"{ARN}*"}]}
)
# Operation → the right it needs, with a version, when the two differ. Source: as of tests/test_policies.py.
RIGHTS = {
    "AbortMultipartUpload": "AbortMultipartUpload",
    "CompleteMultipartUpload": "PutObject",
    "CopyObject": "PutObject",
    "CreateMultipartUpload": "PutObject",
    "DeleteObject": "DeleteObject",
    "GetBucketVersioning": "GetBucketVersioning",
    "GetObject": "GetObject",
    "GetObjectLegalHold": "GetObjectLegalHold",
    "GetObjectLockConfiguration": "GetBucketObjectLockConfiguration",
    "GetObjectRetention": "GetObjectRetention",
    "HeadBucket": "ListBucket",
    "HeadObject": "GetObject",
    "ListMultipartUploads": "ListBucketMultipartUploads",
    "ListObjectVersions": "ListBucketVersions",
    "ListObjectsV2": "ListBucket",
    "ListParts": "ListMultipartUploadParts",
    "PutBucketVersioning": "PutBucketVersioning",
    "PutObject": "PutObject",
    "PutObjectLegalHold": "PutObjectLegalHold",
    "PutObjectRetention": "PutObjectRetention",
    "UploadPart": "PutObject",
    "UploadPartCopy": "PutObject",
}
BY_VERSION = {"DeleteObject": "DeleteObjectVersion", "GetObject": "GetObjectVersion"}


@dataclass
class Store:
    """Two buckets and three users, each under the document of its role, and what each of them sent."""

    owner: S3
    vault_bucket: str
    checkpoints: str
    doors: dict[str, S3] = field(default_factory=dict)
    sent: dict[str, set[tuple[str, str, str]]] = field(default_factory=dict)  # role → (call, right, resource)

    def document(self, role: str) -> str:
        text = (PLACE / f"{role}.json").read_text("utf-8")
        return text.replace("VAULT_BUCKET", self.vault_bucket).replace("CHECKPOINT_BUCKET", self.checkpoints)

    def named(self, resource: str) -> str:
        """Return a resource as the documents name it."""
        return resource.replace(self.vault_bucket, "VAULT_BUCKET").replace(
            self.checkpoints, "CHECKPOINT_BUCKET"
        )

    @contextmanager
    def written_down(self, role: str, *clients: Any) -> Iterator[None]:
        """Write down every call of these clients as one of `role`."""

        def note(model: Any, params: dict[str, Any], **_: Any) -> None:
            self.note(role, model.name, params["url"], params["headers"])

        for client in clients:
            client.meta.events.register("before-call.s3", note, unique_id=f"rights-{role}")
        try:
            yield
        finally:
            for client in clients:
                client.meta.events.unregister("before-call.s3", unique_id=f"rights-{role}")

    def note(self, role: str, call: str, url: str, headers: Any) -> None:
        parts = urlsplit(url)
        where = ARN + unquote(parts.path).strip("/")
        sent = self.sent.setdefault(role, set())

        def needs(right: str, resource: str, *, version: bool) -> None:
            sent.add((call, "s3:" + (BY_VERSION.get(right, right) if version else right), resource))

        needs(RIGHTS[call], where, version="versionId" in parse_qs(parts.query))
        if "x-amz-copy-source" in headers:
            place, _, version_id = str(headers["x-amz-copy-source"]).partition("?versionId=")
            needs("GetObject", ARN + unquote(place).strip("/"), version=bool(version_id))
        for header, right in (
            ("x-amz-object-lock-mode", "PutObjectRetention"),
            ("x-amz-object-lock-legal-hold", "PutObjectLegalHold"),
            ("x-amz-bypass-governance-retention", "BypassGovernanceRetention"),
        ):
            if header in {name.lower() for name in headers}:
                needs(right, where, version=False)


@pytest.fixture
def store(s3_endpoint: S3, settings: LazySettings, tmp_path: Path) -> Store:
    made = Store(s3_endpoint, s3_endpoint.new_bucket(locked=True), s3_endpoint.new_bucket(locked=True))
    for role in ROLES:
        made.doors[role] = s3_endpoint.new_user(f"{role}-{made.vault_bucket}", made.document(role))
    settings.VAULT_URL = s3_url(made.doors["vault"], made.vault_bucket)
    settings.DATA_DIR = tmp_path / "data"
    settings.SOURCE_ROOTS = []
    return made


def save(store: Store, tmp_path: Path) -> list[dict[str, Any]]:
    """Save two checkpoints as a trainer does, read one back, and rotate the older; returns its table."""
    client = store.doors["trainer"].client()
    in_parts = TransferConfig(multipart_threshold=5 << 20, multipart_chunksize=5 << 20)
    with store.written_down("trainer", client):
        for step in (800, 900):
            directory, table = world.write_checkpoint(tmp_path / "trainer", step, files=2)
            big = os.urandom((5 << 20) + 1)
            (directory / "big.bin").write_bytes(big)
            table.append({"path": "big.bin", "bytes": len(big), "sha256": hashlib.sha256(big).hexdigest()})
            (directory / "commit.json").write_text(json.dumps({"step": step, "files": table}))
            for path in directory.iterdir():
                key = f"step-{step}/{path.name}"
                client.upload_file(str(path), store.checkpoints, key, Config=in_parts)
        client.get_object(Bucket=store.checkpoints, Key="step-900/commit.json")["Body"].read()
        for row in client.list_objects_v2(Bucket=store.checkpoints, Prefix="step-800/")["Contents"]:
            client.delete_object(Bucket=store.checkpoints, Key=row["Key"])
    return table


def send_log(store: Store) -> None:
    """Bring a node's log by presigned URLs; the agent itself signs nothing, it only puts."""
    body = os.urandom(4000)
    part = Part(1, len(body), hashlib.sha256(body).hexdigest(), hashlib.md5(body).hexdigest())
    task = AgentTask.objects.select_related("item__dossier", "run").get()
    task.bytes_total, task.sha256, task.part_bytes = len(body), part.sha256, 8 << 20
    task.store_upload = intake().begin(task)
    task.save()
    (one,) = intake().urls(task, [part])
    to = urlsplit(one.url)
    store.note("vault", "UploadPart", one.url, one.headers)  # by the rights of who signed it
    connection = http.client.HTTPConnection(to.netloc, timeout=30)
    connection.request("PUT", f"{to.path}?{to.query}", body=body, headers=dict(one.headers))
    assert connection.getresponse().status == 200
    connection.close()
    assert intake().have(task, [part]) == {1}
    task.parts, task.arrived_at = [[part.sha256, part.md5]], timezone.now()
    task.save()
    enqueue(kind="evidence.arrive", key=str(task.pk), payload={"task": task.pk})
    run_due()


def everything(
    store: Store, table: list[dict[str, Any]], clock: Clock, one: Person, two: Person, tmp_path: Path
) -> Dossier:
    """Do all that a server ever does with its store: from the first probe to the deletion."""
    probed = probe_and_record().result
    assert probed["says"] == "locks hold"
    vault().check()
    run = world.make_run()
    checkpoint = world.commit(
        run, 900, f"s3://{store.checkpoints}/step-900", table, state="committed", read_back=False
    )
    verify_checkpoint(checkpoint)
    run_due()
    told = {"kind": "rank_log", "uri": "file:///node/rank0.log", "rank": 0, "node": "n1"}
    world.post(run, "artifact.available", data=told)
    Attempt.objects.filter(run=run).update(exited_at=timezone.now())
    kinds = (("last_good_checkpoint", "governance"), ("topology", "governance"), ("rank_logs", "none"))
    rules = Policy(evidence=tuple(EvidenceRule(kind, retain_days=5, lock=lock) for kind, lock in kinds))
    dossier = world.open_dossier(run, rules=rules)
    world.work(dossier, rounds=3)
    send_log(store)
    world.work(dossier)
    states = dict(dossier.items.values_list("kind", "state"))
    assert states == dict.fromkeys(states, "sealed"), list(dossier.items.values_list("kind", "why"))
    assert dossier.items.get(kind="last_good_checkpoint").protected_by["how"] == "legal_hold"
    done = fixity.sweep(timezone.now(), budget_bytes=1 << 40)
    assert (done.mismatches, done.lost, done.unreadable) == (0, 0, 0)
    export_bag(dossier, tmp_path / "bag")
    until = timezone.now() + timedelta(days=20)
    extend_retention(dossier=dossier, person=one, until=until, why="an audit")
    run_due()
    Dossier.objects.filter(pk=dossier.pk).update(url="")
    close_dossier(dossier=dossier, person=one, why="looked at")
    clock.pass_days(30)
    approve_release(request=request_release(dossier=dossier, person=one, why="space"), person=two)
    run_due()
    assert dossier.custody.get(what="released").data["legal_holds_off"] > 0
    approve_deletion(request=request_deletion(dossier=dossier, person=one, why="space"), person=two)
    run_due()
    assert verify_custody(dossier) == []
    return dossier


def test_the_documents_let_every_role_do_its_work_and_every_call_is_in_them(
    store: Store, clock: Clock, alice: Person, bob: Person, tmp_path: Path
) -> None:
    table = save(store, tmp_path)
    place = s3_client.parse(s3_url(store.doors["vault"], store.vault_bucket))
    with ExitStack() as stack:
        clients = (s3_client.client(place), s3_client.client(place, quick=True))
        stack.enter_context(store.written_down("vault", *clients))
        dossier = everything(store, table, clock, alice, bob, tmp_path)
    # The store's own lock has the last word over what two people had deleted: the rest is gone.
    log = dossier.items.get(kind="rank_logs").stored_objects.get()
    kept = dossier.items.get(kind="topology").stored_objects.get()
    there = store.owner.client().list_object_versions(Bucket=store.vault_bucket, Prefix="evidence/")
    keys = {row["Key"] for row in there["Versions"]}
    assert kept.key in keys
    assert log.deleted_at is not None or log.key in keys
    assert "agent" not in store.sent, "an agent signs nothing of its own"
    for role, sent in store.sent.items():
        refused = {one for one in sent if not is_allowed(role, one[1], store.named(one[2]))}
        assert {right for _, right, _ in refused} <= (TRIED if role == "vault" else set()), refused
        assert all("/probe/" in where or where.count("/") == 0 for _, _, where in refused)
    calls = {call for sent in store.sent.values() for call, _, _ in sent}
    assert calls >= {"PutObject", "CopyObject", "UploadPart", "PutObjectLegalHold", "PutObjectRetention"}
    assert calls >= {"DeleteObject", "HeadObject", "GetObject", "ListParts", "CompleteMultipartUpload"}


# --- what no role may ever do


def on_bucket(client: Any, bucket: str) -> dict[str, Callable[[], object]]:
    """Return what would make a bucket forget what it keeps."""
    anybody = {"Effect": "Allow", "Principal": "*", "Action": "s3:GetObject", "Resource": f"{ARN}{bucket}/*"}
    expire = {"ID": "x", "Filter": {"Prefix": ""}, "Status": "Enabled", "Expiration": {"Days": 1}}
    shorter = {"DefaultRetention": {"Mode": "GOVERNANCE", "Days": 1}}
    return {
        "suspend versioning": lambda: client.put_bucket_versioning(
            Bucket=bucket, VersioningConfiguration={"Status": "Suspended"}
        ),
        "change the default lock": lambda: client.put_object_lock_configuration(
            Bucket=bucket, ObjectLockConfiguration={"ObjectLockEnabled": "Enabled", "Rule": shorter}
        ),
        "change the bucket's policy": lambda: client.put_bucket_policy(
            Bucket=bucket, Policy=json.dumps({"Version": "2012-10-17", "Statement": [anybody]})
        ),
        "expire its objects": lambda: client.put_bucket_lifecycle_configuration(
            Bucket=bucket, LifecycleConfiguration={"Rules": [expire]}
        ),
        "delete it": lambda: client.delete_bucket(Bucket=bucket),
    }


def on_version(client: Any, at: dict[str, str]) -> dict[str, Callable[[], object]]:
    """Return what would lose or give away a locked version."""
    bucket, key = at["Bucket"], at["Key"]
    soon = {"Mode": "GOVERNANCE", "RetainUntilDate": timezone.now() + timedelta(hours=1)}
    return {
        "shorten": lambda: client.put_object_retention(**at, Retention=soon, BypassGovernanceRetention=True),
        "bypass": lambda: client.delete_object(**at, BypassGovernanceRetention=True),
        "lift": lambda: client.put_object_legal_hold(**at, LegalHold={"Status": "OFF"}),
        "hide": lambda: client.delete_object(Bucket=bucket, Key=key),
        "read": lambda: client.get_object(Bucket=bucket, Key=key),
        "write": lambda: client.put_object(Bucket=bucket, Key=key, Body=b"other"),
        "list": lambda: client.list_object_versions(Bucket=bucket),
    }


DESTROY = {"shorten", "bypass"}
EVERYTHING = {*DESTROY, "lift", "hide", "read", "write", "list"}
# Role → what it may not do to a locked version in the vault, and in the checkpoints' bucket.
NEVER = {
    "vault": (DESTROY | {"hide"}, DESTROY | {"hide"}),  # it lifts holds: after two people released them
    "trainer": (EVERYTHING, DESTROY | {"lift"}),
    "agent": (EVERYTHING, EVERYTHING),
}


def answer(call: Callable[[], object]) -> str:
    """Return the store's name of its refusal, "allowed" when it did what was asked."""
    try:
        call()
    except ClientError as error:
        return error_code(error)
    return "allowed"


@pytest.mark.parametrize("role", ROLES)
def test_what_a_role_may_never_do_is_refused_whatever_else_it_is_granted(store: Store, role: str) -> None:
    owner = store.owner.client()
    # Beside the document of its role this user is granted everything: what is refused, the document denies.
    client = store.owner.new_user(
        f"{role}-all-{store.vault_bucket}", store.document(role), ALLOW_ALL
    ).client()
    other = store.owner.new_bucket(locked=False)
    assert answer(lambda: client.put_object(Bucket=other, Key="x", Body=b"x")) == "allowed"
    for bucket, never in zip((store.vault_bucket, store.checkpoints), NEVER[role], strict=True):
        made = owner.put_object(
            Bucket=bucket,
            Key="evidence/x",
            Body=b"x",
            ObjectLockMode="GOVERNANCE",
            ObjectLockRetainUntilDate=timezone.now() + timedelta(days=1),
        )
        at = {"Bucket": bucket, "Key": "evidence/x", "VersionId": made["VersionId"]}
        calls = on_bucket(client, bucket)
        calls |= {name: call for name, call in on_version(client, at).items() if name in never}
        answers = {name: answer(call) for name, call in calls.items()}
        assert answers == dict.fromkeys(calls, "AccessDenied")
        found = owner.head_object(**at)
        assert found["ObjectLockRetainUntilDate"] > timezone.now() + timedelta(hours=23)
        assert owner.get_bucket_versioning(Bucket=bucket)["Status"] == "Enabled"
        assert "DeleteMarkers" not in owner.list_object_versions(Bucket=bucket)
