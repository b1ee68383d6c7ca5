"""What nccl-tests print (`all_reduce_perf`, `alltoall_perf`, …): bandwidth by size, and whether results
were right.

A row is read from its right end: time, algbw, busbw and a check, twice. Its left end differs by operation and
version (no root, a blank redop). The check is a count of wrong values under `#wrong`, and a relative
deviation under the older `error`, which rounding makes larger than 0. A text without rows measured nothing:
that is neither a pass nor 0 GB/s. (https://github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md)
"""

import re
from typing import Any, Literal

import msgspec

MIN_RATIO = 0.9  # of the baseline of nodes known to be good; a datasheet says nothing here

_PREFIX = re.compile(r"^(?:\[\d+,\d+\]<\w+>:\s?|\d{1,6}:\s)")  # of mpirun
_DEVICE = re.compile(
    r"#\s+Rank\s+(\d+)\s+(?:Group\s+\d+\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\s+(\d+)\s*(?:\[\S+\])?\s*(.*)"
)
_HEADER = re.compile(r"#\s+size\s+count\s+type\s+redop\b.*\bbusbw\s+(#wrong|error)\b")
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_BOUNDS = re.compile(r"#\s*Out of bounds values\s*:\s*(\d+)\s*(OK|FAILED)?", re.I)
_AVERAGE = re.compile(r"#\s*Avg bus bandwidth\s*:\s*(\d+(?:\.\d+)?)")
_GROUP = 4  # time, algbw, busbw, check
_MAX_ROWS = 10_000

Verdict = Literal["pass", "fail", "not compared", "inconclusive"]


