"""What a rank's log says when it fails: tracebacks, watchdogs, dead devices, broken links, Megatron's rerun.

Each becomes one `process.error` event (Megatron's verdict on a rank and iteration a `step` event). Who
reports is usually the victim, so nothing here names a culprit: the server weighs what all ranks said.
Numbers at the end of warnings are left alone.
"""

import re

import msgspec

from andon.readers.logs.lines import Line
from andon.wire_events import BITS

_MAX_LINES = 200  # of one traceback
_MAX_LINE_CHARS = 1_000
_MAX_OPEN = 64  # tracebacks that interleave
_MAX_CHARS = 8_000
_ONE_LINE = (
    ("nccl_timeout", re.compile(r"Watchdog caught collective operation timeout: WorkNCCL\(")),
    ("nccl_exception", re.compile(r"Exception \(either an error or timeout\) detected by watchdog")),
    ("fabric", re.compile(r"NET/IB : Got completion from peer .*? with (?:status=|error )\d+", re.A)),
    ("device", re.compile(r"^\s*what\(\):\s+.*CUDA error")),
    ("distributed", re.compile(r"\[ERROR\].{0,40}\(PID:\d+, Device:\d+, RankID:\d+\)", re.A)),
    ("nan_stop", re.compile(r"\bLoss is (?:nan|inf\w*), stopping training", re.I)),
)
_GLOBAL_RANK = re.compile(r"\[(?:PG \S+(?: GUID [^\]]*?)? )?Rank (\d{1,7})\]", re.A)
_ASCEND = re.compile(r"\(PID:(\d{1,9}), Device:(\d{1,9}), RankID:(\d{1,9})\)", re.A)
_NCCL = re.compile(r"([A-Za-z][\w.\-]{0,252}):\d+:\d+ \[\d+\] ", re.A)  # host:pid:thread [device]
_ROOT_CAUSE = "Root Cause (first observed failure):"  # torchelastic's ChildFailedError, one per node
_FIELD = re.compile(r"^\s*(time|host|rank|exitcode|error_file|traceback)\s*:\s*(.*)$")
_TRACEBACK = "Traceback (most recent call last):"
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Failure)(?::.*)?$")
_RERUN = re.compile(
    r"Unexpected result (\S+) on rank (\d{1,7}) at iteration #(\d{1,18}) invocation #\d+ \(message='([^']*)'",
    re.A,
)
_RERUN_VERDICT = re.compile(
    r"Rank (\d{1,7}), node (\S+), device (\d+), iteration #(\d{1,18}): "
    r"(.*(?:reproducible|correct|transient|persistent).*)",
    re.A,
)


class Traceback(msgspec.Struct):
    """Lines of a traceback (or of torchelastic's summary) whose end was not seen; `line` is its first."""

    lines: list[str]
    line: Line


class Errors:
    """Reads errors from the lines of one log; tracebacks of several ranks may interleave.

    `open_` holds what is begun, by source; it is the caller's to keep.
    """

    def __init__(self, open_: dict[str, Traceback]) -> None:
        self._open = open_

    def feed(self, line: Line) -> list[dict[str, object]]:
        """Return the events that this line ends; times, node and attempt are the caller's."""
        text = line.text
        open_ = self._open.get(line.source)
        if _TRACEBACK in text or _ROOT_CAUSE in text:
            ended = self._end(line.source)
            if len(self._open) >= _MAX_OPEN:
                ended += self._end(next(iter(self._open)))
            self._open[line.source] = Traceback([text], line)
            return ended
        if open_ is not None:
            if _ROOT_CAUSE in open_.lines[0] and text.startswith("==="):
                return self._end(line.source)
            open_.lines.append(text[:_MAX_LINE_CHARS])
            if _ROOT_CAUSE in open_.lines[0] and len(open_.lines) < _MAX_LINES:
                return []
            if _EXCEPTION.match(text) or len(open_.lines) >= _MAX_LINES:
                return self._end(line.source)
            if text.startswith((" ", "\t")) or not text.strip():
                return []
            # Neither code nor the exception's name: an exception of a library's own making, or a line
            # of something else; either way the traceback is over.
            return self._end(line.source)
        return _single(line)

    def flush(self) -> list[dict[str, object]]:
        """End what is open."""
        return [event for source in list(self._open) for event in self._end(source)]

    def _end(self, source: str) -> list[dict[str, object]]:
        open_ = self._open.pop(source, None)
        if open_ is None or len(open_.lines) < 2:
            return []
        if _ROOT_CAUSE in open_.lines[0]:
            return _root_cause(open_.lines)
        data: dict[str, object] = {
            "class": "exception",
            "message": open_.lines[-1].strip()[:500],
            "traceback": "\n".join(open_.lines)[-_MAX_CHARS:],
        }
        return [_event("process.error", open_.line, data)]


