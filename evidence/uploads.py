"""What the node agents of a run ask and report; every write here changes tasks only (`evidence.agents`)."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db import connection, transaction
from django.db.models import Q
from django.utils import timezone

from andon import held_tree
from evidence import agents
from evidence.arrivals import ARRIVE
from evidence.gathering import committed_files
from evidence.hashing import part_bytes_for
from evidence.intake import Part, PartUrl, UploadGone, intake
from evidence.kinds import words
from evidence.models import Agent, AgentTask
from evidence.seals import FINAL
from runs.identity import KnownRun
from runs.models import Checkpoint
from runs.problems import Problem
from runs.work import enqueue

SEEN_WRITTEN_EVERY = timedelta(seconds=15)
GIVEN_FOR = timedelta(seconds=60)  # how long a hold that any node may do is one node's alone
TASKS_AT_ONCE = 100
IDLE_S, BUSY_S = 5.0, 1.0  # when an agent should ask again
MOST_HELD_FILES = 200_000
MOST_BYTES = 5 * 2**40  # the largest object S3 takes
# Masking can make a line longer; more than this much longer is not the end that was asked for.
TAIL_GROWS = 4


def wanted(run: KnownRun, node: str) -> dict[str, Any]:
    """Return what a node's agent should do now, holds first."""
    now = timezone.now()
    _note_seen(run.run_id, node)
    items = []
    for task in agents.offered_to(run.run_id, node)[:TASKS_AT_ONCE]:
        if not task.node and not _give(task, node):
            continue
        items.append(_described(task))
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


def _described(task: AgentTask) -> dict[str, Any]:
    item = task.item
    one: dict[str, Any] = {
        "id": str(task.pk),
        "act": str(task.act),
        "kind": item.kind,
        "says": f"{words(item.kind)}: {item.name}",
        "paths": [task.uri],
        "window": None if task.tail_bytes is None else {"tail_bytes": task.tail_bytes},
        "deadline": None if item.deadline is None else item.deadline.isoformat().replace("+00:00", "Z"),
    }
    if task.act == AgentTask.Act.HOLD:
        return one | {"tree": tree_name(task), "files": _left_to_hold(task)}
    return one | {
        "mask": task.masked,
        "bytes": task.bytes_total if task.known else None,
        "sha256": task.sha256 if task.known else None,
    }


def tree_name(task: AgentTask) -> str:
    """Return the name of the tree of a hold: unique on a file system that many runs share."""
    number = task.path.rstrip("/")
    return f"{task.item.dossier.uid}/{task.item_id}" + (f"-{number}" if number else "")


def _committed(task: AgentTask) -> list[dict[str, Any]]:
    checkpoint = Checkpoint.objects.filter(pk=task.item.source.get("checkpoint", 0)).first()
    return committed_files(checkpoint) if checkpoint is not None else []


def _left_to_hold(task: AgentTask) -> list[dict[str, Any]] | None:
    """Return the files nobody holds yet, None when only a node can list them."""
    have = {entry["path"] for entry in task.files}
    return [entry for entry in _committed(task) if entry["path"] not in have] or None


