"""Records of fleet tools, one JSON object each or one line of a log, as events.

Field names: GCM HealthCheckLog (facebookresearch/gcm), SuperBench results-summary.jsonl
(microsoft/superbenchmark), SCOUTFaultReport (lm_resiliency/detection/reports.py), FlagScale heartbeats
(flagscale/runner/heartbeat/monitor.py), NVRx cycles (nvrx_interface.proto, shared_utils/profiling.py),
DLRover events (dlrover/python/training_event/event.py), xpu_timer's hang gauge, Megatron's StragglerDetector
(megatron/core/README_STRAGGLER.md). Every field is narrowed before it is used; what a record lacks is left
out.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from andon.wire_times import parse_time

Event = dict[str, Any]

_GCM = {0: "ok", 1: "warn", 2: "critical", 3: "unknown"}
_GCM_VERDICT = {0: "pass", 1: "pass", 2: "fail", 3: "inconclusive"}
_HEARTBEATS = frozenset({"process_start", "heartbeat", "checkpoint_start", "checkpoint_end", "process_end"})
_SCOUT = (
    "scope",
    "layer_id",
    "sources",
    "mismatch_kind",
    "confirmations",
    "confidence",
    "reason",
    "exit_code",
    "stall_duration_s",
    "dataloader_key",
    "dataloader_sequence",
    "dataloader_culprit_ranks",
)
_MOST = 200  # values of one record
_MAX_RANK = 2**31

_NVRX = re.compile(
    r"Cycle: (?P<cycle>\d{1,9}) Event: (?P<event>[a-z_]{1,60}) Node: (?P<node>\S{1,100})"
    r"(?: Rank: (?P<rank>\d{1,9}|None))? Time: (?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d{1,6})?) UTC"
)
_DLROVER = re.compile(
    r"\[(?P<time>[^\]]{10,40})\] \[(?P<pid>\d{1,9})\] \[(?P<id>[^\]]{1,80})\] \[(?P<target>[^\]]{1,80})\] "
    r"\[(?P<name>#?[\w.]{1,80})\] \[(?P<phase>BEGIN|END|INSTANT)\](?: (?P<content>\{.*\}))?\s*$"
)
_XPU = re.compile(r"^XPU_TIMER_COMMON_HANG\{(?P<labels>[^}]{0,2000})\} (?P<value>[01](?:\.0+)?)\s*$")
_RANK = re.compile(r'(?:^|,)rank="(\d{1,9})"')
_STRAGGLER = re.compile(
    r"\b(M[nx]D?Rtt|M[nx]Etpt|M[nx]Tmp|M[nx]Clk|M[nx]Utl)/Rnk: ([\d.]{1,20})[A-Za-z%]*/(\d{1,9})"
)
STRAGGLER_SPREAD = 0.05  # slowest over fastest round trip, from which a rank is worth a look


def read_record(document: Mapping[str, Any]) -> list[Event]:
    """Return the events of one JSON object; [] where it is none of these tools'."""
    if "health_check" in document and "result" in document:
        return [_gcm(document)]
    if "failed_ranks" in document and ("kind" in document or "scope" in document):
        return [_scout(document)]
    if "cycle_number" in document and "job_id" in document:
        return [_cycle(document)]
    kind = next(
        (document[n] for n in ("event", "event_type", "type") if document.get(n) in _HEARTBEATS), None
    )
    if kind is not None and _rank(document.get("rank")) is not None:
        return [_heartbeat(document, kind)]
    values = {k: v for k, v in document.items() if ("/" in k or ":" in k) and _is_number(v)}
    if isinstance(document.get("node"), str) and values:
        return [_superbench(document, values)]
    return []


def _gcm(document: Mapping[str, Any]) -> Event:
    result = document.get("result")
    result = result if isinstance(result, int) and result in _GCM else 3
    name, kind = _text(document.get("health_check")), _text(document.get("type"))
    told = {"check": name, "detail": _text(document.get("_msg")), "job": _text(document.get("job_id"))}
    if kind in ("prolog", "epilog"):
        data = {"tool": "gcm", "verdict": _GCM_VERDICT[result], "when": kind, "said": _GCM[result], **told}
        event: Event = {"type": "preflight.report", "data": data}
    else:
        event = {"type": "node.state", "data": {"state": f"check_{_GCM[result]}", "reason": name, **told}}
    return _at(event, document, node="node", time=("end_time", "start_time"))