def _root_cause(lines: list[str]) -> list[dict[str, object]]:
    """The first failure that this node's launcher saw; other nodes' launchers have their own."""
    fields = {found[1]: found[2].strip() for line in lines if (found := _FIELD.match(line)) is not None}
    numbers = {name: re.findall(r"-?\b\d{1,9}\b", text) for name, text in fields.items()}
    data: dict[str, object] = {"class": "worker_failed", "message": fields.get("traceback", "")[:2_000]}
    if code := numbers.get("exitcode"):
        data["exitcode"] = int(code[0])
        if len(code) > 1:
            data["pid"] = int(code[1])
    ranks = numbers.get("rank") or []
    if len(ranks) > 1:
        data["local_rank"] = int(ranks[1])
    event: dict[str, object] = {"type": "process.error", "data": data}
    if ranks and 0 <= int(ranks[0]) < 2**31:
        event["rank"] = int(ranks[0])
    if fields.get("host"):
        event["node"] = fields["host"][:255]
    return [event] if code or data["message"] else []


def _single(line: Line) -> list[dict[str, object]]:
    text = line.text
    found = _RERUN.search(text)
    if found is not None:
        return [_unexpected(found)]
    found = _RERUN_VERDICT.search(text)
    if found is not None:
        verdict: dict[str, object] = {
            "class": "rerun",
            "message": found[5].strip()[:500],
            "device": int(found[3]),
            "iteration": int(found[4]),
        }
        return [{"type": "process.error", "rank": int(found[1]), "node": found[2][:255], "data": verdict}]
    kind = next((name for name, pattern in _ONE_LINE if pattern.search(text)), None)
    if kind is None and _EXCEPTION.match(text) and "ChildFailedError" not in text:
        kind = "exception"  # its traceback was cut, or printed elsewhere
    if kind is None:
        return []
    data: dict[str, object] = {"class": kind, "message": text.strip()[:2_000]}
    event = _event("process.error", line, data)
    named = _GLOBAL_RANK.search(text)
    if named is not None:
        event["rank"] = int(named[1])
    nccl = _NCCL.match(text)
    if nccl is not None:
        event["node"] = nccl[1]
    ascend = _ASCEND.search(text)
    if ascend is not None:
        data |= {"pid": int(ascend[1]), "device": int(ascend[2])}
        event["rank"] = int(ascend[3])
    return [event]


def _unexpected(found: re.Match[str]) -> dict[str, object]:
    """Megatron looked at this rank's own loss or gradient before the reduce: the rank is the source."""
    value, rank, step, message = found[1].lower(), int(found[2]), int(found[3]), found[4]
    event: dict[str, object] = {"type": "process.error", "rank": rank}
    # Other unexpected results (a spike) are no nonfinite value.
    if value.strip("+-") not in ("nan", "inf"):
        event["data"] = {"class": "rerun", "message": message[:500], "iteration": step, "value": value[:40]}
        return event
    bits = BITS["local_grad"] if "grad" in message.lower() else BITS["forward"]
    data = {"nonfinite": bits, "view": "local", "note": message[:500]}
    return {"type": "step", "step": step, "rank": rank, "data": data}


def _event(kind: str, line: Line, data: dict[str, object]) -> dict[str, object]:
    if line.local_rank is not None:
        data.setdefault("local_rank", line.local_rank)
    return (
        {"type": kind, "data": data} if line.rank is None else {"type": kind, "rank": line.rank, "data": data}
    )