# --- holds


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

    Raises:
        Problem: 404 unknown task, 409 not this node's, 422 a file that was not asked for or is not as
            committed.
    """
    with transaction.atomic():
        task = _task(run, task_id, AgentTask.Act.HOLD, lock=True)
        _check_node(task, report.node)
        if report.changed:
            task.changed = sorted({*task.changed, *report.changed})[:1000]
        if task.done_at is None:
            _take_files(task, report)
        task.seen_at = timezone.now()
        task.save(update_fields=["files", "changed", "cannot", "trouble", "seen_at", "done_at"])
        if task.done_at is not None and task.item.state not in FINAL:
            enqueue(kind="evidence.hold", key=str(task.item_id), payload={"item": task.item_id})
    left = None if task.done_at is not None else len(_left_to_hold(task) or ())
    return {"id": str(task.pk), "state": "held" if task.done_at else "partly", "left": left or 0}


def _take_files(task: AgentTask, report: HoldReport) -> None:
    committed = {str(entry["path"]): entry for entry in _committed(task)}
    have = {entry["path"] for entry in task.files}
    if report.how != "none" and not report.tree.endswith(f"/{held_tree.TREES}/{tree_name(task)}"):
        raise Problem(422, "invalid", f"expected …/{held_tree.TREES}/{tree_name(task)}", field="tree")
    for index, entry in enumerate(report.files):
        _check_file(entry, committed, f"files[{index}]")
        if entry["path"] in have:
            continue
        have.add(entry["path"])
        task.files.append(entry | {"node": report.node, "tree": report.tree, "how": report.how})
    if len(task.files) > MOST_HELD_FILES:
        raise Problem(422, "invalid", f"at most {MOST_HELD_FILES} files in one place", field="files")
    if report.how == "none":
        task.trouble = report.says
    if not report.last:
        return
    lacking = [path for path in committed if path not in have]
    if not lacking and task.files:
        task.done_at = timezone.now()
    else:
        says = (
            f"{len(lacking)} of {len(committed)} files are not on this node" if committed else "it is empty"
        )
        task.cannot[report.node] = {"why": "not-here", "says": report.says or says}


def _check_file(entry: dict[str, Any], committed: dict[str, dict[str, Any]], where: str) -> None:
    try:
        held_tree.inside(entry["path"])
    except held_tree.HoldError as error:
        raise Problem(422, "invalid", error.says, field=f"{where}.path") from error
    if not committed:
        return
    asked = committed.get(entry["path"])
    if asked is None:
        raise Problem(
            422, "not-asked-for", f"{entry['path'][:200]!r} is none of its files", field=f"{where}.path"
        )
    for name in ("bytes", "sha256"):
        if asked.get(name) not in (None, "", entry[name]):
            raise Problem(
                409,
                "bytes-differ",
                f"{entry['path'][:200]}: committed with {name} {asked[name]}, held is {entry[name]}.",
                field=f"{where}.{name}",
            )


# --- uploads


@dataclass(frozen=True)
class Announced:
    """What an agent says it will send: who it is, size and digest of the whole, and parts by number."""

    node: str
    bytes_total: int
    sha256: str
    parts: list[Part]


def begin(run: KnownRun, task_id: str, told: Announced) -> tuple[AgentTask, set[int], list[PartUrl]]:
    """Begin an upload, or go on with it: which of the announced parts are there, and where to put the rest.

    Raises:
        Problem: 404 unknown task; 409 not this node's, done already, or other bytes than were committed;
            422 parts that do not fit the size.
        VaultError: the store does not answer.
    """
    task = _task(run, task_id, AgentTask.Act.UPLOAD)
    _check_node(task, told.node)
    _check_open(task)
    _check_size(task, told)
    store = intake()
    part_bytes = part_bytes_for(told.bytes_total)
    _check_parts(told, part_bytes)
    if not task.store_upload or (task.sha256, task.bytes_total) != (told.sha256, told.bytes_total):
        task = _start(task, told, part_bytes)
    try:
        have = store.have(task, told.parts)
    except UploadGone:
        AgentTask.objects.filter(pk=task.pk, store_upload=task.store_upload).update(store_upload="")
        task.store_upload = ""
        task = _start(task, told, part_bytes)
        have = store.have(task, told.parts)
    # Agents announce parts in order: what lies before these is there.
    first = min((part.n for part in told.parts), default=1)
    done = min(told.bytes_total, (first - 1 + len(have)) * part_bytes)
    AgentTask.objects.filter(pk=task.pk).update(
        seen_at=timezone.now(), given_to=told.node, given_at=timezone.now(), bytes_done=done
    )
    return task, have, store.urls(task, [part for part in told.parts if part.n not in have])


def _start(task: AgentTask, told: Announced, part_bytes: int) -> AgentTask:
    before = task.store_upload
    old = AgentTask.objects.get(pk=task.pk)
    task.bytes_total, task.sha256, task.part_bytes = told.bytes_total, told.sha256, part_bytes
    name = intake().begin(task)  # the store's word may take a while: outside of any transaction
    won = AgentTask.objects.filter(pk=task.pk, store_upload=before, done_at=None, arrived_at=None).update(
        store_upload=name,
        bytes_total=told.bytes_total,
        sha256=told.sha256,
        part_bytes=part_bytes,
        bytes_done=0,
        seen_at=timezone.now(),
    )
    if won:
        if before:
            intake().forget(old)  # other bytes of the same file were under way: a log that grew
        return _reload(task)
    task.store_upload = name
    intake().forget(task)
    return _reload(task)  # another agent began at the same moment; its upload is as good


def complete(run: KnownRun, task_id: str, told: Announced) -> str:
    """Take the word that all parts are sent; the worker then checks every byte. Returns a state.

    Raises:
        Problem: as `begin`; 409 `parts-missing` with their numbers.
    """
    task = _task(run, task_id, AgentTask.Act.UPLOAD)
    _check_node(task, told.node)
    parts = [[part.sha256, part.md5] for part in told.parts]
    if task.arrived_at is not None or task.done_at is not None:
        if (task.sha256, task.bytes_total, task.parts) != (told.sha256, told.bytes_total, parts):
            raise Problem(409, "other-bytes", "It was completed with other bytes.", field="sha256")
        return "stored" if task.done_at is not None else "checking"
    _check_open(task)
    if not task.store_upload or (task.sha256, task.bytes_total) != (told.sha256, told.bytes_total):
        raise Problem(
            409, "not-begun", "No upload of these bytes was begun: ask for its URLs.", field="sha256"
        )
    part_bytes = part_bytes_for(told.bytes_total)
    _check_parts(told, part_bytes)
    count = -(-told.bytes_total // part_bytes)
    if len(told.parts) != count:
        raise Problem(
            422,
            "invalid",
            f"{told.bytes_total} bytes are {count} parts, got {len(told.parts)}",
            field="parts",
        )
    try:
        missing = sorted({part.n for part in told.parts} - intake().have(task, told.parts))
    except UploadGone:
        missing = [part.n for part in told.parts]
        AgentTask.objects.filter(pk=task.pk, store_upload=task.store_upload).update(store_upload="")
    if missing:
        raise Problem(
            409,
            "parts-missing",
            f"{len(missing)} of {count} parts are not in the store: ask for their URLs and send them.",
            field="parts",
            extra={"missing": missing},
        )
    now = timezone.now()
    with transaction.atomic():
        AgentTask.objects.filter(
            pk=task.pk, store_upload=task.store_upload, arrived_at=None, done_at=None
        ).update(parts=parts, arrived_at=now, seen_at=now, bytes_done=told.bytes_total, trouble="")
        enqueue(kind=ARRIVE, key=str(task.pk), payload={"task": task.pk})
    return "checking"


def decline(run: KnownRun, task_id: str, *, node: str, why: str, says: str) -> None:
    """Take an agent's word that it cannot do a task (not here, outside its roots, other bytes).

    Raises:
        Problem: 404 unknown task, 409 not this node's.
    """
    with transaction.atomic():
        task = _task(run, task_id, lock=True)
        _check_node(task, node)
        if task.done_at is not None or task.arrived_at is not None:
            return  # a late or repeated word about what is there by now
        task.cannot[node] = {"why": why, "says": says}
        if task.given_to == node:
            task.given_to, task.given_at = "", None
        task.seen_at = timezone.now()
        task.save(update_fields=["cannot", "given_to", "given_at", "seen_at"])
        if task.item.state not in FINAL:
            enqueue(kind="evidence.item", key=str(task.item_id), payload={"item": task.item_id})


# --- checks


def _task(run: KnownRun, task_id: str, act: str = "", *, lock: bool = False) -> AgentTask:
    rows = AgentTask.objects.select_related("item__dossier", "run")
    if lock:
        rows = rows.select_for_update(of=("self",))
    number = int(task_id) if task_id.isascii() and task_id.isdigit() and len(task_id) < 19 else 0
    task = rows.filter(run_id=run.run_id, pk=number).first()
    if task is None or (act and task.act != act):
        # Also for a task of another run: whose it is, is nobody else's business.
        raise Problem(404, "unknown-task", "Nothing of that id is wanted of this run.", field="id")
    return task


def _reload(task: AgentTask) -> AgentTask:
    return AgentTask.objects.select_related("item__dossier", "run").get(pk=task.pk)


def _check_node(task: AgentTask, node: str) -> None:
    if not agents.may_do(task, node):
        raise Problem(
            409, "wrong-node", f"This is asked of node {task.node!r}, not of {node!r}.", field="node"
        )


def _check_open(task: AgentTask) -> None:
    if task.done_at is not None or task.arrived_at is not None or task.item.state in FINAL:
        raise Problem(409, "not-wanted", "It is not wanted any more: it is there, or its item has ended.")


def _check_size(task: AgentTask, told: Announced) -> None:
    if task.known and (task.bytes_total, task.sha256) != (told.bytes_total, told.sha256):
        raise Problem(
            409,
            "bytes-differ",
            f"Committed were {task.bytes_total} bytes with SHA-256 {task.sha256}, offered are "
            f"{told.bytes_total} with {told.sha256}.",
            field="sha256",
        )
    most = MOST_BYTES if task.tail_bytes is None else TAIL_GROWS * task.tail_bytes + 4096
    if told.bytes_total > most:
        raise Problem(422, "too-large", f"At most {most} bytes are wanted of it.", field="bytes")


def _check_parts(told: Announced, part_bytes: int) -> None:
    count = -(-told.bytes_total // part_bytes)
    for index, part in enumerate(told.parts):
        size = min(part_bytes, told.bytes_total - (part.n - 1) * part_bytes)
        if not 1 <= part.n <= count:
            raise Problem(422, "invalid", f"must be 1 to {count}", field=f"parts[{index}].n")
        if part.bytes_total != size:
            raise Problem(422, "invalid", f"part {part.n} has {size} bytes", field=f"parts[{index}].bytes")
