"""Uploads into a real S3 store: the signature binds the bytes, damage on the way is caught, locks hold."""

import hashlib
import http.client
import os
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.conf import LazySettings
from django.utils import timezone

from evidence.agents import node_work
from evidence.custody import verify_custody
from evidence.models import AgentTask, StoredObject
from evidence.sources import NodeSource
from evidence.stores.intake import Part, PartUrl, UploadGone, intake, key_of
from evidence.vault import vault
from runs.work import enqueue
from tests.agents.beside import Node, contain, states, work_until
from tests.agents.proxy import Proxy
from tests.evidence import world
from tests.servers import S3

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def proxy(s3_endpoint: S3, settings: LazySettings) -> Iterator[Proxy]:
    """The store's public address, where one byte of the third megabyte of a connection is damaged once."""
    made = Proxy(int(s3_endpoint.url.rsplit(":", 1)[1]), after=3 << 20)
    settings.VAULT_PUBLIC_URL = made.url
    yield made
    made.close()


def test_a_part_damaged_on_the_way_is_caught_and_sent_again(node: Node, vault_s3: str, proxy: Proxy) -> None:
    directory, table = world.write_checkpoint(node.disk, 900, size=9 << 20, files=2)
    world.commit(node.run, 900, directory.as_uri(), table, read_back=True)
    dossier = world.open_dossier(node.run, rules=world.policy("last_good_checkpoint"))
    node.agent()
    work_until(lambda: states(dossier)["last_good_checkpoint"] == "sealed")
    assert proxy.flipped == 1
    item = dossier.items.get()
    kept = {one.path: one for one in StoredObject.objects.filter(item=item)}
    for entry in table:
        one = kept[str(entry["path"])]
        assert one.sha256 == entry["sha256"]
        assert hashlib.sha256(vault().open(one.key, one.version_id).read()).hexdigest() == entry["sha256"]
        assert one.protected_by["legal_hold"] is True
        store: Any = vault()
        assert len(store._versions(one.key)) == 1
    assert verify_custody(dossier) == []


def put(one: PartUrl, body: bytes, **changed: str) -> int:
    parts = urlsplit(one.url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=30)
    connection.request("PUT", f"{parts.path}?{parts.query}", body=body, headers={**one.headers, **changed})
    status = connection.getresponse().status
    connection.close()
    return status


def task_of(node: Node, body: bytes) -> AgentTask:
    dossier = world.open_dossier(node.run, rules=world.policy("rank_logs"))
    item = dossier.items.get()
    node_work.ask(item, [("rank.log", NodeSource("file:///x/rank.log", "n1", masked=True), "")])
    AgentTask.objects.update(
        bytes_total=len(body), sha256=hashlib.sha256(body).hexdigest(), part_bytes=8 << 20
    )
    task = AgentTask.objects.select_related("item__dossier", "run").get()
    task.store_upload = intake().begin(task)
    task.save()
    return task


def part_of(body: bytes, n: int = 1) -> Part:
    md5 = hashlib.md5(body, usedforsecurity=False).hexdigest()
    return Part(n, len(body), hashlib.sha256(body).hexdigest(), md5)


def test_a_url_takes_only_the_bytes_it_was_signed_for(node: Node, vault_s3: str) -> None:
    body = os.urandom(5000)
    task, part = task_of(node, body), part_of(body)
    store = intake()
    (one,) = store.urls(task, [part])
    assert "x-amz-content-sha256" in one.url
    other = os.urandom(5000)
    changed = dict(store.urls(task, [part_of(other)])[0].headers)
    assert put(one, other) // 100 == 4
    assert put(one, other, **changed) == 403
    assert put(one, body + b"more") // 100 == 4
    assert put(one, body[:-1]) // 100 == 4
    assert store.have(task, [part]) == set()
    assert put(one, body) == 200
    assert store.have(task, [part]) == {1}
    stored = store.take(task, [part])
    assert (stored.sha256, stored.bytes_total) == (part.sha256, 5000)
    # A worker that was killed after the store made the object finds it again.
    assert store.take(task, [part]).version_id == stored.version_id
    with pytest.raises(UploadGone):
        store.have(task, [part])


def test_bytes_that_are_not_what_was_announced_never_become_evidence(node: Node, vault_s3: str) -> None:
    body = os.urandom(5000)
    task, part = task_of(node, body), part_of(body)
    lie = hashlib.sha256(b"something else").hexdigest()
    AgentTask.objects.update(sha256=lie)
    task = AgentTask.objects.select_related("item__dossier", "run").get()
    task.store_upload = intake().begin(task)
    assert put(intake().urls(task, [part])[0], body) == 200
    task.parts, task.arrived_at = [[part.sha256, part.md5]], timezone.now()
    task.save()
    enqueue(kind="evidence.arrive", key=str(task.pk), payload={"task": task.pk})
    work_until(lambda: AgentTask.objects.get().arrived_at is None)
    task.refresh_from_db()
    assert "sent again" in task.trouble
    assert task.done_at is None
    assert not StoredObject.objects.exists()
    assert key_of(task).endswith(lie)


def test_the_agent_masks_before_the_store_sees_a_byte(node: Node, vault_s3: str) -> None:
    log = node.disk / "rank0.log"
    log.write_bytes(b"export WANDB_API_KEY=" + b"0123456789abcdef" * 2 + b"0a1b2c3d\nstep 1 loss 2.5\n")
    told = {"kind": "rank_log", "uri": log.as_uri(), "rank": 0, "node": "n1"}
    world.post(node.run, "artifact.available", data=told)
    contain(node.run)
    dossier = world.open_dossier(node.run, rules=world.policy("rank_logs"))
    world.age(dossier, 60)
    node.agent()
    work_until(lambda: states(dossier)["rank_logs"] == "sealed")
    one = StoredObject.objects.get()
    assert vault().open(one.key, one.version_id).read() == (
        b"export WANDB_API_KEY=[masked]\nstep 1 loss 2.5\n"
    )
