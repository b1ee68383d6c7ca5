"""What the worker asks of the agents on the nodes, and how it takes what they did into an item.

The server cannot read a node's disk. So it writes down what is wanted (`AgentTask`), the agents ask for
it and post the outcome (`evidence.agents.uploads`), and the worker that owns the item looks here again. An
agent's posts change tasks, never items: held and sealed stay the worker's words.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from django.db.models import Q, QuerySet
from django.utils import timezone

from andon import held_tree
from evidence.agents import node_trees
from evidence.agents.silence import SILENT_AFTER, seen_of, silence, silent_since
from evidence.holding.places import Held
from evidence.models import Agent, AgentTask, Item, StoredObject
from evidence.proof.seals import FINAL
from evidence.sources import NodeSource, SourceError, host_of
from runs.identity import KnownRun
from runs.models import Attempt
from runs.problems import Problem

_NAMED = 3  # files that a sentence names; the rest is counted


class OnNode(Exception):
    """Agents are at it, or silent: `since` is when the first was last heard, None while all answer."""

    def __init__(self, says: str, since: datetime | None, bytes_done: int = 0) -> None:
        super().__init__(says)
        self.says = says
        self.since = since
        self.bytes_done = bytes_done


def open_tasks(run_id: int) -> QuerySet[AgentTask]:
    """Return what is still wanted of a run's agents: not sent yet, for an item that is not final.

    The removal of a tree is wanted whatever became of its item.
    """
    tasks = AgentTask.objects.filter(run_id=run_id, done_at=None, arrived_at=None)
    return tasks.filter(Q(act=AgentTask.Act.RELEASE) | ~Q(item__state__in=FINAL))


def is_wanted(task: AgentTask) -> bool:
    """Return whether a task's item is open and still names the place of a hold."""
    item = task.item
    if item.state in FINAL:
        return False
    return task.act != AgentTask.Act.HOLD or "checkpoint" not in item.source or item.source["uri"] == task.uri


def count_wanted(run_id: int) -> int:
    """Return how many things are wanted of a run's agents."""
    return open_tasks(run_id).count()


# --- holding


def hold(item: Item, uri: str, *, node: str = "", prefix: str = "") -> AgentTask:
    """Return the finished hold of a place on a node; asked for here the first time.

    Args:
        node: the only one that has it, "" when any may.
        prefix: what the paths of its files begin with inside the item.

    Raises:
        OnNode: it is not held yet.
        SourceError: no node can hold it (permanent).
    """
    task = AgentTask.objects.filter(item=item, act=AgentTask.Act.HOLD, path=prefix).first()
    if task is not None and task.uri != uri:
        # The item came to name another checkpoint before this one was held.
        node_trees.forget(item, node_trees.GAVE_WAY)
        task = None
    if task is None:
        task = AgentTask.objects.create(
            run_id=item.dossier.run_id,
            item=item,
            act=AgentTask.Act.HOLD,
            path=prefix,
            uri=uri,
            node=node or host_of(uri),
            made_at=timezone.now(),
        )
    if task.done_at is None:
        _raise_if_nobody_can([task])
        raise wait_for([task])
    return task


def held_of(task: AgentTask) -> Held:
    """Return a finished hold: its files, each with the node that holds it, and what protects them."""
    nodes = sorted({str(entry["node"]) for entry in task.files})
    where = nodes[0] if len(nodes) == 1 else f"{len(nodes)} nodes"
    hows = {str(entry["how"]) for entry in task.files}
    if "none" in hows:
        why = task.trouble or "no hard links could be made beside it"
        return Held(task.files, {"how": "none", "says": f"{why} (on {where})", "nodes": nodes})
    how, kind = ("reflinks", "clones") if hows == {"reflinks"} else ("links", "hard links")
    says = task.says if len(nodes) == 1 else ""
    says = says or f"held by read-only {kind} in the same file system; root can still change them"
    return Held(task.files, {"how": how, "says": f"{says} (on {where})", "nodes": nodes})


