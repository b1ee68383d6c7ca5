"""The agent as a process beside a real server: it holds, masks and uploads, and survives being killed."""

import shutil
from datetime import timedelta
from pathlib import Path

import pytest
from django.utils import timezone

from evidence.collecting.samples import read_samples
from evidence.custody import verify_custody
from evidence.gates import resume_gate
from evidence.models import Agent, AgentTask, Item, StoredObject
from evidence.vault import vault
from runs.models import Membership, Person, Role
from tests.agents.beside import Node, contain, states, stopped_at, suspect, work_until
from tests.evidence import world

pytestmark = pytest.mark.django_db(transaction=True)

LAST_GOOD = "last_good_checkpoint"


def checkpoint(node: Node, step: int = 900, **more: int) -> dict[str, str]:
    """Commit a checkpoint on the node's disk; returns the digest of each file."""
    directory, table = world.write_checkpoint(node.disk, step, **more)
    world.commit(node.run, step, directory.as_uri(), table, read_back=True)
    return {str(entry["path"]): str(entry["sha256"]) for entry in table}


def stored(item: Item) -> dict[str, str]:
    return dict(StoredObject.objects.filter(item=item).values_list("path", "sha256"))


def text_of(item: Item, path: str) -> bytes:
    one = StoredObject.objects.get(item=item, path=path)
    return vault().open(one.key, one.version_id).read()


def test_a_checkpoint_on_a_nodes_disk_is_held_uploaded_and_sealed(node: Node, vault_dir: Path) -> None:
    digests = checkpoint(node)
    dossier = world.open_dossier(node.run, rules=world.policy(LAST_GOOD))
    node.agent()
    work_until(lambda: dossier.items.get().held_at is not None)
    item = dossier.items.get()
    assert item.protected_by["nodes"] == ["n1"]
    assert {entry["node"] for entry in item.files} == {"n1"}
    # Rotation deletes meanwhile: the held tree keeps the bytes, and the upload comes from there.
    shutil.rmtree(node.disk / "step-00000900")
    work_until(lambda: states(dossier)[LAST_GOOD] == "sealed")
    kept = stored(dossier.items.get())
    assert kept.pop("commit.json")
    assert kept == digests
    assert resume_gate(dossier).open
    assert verify_custody(dossier) == []
    assert not list((vault_dir / "incoming" / "uploads").iterdir())


def test_logs_are_masked_on_the_node_whole_for_suspects_and_the_end_of_others(
    node: Node, vault_dir: Path
) -> None:
    suspect(node.run, 3)
    line = b"step 1 loss 2.5 " + b"." * 100 + b"\n"
    for rank in range(4):
        log = node.disk / f"rank{rank}.log"
        log.write_bytes(line * 5000 + b"the end HF_TOKEN=hf_" + b"q" * 34 + b"\n")
        told = {"kind": "rank_log", "uri": log.as_uri(), "rank": rank, "node": "n1"}
        world.post(node.run, "artifact.available", data=told)
    contain(node.run)
    dossier = world.open_dossier(node.run, rules=world.policy("rank_logs"))
    world.age(dossier, 60)
    node.agent()
    work_until(lambda: states(dossier)["rank_logs"] == "sealed")
    item = dossier.items.get()
    for rank in range(4):
        kept = text_of(item, f"rank-{rank:05d}/rank{rank}.log")
        assert kept.endswith(b"the end HF_TOKEN=[masked]\n")
        whole = len(kept) > len(line) * 5000
        assert whole is (rank in {2, 3})  # the first bad rank and its neighbour on node n1
        assert whole or kept.startswith(b"[the last 204800 of ")
    # Not even in the parts, and nothing of it stays on the node.
    assert not any(b"hf_qqq" in file.read_bytes() for file in vault_dir.rglob("*") if file.is_file())
    work_until(lambda: not list((node.state / "copies").iterdir()))


