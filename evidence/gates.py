"""The two gates: may this run go on, and may this object be deleted?"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypedDict

from django.db import transaction
from django.db.models import F, Q
from django.utils import timezone

from evidence.kinds import CHECKPOINT_KINDS
from evidence.models import DeletionAllow, Dossier, GateUse, Hold, Item
from evidence.uris import UnusableUri, ancestors, covers, normalise, spellings
from runs.directives import current
from runs.locks import lock_run
from runs.models import Checkpoint, Run
from runs.reading import kept

# A checkpoint above this size opens the gate once it is held with known digests: hashing 5.7 TB
# first would idle a fleet for hours. Everything else must be sealed.
HELD_IS_ENOUGH_ABOVE_BYTES = 100 * 10**9
ALLOW_FOR = timedelta(minutes=10)
# A run that did not ask the deletion gate for this long may be deleting without it.
GATE_USED_WITHIN = timedelta(days=7)
_NOTE_USE_EVERY = timedelta(minutes=1)
_HOLDS_PER_QUERY = 200


@dataclass(frozen=True)
class GateLine:
    """One required item as the resume gate sees it. `says` is what a person reads."""

    item_id: int
    name: str
    kind: str
    state: str
    satisfied: bool
    waived: bool
    says: str


@dataclass(frozen=True)
class Gate:
    """Open when every line is satisfied. A dossier without required items is open."""

    open: bool
    lines: tuple[GateLine, ...]

    @property
    def lacking(self) -> tuple[GateLine, ...]:
        """Return the lines that keep it shut."""
        return tuple(line for line in self.lines if not line.satisfied)


class Answer(TypedDict):
    """One answer of the deletion gate; `until` is RFC 3339, `dossier` is the id of one that holds it."""

    uri: str
    allow: bool
    until: str | None
    dossier: str | None
    reason: str


def resume_gate(dossier: Dossier) -> Gate:
    """Return whether the evidence lets the run go on, with one line per required item."""
    asks = uses_gate(dossier.run_id)
    lines = tuple(_line(item, asks) for item in required_items(dossier))
    return Gate(open=all(line.satisfied for line in lines), lines=lines)


def required_items(dossier: Dossier) -> list[Item]:
    """Return the items that the resume gate needs, without their files; annotated with `source_uri`."""
    items = Item.objects.filter(dossier=dossier, required=True)
    return kept(
        ("required", dossier.pk),
        lambda: list(items.defer("files", "source").annotate(source_uri=F("source__uri"))),
    )


def held_is_enough(item: Item) -> bool:
    """Return whether `held` with known digests opens the gate for this item (a very large checkpoint)."""
    return (
        item.kind in CHECKPOINT_KINDS
        and (item.bytes_total or 0) > HELD_IS_ENOUGH_ABOVE_BYTES
        and item.held_at is not None
        and bool(item.digest)
    )


def uses_gate(run_id: int, now: datetime | None = None) -> bool:
    """Return whether a run's checkpoint manager asks before it deletes, as far as it was ever seen to."""
    since = (now or timezone.now()) - GATE_USED_WITHIN
    uses = GateUse.objects.filter(run_id=run_id, asked_at__gte=since)
    return kept(("gate", run_id), uses.exists)


def unprotected(item: Item, *, asks: bool) -> str:
    """Return "not protected until copied" where neither a lock nor the gate keeps a checkpoint's bytes.

    "" when something does, when its bytes are in the vault, and for what is no stored checkpoint.

    Args:
        item: with `source`, or annotated with `source_uri`.
        asks: what `uses_gate` says of the run.
    """
    if item.kind not in CHECKPOINT_KINDS - {"halt_snapshot"}:
        return ""
    if item.state not in {Item.State.PLANNED, Item.State.HELD, Item.State.COLLECTING}:
        return ""
    deferred = "source" in item.get_deferred_fields()
    uri = getattr(item, "source_uri", None) if deferred else item.source.get("uri")
    locked = item.protected_by.get("how", "none") != "none"
    return "" if locked or asks or not uri else "not protected until copied"


def _line(item: Item, asks: bool) -> GateLine:
    satisfied, says = _judge(item)
    bare = "" if satisfied else unprotected(item, asks=asks)
    says = f"{says}; {bare}" if bare else says
    waived = item.waived_at is not None
    if not satisfied and waived:
        satisfied, says = True, f"waived: {item.waived_why}"
    return GateLine(
        item_id=item.pk,
        name=item.name,
        kind=item.kind,
        state=item.state,
        satisfied=satisfied,
        waived=waived,
        says=says,
    )


def _judge(item: Item) -> tuple[bool, str]:
    if item.state == Item.State.SEALED:
        return True, "sealed"
    if item.state == Item.State.NOT_APPLICABLE:
        return True, f"not applicable: {item.why}"
    if item.state == Item.State.MISSING:
        return False, f"missing: {item.why}; it can be waived with a reason"
    if held_is_enough(item):
        return True, "held with known digests; sealing goes on and must end within 24 h"
    if item.silent_since is not None:
        return False, f"its source has been silent since {item.silent_since:%H:%M:%S} UTC; still trying"
    if item.trouble_since is not None:
        return False, f"{item.why}, since {item.trouble_since:%H:%M:%S} UTC; still trying"
    if item.state == Item.State.PLANNED:
        return False, f"planned: {item.why}" if item.why else "planned: nothing is held yet"
    if item.state == Item.State.HELD:
        return False, "held: its bytes are safe, copying has not begun"
    done, total = item.bytes_done, item.bytes_total
    share = f"{done:,} of {total:,} bytes" if total is not None else f"{done:,} bytes so far"
    # Why it does not go on: the vault's own trouble, a part on its way from a node.
    return False, f"collecting: {share}" + (f"; {item.why}" if item.why else "")