def _scout(document: Mapping[str, Any]) -> Event:
    listed = document.get("failed_ranks")
    ranks = (
        [rank for one in listed if (rank := _rank(one)) is not None][:4096]
        if isinstance(listed, list)
        else []
    )
    kind = _text(document.get("kind")) or "fault"
    told = {name: document[name] for name in _SCOUT if document.get(name) is not None}
    rule = {"sdc": "corruption", "straggler": "straggler"}.get(kind, kind)
    data = {"kind": kind, "rule": rule, "severity": "warn", "detector": "lm-resiliency", **told}
    event: Event = {"type": "verdict", "data": data}
    if ranks:
        event["ranks"] = sorted(set(ranks))
    steps = document.get("steps")
    step = _whole(steps[0] if isinstance(steps, list) and steps else document.get("step"))
    return event if step is None else {**event, "step": step}


def _cycle(document: Mapping[str, Any]) -> Event:
    names = ("job_id", "attempt_index", "cycle_number", "active_nodes", "standby_nodes", "active_ranks")
    data = {"state": "nvrx_cycle", **{n: document[n] for n in names if document.get(n) not in (None, "")}}
    ended = _text(document.get("cycle_end_time"))
    data["cycle"] = "ended" if ended else "running"
    return _at({"type": "node.state", "data": data}, document, time=("cycle_end_time", "cycle_start_time"))


def _heartbeat(document: Mapping[str, Any], kind: str) -> Event:
    names = ("phase", "pid", "progress_seq", "checkpoint_id", "assigned_gpu")
    told = {name: document[name] for name in names if document.get(name) is not None}
    event: Event = {"type": "heartbeat", "data": {"state": kind, "from": "flagscale", **told}}
    event["rank"] = _rank(document.get("rank"))
    step = _whole(document.get("iteration"))
    if step is not None:
        event["step"] = step
    return _at(event, document, node="hostname", time=("timestamp", "time"))


def _superbench(document: Mapping[str, Any], values: Mapping[str, Any]) -> Event:
    shown = dict(list(values.items())[:_MOST])
    data: dict[str, Any] = {"check": "benchmarks", "tool": "superbench", "verdict": "not compared"}
    # One seed gives one result on sound devices: what differs between the ranks of a node is a finding.
    fixed: dict[str, set[float]] = {}
    for name, value in values.items():
        if "deterministic_" in name and "count" not in name:
            fixed.setdefault(name.rsplit(":", 1)[0], set()).add(value)
    differ = sorted(name for name, seen in fixed.items() if len(seen) > 1)
    if fixed:
        data["verdict"] = "fail" if differ else "pass"
        data["detail"] = (
            f"differs between ranks: {', '.join(differ[:4])}" if differ else "deterministic results agree"
        )
    return _at({"type": "preflight.report", "data": {**data, "values": shown}}, document, node="node")


# --- lines