# Where an agent is killed: in front of these functions, after so many calls of them.
STAGES = {
    "before it asked": ("andon.agent.server/Server:wanted", 0),
    "before the first link": ("andon.held_tree:_hold", 0),
    "between two links": ("andon.held_tree:_hold", 2),
    "before the tree is read-only": ("andon.held_tree:_freeze", 0),
    "held, and not reported": ("andon.agent.holding/Holder:_report", 0),
    "before the digests": ("andon.agent.uploading:_digests", 0),
    "before an upload begins": ("andon.agent.uploading/Uploader:_send", 0),
    "before the first part": ("andon.agent.putting/Putter:put", 0),
    "between two parts": ("andon.agent.putting/Putter:put", 3),
    "all parts sent, and not said": ("andon.agent.uploading/Uploader:_settle", 0),
}


@pytest.mark.parametrize("stage", STAGES)
def test_an_agent_killed_at_any_stage_goes_on_after_a_restart(
    stage: str, node: Node, vault_dir: Path
) -> None:
    digests = checkpoint(node, size=9 << 20, files=2)  # two parts each
    dossier = world.open_dossier(node.run, rules=world.policy(LAST_GOOD))
    where, after = STAGES[stage]
    agent = node.agent("--uploads", "1", stage=where, after=after)
    work_until(lambda: stopped_at(agent))
    assert states(dossier)[LAST_GOOD] != "sealed"
    node.kill()
    node.agent()
    work_until(lambda: states(dossier)[LAST_GOOD] == "sealed")
    kept = stored(dossier.items.get())
    assert kept.pop("commit.json")
    assert kept == digests
    assert dossier.custody.filter(what="held").count() == 1
    assert dossier.seals.count() == 1
    assert verify_custody(dossier) == []


def test_an_agent_that_is_gone_is_said_and_given_up_at_the_deadline(node: Node, vault_dir: Path) -> None:
    checkpoint(node)
    dossier = world.open_dossier(node.run, rules=world.policy(LAST_GOOD))
    work_until(lambda: dossier.items.get().silent_since is not None)
    says = resume_gate(dossier).lines[0].says
    assert "silent since" in says
    assert "no agent of this run has asked" in dossier.items.get().why
    node.agent(stage="andon.agent.uploading/Uploader:_send")
    work_until(lambda: dossier.items.get().state == "collecting")
    node.kill()
    Agent.objects.update(seen_at=timezone.now() - timedelta(minutes=5))
    AgentTask.objects.update(seen_at=None)
    work_until(lambda: dossier.items.get().silent_since is not None)
    item = dossier.items.get()
    assert item.silent_since == Agent.objects.get().seen_at
    assert item.why.startswith("the agent of n1 has been silent since ")
    Item.objects.update(deadline=timezone.now())
    work_until(lambda: states(dossier)[LAST_GOOD] == "missing")
    why = dossier.items.get().why
    assert "silent since" in why
    assert "4 files have not come: commit.json, shard-00000.bin, shard-00001.bin and 1 more" in why
    assert not StoredObject.objects.exists()
    assert resume_gate(dossier).open is False
    assert verify_custody(dossier) == []


def test_a_shard_changed_in_place_after_the_hold_is_found_and_gives_way(node: Node, vault_dir: Path) -> None:
    checkpoint(node, 800)
    checkpoint(node, 900)
    dossier = world.open_dossier(node.run, rules=world.policy(LAST_GOOD))
    agent = node.agent(stage="andon.agent.uploading:_digests")
    work_until(lambda: dossier.items.get().held_at is not None)
    shard = node.disk / "step-00000900" / "shard-00001.bin"
    shard.chmod(0o644)
    body = bytearray(shard.read_bytes())
    body[7] ^= 1
    with shard.open("r+b") as file:
        file.write(body)
    assert agent.poll() is None
    node.kill()
    # It looks at what it holds before anything is read, and the chain keeps what it saw.
    node.agent(stage="andon.agent.uploading:_digests")
    work_until(lambda: dossier.custody.filter(what="changed in place").exists())
    row = dossier.custody.get(what="changed in place")
    assert row.data["files"] == ["shard-00001.bin: was changed in place after it was held"]
    node.kill()
    node.agent()
    work_until(lambda: dossier.items.filter(state="sealed").exists())
    assert dossier.items.get(state="sealed").source["step"] == 800
    old = dossier.items.exclude(state="sealed").get()
    assert (old.state, "committed with" in old.why) == ("missing", True)
    assert verify_custody(dossier) == []


