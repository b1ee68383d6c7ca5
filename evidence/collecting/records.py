"""Evidence that Andon itself holds: events, frames and facts of the window, written as files.

Each gatherer writes into a spool directory and returns the paths it wrote, relative to it; an empty
list means that nobody posted such a thing. Secrets are masked before anything is written.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import rfc8785
from django.db.models import Min, Q, QuerySet

from andon.masking import mask_value
from evidence import custody
from evidence.models import Dossier, Item
from runs.models import Attempt, Event, Frame, Run

_PAGE = 2_000
# Events without a step (heartbeats, acks, hardware) count to the window from this long before it.
_BEFORE_WINDOW = timedelta(minutes=10)
# Few and telling: kept of the whole run, whatever the window.
_WHOLE_RUN = ("run.started", "run.finished", "attempt.launched", "attempt.exited", "stop.requested", "action")
_HARDWARE = (
    "hardware.xid",
    "hardware.ecc",
    "hardware.thermal",
    "hardware.link",
    "node.state",
    "preflight.report",
)


@dataclass(frozen=True)
class Window:
    """Steps first … last of an attempt (None: of all attempts), both included."""

    run_id: int
    attempt: int | None
    first: int
    last: int


def window_of(dossier: Dossier, item: Item) -> Window:
    """Return the window of an item: its policy's number of steps around b, or up to the newest step."""
    steps = int(item.source.get("window_steps") or dossier.plan.get("window_steps") or 128)
    middle = dossier.first_bad_step
    if middle is None:
        rows = _of_attempt(Event.objects.filter(run_id=dossier.run_id, type="step"), dossier.attempt)
        newest = rows.order_by("-step").values_list("step", flat=True).first()
        middle = newest or 0
    return Window(dossier.run_id, dossier.attempt, max(0, middle - steps), middle + steps)


def _of_attempt(rows: QuerySet[Any], attempt: int | None) -> QuerySet[Any]:
    return rows if attempt is None else rows.filter(attempt=attempt)


def paged(rows: QuerySet[Any]) -> Iterator[Any]:
    """Iterate by key: a server-side cursor would not survive a pooler in transaction mode."""
    last = 0
    while True:
        page = list(rows.filter(id__gt=last).order_by("id")[:_PAGE])
        yield from page
        if len(page) < _PAGE:
            return
        last = page[-1].id


def event_document(event: Event) -> dict[str, Any]:
    """Return an event as it is kept: null plus a flag for a nonfinite value, times in UTC."""
    return {
        "type": event.type,
        "run_attempt": event.attempt,
        "step": event.step,
        "rank": event.rank,
        "ranks": event.ranks,
        "node": event.node,
        "time": custody.stamp(event.occurred_at),
        "received": custody.stamp(event.received_at),
        "backfill": event.backfill,
        "view": event.view,
        "flags": event.flags,
        "data": mask_value(event.data),
        "post": event.webhook_id,
        "index": event.index,
    }


def _canonical(document: Mapping[str, Any]) -> bytes:
    try:
        return rfc8785.dumps(dict(document))
    except rfc8785.CanonicalizationError:
        # An integer beyond 2^53 has no RFC 8785 form; it is kept exactly all the same.
        return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def write_lines(path: Path, documents: Iterable[Mapping[str, Any]]) -> int:
    """Write a document per line in canonical form; returns how many, and leaves no file when none."""
    count = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for document in documents:
            file.write(_canonical(document) + b"\n")
            count += 1
    if count == 0:
        path.unlink()
    return count


def _write_document(path: Path, document: Mapping[str, Any]) -> None:
    path.write_bytes(json.dumps(mask_value(document), sort_keys=True, indent=1, default=str).encode() + b"\n")


def events(window: Window, *types: str) -> QuerySet[Event]:
    """Return the events of a window, of these types only when any are given."""
    rows = _of_attempt(Event.objects.filter(run_id=window.run_id), window.attempt)
    rows = rows.filter(type__in=types) if types else rows
    return rows.filter(step__gte=window.first, step__lte=window.last)


