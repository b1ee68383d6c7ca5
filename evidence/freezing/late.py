"""What is offered after an item ended without it: a process that hangs gives its stacks when it is killed.

Runs inside the transaction that stored the offer: rows only.
"""

from datetime import timedelta

from django.utils import timezone

from evidence import custody
from evidence.kinds import ARTIFACT_KINDS
from evidence.models import Dossier, Item
from evidence.plan import START
from runs.models import Run
from runs.work import enqueue

# Of these every file that only comes later is worth an item that was given up, or a second one.
_LATE = frozenset({"halt_snapshot", "flight_recorder", "rank_logs", "hardware_records"})
TRIED_FOR = timedelta(hours=1)  # from then on, as an item of the plan is by default
_SECOND = ", what came later"  # of an item that was sealed already: a seal is never opened again


def offered(run: Run, attempt: int, artifact_kind: str, uri: str) -> None:
    """Open again what was missing for want of such a file, in the open dossiers of an attempt.

    Args:
        uri: of a file that was offered; one that is known already opens nothing.
    """
    kind = ARTIFACT_KINDS.get(artifact_kind)
    if kind not in _LATE:
        return
    ended = Item.objects.filter(
        dossier__run=run,
        dossier__attempt=attempt,
        dossier__closed_at=None,
        kind=kind,
        state__in=(Item.State.MISSING, Item.State.SEALED),
    )
    for dossier_id in sorted(set(ended.values_list("dossier", flat=True))):
        dossier = Dossier.objects.select_for_update(no_key=True, of=("self",)).get(pk=dossier_id)
        if _open_again(dossier, kind, uri):
            enqueue(kind=START, key=str(dossier.pk), payload={"dossier": dossier.pk})


def _open_again(dossier: Dossier, kind: str, uri: str) -> bool:
    mine = Item.objects.select_for_update(no_key=True).filter(dossier=dossier, kind=kind).order_by("pk")
    items = list(mine.defer("files"))
    if any(one["uri"] == uri for item in items for one in item.source.get("artifacts", [])):
        return False
    missing = [item for item in items if item.state == Item.State.MISSING]
    for item in missing:
        item.state, item.why = Item.State.PLANNED, f"offered after it was missing ({item.why})"
        if item.deadline is not None:
            item.deadline = timezone.now() + TRIED_FOR
        item.save(update_fields=["state", "why", "deadline"])
        custody.append(dossier, "offered late", item_name=item.name, data={"kind": kind})
    # Logs go on being offered while ranks leave; of a recorder each later file is another stack.
    if missing or kind != "flight_recorder" or any(item.state != Item.State.SEALED for item in items):
        return bool(missing)
    last = items[-1]
    second = Item.objects.create(
        dossier=dossier,
        kind=kind,
        name=f"{items[0].name}{_SECOND}" if len(items) == 1 else f"{items[0].name}{_SECOND} ({len(items)})",
        required=False,
        order=last.order,
        lock=last.lock,
        retain_days=last.retain_days,
        retain_until=last.retain_until,
        deadline=timezone.now() + TRIED_FOR,
    )
    custody.append(dossier, "offered late", item_name=second.name, data={"kind": kind})
    return True
