"""Trees that agents hold on their nodes, and their end: who is asked to remove which, and what they said.

A tree goes when two people released its dossier, when a checkpoint that gave way no longer needs it, or, by
policy, when the vault has sealed its item. Only the node that made it is asked, until it answers: a silent
agent is shown as such and asked again when it is back. That a tree is gone is a custody row.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import connection, transaction
from django.db.models import Q, QuerySet
from django.utils import timezone

from evidence import custody
from evidence.agents.silence import seen_of, silent_since
from evidence.models import AgentTask, Dossier, Item
from runs.policies import policy_for
from runs.work import Lease, Payload, enqueue, handler

GONE = "evidence.tree_gone"  # kind of the work that writes down that a tree was removed
RELEASED = "its dossier was released by two people"
GAVE_WAY = "its checkpoint gave way to another"
SEALED = "the vault has sealed its item, and the policy keeps held trees until then"
# A node that could not remove a tree (its agent has no such root any more) is asked again after this.
ASK_AGAIN = timedelta(minutes=10)
_AT_ONCE = 3  # each names every file of its tree
_NAMED = 20  # paths in a custody row


def name_of(task: AgentTask) -> str:
    """Return the name of the tree of a hold: unique on a file system that many runs share."""
    return f"{task.item.dossier.uid}/{task.item_id}-{task.pk}"


# --- asking


def let_go(item: Item, why: str) -> int:
    """Ask for the removal of an item's trees, in the caller's transaction; returns of how many.

    Asking twice changes nothing. What an agent linked and nobody took, it removes by itself.
    """
    now = timezone.now()
    asked = 0
    for task in AgentTask.objects.filter(item=item, act=AgentTask.Act.HOLD).select_related("item__dossier"):
        by_node: dict[str, list[dict[str, Any]]] = {}
        for entry in task.files:
            if entry.get("tree"):
                by_node.setdefault(str(entry["node"]), []).append(
                    {name: entry.get(name) for name in ("path", "inode", "tree")}
                )
        AgentTask.objects.bulk_create(
            [
                AgentTask(
                    run_id=task.run_id,
                    item=item,
                    act=AgentTask.Act.RELEASE,
                    path=name_of(task),
                    uri=task.uri,
                    node=node,
                    files=files,
                    says=why,
                    made_at=now,
                )
                for node, files in sorted(by_node.items())
            ],
            ignore_conflicts=True,
        )
        asked += len(by_node)
    return asked


def let_go_all(dossier: Dossier) -> int:
    """Ask for the removal of every tree of a released dossier; returns how many are not gone yet."""
    held = AgentTask.objects.filter(item__dossier=dossier, act=AgentTask.Act.HOLD).exclude(files=[])
    for item in Item.objects.filter(pk__in=held.values("item")).defer("files", "source"):
        with transaction.atomic():
            let_go(item, RELEASED)
    return AgentTask.objects.filter(item__dossier=dossier, act=AgentTask.Act.RELEASE, done_at=None).count()


def let_go_sealed(item: Item) -> None:
    """Ask for the removal of a sealed item's trees where its run's policy keeps them only until then."""
    if not AgentTask.objects.filter(item=item, act=AgentTask.Act.HOLD).exists():
        return
    if policy_for(item.dossier.run_id).agent.held_trees == "until_sealed":
        let_go(item, SEALED)


def forget(item: Item, why: str) -> None:
    """Drop what nodes were asked for an item that came to name something else; its trees go too."""
    with transaction.atomic():
        let_go(item, why)
        AgentTask.objects.filter(item=item).exclude(act=AgentTask.Act.RELEASE).delete()


def wanted_of(run_id: int, node: str) -> QuerySet[AgentTask]:
    """Return the trees a node shall remove now: only its own; what it could not remove, only now and then."""
    return (
        AgentTask.objects.filter(
            Q(seen_at=None) | Q(cannot={}) | Q(seen_at__lt=timezone.now() - ASK_AGAIN),
            run_id=run_id,
            act=AgentTask.Act.RELEASE,
            node=node,
            done_at=None,
            arrived_at=None,
        )
        .select_related("item__dossier")
        .order_by("id")[:_AT_ONCE]
    )


def described(task: AgentTask) -> dict[str, Any]:
    """Return what an agent needs to remove exactly its own: where it said the tree lies, and its files."""
    return {
        "tree": task.path,
        "trees": sorted({str(entry["tree"]) for entry in task.files}),
        "files": [{"path": entry["path"], "inode": entry["inode"]} for entry in task.files],
    }


# --- answers


def arrived(task: AgentTask, files: int, left: Iterable[str]) -> None:
    """Take an agent's word that a tree of its own is gone, in the caller's transaction.

    Args:
        files: how many of the held names are gone.
        left: what lies there and was not put there by a hold; it stays.
    """
    if task.arrived_at is not None or task.done_at is not None:
        return  # the same word again
    task.arrived_at = task.seen_at = timezone.now()
    task.bytes_done, task.changed, task.cannot, task.trouble = files, sorted(left), {}, ""
    task.save(update_fields=["arrived_at", "seen_at", "bytes_done", "changed", "cannot", "trouble"])
    enqueue(kind=GONE, key=str(task.pk), payload={"task": task.pk})


@handler(GONE)
def gone(payload: Payload, lease: Lease) -> None:
    """Write down once that a node removed a tree: which, of how many files, why, and when it was asked."""
    task = AgentTask.objects.select_related("item__dossier__run").filter(pk=int(str(payload["task"]))).first()
    if task is None or task.arrived_at is None or task.done_at is not None:
        return
    with transaction.atomic():
        lease.guard()
        dossier = Dossier.objects.select_for_update(no_key=True, of=("self",)).get(pk=task.item.dossier_id)
        if not AgentTask.objects.filter(pk=task.pk, done_at=None).update(done_at=timezone.now()):
            return
        item = Item.objects.select_for_update(no_key=True).get(pk=task.item_id)
        custody.append(
            dossier,
            "tree removed",
            item_name=item.name,
            data={
                "by": f"agent of {task.node}",
                "tree": task.path,
                "uri": task.uri,
                "files": task.bytes_done,
                "why": task.says,
                "asked": custody.stamp(task.made_at),
                "said": custody.stamp(task.arrived_at),
            }
            | ({"left": task.changed[:_NAMED], "left_n": len(task.changed)} if task.changed else {}),
        )
        if task.node in item.protected_by.get("nodes", []):
            says = str(item.protected_by["says"]).partition("; gone from ")[0]
            nodes = sorted({task.node, *item.protected_by.get("gone_from", [])})
            item.protected_by |= {"gone_from": nodes, "says": f"{says}; gone from {', '.join(nodes)} since"}
            item.save(update_fields=["protected_by"])


def count(dossier: Dossier) -> int:
    """Return how many trees nodes still hold for a dossier and were not asked to remove."""
    return sum(1 for one in trees_of(dossier, limit=10_000) if one.asked_at is None)


# --- what pages say


@dataclass(frozen=True, slots=True)
class Tree:
    """One tree on one node. `says` is for people; `silent` when that node does not answer a removal."""

    item: Item
    node: str
    tree: str
    files: int
    asked_at: datetime | None
    gone_at: datetime | None
    says: str
    silent: bool = False


def trees_of(dossier: Dossier, limit: int = 100) -> list[Tree]:
    """Return the trees that nodes hold or held for a dossier, those that shall go and have not first."""
    asked = {
        (task.item_id, task.path, task.node): task
        for task in AgentTask.objects.filter(item__dossier=dossier, act=AgentTask.Act.RELEASE).defer("files")
    }
    seen = seen_of(dossier.run_id)
    items = {item.pk: item for item in Item.objects.filter(dossier=dossier).defer("files", "source")}
    made = []
    for item_id, node, tree, files in _rows(dossier):
        name = "/".join(tree.split("/")[-2:])
        task = asked.get((item_id, name, node))
        says, silent = ("held", False) if task is None else _says(task, seen)
        made.append(
            Tree(
                item=items[item_id],
                node=node,
                tree=tree,
                files=files,
                asked_at=None if task is None else task.made_at,
                gone_at=None if task is None else task.arrived_at,
                says=says,
                silent=silent,
            )
        )
    made.sort(key=lambda one: (one.gone_at is not None, one.asked_at is None, one.item.pk, one.node))
    return made[:limit]


def _rows(dossier: Dossier) -> list[tuple[int, str, str, int]]:
    """Return item, node, tree and number of files; counted by the database, a table may have 16,384 lines.

    A hold that was dropped lives on in the request to remove its tree.
    """
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT item_id, node, tree, max(files) FROM (SELECT task.item_id,"
            " coalesce(entry->>'node', task.node) AS node, entry->>'tree' AS tree, count(*) AS files"
            " FROM evidence_agenttask task JOIN evidence_item item ON item.id = task.item_id,"
            " jsonb_array_elements(task.files) entry"
            " WHERE item.dossier_id = %s AND task.act IN ('hold', 'release') AND entry->>'tree' <> ''"
            " GROUP BY task.id, task.item_id, 2, 3) counted GROUP BY item_id, node, tree",
            [dossier.pk],
        )
        return list(cursor.fetchall())


def _says(task: AgentTask, seen: Mapping[str, datetime]) -> tuple[str, bool]:
    if task.arrived_at is not None:
        left = f"; left alone what no hold made: {', '.join(task.changed[:3])}" if task.changed else ""
        return f"removed{left}", False
    since = silent_since(task, seen)
    if since is not None:
        heard = f"silent since {since:%d %b %H:%M:%S} UTC" if task.node in seen else "never heard"
        return f"asked to remove it, but its agent is {heard}; it is asked again when it is back", True
    if task.cannot:
        why = next(iter(task.cannot.values()))["says"]
        return f"could not be removed: {why}; it is asked again", False
    return "asked to remove it", False
