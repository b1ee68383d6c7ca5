"""Trees on nodes go when nobody needs them: removed by the agent that made them, said in the chain, once."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from django.db import transaction
from django.test import Client
from django.utils import timezone

from andon import held_tree
from andon.agent.holding import Holder
from andon.agent.places import Declined, Roots
from andon.agent.server import Server
from andon.agent.state import State
from andon.policy import AgentRules, EvidenceRule, Policy
from evidence.agents import node_trees
from evidence.custody import verify_custody
from evidence.models import Agent, AgentTask, Dossier, Item
from evidence.plan import reconsider
from evidence.retention.dates import close_dossier
from evidence.retention.release import approve_release, request_release
from runs.locks import lock_run
from runs.models import Checkpoint, Person
from runs.policies import set_policy
from tests.agents.beside import Node, stopped_at, work_until
from tests.agents.test_agent import checkpoint
from tests.agents.test_agents_api import Voice, is_problem
from tests.evidence import world
from tests.evidence.conftest import Clock

pytestmark = pytest.mark.django_db(transaction=True)

Release = Callable[[Dossier], None]
LAST_GOOD = "last_good_checkpoint"
FILES = 4  # three shards and the commit manifest


def frozen(node: Node) -> Dossier:
    """A dossier by hand, kept for a day, sealed from the node's disk."""
    checkpoint(node)
    rules = Policy(evidence=(EvidenceRule(LAST_GOOD, retain_days=1),))
    dossier = world.open_dossier(node.run, rules=rules)
    Dossier.objects.filter(pk=dossier.pk).update(url="")
    node.agent()
    work_until(lambda: dossier.items.get().state == "sealed")
    dossier.refresh_from_db()
    return dossier


@pytest.fixture
def release(clock: Clock, alice: Person, bob: Person) -> Release:
    """Close a dossier, let its date pass, and release it by two people."""

    def both(dossier: Dossier) -> None:
        close_dossier(dossier=dossier, person=bob, why="looked at")
        clock.pass_days(1.1)
        request = request_release(dossier=dossier, person=bob, why="the postmortem is final")
        approve_release(request=request, person=alice)

    return both


def trees(node: Node) -> list[Path]:
    return sorted((node.disk / held_tree.TREES).glob("*/*"))


def originals(node: Node, step: int = 900) -> int:
    return len(list((node.disk / f"step-{step:08d}").iterdir()))


def rows(dossier: Dossier) -> list[dict[str, object]]:
    return list(dossier.custody.filter(what="tree removed").values_list("data", flat=True))


def test_a_release_by_two_removes_the_tree_on_its_node(node: Node, vault_dir: Path, release: Release) -> None:
    dossier = frozen(node)
    (tree,) = trees(node)
    assert [one.says for one in node_trees.trees_of(dossier)] == ["held"]
    release(dossier)
    work_until(lambda: bool(rows(dossier)))
    assert not tree.exists()
    assert originals(node) == FILES
    (row,) = rows(dossier)
    assert (row["by"], row["files"], row["why"]) == ("agent of n1", FILES, node_trees.RELEASED)
    assert str(tree).endswith(str(row["tree"]))
    assert dossier.custody.get(what="released").data["trees_asked_of_nodes"] == 1
    (shown,) = node_trees.trees_of(dossier)
    assert (shown.says, shown.files, shown.node) == ("removed", FILES, "n1")
    assert "gone from n1" in dossier.items.get().protected_by["says"]
    assert verify_custody(dossier) == []
    work_until(lambda: not list((node.state / "holds").iterdir()))


# Where an agent is killed, and how many of its files lie in the tree then (None: the tree is gone).
STAGES = {
    "between two names": ("andon.tree_removal:_is_ours", 2, FILES - 2),
    "removed, and not said": ("andon.tree_removal:Removed", 0, None),
}