def changed_since(item: Item) -> list[str]:
    """Return what agents saw change in place after they held it."""
    rows = AgentTask.objects.filter(item=item, act=AgentTask.Act.HOLD).values_list("changed", flat=True)
    return [str(one) for changed in rows for one in changed]


def source_of(entry: dict[str, Any], uri: str, base_name: str) -> NodeSource:
    """Return a held file as the source that its node will upload: from the held tree where there is one."""
    path = str(entry["path"])
    where = f"{uri.rstrip('/')}/{path}" if path else uri
    if entry.get("tree"):
        where = held_tree.place(entry["tree"], base_name, path).as_uri()
    return NodeSource(where, str(entry["node"]), bytes_total=int(entry["bytes"]))


# --- uploads


def ask(item: Item, wanted: Iterable[tuple[str, NodeSource, str]]) -> None:
    """Ask for files of an item: path inside the item, where it lies, its SHA-256 or ""."""
    have = {
        task.path: task
        for task in AgentTask.objects.filter(item=item, act=AgentTask.Act.UPLOAD).defer("parts")
    }
    now = timezone.now()
    fresh = []
    for path, source, sha256 in wanted:
        known = have.get(path)
        if known is None:
            fresh.append(
                AgentTask(
                    run_id=item.dossier.run_id,
                    item=item,
                    act=AgentTask.Act.UPLOAD,
                    path=path,
                    uri=source.uri,
                    node=source.node,
                    tail_bytes=source.tail_bytes,
                    masked=source.masked,
                    bytes_total=source.bytes_total if sha256 else None,
                    sha256=sha256,
                    known=bool(sha256),
                    made_at=now,
                )
            )
        elif known.tail_bytes != source.tail_bytes and known.seen_at is None:
            # Who is a suspect may change as long as nobody has begun to send.
            AgentTask.objects.filter(pk=known.pk, seen_at=None).update(tail_bytes=source.tail_bytes)
    AgentTask.objects.bulk_create(fresh, ignore_conflicts=True, batch_size=1000)


def still_waiting(item: Item) -> None:
    """Return when nothing of the item is on its way from a node.

    Raises:
        OnNode: something is.
        SourceError: a node says that it cannot give what only it has (permanent).
    """
    tasks = list(
        AgentTask.objects.filter(item=item, act=AgentTask.Act.UPLOAD, done_at=None).defer("parts", "files")
    )
    if not tasks:
        return
    _raise_if_nobody_can(tasks)
    stored = sum(StoredObject.objects.filter(item=item).values_list("bytes_total", flat=True))
    raise wait_for(tasks, stored + sum(task.bytes_done for task in tasks))


# --- who answers


def wait_for(tasks: Sequence[AgentTask], bytes_done: int = 0) -> OnNode:
    """Return what there is to say while these tasks of one run are open."""
    seen = seen_of(tasks[0].run_id)
    silent: list[tuple[datetime, AgentTask]] = []
    for task in tasks:
        since = None if task.arrived_at is not None else silent_since(task, seen)  # arrived: being checked
        if since is not None:
            silent.append((since, task))
    if not silent:
        trouble = next((task.trouble for task in tasks if task.trouble), "")
        return OnNode(trouble or _at_it(tasks), None, bytes_done)
    since, task = min(silent, key=lambda one: one[0])
    return OnNode(silence(task, seen) + _lacking(tasks), since, bytes_done)


def _lacking(tasks: Sequence[AgentTask]) -> str:
    """Return which files have not come, as the end of a sentence; a hold names its place already."""
    open_ = [one for one in tasks if one.act == AgentTask.Act.UPLOAD and one.arrived_at is None]
    paths = sorted(one.path for one in open_)
    if not paths:
        return ""
    more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
    count = "1 file has" if len(paths) == 1 else f"{len(paths)} files have"
    return f"; {count} not come: {', '.join(paths[:_NAMED])}{more}"


