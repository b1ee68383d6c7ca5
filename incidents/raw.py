"""Raw, one click: the log around the first bad moment, the node's kernel log, the batch, the stack.

Each answer is lines out of the dossier, read within the bytes of `evidence.pages.excerpts` and noted in its
custody, or one sentence why they are not there.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from evidence.pages import excerpts
from evidence.pages.excerpts import Excerpt, Kept, NoExcerpt
from incidents import batches, launched, roles
from incidents.models import Incident
from runs import formatting as words
from runs.access import project_member
from runs.models import FirstBad, Person, Role

READERS = (*roles.RESPONDERS, Role.VAULT_OFFICER)
WHO = "A responder, approver, vault officer or admin of the project may read raw evidence."
NAMES = {
    "log": "Log of the rank",
    "kernel": "Kernel log of its node",
    "batch": "The batch",
    "stack": "Stack or flight recorder",
}
EITHER_SIDE = 50
_ERRORS = 20

# "step 18003", "step=18,003", "iteration 1200/", '"step": 18003', "[step: 10]", "global_step=7"
_STEP = re.compile(r"(?:step|iteration|iter)[\"']?\s*[:=#]?\s*(\d[\d,]{0,18})", re.IGNORECASE)
_ISO = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?(Z|[+-]\d\d:?\d\d)?")
_SYSLOG = re.compile(r"^(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) +(\d{1,2}) (\d\d):(\d\d):(\d\d)")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_KERNEL_NAMES = ("kern", "dmesg", "journal", "syslog", "messages", "xid")


@dataclass(frozen=True, slots=True)
class Raw:
    """One answer: an excerpt, a table of the batch, or why there is neither."""

    name: str
    title: str
    about: str  # "rank 61 on node-07, step 18,003"
    says: str = ""  # why there is nothing, or what is special about it
    excerpt: Excerpt | None = None
    rows: list[batches.Row] = field(default_factory=list)
    told: list[tuple[str, str]] = field(default_factory=list)  # what the batch told: ids, names, shard


@dataclass(frozen=True, slots=True)
class _Moment:
    """The first bad cell: its rank, step, node and when it occurred."""

    incident: Incident
    rank: int | None
    step: int | None
    node: str
    at: datetime

    @property
    def about(self) -> str:
        pieces = [f"rank {self.rank}" if self.rank is not None else "the rank is not known"]
        if self.node:
            pieces[0] += f" on {words.inert(self.node, 48)}"
        if self.step is not None:
            pieces.append(f"step {words.count(self.step)}")
        return ", ".join(pieces)

    @property
    def keys(self) -> dict[str, tuple[excerpts.Key, float]]:
        found: dict[str, tuple[excerpts.Key, float]] = {}
        if self.step is not None:
            found["step"] = (step_of, float(self.step))
        found["time"] = (time_key(self.at), self.at.timestamp())
        return found


def read(incident: Incident, person: Person, name: str) -> Raw:
    """Return one of `NAMES`. Reading is a custody row; who may not read gets a sentence with who may.

    Raises:
        KeyError: there is no such thing.
    """
    title = NAMES[name]
    moment = _moment(incident)
    if not project_member(person, incident.run.project, *READERS):
        return Raw(name, title, moment.about, says=WHO)
    try:
        return _MAKERS[name](moment, person, title)
    except NoExcerpt as why:
        return Raw(name, title, moment.about, says=why.says)


def _moment(incident: Incident) -> _Moment:
    first = incident.first_bad
    ranks = list(first.get("ranks") or [])
    rank, step = (int(ranks[0]) if ranks else None), first.get("step")
    places = launched.places(incident.run_id, incident.attempt, ranks[:1])
    at = incident.opened_at
    if rank is not None and step is not None:
        cells = FirstBad.objects.filter(
            run_id=incident.run_id, attempt=incident.attempt, stream="rank", lane=str(rank), step=step
        )
        cell = cells.order_by("view").first()
        if cell is not None:
            at = cell.occurred_at or cell.received_at
    return _Moment(incident, rank, step, places[0].node if places else "", at)


def _log(moment: _Moment, person: Person, title: str) -> Raw:
    kept, says = _of_rank(moment, "rank_logs")
    return _lines("log", moment, person, title, kept, says)


def _of_rank(moment: _Moment, kind: str) -> tuple[Kept, str]:
    """Return the file of the first bad rank, else one that belongs to no rank, with a word about that.

    Raises:
        NoExcerpt: neither is there.
    """
    dossier = moment.incident.dossier
    if moment.rank is not None:
        prefix = f"rank-{moment.rank:05d}/"
        try:
            return next(excerpts.files(dossier, kind, prefix)), ""
        except NoExcerpt as none:
            others = _of_no_rank(moment, kind, none)
            return others, "No file of this rank alone: this one belongs to no rank."
    kept = next(excerpts.files(dossier, kind))
    return kept, f"The rank is not known: this is {words.inert(kept.path, 80)}, one of those that are kept."


def _of_no_rank(moment: _Moment, kind: str, none: NoExcerpt) -> Kept:
    for kept in excerpts.files(moment.incident.dossier, kind):
        if not kept.path.startswith("rank-") and not kept.path.endswith(".ndjson"):
            return kept
    raise none


def _lines(name: str, moment: _Moment, person: Person, title: str, kept: Kept, says: str) -> Raw:
    if _is_binary(kept):
        size = words.size(kept.bytes_total)
        raise NoExcerpt(f"{words.inert(kept.path, 100)} ({size}) is no text: take it from the vault.")
    excerpts.note(kept, dossier=moment.incident.dossier, person=person)
    excerpt = excerpts.around(kept, moment.keys, either_side=EITHER_SIDE)
    if not kept.sealed:
        says = f"{says} Not sealed yet: read where it lies, masked here.".strip()
    return Raw(name, title, moment.about, says=says, excerpt=excerpt)


def _is_binary(kept: Kept) -> bool:
    start = kept.at(0, 512)
    return b"\0" in start or start.startswith(b"\x80")


def _kernel(moment: _Moment, person: Person, title: str) -> Raw:
    if not moment.node:
        raise NoExcerpt("The node is not known: the launch did not say on which node the rank ran.")
    files = list(excerpts.files(moment.incident.dossier, "hardware_records"))
    offers = {
        f"{number:05d}-": str(entry.get("node") or "")
        for number, entry in enumerate(files[0].item.source.get("artifacts", []))
    }
    for kept in files:
        mine = offers.get(kept.path[:6], "") == moment.node or moment.node in kept.path
        if mine and any(word in kept.path.lower() for word in _KERNEL_NAMES):
            return _lines("kernel", moment, person, title, kept, "")
    return _reported(moment, person, title, files)


def _reported(moment: _Moment, person: Person, title: str, files: list[Kept]) -> Raw:
    """Return what the node's agent reported of its hardware, where no kernel log was offered."""
    kept = next((one for one in files if one.path == "hardware.ndjson"), None)
    none = (
        f"No kernel log of {words.inert(moment.node, 48)} was offered (artifact.available, kind kernel_log)"
    )
    if kept is None:
        raise NoExcerpt(f"{none}, and no hardware event was reported.")
    excerpts.note(kept, dossier=moment.incident.dossier, person=person)
    mine = [one for one in excerpts.documents(kept) if one.get("node") == moment.node]
    if not mine:
        raise NoExcerpt(f"{none}; of its hardware nothing was reported, of others it was.")
    lines = [
        words.inert(f"{one.get('time')} {one.get('type')} {one.get('data')}", 400)
        for one in mine[-EITHER_SIDE:]
    ]
    found = Excerpt(
        lines, None, "reported events of the node", kept.path, kept.sha256, kept.bytes_total, kept.bytes_read
    )
    return Raw("kernel", title, moment.about, says=f"{none}: these are its reported events.", excerpt=found)


