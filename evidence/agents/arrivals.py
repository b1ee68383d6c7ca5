"""The end of an upload: the server reads what arrived once, and only then it is an object of the vault."""

from collections.abc import Sequence

from django.db import transaction
from django.utils import timezone

from evidence.models import AgentTask, StoredObject
from evidence.proof import leftovers
from evidence.proof.seals import FINAL
from evidence.stores.intake import Part, intake
from evidence.vault import BytesDiffer, VaultError
from runs.work import Lease, Payload, Retry, enqueue, handler

ARRIVE = "evidence.arrive"


@handler(ARRIVE)
def arrive(payload: Payload, lease: Lease) -> None:
    """Make the parts of one upload an object, verified and locked, and ring for its item.

    Nobody's word is taken for the bytes: sizes and digests of the parts were checked by the store, and
    the whole is read back here against the digest that was announced (or committed).
    """
    task = (
        AgentTask.objects.select_related("item__dossier", "run").filter(pk=int(str(payload["task"]))).first()
    )
    if task is None or task.done_at is not None or task.arrived_at is None:
        return
    store = intake()
    if task.item.state in FINAL:
        # Too late: what is stored now would be locked and counted on by nobody.
        says = "it arrived after its item had ended"
        AgentTask.objects.filter(pk=task.pk).update(done_at=timezone.now(), trouble=says)
        store.forget(task)
        return
    parts = parts_of(task)
    try:
        stored = store.take(task, parts)
    except BytesDiffer as error:
        _send_again(task, lease, error.says)
        return
    except VaultError as error:
        AgentTask.objects.filter(pk=task.pk).update(trouble=f"vault: {error.says}"[:500])
        raise Retry(None, error.says) from error
    now = timezone.now()
    with transaction.atomic():
        lease.guard()
        AgentTask.objects.filter(pk=task.pk).update(done_at=now, trouble="")
        item = type(task.item).objects.select_for_update(no_key=True).get(pk=task.item_id)
        if item.state in FINAL:
            # It ended meanwhile: a sealed one must not gain an object that no seal names.
            leftovers.ask(task.item.dossier)
        else:
            StoredObject.objects.update_or_create(item=item, path=task.path, defaults=stored.row(now))
        uploads = AgentTask.objects.filter(item=item, act=AgentTask.Act.UPLOAD)
        others = uploads.filter(done_at=None).exclude(pk=task.pk)
        if item.state not in FINAL and not others.exists():
            enqueue(kind="evidence.item", key=str(item.pk), payload={"item": item.pk})
    store.forget(task)


def parts_of(task: AgentTask) -> Sequence[Part]:
    """Return the parts as they were announced when the upload was completed."""
    total, size = int(task.bytes_total or 0), int(task.part_bytes or 1)
    return [
        Part(n, min(size, total - (n - 1) * size), str(sha256), str(md5))
        for n, (sha256, md5) in enumerate(task.parts, start=1)
    ]


def _send_again(task: AgentTask, lease: Lease, says: str) -> None:
    with transaction.atomic():
        lease.guard()
        AgentTask.objects.filter(pk=task.pk).update(
            arrived_at=None, parts=[], store_upload="", bytes_done=0, trouble=f"sent again: {says}"[:500]
        )
    intake().forget(task)
