"""A dossier as a person reads it: one line per item, what locks it, and whether its chain holds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from typing import Any

from django.db.models import Count, F, Max, Q, Sum
from django.utils import timezone

from evidence import custody, kinds
from evidence.freezing.checkpoints import passed_over_words
from evidence.gates import unprotected, uses_gate
from evidence.models import CustodyRow, Dossier, Item, Seal, StoredObject, StoreProbe
from evidence.pages import thin
from evidence.retention.overdue import overdue_items
from evidence.vault import vault
from runs import formatting
from runs.models import Person
from runs.reading import kept

# One line each up to here; above it items of one kind and state are one line with a count.
GROUP_ABOVE = 40
MEMBERS_SHOWN = 100


@dataclass(frozen=True, slots=True)
class ItemLine:
    """One item: its state as a word, what is known of its size, and a reason when it is late."""

    id: int
    name: str
    state: str
    detail: str
    reason: str
    required: bool
    satisfied: bool
    share: float  # of its bytes that are in the vault, 0 to 1
    waived_by: str
    number: int = 1
    damaged: str = ""  # what the fixity sweep found wrong with its stored bytes
    thin: str = ""  # sealed, and with next to nothing in it
    members: tuple[tuple[int, str], ...] = ()  # of a group: the id and name of each item

    @property
    def is_calm(self) -> bool:
        """Return whether its reason explains and does not warn."""
        return self.state in {"not applicable", "sealed"} or not self.required

    @property
    def more(self) -> int:
        """Return how many of a group's items a page does not name."""
        return max(0, len(self.members) - MEMBERS_SHOWN)


@dataclass(frozen=True, slots=True)
class Tick:
    """One required item as a box of 0..10 units: how much of it is filled, and whether it is missing."""

    x: float
    width: float
    fill: float
    missing: bool


@dataclass(frozen=True, slots=True)
class Chain:
    """The state of a dossier's proof."""

    rows: int
    root: str  # digest of the newest seal
    seals: int
    wrong: tuple[str, ...]
    checked_at: datetime
    signed_by: str


def item_lines(dossier: Dossier, *, grouped: bool = True) -> list[ItemLine]:
    """Return one line per item in order of volatility; many alike are grouped with a count."""
    return kept(("item lines", dossier.pk, grouped), lambda: _item_lines(dossier, grouped=grouped))


def _item_lines(dossier: Dossier, *, grouped: bool) -> list[ItemLine]:
    items = list(
        Item.objects.filter(dossier=dossier)
        .defer("files", "source")
        .annotate(
            source_uri=F("source__uri"),
            objects_n=Count("objects"),
            stored=Sum("objects__bytes_total"),
            largest=Max("objects__bytes_total"),
            empty_n=Count("objects", filter=Q(objects__bytes_total=0)),
            damaged_n=Count("objects", filter=~Q(objects__mismatch="")),
            unlocked_n=Count("objects", filter=Q(objects__lock_lost_at__isnull=False)),
        )
        .order_by("order", "id")
    )
    people = names([item.waived_by for item in items if item.waived_by])
    warnings = _warnings(dossier, items)
    lines = [_line(item, people, warnings.get(item.pk, "")) for item in items]
    lines = _with_passed_over(dossier, items, lines)
    if not grouped or len(lines) <= GROUP_ABOVE:
        return lines
    groups: dict[tuple[object, ...], list[ItemLine]] = {}
    for line, item in zip(lines, items, strict=True):
        # What somebody waived, what is damaged or empty, and what is under way keep their own lines.
        alone = line.waived_by or line.damaged or line.thin or line.state == "collecting"
        why = "" if line.satisfied else line.reason
        key = (item.kind, line.state, line.required, why, item.pk if alone else None)
        groups.setdefault(key, []).append(line)
    named = [_group(kinds.words(str(key[0])), alike) for key, alike in groups.items()]
    return sorted(named, key=lambda line: (line.satisfied, not line.required))


def _with_passed_over(dossier: Dossier, items: Sequence[Item], lines: list[ItemLine]) -> list[ItemLine]:
    """Say at the last good checkpoint why a nearer one that is verified was not taken."""
    at = next((place for place, item in enumerate(items) if item.kind == "last_good_checkpoint"), None)
    passed = "" if at is None else passed_over_words(dossier)
    if at is not None and passed:
        reason = "; ".join(part for part in (lines[at].reason, passed) if part)
        lines[at] = replace(lines[at], reason=reason)
    return lines