def _batch(moment: _Moment, person: Person, title: str) -> Raw:
    if moment.step is None:
        raise NoExcerpt("No first bad step is known, so no batch is.")
    dossier = moment.incident.dossier
    for kind, path in (("batch_statistics", "batch_statistics.ndjson"), ("batch_ids", "batches.ndjson")):
        try:
            kept = next(one for one in excerpts.files(dossier, kind) if one.path == path)
        except (NoExcerpt, StopIteration):
            continue
        excerpts.note(kept, dossier=dossier, person=person)
        found = batches.of_step(excerpts.documents(kept), moment.step, moment.rank)
        if found.rows or found.told:
            says = "" if found.whole else "The batch's own statistics were not told; these are its ids."
            return Raw("batch", title, moment.about, says=says, rows=found.rows, told=found.told)
    next(excerpts.files(dossier, "batch_ids"))  # says why there is none
    raise NoExcerpt("No batch.seen of this rank and step is among those that were kept.")


def _stack(moment: _Moment, person: Person, title: str) -> Raw:
    try:
        kept, says = _of_rank(moment, "flight_recorder")
    except NoExcerpt as none:
        return _errors(moment, person, title, none)
    if kept.path == "flight_recorder.ndjson":
        return _errors(moment, person, title, NoExcerpt("No stack and no dump was offered."))
    return _lines("stack", moment, person, title, kept, says)