def test_paths_outside_the_agents_roots_are_declined_and_said(
    node: Node, vault_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "node" / "secret.log").write_text("not yours")
    (node.disk / "link.log").symlink_to(tmp_path / "node" / "secret.log")
    told = {"kind": "rank_log", "uri": f"file://{node.disk}/link.log", "rank": 0, "node": "n1"}
    world.post(node.run, "artifact.available", data=told)
    contain(node.run)
    dossier = world.open_dossier(node.run, rules=world.policy("rank_logs"))
    world.age(dossier, 60)
    node.agent()
    work_until(lambda: states(dossier)["rank_logs"] == "missing")
    assert "under none of this agent's roots" in dossier.items.get().why
    assert not list(vault_dir.glob("objects/evidence/**/*"))


def test_a_snapshot_on_a_node_is_listed_held_and_kept_as_it_is(node: Node, vault_dir: Path) -> None:
    directory, table = world.write_checkpoint(node.disk / "snapshot", 999)
    (directory / "empty.bin").touch()
    told = {"kind": "halt_snapshot", "uri": directory.as_uri(), "node": "n1"}
    world.post(node.run, "artifact.available", data=told)
    dossier = world.open_dossier(node.run, rules=world.policy("halt_snapshot"))
    world.age(dossier, 60)
    node.agent()
    work_until(lambda: AgentTask.objects.filter(act="hold").exclude(done_at=None).exists())
    shutil.rmtree(directory)
    work_until(lambda: states(dossier)["halt_snapshot"] == "sealed")
    kept = stored(dossier.items.get())
    assert {str(entry["path"]): str(entry["sha256"]) for entry in table}.items() <= kept.items()
    assert text_of(dossier.items.get(), "empty.bin") == b""


SAMPLE = b'{"text": "what somebody wrote"}\n'


def offer_samples(node: Node, **files: bytes) -> None:
    for name, body in files.items():
        path = node.disk / f"{name}.jsonl"
        path.write_bytes(body)
        told = {"kind": "raw_samples", "uri": path.as_uri(), "node": "n1"}
        world.post(node.run, "artifact.available", data=told)


@pytest.mark.parametrize(
    "stage", [None, ("andon.agent.putting/Putter:put", 0), ("andon.agent.uploading:_encrypt", 1)]
)
def test_raw_samples_on_a_node_leave_it_encrypted_and_a_vault_officer_reads_them(
    stage: tuple[str, int] | None, node: Node, vault_dir: Path, bob: Person
) -> None:
    bodies = {"batch-1000": SAMPLE * 1000, "batch-1001": SAMPLE * 100_000}
    offer_samples(node, **bodies)
    dossier = world.open_dossier(node.run, rules=world.policy("raw_samples"))
    world.age(dossier, 60)
    if stage is not None:  # killed there, and started again
        agent = node.agent("--uploads", "1", stage=stage[0], after=stage[1])
        work_until(lambda: stopped_at(agent))
        node.kill()
    node.agent()
    work_until(lambda: states(dossier)["raw_samples"] == "sealed")
    kept = {one.path: one for one in StoredObject.objects.order_by("path")}
    assert list(kept) == ["00000-batch-1000.jsonl.encrypted", "00001-batch-1001.jsonl.encrypted"]
    # Not a plain byte anywhere but where the trainer wrote it.
    work_until(lambda: not list((node.state / "copies").iterdir()))
    for place in (vault_dir, node.state):
        assert not any(b"somebody" in file.read_bytes() for file in place.rglob("*") if file.is_file())
    Membership.objects.filter(person=bob).update(roles=[Role.VAULT_OFFICER])
    for (name, body), one in zip(bodies.items(), kept.values(), strict=True):
        assert name in one.path
        assert b"".join(read_samples(one=one, person=bob, why="which documents?")) == body
    assert dossier.seals.count() == 1
    assert verify_custody(dossier) == []


