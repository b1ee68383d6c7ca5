"""Since when the agents that could do something were not heard, and how pages say so."""

from collections.abc import Mapping
from datetime import datetime, timedelta

from django.utils import timezone

from evidence.models import Agent, AgentTask

# An agent asks every few seconds; one that missed several turns is silent.
SILENT_AFTER = timedelta(seconds=30)


def seen_of(run_id: int) -> dict[str, datetime]:
    """Return when each node's agent last asked what is wanted of it."""
    return dict(Agent.objects.filter(run_id=run_id).values_list("node", "seen_at"))


def silent_since(task: AgentTask, seen: Mapping[str, datetime]) -> datetime | None:
    """Return since when nobody who can do a task was heard, None while somebody is."""
    heard = _heard(task, seen)
    if heard is not None and timezone.now() - heard <= SILENT_AFTER:
        return None
    return heard or task.made_at


def _heard(task: AgentTask, seen: Mapping[str, datetime]) -> datetime | None:
    """Return when an agent that can do the task was last heard, None for never."""
    node = task.node or task.given_to
    if node:
        moments = [seen.get(node), task.seen_at]
    else:
        moments = [at for name, at in seen.items() if name not in task.cannot]
    return max((at for at in moments if at is not None), default=None)


def silence(task: AgentTask, seen: Mapping[str, datetime]) -> str:
    """Return what there is to say of a task that nobody answers."""
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
