"""Uploads of the node agents; every write here changes tasks only (`evidence.agents.node_work`)."""

from dataclasses import dataclass

from django.db import transaction
from django.utils import timezone

from evidence.agents.arrivals import ARRIVE
from evidence.agents.node_work import check_node, task_of
from evidence.hashing import part_bytes_for
from evidence.models import AgentTask
from evidence.proof.seals import FINAL
from evidence.stores.intake import Part, PartUrl, UploadGone, intake
from runs.identity import KnownRun
from runs.problems import Problem
from runs.work import enqueue

MOST_BYTES = 5 * 2**40  # the largest object S3 takes
# Masking can make a line longer; more than this much longer is not the end that was asked for.
TAIL_GROWS = 4


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
    task = task_of(run, task_id, AgentTask.Act.UPLOAD)
    check_node(task, told.node)
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
    task = task_of(run, task_id, AgentTask.Act.UPLOAD)
    check_node(task, told.node)
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
        task = task_of(run, task_id, lock=True)
        check_node(task, node)
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


def _reload(task: AgentTask) -> AgentTask:
    return AgentTask.objects.select_related("item__dossier", "run").get(pk=task.pk)


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
