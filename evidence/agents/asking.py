"""What a node's agent is told when it asks what is wanted of it: holds, uploads, trees to remove."""

import base64
from datetime import timedelta
from typing import Any

from django.db import connection
from django.db.models import Q
from django.utils import timezone

from evidence.agents import node_trees, node_work
from evidence.collecting import samples
from evidence.collecting.gathering import committed_files
from evidence.collecting.outcomes import Nothing
from evidence.kinds import words
from evidence.models import Agent, AgentTask
from runs.identity import KnownRun
from runs.models import Checkpoint

SEEN_WRITTEN_EVERY = timedelta(seconds=15)
GIVEN_FOR = timedelta(seconds=60)  # how long a hold that any node may do is one node's alone
TASKS_AT_ONCE = 100
IDLE_S, BUSY_S = 5.0, 1.0  # when an agent should ask again


def wanted(run: KnownRun, node: str) -> dict[str, Any]:
    """Return what a node's agent should do now: holds first, and trees to remove last."""
    now = timezone.now()
    _note_seen(run.run_id, node)
    items = []
    for task in node_work.offered_to(run.run_id, node)[:TASKS_AT_ONCE]:
        if not task.node and not _give(task, node):
            continue
        one = _described(task)
        if one is not None:
            items.append(one)
    items += [_about(task) | node_trees.described(task) for task in node_trees.wanted_of(run.run_id, node)]
    return {
        "items": items,
        "server_time": int(now.timestamp()),
        "max_mb_per_s": run.policy.agent.upload_mb_per_s,
        "ask_again_s": BUSY_S if items else IDLE_S,
    }


def _note_seen(run_id: int, node: str) -> None:
    now = timezone.now()
    fresh = Agent.objects.filter(run_id=run_id, node=node, seen_at__gt=now - SEEN_WRITTEN_EVERY)
    if not fresh.exists():
        with connection.cursor() as cursor:
            cursor.execute(
                "INSERT INTO evidence_agent (run_id, node, seen_at) VALUES (%s, %s, %s)"
                " ON CONFLICT (run_id, node) DO UPDATE SET seen_at = EXCLUDED.seen_at",
                [run_id, node, now],
            )


def _give(task: AgentTask, node: str) -> bool:
    """Give what any node may do to one at a time, until somebody reported about it.

    On a shared file system a thousand agents would otherwise make the same links at once; where each node
    has a part of the files, the first report opens it to all.
    """
    now = timezone.now()
    if task.act == AgentTask.Act.HOLD and (task.files or task.cannot):
        return True
    free = Q(given_to="") | Q(given_to=node) | Q(given_at__lt=now - GIVEN_FOR)
    alive = Q(seen_at=None) | Q(seen_at__lt=now - GIVEN_FOR) | Q(given_to=node)
    rows = AgentTask.objects.filter(free, alive, pk=task.pk, done_at=None)
    return bool(rows.update(given_to=node, given_at=now))


def _about(task: AgentTask) -> dict[str, Any]:
    item = task.item
    return {
        "id": str(task.pk),
        "act": str(task.act),
        "kind": item.kind,
        "says": f"{words(item.kind)}: {item.name}",
        "paths": [task.uri],
        "window": None if task.tail_bytes is None else {"tail_bytes": task.tail_bytes},
        "deadline": None if item.deadline is None else item.deadline.isoformat().replace("+00:00", "Z"),
    }


def _described(task: AgentTask) -> dict[str, Any] | None:
    """Return a hold or an upload in the words of the wire; None for one that must not be done any more."""
    one = _about(task)
    if not node_work.is_wanted(task):
        return None
    if task.act == AgentTask.Act.HOLD:
        return one | {"tree": node_trees.name_of(task), "files": left_to_hold(task) or None}
    if task.item.kind == "raw_samples":
        # Another act, not a word beside it: an agent that cannot encrypt must not send them as they are.
        try:
            public = samples.public_key(task.item.dossier)
        except Nothing:
            return None
        return one | {"act": "encrypt", "public_key": base64.b64encode(public).decode()}
    return one | {
        "mask": task.masked,
        "bytes": task.bytes_total if task.known else None,
        "sha256": task.sha256 if task.known else None,
    }


def committed(task: AgentTask) -> list[dict[str, Any]]:
    """Return the files that were committed where a hold is wanted, [] when only a node can list them."""
    checkpoint = Checkpoint.objects.filter(pk=task.item.source.get("checkpoint", 0)).first()
    return committed_files(checkpoint) if checkpoint is not None else []


def left_to_hold(task: AgentTask) -> list[dict[str, Any]]:
    """Return the committed files that nobody holds yet."""
    have = {entry["path"] for entry in task.files}
    return [entry for entry in committed(task) if entry["path"] not in have]