def event_log(dossier: Dossier, item: Item, spool: Path) -> list[str]:
    """Every event of the window, those without a step from its time on, and the run's turning points."""
    window = window_of(dossier, item)
    began: datetime | None = events(window).aggregate(first=Min("received_at"))["first"]
    wanted = Q(type__in=_WHOLE_RUN)
    within = Q(step__gte=window.first, step__lte=window.last)
    if began is not None:
        within |= Q(step=None, received_at__gte=began - _BEFORE_WINDOW)
    if window.attempt is not None:
        within &= Q(attempt=window.attempt)
    rows = Event.objects.filter(run_id=window.run_id).filter(wanted | within)
    count = write_lines(spool / "events.ndjson", map(event_document, paged(rows)))
    return ["events.ndjson"] if count else []


def norms(dossier: Dossier, item: Item, spool: Path) -> list[str]:
    """Frames of ranks and layers exactly as posted, and the step events that carry norms."""
    window = window_of(dossier, item)
    rows = events(window, "step").filter(Q(data__has_key="grad_norm") | Q(data__has_key="loss"))
    written = []
    if write_lines(spool / "steps.ndjson", map(event_document, paged(rows))):
        written.append("steps.ndjson")
    return written + _frames(window, ("rank", "layer"), spool)


def _frames(window: Window, streams: tuple[str, ...], spool: Path) -> list[str]:
    """Write frame bodies one after another into `frames.bin`, and where each lies into an index.

    One object instead of ten thousand: at fleet size every node posts a frame each ten seconds.
    """
    rows = _of_attempt(Frame.objects.filter(run_id=window.run_id, stream__in=streams), window.attempt)
    rows = rows.filter(step_first__lte=window.last, step_last__gte=window.first).defer("state_plane")
    bodies, offset = spool / "frames.bin", 0
    with bodies.open("wb") as out, (spool / "frames.ndjson").open("wb") as index:
        last = 0
        # Bodies are large: few at a time.
        while page := list(rows.filter(id__gt=last).order_by("id")[:16]):
            for frame in page:
                body = bytes(frame.body)
                out.write(body)
                index.write(_canonical(_frame_document(frame, offset, body)) + b"\n")
                offset += len(body)
            last = page[-1].id
    if offset == 0:
        bodies.unlink()
        (spool / "frames.ndjson").unlink()
        return []
    return ["frames.bin", "frames.ndjson"]


def _frame_document(frame: Frame, offset: int, body: bytes) -> dict[str, Any]:
    return {
        "offset": offset,
        "bytes": len(body),
        "sha256": hashlib.sha256(body).hexdigest(),
        "content_type": frame.content_type,
        "stream": frame.stream,
        "run_attempt": frame.attempt,
        "node": frame.node,
        "step_first": frame.step_first,
        "step_last": frame.step_last,
        "rows": frame.rows,
        "received": custody.stamp(frame.received_at),
        "post": frame.webhook_id,
    }


def schedule(dossier: Dossier, item: Item, spool: Path) -> list[str]:
    """Learning rate and loss scale by step, and declared boundaries."""
    window = window_of(dossier, item)
    carries = Q(data__has_key="lr") | Q(data__has_key="loss_scale")
    rows = events(window, "step", "schedule.boundary").filter(carries | Q(type="schedule.boundary"))
    return (
        ["schedule.ndjson"]
        if write_lines(spool / "schedule.ndjson", map(event_document, paged(rows)))
        else []
    )


def batch_ids(dossier: Dossier, item: Item, spool: Path) -> list[str]:
    """What each rank read: batch ids, lengths, fingerprints, and loader positions."""
    rows = events(window_of(dossier, item), "batch.seen", "loader.position")
    return (
        ["batches.ndjson"] if write_lines(spool / "batches.ndjson", map(event_document, paged(rows))) else []
    )