def may_delete(*, run: Run, uris: Sequence[str]) -> list[Answer]:
    """Answer "may I delete these?" for a run's checkpoint manager, in the order asked.

    Taken under the run lock: an allow and a freeze plan never pass each other. An allow is a row that
    expires after 10 minutes, and a plan made meanwhile treats that URI as gone.
    """
    with transaction.atomic():
        lock_run(run.pk)
        now = timezone.now()
        if not GateUse.objects.filter(run=run, asked_at__gt=now - _NOTE_USE_EVERY).exists():
            GateUse.objects.update_or_create(run=run, defaults={"asked_at": now})
        asked = {uri: _spellings_or_reason(uri) for uri in uris}
        wanted = {one for names in asked.values() if isinstance(names, list) for one in names}
        holds = holds_touching(wanted)
        undecided = _held_without_dossier(run)
        others = _checkpoints_of_others(run, wanted)
        answers: list[Answer] = []
        allows: list[DeletionAllow] = []
        for uri, names in asked.items():
            if isinstance(names, str):
                answers.append(_deny(uri, f"cannot be matched: {names}"))
                continue
            hold = next((one for one in holds if any(covers(one.uri, name) for name in names)), None)
            if hold is not None:
                answers.append(_held_answer(uri, run, hold))
            elif undecided:
                answers.append(_deny(uri, "the run is held and its evidence is not planned yet; ask again"))
            elif any(covers(other, name) for other in others for name in names):
                answers.append(_deny(uri, "it belongs to another run; only that run may ask"))
            else:
                until = now + ALLOW_FOR
                allows += [
                    DeletionAllow(run=run, uri=name, allowed_at=now, expires_at=until) for name in names
                ]
                answers.append(_allow(uri, until))
        DeletionAllow.objects.bulk_create(allows)
    by_uri = {answer["uri"]: answer for answer in answers}
    return [by_uri[uri] for uri in uris]


def holds_touching(uris: Iterable[str]) -> list[Hold]:
    """Return the live holds, of whichever run, at, above or below any of these normalised URIs."""
    names = sorted(set(uris))
    found: dict[int, Hold] = {}
    for start in range(0, len(names), _HOLDS_PER_QUERY):
        some = names[start : start + _HOLDS_PER_QUERY]
        touching = Q(uri__in={up for name in some for up in ancestors(name)})
        for name in some:
            touching |= Q(uri__startswith=f"{name}/")
        rows = Hold.objects.filter(touching, released_at=None).select_related("dossier", "dossier__run")
        found |= {hold.pk: hold for hold in rows}
    return list(found.values())


def live_allows(run: Run, now: datetime) -> list[str]:
    """Return the normalised URIs that were allowed to be deleted and must be treated as gone."""
    return list(DeletionAllow.objects.filter(run=run, expires_at__gt=now).values_list("uri", flat=True))


def _spellings_or_reason(uri: str) -> list[str] | str:
    try:
        return spellings(uri)
    except UnusableUri as error:
        return str(error)


def _held_without_dossier(run: Run) -> bool:
    """A hold whose incident could not be opened yet: what it will freeze is not known."""
    directive = current(run.pk)
    return directive is not None and directive.kind == "hold" and not directive.incident


def _checkpoints_of_others(run: Run, wanted: set[str]) -> list[str]:
    """Return normalised URIs of other runs' checkpoints near `wanted`.

    Another run's lock is not taken here, so its freeze plan could pass an allow given to this run.
    """
    near = Q()
    for name in wanted:
        near |= Q(uri__in=ancestors(name)) | Q(uri__startswith=f"{name}/")
        near |= Q(uri__in=[up.removeprefix("file://") for up in ancestors(name)])
    if not near:
        return []
    rows = (
        Checkpoint.objects.filter(near)
        .exclude(run=run)
        .exclude(state=Checkpoint.State.DELETED)
        .values_list("uri")
    )
    names = []
    for (uri,) in rows:
        try:
            names.append(normalise(uri))
        except UnusableUri:
            continue
    return names


def _held_answer(uri: str, run: Run, hold: Hold) -> Answer:
    if hold.dossier.run.project_id != run.project_id:
        return _deny(uri, "held as evidence by another project")
    label = hold.dossier.label or f"dossier {hold.dossier.pk}"
    return _deny(uri, f"held as evidence: {label}", dossier=str(hold.dossier.pk))


def _deny(uri: str, reason: str, dossier: str | None = None) -> Answer:
    return {"uri": uri, "allow": False, "until": None, "dossier": dossier, "reason": reason}


def _allow(uri: str, until: datetime) -> Answer:
    stamp = until.isoformat(timespec="seconds").replace("+00:00", "Z")
    return {"uri": uri, "allow": True, "until": stamp, "dossier": None, "reason": "no dossier holds it"}