def test_raw_samples_that_a_node_does_not_have_are_named(node: Node, vault_dir: Path) -> None:
    offer_samples(node, one=SAMPLE, two=SAMPLE, three=SAMPLE)
    (node.disk / "two.jsonl").unlink()
    dossier = world.open_dossier(node.run, rules=world.policy("raw_samples"))
    world.age(dossier, 60)
    work_until(lambda: dossier.items.get().silent_since is not None)
    assert "3 files have not come: 00000-one.jsonl.encrypted, 00001-two" in dossier.items.get().why
    node.agent()
    work_until(lambda: states(dossier)["raw_samples"] == "missing")
    why = dossier.items.get().why
    assert f"n1: {node.disk}/two.jsonl: No such file or directory" in why
    assert not resume_gate(dossier).open
    assert verify_custody(dossier) == []


def test_an_agent_killed_in_an_upload_that_never_comes_back_leaves_nothing_half(
    node: Node, vault_dir: Path
) -> None:
    """Two files of two parts; one part is in the store when the node dies for good."""
    checkpoint(node, size=9 << 20, files=2)
    dossier = world.open_dossier(node.run, rules=world.policy(LAST_GOOD))
    agent = node.agent("--uploads", "1", stage="andon.agent.putting/Putter:put", after=2)
    work_until(lambda: stopped_at(agent))
    assert dossier.items.get().held_at is not None
    node.kill()
    shutil.rmtree(node.disk)
    Agent.objects.update(seen_at=timezone.now() - timedelta(minutes=5))
    AgentTask.objects.update(seen_at=None)
    Item.objects.update(deadline=timezone.now())
    work_until(lambda: states(dossier)[LAST_GOOD] == "missing")
    item = dossier.items.get()
    assert "have not come" in item.why or "has not come" in item.why
    assert "shard-00001.bin" in item.why
    gate = resume_gate(dossier)
    assert (gate.open, "missing: silent since" in gate.lines[0].says) == (False, True)
    # What came whole is kept and has its row; what was cut is not there, and its parts go.
    assert set(stored(item)) <= {"commit.json", "shard-00000.bin"}
    work_until(lambda: not list((vault_dir / "incoming" / "uploads").iterdir()))
    assert not dossier.custody.filter(what="sealed").exists()
    assert verify_custody(dossier) == []


def test_an_agent_killed_in_a_hold_that_never_comes_back_holds_nothing(node: Node, vault_dir: Path) -> None:
    checkpoint(node)
    dossier = world.open_dossier(node.run, rules=world.policy(LAST_GOOD))
    agent = node.agent(stage="andon.held_tree:_hold", after=2)
    work_until(lambda: stopped_at(agent))
    node.kill()
    Agent.objects.update(seen_at=timezone.now() - timedelta(minutes=5))
    AgentTask.objects.update(given_at=timezone.now() - timedelta(minutes=5))
    work_until(lambda: dossier.items.get().why.startswith("the agent of n1 has been silent since"))
    Item.objects.update(deadline=timezone.now())
    work_until(lambda: states(dossier)[LAST_GOOD] == "missing")
    item = dossier.items.get()
    assert (item.held_at, item.files, resume_gate(dossier).open) == (None, [], False)
    assert f"{node.disk}/step-00000900" in item.why
    assert not dossier.custody.filter(what="held").exists()
    # Back after all: nobody counts on what it had linked, so it goes; the checkpoint stays.
    node.agent()
    work_until(lambda: not list((node.disk / ".andon-holds").glob("*/*")))
    assert len(list((node.disk / "step-00000900").iterdir())) == 4
    assert verify_custody(dossier) == []