def hardware_records(dossier: Dossier, item: Item, spool: Path) -> list[str]:
    """Hardware events of the attempt and node frames of the window."""
    rows = _of_attempt(Event.objects.filter(run_id=dossier.run_id, type__in=_HARDWARE), dossier.attempt)
    written = []
    if write_lines(spool / "hardware.ndjson", map(event_document, paged(rows))):
        written.append("hardware.ndjson")
    return written + _frames(window_of(dossier, item), ("node",), spool)


def topology(dossier: Dossier, item: Item, spool: Path) -> list[str]:
    """Which rank ran where, and the groups, as the launch reported them (or that it did not)."""
    attempt = _attempt(dossier)
    if attempt is None:
        return []
    _write_document(
        spool / "topology.json",
        {
            "schema": "andon.topology/1",
            "run_attempt": attempt.number,
            "launched_at": custody.stamp(attempt.launched_at),
            "launch_reported": attempt.launch_reported,
            "world_size": attempt.world_size,
            "nodes": attempt.nodes,
            "groups": attempt.groups,
            "precision": attempt.precision,
            "began_from": attempt.began_from,
        },
    )
    return ["topology.json"]


def _told(dossier: Dossier, names: tuple[str, ...]) -> dict[str, Any]:
    """Return what launch and start events say under `names`; the launch wins."""
    told: dict[str, Any] = {}
    started = Event.objects.filter(run_id=dossier.run_id, type="run.started").order_by("-id").first()
    attempt = _attempt(dossier)
    for source in (started.data if started else {}, attempt.data if attempt else {}):
        inner = source.get("data")
        inner = inner if isinstance(inner, dict) else {}
        told |= {name: value for name, value in {**source, **inner}.items() if name in names and value}
    return told


def code_and_config(dossier: Dossier, item: Item, spool: Path) -> list[str]:
    """Code revision, diff, command and resolved config, as far as the trainer told them."""
    names = (
        "config",
        "config_sha256",
        "code",
        "revision",
        "commit",
        "git",
        "diff",
        "command",
        "argv",
        "args",
    )
    return facts(dossier, spool, "code_and_config.json", names)


def environment(dossier: Dossier, item: Item, spool: Path) -> list[str]:
    """Image, packages, driver and library versions, environment variables (masked)."""
    names = ("environment", "environment_sha256", "env", "image", "packages", "python", "torch", "driver")
    more = ("cuda", "nccl", "versions", "host", "libraries")
    return facts(dossier, spool, "environment.json", names + more)


def facts(dossier: Dossier, spool: Path, name: str, names: tuple[str, ...]) -> list[str]:
    """Write what launch and start events say under `names`, masked; [] when they say nothing."""
    told = _told(dossier, names)
    if not told:
        return []
    run = Run.objects.get(pk=dossier.run_id)
    _write_document(spool / name, {"run": run.slug, "run_attempt": dossier.attempt, "told": told})
    return [name]


def _attempt(dossier: Dossier) -> Attempt | None:
    rows = Attempt.objects.filter(run_id=dossier.run_id).order_by("-number")
    return (rows if dossier.attempt is None else rows.filter(number=dossier.attempt)).first()


GATHERERS: dict[str, Callable[[Dossier, Item, Path], list[str]]] = {
    "event_log": event_log,
    "norms": norms,
    "schedule": schedule,
    "batch_ids": batch_ids,
    "hardware_records": hardware_records,
    "topology": topology,
    "code_and_config": code_and_config,
    "environment": environment,
}

# What to say when nobody posted such a thing.
NOTHING: dict[str, str] = {
    "event_log": "no event of the window was received",
    "norms": "no loss, norm or frame of the window was received",
    "schedule": "no learning rate (step event, data.lr) was received in the window",
    "batch_ids": "no batch.seen or loader.position event was received in the window",
    "hardware_records": "no hardware event and no node frame was received",
    "topology": "no attempt is known",
    "code_and_config": "neither run.started nor attempt.launched told code or config",
    "environment": "neither run.started nor attempt.launched told the environment",
    "rank_logs": "no rank log was offered (artifact.available, kind rank_log)",
    "halt_snapshot": "the trainer offered no snapshot (artifact.available, kind halt_snapshot)",
}