def _group(name: str, alike: list[ItemLine]) -> ItemLine:
    """Return one line for items of one kind and state that wait for, or explain, the same."""
    first = alike[0]
    if len(alike) == 1:
        return first
    reason = "" if first.satisfied else first.reason
    count = formatting.plural(len(alike), "item")
    return replace(
        first,
        name=name,
        detail=count if first.satisfied else f"{count} {first.state}",
        reason=reason,
        share=sum(line.share for line in alike) / len(alike),
        number=len(alike),
        members=tuple((line.id, line.name) for line in alike),
    )


def _warnings(dossier: Dossier, items: Sequence[Item]) -> dict[int, str]:
    """Return by item what is wrong beside its state: overdue, or kept by nothing until it is copied."""
    if all(item.state in {Item.State.SEALED, Item.State.NOT_APPLICABLE} for item in items):
        return {}
    asks = uses_gate(dossier.run_id)
    bare = {item.pk: unprotected(item, asks=asks) for item in items}
    return bare | {one.item.pk: one.says for one in overdue_items(dossier)}


def _line(item: Item, people: dict[str, str], warning: str = "") -> ItemLine:
    state = item.state.replace("_", " ")
    objects_n: int = getattr(item, "objects_n", 0)
    stored: int | None = getattr(item, "stored", None)
    total = item.bytes_total if item.bytes_total is not None else stored
    share = 1.0 if item.state == Item.State.SEALED else 0.0
    detail, reason, empty = "", "", ""
    match item.state:
        case Item.State.SEALED:
            files = formatting.plural(objects_n, "file") if objects_n > 1 else ""
            largest: int = getattr(item, "largest", None) or 0
            empty = thin.words(item.kind, files=objects_n, largest=largest, empty=getattr(item, "empty_n", 0))
            detail = ", ".join(part for part in (formatting.size(total) if total else "", files) if part)
        case Item.State.COLLECTING:
            if total:
                share = min(1.0, item.bytes_done / total)
                detail = f"{formatting.percent(item.bytes_done, total)} of {formatting.size(total)}"
            else:
                detail = f"collecting, {formatting.size(item.bytes_done)} so far"
        case Item.State.HELD:
            detail = f"held, {formatting.size(total)}" if total else "held"
        case Item.State.NOT_APPLICABLE:
            detail = "does not apply"
            reason = item.why
        case Item.State.MISSING:
            detail, reason = "missing", item.why or "nobody offered it"
        case _:
            detail, reason = "planned", item.why
    now = timezone.now()
    ended = {Item.State.SEALED, Item.State.NOT_APPLICABLE}
    if item.silent_since is not None and item.state not in ended:
        lasting = formatting.duration((now - item.silent_since).total_seconds())
        reason = f"its source is silent since {formatting.clock(item.silent_since, now)} UTC ({lasting})"
        if item.deadline is not None and item.deadline > now:
            reason += f", tried until {formatting.clock(item.deadline, now)} UTC"
    elif item.trouble_since is not None and item.state not in ended:
        lasting = formatting.duration((now - item.trouble_since).total_seconds())
        reason = (
            f"{item.why}, since {formatting.clock(item.trouble_since, now)} UTC ({lasting}); still trying"
        )
    damaged_n: int = getattr(item, "damaged_n", 0)
    damaged = ""
    if damaged_n:
        files = formatting.plural(damaged_n, "file")
        damaged = f"fixity: mismatch in {files} of {objects_n}"
    unlocked_n: int = getattr(item, "unlocked_n", 0)
    if unlocked_n and item.dossier.released_at is None:
        files = formatting.plural(unlocked_n, "file")
        damaged = "; ".join(part for part in (damaged, f"lock lost: {files} of {objects_n}") if part)
    reason = "; ".join(part for part in (warning, reason) if part)
    waived_by = people.get(item.waived_by, "somebody") if item.waived_at is not None else ""
    if waived_by:
        reason = f"waived by {waived_by}: {item.waived_why}"
    return ItemLine(
        id=item.pk,
        name=item.name,
        state=state,
        detail=detail,
        reason=reason,
        required=item.required,
        satisfied=item.state in {Item.State.SEALED, Item.State.NOT_APPLICABLE} or bool(waived_by),
        share=share,
        waived_by=waived_by,
        damaged=damaged,
        thin=empty,
    )


def ticks(lines: list[ItemLine]) -> list[Tick]:
    """Return a box per required item that applies, for the strip's bar of 100 units."""
    required = [line for line in lines if line.required and line.state != "not applicable"]
    if not required:
        return []
    pitch = 100 / sum(line.number for line in required)
    gap = min(1.0, pitch * 0.15)
    made, before = [], 0
    for line in required:
        # A group is as wide as its items.
        x, width = before * pitch, pitch * line.number - gap
        made.append(Tick(round(x, 2), round(width, 2), round(width * line.share, 2), line.state == "missing"))
        before += line.number
    return made


