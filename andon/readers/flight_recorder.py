"""PyTorch's flight recorder: the last collectives of one rank, as pickle or JSON, "version" 2.x.

The pickle holds no class and no call (torch/csrc/distributed/c10d/FlightRecorder.hpp writes numbers, strings,
lists and dicts), so an unpickler that refuses every class reads it, and runs nothing of a forged one. A
pickle can still hold one list a billion times over: what is kept is built anew, field by field.

The dialects differ: JSON has 0 for unknown times and numbers as strings; gloo's collectives end as
"scheduled" and retired. The rank is not in the dump; its file's name ends in it.
"""

import io
import json
import pickle
import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

MAX_BYTES = 32 << 20
MAX_ENTRIES = 400  # the newest; the ring holds 2,000, and what went wrong is at its end
_MAX_ITEMS = 64  # of a list of sizes, frames or types
_MAX_TEXT = 400
_STATES = frozenset({"scheduled", "started", "completed"})
_NUMBERS = ("record_id", "pg_id", "collective_seq_id", "p2p_seq_id", "op_id", "timeout_ms")
_TIMES = ("time_created_ns", "time_discovered_started_ns", "time_discovered_completed_ns")
_LISTS = ("input_sizes", "output_sizes", "input_dtypes", "output_dtypes")


class DumpError(ValueError):
    """The bytes are no flight-recorder dump; the message says why."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise DumpError(f"it names the class {module}.{name}, which no dump does: refused")

    def persistent_load(self, pid: Any) -> Any:
        raise DumpError("it names something outside of itself, which no dump does: refused")


def read(body: bytes) -> dict[str, Any]:
    """Return a dump as the data of a `flight_recorder.dump` event.

    Raises:
        DumpError: too large, neither pickle nor JSON, or of another shape.
    """
    if len(body) > MAX_BYTES:
        raise DumpError(f"{len(body)} bytes: larger than any dump")
    document = _document(body)
    if not isinstance(document, dict) or not isinstance(document.get("entries"), list):
        raise DumpError("it has no list of entries")
    entries = [entry for entry in document["entries"][-MAX_ENTRIES:] if isinstance(entry, dict)]
    data = {
        "version": _text(document.get("version")),
        "comm_lib_version": _text(document.get("comm_lib_version", document.get("nccl_version"))),
        "pg_config": _groups(document.get("pg_config")),
        "pg_status": _status(document.get("pg_status")),
        "entries": [_entry(entry) for entry in entries],
        "entries_total": len(document["entries"]),
    }
    return {name: value for name, value in data.items() if value is not None}


def rank_of(path: PurePath | str) -> int | None:
    """Return the rank that a dump's file name ends in: "nccl_trace_rank_node02_5" is 5, "fr0" is 0.

    Digits of a host's name are none: they stand behind a letter.
    """
    name = re.sub(r"\.(?:json|pickle|pkl|bin)$", "", PurePath(path).name)
    found = re.search(r"_(\d{1,7})$", name) or re.fullmatch(r"(?:fr|fr_trace|nccl_trace)(\d{1,7})", name)
    return None if found is None else int(found[1])


def _document(body: bytes) -> Any:
    if body.lstrip()[:1] in (b"{", b"["):
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise DumpError(f"it is no JSON: {error}") from error
    try:
        return _Unpickler(io.BytesIO(body)).load()
    except DumpError:
        raise
    except Exception as error:  # a torn or forged pickle fails in any way it likes
        raise DumpError(f"it is no pickle: {type(error).__name__}: {error}") from error


def _entry(entry: Mapping[Any, Any]) -> dict[str, Any]:
    name = _text(entry.get("profiling_name")) or ""
    state = _text(entry.get("state")) or ""
    retired = entry.get("retired") is True
    if state not in _STATES:
        state = "unknown"
    if name.startswith("gloo:") and retired and state == "scheduled":
        state = "completed"  # gloo never says more
    found: dict[str, Any] = {"profiling_name": name, "state": state, "retired": retired}
    found["is_p2p"] = entry.get("is_p2p") is True
    group = entry.get("process_group")
    if isinstance(group, list | tuple):
        found["process_group"] = [_text(one) or "" for one in group[:2]]
    for key in _NUMBERS:
        number = _whole(entry.get(key))
        if number is not None:
            found[key] = number
    for key in _TIMES:
        found[key] = _whole(entry.get(key)) or None  # 0: not known
    for key in _LISTS:
        if key in entry:
            found[key] = _sizes(entry[key])
    frames = entry.get("frames")
    if isinstance(frames, list):
        found["frames"] = [_frame(one) for one in frames[:_MAX_ITEMS][:12] if isinstance(one, dict)]
    return found


def _frame(frame: Mapping[Any, Any]) -> dict[str, Any]:
    return {
        "name": _text(frame.get("name")),
        "filename": _text(frame.get("filename")),
        "line": _whole(frame.get("line")),
    }


def _sizes(value: Any) -> Any:
    """Sizes are lists of lists of numbers; types are lists of names, or one name."""
    if not isinstance(value, list | tuple):
        return _text(value)
    return [
        [_whole(one) for one in part[:_MAX_ITEMS]] if isinstance(part, list | tuple) else _text(part)
        for part in value[:_MAX_ITEMS]
    ]


def _groups(value: Any) -> dict[str, Any] | None:
    if not isinstance(value, dict):
        return None
    found = {}
    for key, group in list(value.items())[:_MAX_ITEMS]:
        if isinstance(group, dict):
            found[_text(key) or ""] = {
                "name": _text(group.get("name")),
                "desc": _text(group.get("desc")),
                "ranks": _ranks(group.get("ranks")),
            }
    return found


def _ranks(value: Any) -> list[int] | None:
    """`ranks` is the text of a list."""
    if isinstance(value, str) and len(value) < 1 << 20:
        return [int(one) for one in re.findall(r"\b\d{1,7}\b", value)][: 1 << 16]
    if isinstance(value, list):
        return [number for one in value[: 1 << 16] if (number := _whole(one)) is not None]
    return None


def _status(value: Any) -> dict[str, Any] | None:
    if not isinstance(value, dict):
        return None
    return {
        _text(key) or "": {
            _text(name) or "": _whole(number) for name, number in list(group.items())[:_MAX_ITEMS]
        }
        for key, group in list(value.items())[:_MAX_ITEMS]
        if isinstance(group, dict)
    }


def _text(value: Any) -> str | None:
    if isinstance(value, str):
        return value[:_MAX_TEXT]
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _whole(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        value = int(value) if re.fullmatch(r"-?\d{1,18}", value, re.ASCII) else None
    return value if isinstance(value, int) and -(2**63) <= value < 2**63 else None
