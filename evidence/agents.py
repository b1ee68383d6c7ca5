"""What the worker asks of the agents on the nodes, and how it takes what they did into an item.

The server cannot read a node's disk. So it writes down what is wanted (`AgentTask`), the agents ask for
it and post the outcome (`evidence.uploads`), and the worker that owns the item looks here again. An
agent's posts change tasks, never items: held and sealed stay the worker's words.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Q, QuerySet
from django.utils import timezone

from andon import held_tree
from evidence.holding import Held
from evidence.models import Agent, AgentTask, Item, StoredObject
from evidence.seals import FINAL
from evidence.sources import NodeSource, SourceError, host_of
from runs.models import Attempt

# An agent asks every few seconds; one that missed several turns is silent.
SILENT_AFTER = timedelta(seconds=30)


class OnNode(Exception):
    """Agents are at it, or silent: `since` is when the first was last heard, None while all answer."""

    def __init__(self, says: str, since: datetime | None, bytes_done: int = 0) -> None:
        super().__init__(says)
        self.says = says
        self.since = since
        self.bytes_done = bytes_done


def open_tasks(run_id: int) -> QuerySet[AgentTask]:
    """Return what is still wanted of a run's agents: not sent yet, for an item that is not final."""
    return AgentTask.objects.filter(run_id=run_id, done_at=None, arrived_at=None).exclude(
        item__state__in=FINAL
    )


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
        AgentTask.objects.filter(item=item).delete()
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
    says = f"held by read-only {kind} in the same file system, by the agent of {where}; root can change them"
    return Held(task.files, {"how": how, "says": says, "nodes": nodes})


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
    run_id = tasks[0].run_id
    now = timezone.now()
    seen = dict(Agent.objects.filter(run_id=run_id).values_list("node", "seen_at"))
    silent: list[tuple[datetime, AgentTask]] = []
    for task in tasks:
        if task.arrived_at is not None:
            continue  # the server is checking it
        heard = _heard(task, seen)
        if heard is None or now - heard > SILENT_AFTER:
            silent.append((heard or task.made_at, task))
    if not silent:
        trouble = next((task.trouble for task in tasks if task.trouble), "")
        return OnNode(trouble or _at_it(tasks), None, bytes_done)
    since, task = min(silent, key=lambda one: one[0])
    return OnNode(_silence(task, seen), since, bytes_done)


def _heard(task: AgentTask, seen: dict[str, datetime]) -> datetime | None:
    """Return when an agent that can do the task was last heard, None for never."""
    node = task.node or task.given_to
    if node:
        moments = [seen.get(node), task.seen_at]
    else:
        moments = [at for name, at in seen.items() if name not in task.cannot]
    return max((at for at in moments if at is not None), default=None)


def _at_it(tasks: Sequence[AgentTask]) -> str:
    nodes = sorted({task.node or task.given_to for task in tasks} - {""})
    where = nodes[0] if len(nodes) == 1 else f"{len(nodes)} nodes"
    if any(task.act == AgentTask.Act.HOLD for task in tasks):
        return f"the agent of {where} is asked to hold it" if nodes else "agents are asked to hold it"
    return f"{len(tasks)} files are on their way from {where}" if nodes else "agents are asked for its files"


def _silence(task: AgentTask, seen: dict[str, datetime]) -> str:
    node = task.node or task.given_to
    if node and node in seen:
        return f"the agent of {node} has been silent since {seen[node]:%H:%M:%S} UTC ({task.uri})"
    if task.cannot:
        name, why = next(iter(task.cannot.items()))
        return f"no agent that answered has {task.uri}; {name} says: {why['says']}"
    whose = f"the agent of {node}" if node else "no agent of this run"
    never = "has never asked" if node else "has asked"
    return (
        f"{task.uri}: is under none of ANDON_SOURCE_ROOTS, this server may not read it, and {whose} {never} "
        "what is wanted: run `andon agent` there"
    )


def _raise_if_nobody_can(tasks: Sequence[AgentTask]) -> None:
    """Raise SourceError where everybody who could do a task has said that they cannot."""
    for task in tasks:
        if not task.cannot or task.files:
            continue
        able = {task.node} if task.node else _nodes_of(task)
        if able and able <= set(task.cannot):
            name, why = next(iter(task.cannot.items()))
            raise SourceError(f"{name}: {why['says']}", permanent=True)


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
        .filter(Q(node__in=("", node)) | Q(known=True, node__in=silent))
        .exclude(cannot__has_key=node)
        .select_related("item__dossier")
        .defer("parts")
        .order_by("act", "item__order", "id")
    )