@pytest.mark.parametrize("stage", STAGES)
def test_an_agent_killed_while_it_removes_goes_on_and_it_is_one_row(
    stage: str, node: Node, vault_dir: Path, release: Release
) -> None:
    dossier = frozen(node)
    node.kill()
    (tree,) = trees(node)
    release(dossier)
    where, after, left = STAGES[stage]
    agent = node.agent(stage=where, after=after)
    work_until(lambda: stopped_at(agent))
    assert (len(list(tree.iterdir())) if tree.exists() else None) == left
    assert not rows(dossier)
    node.kill()
    node.agent()
    work_until(lambda: bool(rows(dossier)))
    assert trees(node) == []
    assert originals(node) == FILES
    assert [row["files"] for row in rows(dossier)] == [FILES]
    assert verify_custody(dossier) == []


def test_a_silent_agent_is_shown_and_asked_when_it_is_back(
    node: Node, vault_dir: Path, release: Release, client: Client, alice: Person
) -> None:
    dossier = frozen(node)
    node.kill()
    Agent.objects.update(seen_at=timezone.now() - timedelta(minutes=5))
    AgentTask.objects.update(seen_at=None)
    release(dossier)
    work_until(lambda: dossier.vault_requests.get().state == "done")  # the dossier does not wait for it
    (shown,) = node_trees.trees_of(dossier)
    assert shown.silent
    client.force_login(alice)
    page = client.get(f"/vault/{dossier.pk}").content.decode()
    assert "asked to remove it, but its agent is silent since" in page
    # Nobody else is asked, nor believed, although everybody knows the digests.
    other = Voice(node.run, "n2")
    assert other.wanted() == []
    task = AgentTask.objects.get(act="release")
    assert is_problem(other.post(f"/wanted/{task.pk}/released", {"files": 4}), 409, "wrong-node")
    stranger = Voice(world.make_run("other"), "n1")
    assert is_problem(stranger.post(f"/wanted/{task.pk}/released", {"files": 4}), 404, "unknown-task")
    assert len(trees(node)) == 1
    node.agent()
    work_until(lambda: bool(rows(dossier)))
    assert trees(node) == []


def test_what_an_agent_may_not_remove_is_said_and_asked_again(
    node: Node, vault_dir: Path, release: Release
) -> None:
    dossier = frozen(node)
    node.kill()
    release(dossier)
    (tree,) = trees(node)
    # Somebody put a link where the dossier's directory was: it leads to the same files.
    moved = tree.parent.with_name("moved")
    tree.parent.rename(moved)
    tree.parent.symlink_to(moved)
    node.agent()
    work_until(AgentTask.objects.filter(act="release").exclude(cannot={}).exists)
    (shown,) = node_trees.trees_of(dossier)
    assert "a link leads to it; it is asked again" in shown.says
    assert len(list((moved / tree.name).iterdir())) == FILES
    tree.parent.unlink()
    moved.rename(tree.parent)
    assert not node_trees.wanted_of(node.run.pk, "n1")  # not over and over
    AgentTask.objects.update(seen_at=timezone.now() - node_trees.ASK_AGAIN)
    work_until(lambda: bool(rows(dossier)))
    assert trees(node) == []


def test_by_policy_a_tree_goes_when_the_vault_has_its_item_but_nothing_of_anybody_else(
    node: Node, vault_dir: Path
) -> None:
    rules = Policy(agent=AgentRules(held_trees="until_sealed"))
    set_policy(run=node.run, document=rules.document(), person=None, why="disks are small")
    checkpoint(node)
    dossier = world.open_dossier(node.run, rules=world.policy(LAST_GOOD))
    agent = node.agent(stage="andon.agent.uploading:_digests")
    work_until(lambda: stopped_at(agent))
    (tree,) = trees(node)
    tree.chmod(0o755)
    (tree / "notes.txt").write_text("somebody's own")
    node.kill()
    node.agent()
    work_until(lambda: bool(rows(dossier)))
    assert [path.name for path in tree.iterdir()] == ["notes.txt"]
    assert (rows(dossier)[0]["why"], rows(dossier)[0]["left"]) == (node_trees.SEALED, ["notes.txt"])
    assert node_trees.trees_of(dossier)[0].says == "removed; left alone what no hold made: notes.txt"
    assert originals(node) == FILES