def _errors(moment: _Moment, person: Person, title: str, none: NoExcerpt) -> Raw:
    """Return the errors that ranks reported, the first bad one's first."""
    path = "flight_recorder.ndjson"
    kept = next(
        (one for one in excerpts.files(moment.incident.dossier, "flight_recorder") if one.path == path), None
    )
    if kept is None:
        raise none
    excerpts.note(kept, dossier=moment.incident.dossier, person=person)
    told = [
        one
        for one in excerpts.documents(kept)
        if one.get("type") in ("process.error", "flight_recorder.dump")
    ]
    told.sort(key=lambda one: (one.get("rank") != moment.rank, str(one.get("time"))))
    lines = [line for one in told[:_ERRORS] for line in _error_lines(one)]
    if not lines:
        raise none
    found = Excerpt(
        lines[:200], None, "errors that ranks reported", path, kept.sha256, kept.bytes_total, kept.bytes_read
    )
    return Raw("stack", title, moment.about, says=none.says, excerpt=found)


def _error_lines(one: dict[str, Any]) -> list[str]:
    data = one.get("data")
    data = data if isinstance(data, dict) else {}
    head = f"rank {one.get('rank')} {one.get('time')} {one.get('type')}"
    message = data.get("message") or data.get("error") or data
    extra = message.get("extraInfo") if isinstance(message, dict) else None
    stack = data.get("py_callstack") or data.get("stack") or (extra or {}).get("py_callstack") or ""
    text = str(message.get("message") or message) if isinstance(message, dict) else str(message)
    lines = [head, *text.splitlines()[:10], *str(stack).splitlines()[-40:]]
    return [words.inert(line.expandtabs(4), 400) for line in lines]


_MAKERS: dict[str, Callable[[_Moment, Person, str], Raw]] = {
    "log": _log,
    "kernel": _kernel,
    "batch": _batch,
    "stack": _stack,
}


def step_of(line: str) -> float | None:
    """Return the step a log line names, None when it names none."""
    found = _STEP.search(line)
    return float(found[1].replace(",", "")) if found else None


def time_key(near: datetime) -> excerpts.Key:
    """Return a key by the time a line begins with: RFC 3339 or syslog's, which names no year.

    A time without an offset is taken as UTC.
    """
    year = near.astimezone(UTC).year

    def key(line: str) -> float | None:
        try:
            if (iso := _ISO.search(line[:80])) is not None:
                zone = (iso[4] or "Z").replace("Z", "+00:00")
                fraction = f".{iso[3]:0<6}" if iso[3] else ""
                return datetime.fromisoformat(f"{iso[1]}T{iso[2]}{fraction}{zone}").timestamp()
            if (old := _SYSLOG.match(line)) is not None:
                month = _MONTHS.index(old[1]) + 1
                return datetime(
                    year, month, int(old[2]), int(old[3]), int(old[4]), int(old[5]), tzinfo=UTC
                ).timestamp()
        except (ValueError, OverflowError):
            return None
        return None

    return key