def _at_it(tasks: Sequence[AgentTask]) -> str:
    nodes = sorted({task.node or task.given_to for task in tasks} - {""})
    where = nodes[0] if len(nodes) == 1 else f"{len(nodes)} nodes"
    if any(task.act == AgentTask.Act.HOLD for task in tasks):
        return f"the agent of {where} is asked to hold it" if nodes else "agents are asked to hold it"
    return f"{len(tasks)} files are on their way from {where}" if nodes else "agents are asked for its files"


def _raise_if_nobody_can(tasks: Sequence[AgentTask]) -> None:
    """Raise SourceError where everybody who could do a task has said that they cannot: which, and why."""
    lost = [task for task in tasks if task.cannot and not task.files and _nobody_can(task)]
    if not lost:
        return
    whys = [f"{name}: {why['says']}" for task in lost for name, why in list(task.cannot.items())[:1]]
    count = f"{len(lost)} of {len(tasks)} files: " if len(tasks) > 1 else ""
    more = f"; and {len(whys) - _NAMED} more" if len(whys) > _NAMED else ""
    raise SourceError(f"{count}{'; '.join(whys[:_NAMED])}{more}", permanent=True)


def _nobody_can(task: AgentTask) -> bool:
    able = {task.node} if task.node else _nodes_of(task)
    return bool(able) and able <= set(task.cannot)


def _nodes_of(task: AgentTask) -> set[str]:
    """Return the nodes of the dossier's attempt, or else the agents that ever asked."""
    attempts = Attempt.objects.filter(run_id=task.run_id).order_by("-number")
    number = task.item.dossier.attempt
    attempt = (attempts if number is None else attempts.filter(number=number)).first()
    named = {
        str(one["node"])
        for one in (attempt.nodes if attempt else [])
        if isinstance(one, dict) and one.get("node")
    }
    return named or set(Agent.objects.filter(run_id=task.run_id).values_list("node", flat=True))


def may_do(task: AgentTask, node: str) -> bool:
    """Return whether a node may do a task: it is asked, or the asked one is silent and the bytes are known.

    Known digests make sure that another node on a shared file system gives the same bytes; a log of the
    same name on another node would be another log.
    """
    if task.node in ("", node):
        return True
    if not task.known:
        return False
    return _silent_nodes(task.run_id).filter(node=task.node).exists()


def _silent_nodes(run_id: int) -> QuerySet[Agent]:
    return Agent.objects.filter(run_id=run_id, seen_at__lt=timezone.now() - 2 * SILENT_AFTER)


def offered_to(run_id: int, node: str) -> QuerySet[AgentTask]:
    """Return the open tasks a node may do and has not declined, holds first, then by volatility."""
    silent = _silent_nodes(run_id).values("node")
    return (
        open_tasks(run_id)
        .exclude(act=AgentTask.Act.RELEASE)
        .filter(Q(node__in=("", node)) | Q(known=True, node__in=silent))
        .exclude(cannot__has_key=node)
        .select_related("item__dossier")
        .defer("parts")
        .order_by("act", "item__order", "id")
    )


def task_of(run: KnownRun, task_id: str, act: str = "", *, lock: bool = False) -> AgentTask:
    """Return a task of this run, locked until the transaction ends when `lock`.

    Raises:
        Problem: 404, also for a task of another run.
    """
    rows = AgentTask.objects.select_related("item__dossier", "run")
    if lock:
        rows = rows.select_for_update(of=("self",))
    number = int(task_id) if task_id.isascii() and task_id.isdigit() and len(task_id) < 19 else 0
    task = rows.filter(run_id=run.run_id, pk=number).first()
    if task is None or (act and task.act != act):
        # Also for a task of another run: whose it is, is nobody else's business.
        raise Problem(404, "unknown-task", "Nothing of that id is wanted of this run.", field="id")
    return task


def check_node(task: AgentTask, node: str) -> None:
    """Raise a Problem (409) unless this node may do the task."""
    if not may_do(task, node):
        raise Problem(
            409, "wrong-node", f"This is asked of node {task.node!r}, not of {node!r}.", field="node"
        )