def test_the_tree_of_a_last_good_that_gave_way_goes_and_the_others_stay(node: Node, vault_dir: Path) -> None:
    checkpoint(node, 800)
    checkpoint(node, 900)
    dossier = world.open_dossier(node.run, rules=world.policy(LAST_GOOD))
    node.agent(stage="andon.agent.uploading:_digests")
    work_until(lambda: dossier.items.get().held_at is not None)
    shard = node.disk / "step-00000900" / "shard-00001.bin"
    shard.chmod(0o644)
    shard.write_bytes(b"!" * shard.stat().st_size)
    node.kill()
    node.agent()
    work_until(lambda: dossier.items.filter(state="sealed").exists() and bool(rows(dossier)))
    assert rows(dossier)[0]["why"] == node_trees.GAVE_WAY
    sealed = dossier.items.get(state="sealed")
    assert [one.item for one in node_trees.trees_of(dossier) if one.gone_at is None] == [sealed]
    assert len(trees(node)) == 1
    assert originals(node) == FILES
    assert verify_custody(dossier) == []


def move_first_bad(dossier: Dossier, step: int) -> None:
    with transaction.atomic():
        lock_run(dossier.run_id)
        reconsider(dossier, first_bad_step=step)


def test_a_tree_that_nobody_took_is_removed_by_the_agent_itself(node: Node, vault_dir: Path) -> None:
    """Killed before it said what it held; meanwhile the item came to name an older checkpoint."""
    checkpoint(node, 800)
    checkpoint(node, 900)
    dossier = world.open_dossier(node.run, rules=world.policy(LAST_GOOD))
    agent = node.agent(stage="andon.agent.holding/Holder:_report")
    work_until(lambda: stopped_at(agent))
    (tree,) = trees(node)
    node.kill()
    move_first_bad(dossier, 850)
    node.agent()
    work_until(lambda: dossier.items.filter(state="sealed").exists() and not tree.exists())
    item = dossier.items.get()
    assert (item.source["step"], item.state) == (800, "sealed")
    assert len(trees(node)) == 1
    assert (originals(node, 800), originals(node, 900)) == (FILES, FILES)


def test_files_of_another_checkpoint_are_never_noted_as_held(node: Node, vault_dir: Path) -> None:
    """Two checkpoints of the same names and sizes; an agent reports the one that is no longer named."""
    checkpoint(node, 800)
    checkpoint(node, 900)
    dossier = world.open_dossier(node.run, rules=world.policy(LAST_GOOD))
    voice = Voice(node.run)
    work_until(AgentTask.objects.exists)
    (task,) = voice.wanted()
    with transaction.atomic():
        lock_run(node.run.pk)
        Checkpoint.objects.filter(step=900).update(state="bad")
        reconsider(dossier)
    assert dossier.items.get().source["step"] == 800
    assert voice.wanted() == []  # what it was asked for is nobody's any more
    body = {"id": task["id"], "how": "links", "files": [], "tree": f"/x/.andon-holds/{task['tree']}"}
    assert is_problem(voice.post("/holds", body), 409, "not-wanted")
    assert not Item.objects.exclude(held_at=None).exists()


def test_only_the_tree_of_its_name_is_taken_for_one(node: Node, vault_dir: Path) -> None:
    """A server that lies gets nothing removed."""
    checkpoint(node)
    holder = Holder(Server(node.url, node.run.slug, node.secret, "n1"), Roots([node.disk]), State(node.state))
    uid = "0b4b3c1e-0000-4000-8000-000000000000"
    real = node.disk / "step-00000900"
    files = [{"path": path.name, "inode": path.stat().st_ino} for path in real.iterdir()]
    within = f"{node.disk}/{held_tree.TREES}"
    lies = [
        (f"{uid}/7-1", str(real)),
        (f"{uid}/7-1", f"{within}/../step-00000900"),
        (f"{uid}/7-1", f"{within}/{uid}/7-1/../../../step-00000900"),
        (f"{uid}/7-1", f"/etc/{held_tree.TREES}/{uid}/7-1"),
        ("step-00000900", f"{within}/step-00000900"),
        (f"{uid}/..", f"{within}/{uid}/.."),
    ]
    for name, where in lies:
        task = {"id": "1", "act": "release", "tree": name, "trees": [where], "files": files}
        with pytest.raises(Declined):
            holder.release(task | {"paths": [real.as_uri()]})
    assert originals(node) == FILES