class Size(msgspec.Struct, frozen=True):
    """One row: the message's size, the better of out-of-place and in-place, and how many values were wrong
    (None: not counted)."""

    bytes: int
    time_us: float
    busbw_gbs: float
    algbw_gbs: float
    wrong: int | None


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one test.

    Attributes:
        ranks, nodes: as its list of devices says; 0: it lists none.
        average_gbs: over all sizes, as printed; it depends on which sizes were chosen.
        out_of_bounds: values that were wrong, over all sizes; None: not printed.
        said: the first line that is none of the test's own, where nothing was measured.
    """

    sizes: tuple[Size, ...] = ()
    ranks: int = 0
    nodes: int = 0
    devices: str = ""
    average_gbs: float | None = None
    out_of_bounds: int | None = None
    said: str = ""

    @property
    def largest(self) -> Size | None:
        """The row that bandwidth is judged by."""
        measured = [one for one in self.sizes if one.bytes]
        return max(measured, key=lambda one: one.bytes) if measured else None

    @property
    def wrong(self) -> int | None:
        """How many values were wrong, None where none was counted."""
        counts = [one.wrong for one in self.sizes if one.wrong is not None]
        if self.out_of_bounds is not None:
            counts.append(self.out_of_bounds)
        return max(counts) if counts else None

    @property
    def bus_factor(self) -> float | None:
        """Bus bandwidth over algorithm bandwidth: 2(n−1)/n for an all-reduce, (n−1)/n for an all-to-all. Only
        runs of one factor and one number of nodes compare."""
        top = self.largest
        return None if top is None or not top.algbw_gbs else round(top.busbw_gbs / top.algbw_gbs, 2)


def is_output(text: str) -> bool:
    """Return whether a text looks like a run of nccl-tests, also like one that did not start."""
    return (
        _AVERAGE.search(text) is not None
        or any(_HEADER.search(line) for line in text.splitlines()[:400])
        or re.search(r"^\s*(?:\[\d+,\d+\]<\w+>:)?# nThread \d+ nGpus \d+ minBytes", text, re.M) is not None
        or ("mpirun" in text and re.search(r"\b\w+_perf\b", text) is not None)
    )


def read(text: str) -> Run:
    """Read one run. Whatever is no line of the test (NCCL INFO, mpirun, warnings) is passed over."""
    sizes: list[Size] = []
    hosts: set[str] = set()
    ranks: set[int] = set()
    name = said = ""
    counts = True
    average: float | None = None
    bounds: int | None = None
    for raw in text.splitlines():
        line = _PREFIX.sub("", raw.strip())
        device = _DEVICE.match(line)
        if device is not None:
            ranks.add(int(device[1][:9]))
            hosts.add(device[2])
            name = device[4].strip()[:80] or name
        elif (header := _HEADER.match(line)) is not None:
            counts = header[1] == "#wrong"
        elif (found := _BOUNDS.match(line)) is not None:
            bounds = int(found[1][:18])
        elif (found := _AVERAGE.match(line)) is not None:
            average = float(found[1])
        elif (size := _row(line, counts=counts)) is not None:
            if len(sizes) < _MAX_ROWS:
                sizes.append(size)
        elif line.strip("-#= ") and not line.startswith("#") and "NCCL" not in line and not said:
            said = line[:300]
    return Run(
        sizes=tuple(sizes),
        ranks=len(ranks),
        nodes=len(hosts),
        devices=name,
        average_gbs=average,
        out_of_bounds=bounds,
        said="" if sizes else said,
    )


def _row(line: str, *, counts: bool) -> Size | None:
    cells = line.split()
    if len(cells) < 3 + 2 * _GROUP or not cells[0].isdigit() or not cells[1].isdigit():
        return None
    pairs = [cells[-2 * _GROUP : -_GROUP], cells[-_GROUP:]]
    measured = [[_number(cell) for cell in pair] for pair in pairs]
    known = [one for one in measured if None not in one[:3]]
    if not known or any(
        cell not in ("N/A", "-") and _number(cell) is None for pair in pairs for cell in pair
    ):
        return None
    time_us, algbw, busbw, _ = max(known, key=lambda one: one[2] or 0.0)
    wrong = [one[3] for one in measured if one[3] is not None]
    assert time_us is not None
    assert algbw is not None
    assert busbw is not None
    return Size(
        bytes=int(cells[0][:18]),
        time_us=time_us,
        busbw_gbs=busbw,
        algbw_gbs=algbw,
        wrong=int(max(wrong)) if wrong and counts else None,
    )


def _number(cell: str) -> float | None:
    return float(cell) if _NUMBER.fullmatch(cell) and len(cell) < 40 else None


def verdict(run: Run, baseline_gbs: float | None = None, min_ratio: float = MIN_RATIO) -> tuple[Verdict, str]:
    """Return what a run says, and why.

    Args:
        baseline_gbs: bus bandwidth at the largest size of known-good nodes, for the same operation, size and
            number of nodes; without one a bandwidth is neither good nor bad.
    """
    wrong, top = run.wrong, run.largest
    if wrong:
        return "fail", f"{wrong} values were wrong: data is damaged on its way or on a device"
    if top is None:
        why = run.said or "the text holds no row"
        return "inconclusive", f"nothing was measured: {why}"
    speed = f"{top.busbw_gbs:g} GB/s at {top.bytes:,} bytes over {run.ranks or '?'} ranks"
    if baseline_gbs is None:
        return "not compared", f"{speed}; unknown without a baseline of the same operation and nodes"
    ratio = top.busbw_gbs / baseline_gbs if baseline_gbs > 0 else 0.0
    word = f"{speed}, {ratio:.2f} of the baseline's {baseline_gbs:g}"
    return ("pass", word) if ratio >= min_ratio else ("fail", f"{word}: under {min_ratio:g}")


def event(run: Run, baseline_gbs: float | None = None) -> dict[str, Any]:
    """Return a run as a `preflight.report` event."""
    said, why = verdict(run, baseline_gbs)
    top = run.largest
    data: dict[str, Any] = {
        "check": "collective",
        "tool": "nccl-tests",
        "verdict": said,
        "detail": why,
        "ranks": run.ranks or None,
        "nodes_tested": run.nodes or None,
        "device": run.devices or None,
        "wrong": run.wrong,
        "average_busbw_gbs": run.average_gbs,
        "bus_factor": run.bus_factor,
    }
    if top is not None:
        data |= {"busbw_gbs": top.busbw_gbs, "size_bytes": top.bytes, "time_us": top.time_us}
    if baseline_gbs is not None:
        data["baseline_gbs"] = baseline_gbs
    return {"type": "preflight.report", "data": {k: v for k, v in data.items() if v is not None}}