def names(opaque_ids: list[str]) -> dict[str, str]:
    """Return names for opaque ids of people; an erased person is not in it."""
    wanted = [value for value in set(opaque_ids) if len(value) == 36]
    return {str(person.opaque_id): person.username for person in Person.objects.filter(opaque_id__in=wanted)}


def chain_of(dossier: Dossier) -> Chain:
    """Return the checked chain of custody; checked anew whenever a row or a seal was added."""
    last = (
        CustodyRow.objects.filter(dossier=dossier).order_by("-seq").values_list("digest", flat=True).first()
    )
    seal = Seal.objects.filter(dossier=dossier).order_by("-number").values_list("number", flat=True).first()
    # A rewritten row in the middle leaves the head as it is, so the check is repeated every minute.
    return _checked(dossier.pk, last or "", seal or 0, int(timezone.now().timestamp()) // 60)


@lru_cache(maxsize=256)
def _checked(dossier_id: int, head: str, seal_number: int, minute: int) -> Chain:
    dossier = Dossier.objects.get(pk=dossier_id)
    wrong = custody.verify_custody(dossier)
    seal = Seal.objects.filter(dossier=dossier).order_by("-number").first()
    return Chain(
        rows=CustodyRow.objects.filter(dossier=dossier).count(),
        root=seal.digest if seal is not None else "",
        seals=seal.number if seal is not None else 0,
        wrong=tuple(wrong),
        checked_at=timezone.now(),
        signed_by=seal.key_id if seal is not None else "",
    )


def lock_sentences(dossier: Dossier) -> tuple[str, bool]:
    """Return what protects the stored objects, as the store answered, and whether it is a real lock.

    It is none when the newest probe saw the store let go of what it had locked, or when an object that
    its policy locks has no lock.
    """
    objects = list(
        StoredObject.objects.filter(item__dossier=dossier, deleted_at=None).values_list(
            "protected_by", "item__lock"
        )
    )
    now = timezone.now()
    probe = StoreProbe.objects.filter(store=vault().name[:300]).order_by("-probed_at").first()
    tested = f", tested {formatting.clock(probe.probed_at, now)} UTC" if probe is not None else ""
    if not objects:
        return "Nothing is stored yet; the deletion gate protects the sources.", True
    locked = [entry for entry, _ in objects if _is_locked(entry, now)]
    if not locked:
        says = str(next((entry.get("says") for entry, _ in objects if entry.get("says")), ""))
        return says[:1].upper() + says[
            1:
        ] or f"Not locked: this store does not enforce retention{tested}.", False
    if probe is not None and str(probe.result.get("says", "")).startswith("not locked"):
        return f"{str(probe.result['says']).capitalize()}{tested}.", False
    words = []
    dates = [entry["until"] for entry in locked if entry.get("until")]
    if dates:
        first = min(datetime.fromisoformat(date) for date in dates)
        modes = sorted({str(entry["mode"]).lower() for entry in locked if entry.get("mode")})
        words.append(f"Locked until {formatting.day(first, now)} {first.year} ({', '.join(modes)})")
    if all(entry.get("legal_hold") for entry in locked):
        words.append("on legal hold" if words else "On legal hold")
    says = " and ".join(words)
    bare = sum(lock != "none" and not _is_locked(entry, now) for entry, lock in objects)
    if bare:
        count = f"{formatting.plural(bare, 'object')} of {len(objects)}"
        return f"{count} not locked any more; the others: {says[:1].lower()}{says[1:]}{tested}.", False
    if len(locked) < len(objects):
        says += f"; {formatting.plural(len(objects) - len(locked), 'object')} of kinds kept without a lock"
    return f"{says}, as the store answered{tested}.", True


def _is_locked(protection: dict[str, Any], now: datetime) -> bool:
    until = protection.get("until")
    return bool(protection.get("legal_hold") or (until and datetime.fromisoformat(until) > now))


def bytes_words(dossier: Dossier) -> str:
    """Return `338 of 520 GB` of what is known of the items' sizes, "" when nothing is."""
    totals = Item.objects.filter(dossier=dossier).aggregate(total=Sum("bytes_total"))
    stored = StoredObject.objects.filter(item__dossier=dossier).aggregate(total=Sum("bytes_total"))
    have, want = stored["total"] or 0, totals["total"] or 0
    if not have and not want:
        return ""
    return formatting.size(have) if have >= want else f"{formatting.size(have)} of {formatting.size(want)}"
