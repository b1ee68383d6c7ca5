"""Any file of the field's tools, told by its content: which format it is, and its events.

For files that are there as a whole; logs that grow are followed by `andon tail` and the node's agent.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import PurePath
from typing import Any

import msgspec

from andon.readers import (
    dcgmi,
    fleet_reports,
    flight_recorder,
    gpu_counters,
    nccl_tests,
    scalars,
    tensorboard,
    torchelastic,
    wandb,
)
from andon.readers.kernel_log import KernelLog
from andon.readers.training_log import TrainingLog

MAX_BYTES = 512 << 20
_MAX_EVENTS = 1_000_000

Event = dict[str, Any]


class Unknown(ValueError):
    """The bytes are in no format that is known, or damaged; the message says which were tried."""


class Reading(msgspec.Struct, frozen=True):
    """What a file is, in words, and the events in it."""

    format: str
    events: list[Event]


def read(name: str, body: bytes, *, baseline_gbs: float | None = None) -> Reading:
    """Read a file.

    Args:
        name: of the file, which names the rank of a dump.
        baseline_gbs: bus bandwidth of known-good nodes, for nccl-tests.

    Raises:
        Unknown: no format fits, or the one that does holds nothing.
    """
    if not body.strip():
        raise Unknown("the file is empty")
    try:
        found = _binary(name, body) or _text(name, body, baseline_gbs)
    except Unknown:
        raise
    except (ValueError, RecursionError) as error:
        raise Unknown(str(error)) from error
    return Reading(found.format, found.events[:_MAX_EVENTS])


def _binary(name: str, body: bytes) -> Reading | None:
    if tensorboard.is_events(body):
        return Reading("TensorBoard events", scalars.events(tensorboard.read(body)))
    if wandb.is_run_file(body):
        return Reading("W&B run file", scalars.events(wandb.read(body)))
    if body[:1] == b"\x80":
        return Reading("flight-recorder dump", [_dump(name, body)])
    return None


def _dump(name: str, body: bytes) -> Event:
    event: Event = {"type": "flight_recorder.dump", "data": flight_recorder.read(body)}
    rank = flight_recorder.rank_of(PurePath(name))
    return event if rank is None else {**event, "rank": rank}


def _text(name: str, body: bytes, baseline_gbs: float | None) -> Reading:
    text = body.decode("utf-8", "replace")
    document = _object(text)
    if document is not None:
        found = _of_document(name, body, document)
        if found is not None:
            return found
    if dcgmi.is_output(text):
        report = dcgmi.read(text)
        return Reading(f"dcgmi {report.kind}", dcgmi.events(report))
    if nccl_tests.is_output(text):
        return Reading("nccl-tests", [nccl_tests.event(nccl_tests.read(text), baseline_gbs)])
    if wandb.is_export(text):
        return Reading("W&B export", scalars.events(wandb.read(body)))
    for words, reader in _LINES:
        events = list(reader(text.splitlines()))
        if events:
            return Reading(words, events)
    known = (
        "TensorBoard, W&B, flight recorder, torchelastic, dcgmi, nccl-tests, fleet reports, nvidia-smi, logs"
    )
    raise Unknown(f"no format fits; tried {known}")


def _of_document(name: str, body: bytes, document: dict[str, Any]) -> Reading | None:
    if "entries" in document and "pg_config" in document:
        return Reading("flight-recorder dump", [_dump(name, body)])
    events = fleet_reports.read_record(document)
    if events:
        return Reading("fleet report", events)
    if "message" in document and not dcgmi.is_output(body[:4096].decode("utf-8", "replace")):
        return Reading("torchelastic error file", [torchelastic.read(body)])
    return None


def _object(text: str) -> dict[str, Any] | None:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


# --- line by line


def _records(lines: Iterable[str]) -> Iterable[Event]:
    for line in lines:
        document = _object(line) if line.lstrip().startswith("{") else None
        if document is not None:
            yield from fleet_reports.read_record(document)


def _fleet(lines: Iterable[str]) -> Iterable[Event]:
    reader = fleet_reports.Lines()
    for line in lines:
        yield from reader.feed(line)
    yield from reader.end()


def _counters(lines: list[str]) -> Iterable[Event]:
    gpus = gpu_counters.read_dcgm(lines) or gpu_counters.read_query("\n".join(lines))
    rows = [
        {"gpu": one.index, "gpu_uuid": one.uuid or None, "pci": one.pci or None, **one.values} for one in gpus
    ]
    told = [{k: v for k, v in row.items() if v is not None} for row in rows]
    if told:
        yield {"type": "node.state", "data": {"state": "sampled", "gpus": told}}


def _kernel(lines: Iterable[str]) -> Iterable[Event]:
    reader = KernelLog()
    for line in lines:
        yield from reader.feed(line)


def _training(lines: Iterable[str]) -> Iterable[Event]:
    reader = TrainingLog()
    for line in lines:
        yield from reader.feed(line)
    yield from reader.flush()


_LINES: tuple[tuple[str, Callable[[list[str]], Iterable[Event]]], ...] = (
    ("fleet reports", _records),
    ("fleet log", _fleet),
    ("GPU counters", _counters),
    ("kernel log", _kernel),
    ("training log", _training),
)