class Lines:
    """Reads the lines of these tools' logs in their order. `end` tells what was begun and never ended."""

    def __init__(self) -> None:
        self._open: dict[str, Event] = {}
        self._hang: dict[int, bool] = {}

    def feed(self, line: str) -> list[Event]:
        """Return the events of one line."""
        line = line[:8_000]
        if (found := _NVRX.search(line)) is not None:
            data = {"state": f"nvrx_{found['event']}", "cycle_number": int(found["cycle"])}
            event: Event = {"type": "node.state", "node": found["node"], "data": data}
            if (found["rank"] or "None") != "None":
                event["rank"] = int(found["rank"])
            return [_timed(event, found["time"])]
        if (found := _DLROVER.match(line.strip())) is not None:
            return self._dlrover(found)
        if (found := _XPU.match(line.strip())) is not None:
            rank = _RANK.search(found["labels"])
            if rank is not None and len(self._hang) < 1_000_000:
                self._hang[int(rank[1])] = found["value"].startswith("1")
            return []
        return _straggler(line)

    def end(self) -> list[Event]:
        """Return what is open: phases without an end, and the gauge of all ranks."""
        told = [{**one, "data": {**one["data"], "open": True}} for one in self._open.values()]
        self._open = {}
        hanging = sorted(rank for rank, hangs in self._hang.items() if hangs)
        silent = sorted(rank for rank, hangs in self._hang.items() if not hangs)
        self._hang = {}
        if hanging:
            # Who waits reports; who never came does not: the silent ones are candidates, not cleared.
            data: dict[str, Any] = {"state": "suspected_hang", "reporting": hanging, "silent": silent}
            data["detail"] = f"{len(hanging)} of {len(hanging) + len(silent)} ranks report a hang"
            told.append({"type": "node.state", "data": data})
        return told

    def _dlrover(self, found: re.Match[str]) -> list[Event]:
        content: Any = {}
        try:
            content = json.loads(found["content"] or "{}")
        except (ValueError, RecursionError):
            content = {}
        data: dict[str, Any] = {"state": f"dlrover_{found['name'].lstrip('#')}", "target": found["target"]}
        data |= {"content": content} if content else {}
        event = _timed({"type": "node.state", "data": data}, found["time"])
        if found["phase"] == "BEGIN":
            if len(self._open) < 10_000:
                self._open[found["id"]] = event
            return []
        begun = self._open.pop(found["id"], None)
        if begun is not None and "time" in begun and "time" in event:
            data["duration_s"] = round(max(0, event["time"] - begun["time"]) / 1e9, 3)
        return [event]


def _straggler(line: str) -> list[Event]:
    told = {
        name: (float(value), int(rank)) for name, value, rank in _STRAGGLER.findall(line) if _plain(value)
    }
    if "MnRtt" not in told or "MxRtt" not in told:
        return []
    (fast_ms, fast), (slow_ms, slow) = told["MnRtt"], told["MxRtt"]
    spread = slow_ms / fast_ms - 1 if fast_ms > 0 else 0.0
    is_one = spread > STRAGGLER_SPREAD
    data: dict[str, Any] = {
        "kind": "straggler" if is_one else "straggler_report",
        "rule": "straggler",
        "severity": "warn" if is_one else "info",
        "detector": "megatron",
        "fastest_ms": fast_ms,
        "slowest_ms": slow_ms,
        "spread": round(spread, 5),
        "detail": f"round trips {fast_ms:g} ms (rank {fast}) to {slow_ms:g} ms (rank {slow}): "
        + (f"rank {slow} is {spread:.1%} slower" if is_one else f"spread {spread:.2%}, no straggler"),
    }
    event: Event = {"type": "verdict", "data": data}
    return [{**event, "ranks": [slow]} if is_one else event]


# --- narrow values


def _at(event: Event, document: Mapping[str, Any], *, node: str = "", time: tuple[str, ...] = ()) -> Event:
    """Give an event the node and the time that a record names."""
    name = _text(document.get(node)) if node else ""
    if name:
        event["node"] = name[:100]
    for one in time:
        value = document.get(one)
        if isinstance(value, str | int | float) and not isinstance(value, bool) and value != "":
            try:
                return {**event, "time": parse_time(value)[0]}
            except (ValueError, OverflowError):
                continue
    return event


def _timed(event: Event, text: str) -> Event:
    try:
        return {**event, "time": parse_time(text.strip().replace(" ", "T", 1).replace(",", "."))[0]}
    except (ValueError, OverflowError):
        return event


def _text(value: Any) -> str:
    return str(value)[:500] if isinstance(value, str | int) and not isinstance(value, bool) else ""


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else None


def _rank(value: Any) -> int | None:
    rank = int(value) if isinstance(value, str) and re.fullmatch(r"\d{1,9}", value, re.A) else _whole(value)
    return rank if rank is not None and rank < _MAX_RANK else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain(value: str) -> bool:
    return re.fullmatch(r"\d+(?:\.\d+)?", value) is not None
