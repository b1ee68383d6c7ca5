"""What agents report of the trees on their nodes (see `node_work`): made, changed in place, removed."""

from dataclasses import dataclass
from typing import Any

from django.db import transaction
from django.utils import timezone

from andon import held_tree
from evidence.agents import node_trees, node_work
from evidence.agents.asking import committed, left_to_hold
from evidence.agents.node_work import check_node, task_of
from evidence.models import AgentTask
from evidence.proof.seals import FINAL
from runs.identity import KnownRun
from runs.problems import Problem
from runs.work import enqueue

MOST_HELD_FILES = 200_000


@dataclass(frozen=True)
class HoldReport:
    """What an agent holds of a place. `last`: it has looked at everything that it was asked for."""

    node: str
    how: str
    says: str
    tree: str
    files: list[dict[str, Any]]
    last: bool
    changed: list[str]


def report_hold(run: KnownRun, task_id: str, report: HoldReport) -> dict[str, Any]:
    """Take (a piece of) a hold report. The same report twice changes nothing.

    The answer says whether this node's tree is counted on (`keep`): one that is not, its agent removes.

    Raises:
        Problem: 404 unknown task, 409 not this node's, 422 a file that was not asked for or is not as
            committed.
    """
    with transaction.atomic():
        task = task_of(run, task_id, AgentTask.Act.HOLD, lock=True)
        check_node(task, report.node)
        if task.done_at is None and not node_work.is_wanted(task):
            raise Problem(409, "not-wanted", "Its item has ended, or came to name another checkpoint.")
        if report.changed:
            task.changed = sorted({*task.changed, *report.changed})[:1000]
        if task.done_at is None:
            _take_files(task, report)
        task.seen_at = timezone.now()
        task.save(update_fields=["files", "changed", "cannot", "trouble", "says", "seen_at", "done_at"])
        if task.done_at is not None and task.item.state not in FINAL:
            enqueue(kind="evidence.hold", key=str(task.item_id), payload={"item": task.item_id})
    left = 0 if task.done_at is not None else len(left_to_hold(task))
    return {
        "id": str(task.pk),
        "state": "held" if task.done_at else "partly",
        "left": left,
        "keep": _counts_on(task, report.node),
    }


def _counts_on(task: AgentTask, node: str) -> bool:
    if any(entry["node"] == node and entry["tree"] for entry in task.files):
        return True
    return task.done_at is None and node not in task.cannot


def _take_files(task: AgentTask, report: HoldReport) -> None:
    asked = {str(entry["path"]): entry for entry in committed(task)}
    have = {entry["path"] for entry in task.files}
    name = f"{held_tree.TREES}/{node_trees.name_of(task)}"
    if report.how != "none" and not report.tree.endswith(f"/{name}"):
        raise Problem(422, "invalid", f"expected …/{name}", field="tree")
    for index, entry in enumerate(report.files):
        _check_file(entry, asked, f"files[{index}]")
        if entry["path"] in have:
            continue
        have.add(entry["path"])
        task.files.append(entry | {"node": report.node, "tree": report.tree, "how": report.how})
    if len(task.files) > MOST_HELD_FILES:
        raise Problem(422, "invalid", f"at most {MOST_HELD_FILES} files in one place", field="files")
    if report.how == "none":
        task.trouble = report.says
    elif report.files:
        task.says = report.says
    if not report.last:
        return
    lacking = [path for path in asked if path not in have]
    if not lacking and task.files:
        task.done_at = timezone.now()
    else:
        says = f"{len(lacking)} of {len(asked)} files are not on this node" if asked else "it is empty"
        task.cannot[report.node] = {"why": "not-here", "says": report.says or says}


def _check_file(entry: dict[str, Any], asked: dict[str, dict[str, Any]], where: str) -> None:
    try:
        held_tree.inside(entry["path"])
    except held_tree.HoldError as error:
        raise Problem(422, "invalid", error.says, field=f"{where}.path") from error
    if not asked:
        return
    one = asked.get(entry["path"])
    if one is None:
        raise Problem(
            422, "not-asked-for", f"{entry['path'][:200]!r} is none of its files", field=f"{where}.path"
        )
    for name in ("bytes", "sha256"):
        if one.get(name) not in (None, "", entry[name]):
            raise Problem(
                409,
                "bytes-differ",
                f"{entry['path'][:200]}: committed with {name} {one[name]}, held is {entry[name]}.",
                field=f"{where}.{name}",
            )


def report_release(run: KnownRun, task_id: str, *, node: str, files: int, left: list[str]) -> None:
    """Take an agent's word that it removed a tree of its own. The same word twice changes nothing.

    Raises:
        Problem: 404 unknown task, 409 not this node's.
    """
    with transaction.atomic():
        task = task_of(run, task_id, AgentTask.Act.RELEASE, lock=True)
        check_node(task, node)
        node_trees.arrived(task, files, left)
