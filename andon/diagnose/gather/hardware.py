"""What devices, links and hosts reported, on the nodes that went bad first and on others."""

import re

from andon.diagnose import devices
from andon.diagnose.fact import Fact
from andon.diagnose.record import Posted, Record

_TYPES = ("hardware.xid", "hardware.ecc", "hardware.thermal", "hardware.link")
_DEVICE = re.compile(r"CUDA error|uncorrectable ECC|fallen off the bus|device-side|cudaError|NPU error", re.I)
_MEMORY = re.compile(r"out of memory|CUDA OOM|OutOfMemoryError", re.I)
_KILLED = re.compile(r"SIGKILL|Signal 9\b|exitcode\W+-9\b|oom-?kill", re.I)


def facts(record: Record) -> list[Fact]:
    """Return hardware records folded by device and kind, and the first error of a process by its class."""
    here = set(record.bad_nodes)
    alike: dict[tuple[str, str, str], list[Posted]] = {}
    words: dict[tuple[str, str, str], str] = {}
    for event in record.of_type(*_TYPES):
        kind, text = _record(event, here)
        if kind:
            # The driver repeats itself: five lines of one Xid on one device are one fault.
            key = (kind, text, _device(event))
            alike.setdefault(key, []).append(event)
            words.setdefault(key, text)
    found = [
        Fact(id=rows[0].id, kind=key[0], text=f"{words[key]} on {_where(rows[0])}", more=len(rows) - 1)
        for key, rows in alike.items()
    ]
    return found + _errors(record)


def _record(event: Posted, here: set[str]) -> tuple[str, str]:
    near = "here" if event.node in here else "elsewhere" if here else "somewhere"
    match event.type:
        case "hardware.xid":
            code, kind, words = devices.xid(event.data)
            text = f"Xid {code} ({words})" if code is not None else f"Xid: {words}"
            by_class = {"application": "application_fault", "remapped": "corrected", "follows": ""}
            return by_class.get(kind, f"{'link' if kind == 'link' else 'device'}_fault_{near}"), text
        case "hardware.ecc":
            uncorrected, corrected = devices.ecc(event.data)
            if uncorrected:
                return f"device_fault_{near}", f"{uncorrected:,} uncorrected ECC errors"
            if corrected:
                return "corrected", f"{corrected:,} corrected ECC errors"
            return f"device_fault_{near}", "an ECC record without counts"
        case "hardware.link":
            said = (
                event.data.get("detail")
                or event.data.get("error")
                or event.data.get("state")
                or "link record"
            )
            return f"link_fault_{near}", str(said)[:120]
        case _:
            said = event.data.get("detail") or event.data.get("reason") or "thermal slowdown"
            return "throttled", str(said)[:120]


def _device(event: Posted) -> str:
    known = next(
        (event.data[name] for name in ("gpu_uuid", "gpu", "pci", "device") if name in event.data), ""
    )
    return f"{event.node}/{known}"


def _where(event: Posted) -> str:
    node, _, device = _device(event).partition("/")
    return f"{node or 'an unnamed node'}{f', {device}' if device else ''}"


def _errors(record: Record) -> list[Fact]:
    """Return the first error of each class: what comes after the first is clean-up and victims."""
    found: dict[str, Fact] = {}
    for event in record.of_type("process.error"):
        text = error_text(event)
        kind = (
            "device_error"
            if _DEVICE.search(text)
            else "out_of_memory"
            if _MEMORY.search(text)
            else "killed_from_outside"
            if _KILLED.search(text) or event.data.get("exitcode") in (-9, 137)
            else ""
        )
        if kind and kind not in found:
            who = f"rank {event.rank}" if event.rank is not None else event.node or "a process"
            line = text.strip().splitlines()[0][:160] if text.strip() else "no text"
            found[kind] = Fact(id=event.id, kind=kind, text=f"{who}: {line}")
    return list(found.values())


def error_text(event: Posted) -> str:
    """Return what a `process.error` says, under whichever of the field's names."""
    for name in ("message", "error", "text", "detail"):
        value = event.data.get(name)
        if isinstance(value, dict):
            value = value.get("message")
        if isinstance(value, str) and value:
            return value
    return ""
