"""What posts say of curves: every number of a step event, and what frames of ranks and nodes add to it."""

import json
import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping

import numpy as np
import zstandard
from numpy.typing import NDArray

from andon.wire import Frame
from runs.curve_columns import KINDS, REDUCED, Reports
from runs.models import Event

MAX_NAME = 100
MAX_NAMES = 128  # numbers of one step event; a trainer that logs every layer as a metric sends frames

SKIPPED = "skipped"  # 1 where the update was not applied
OCCURRED = "occurred_s"  # when the step was over, in seconds since 1970
WAIT = "rank:wait_s"  # the shortest wait in collectives: of the rank that came last and waited for nobody
TEMPERATURE = "node:gpu_temp_c"
CLOCK = "node:sm_clock_mhz"
LINK_ERRORS = "node:link_errors"
RETRANSMITS = "node:retransmits"

# How the values of several ranks or nodes become the one of a step; all others are averaged.
HOW = {
    SKIPPED: "max",
    OCCURRED: "min",
    "step_time_s": "max",  # a step is as long as its slowest rank's
    WAIT: "min",
    TEMPERATURE: "max",
    CLOCK: "min",
    LINK_ERRORS: "sum",
    RETRANSMITS: "sum",
}
FRAME_METRICS = ("loss", "step_time_s", "wait_s", "nonfinite")
_NOT_CURVES = {"nonfinite", "skipped", "view", "directive_seq"}
_BIT_SKIPPED = 64

Said = dict[str, Reports]  # by the name of the series


def how(name: str) -> str:
    """Return how values of one step are taken together: mean, max, min or sum."""
    return HOW.get(name, "mean")


def of_events(events: Iterable[Event]) -> dict[int, Said]:
    """Return what step and skip events say, by attempt."""
    rows: dict[tuple[int, str], list[tuple[int, float, int, int]]] = defaultdict(list)
    for event in events:
        step = event.step
        if step is None or event.type not in {"step", "skip"}:
            continue
        data = event.data
        bits = data.get("nonfinite")
        skipped = event.type == "skip" or data.get("skipped") is True
        skipped = skipped or (type(bits) is int and bool(bits & _BIT_SKIPPED))
        rows[event.attempt, SKIPPED].append((step, float(skipped), 0, 1))
        if event.type == "skip":
            continue
        rows[event.attempt, OCCURRED].append((step, event.occurred_at.timestamp(), 0, 1))
        reduced = event.rank is None or event.view == "reduced"
        for name in list(data)[:MAX_NAMES]:
            if name in _NOT_CURVES or len(name) > MAX_NAME:
                continue
            value, flag = data[name], event.flags.get(f"data.{name}", "")
            kind = KINDS.index(flag) if flag in KINDS else 0
            if not kind and (flag or isinstance(value, bool) or not isinstance(value, int | float)):
                continue  # not measured, or no number
            same = reduced or (name == "grad_norm" and "view" not in data)
            row = (step, 0.0 if kind else float(value), kind, int(REDUCED) if same else 1)
            rows[event.attempt, name].append(row)
    said: dict[int, Said] = defaultdict(dict)
    for (attempt, name), found in rows.items():
        steps, values, kinds, weights = zip(*found, strict=True)
        said[attempt][name] = Reports(
            np.array(steps, np.int64),
            np.array(values, np.float64),
            np.array(kinds, np.uint8),
            np.array(weights, np.uint32),
            np.zeros(len(found), np.uint32),
        )
    return dict(said)


def of_rank_frame(frame: Frame) -> Said:
    """Return what a frame of ranks says of its steps: loss, step time, time in collectives, skips."""
    said: Said = {}
    for metric, name in (("loss", "loss"), ("step_time_s", "step_time_s"), ("wait_s", WAIT)):
        if metric in frame.metrics:
            said[name] = _of_ranks(frame, metric, how(name))
    bits = frame.metrics.get("nonfinite")
    if bits is not None and bits.dtype.kind in "iu":
        skips = np.unique(frame.step[(np.ma.getdata(bits) & _BIT_SKIPPED) > 0])
        steps = np.unique(frame.step)
        said[SKIPPED] = Reports.of(steps, np.isin(steps, skips).astype(np.float64), weight=1)
    return {name: reports for name, reports in said.items() if len(reports)}


def _of_ranks(frame: Frame, metric: str, rule: str) -> Reports:
    """Return one report per step: a frame of 16,384 ranks is taken together before it is kept."""
    values = np.ma.getdata(frame.metrics[metric]).astype(np.float64)
    known = frame.measured(metric)
    if rule != "mean":
        known = known & np.isfinite(values)
    steps, values = frame.step[known], values[known]
    if frame.view_of(metric) == "reduced":
        return Reports.of(steps, values)
    order = np.argsort(steps, kind="stable")
    steps, values = steps[order], values[order]
    starts = np.flatnonzero(np.diff(steps, prepend=-1))
    if not len(starts):
        return Reports.of(steps, values)
    if rule != "mean":
        most = (np.minimum if rule == "min" else np.maximum).reduceat(values, starts)
        return Reports.of(steps[starts], most, weight=1)
    ranks = np.diff(np.append(starts, len(steps)))
    with np.errstate(invalid="ignore"):  # an infinity beside its opposite is a NaN, as it should be
        found = Reports.of(steps[starts], np.add.reduceat(values, starts) / ranks, weight=1)
    found.weights[:] = ranks
    return found


_HEAD = struct.Struct("<I")
_KINDS: Mapping[str, str] = {"steps": "<i8", "values": "<f8", "kinds": "u1", "weights": "<u4", "who": "<u4"}


def pack(said: Said) -> bytes:
    """Return the stored form of what was said, until a worker takes it into the blocks."""
    head = json.dumps({name: len(reports) for name, reports in said.items()}).encode()
    parts = [_HEAD.pack(len(head)), head]
    for reports in said.values():
        parts += [getattr(reports, name).astype(kind).tobytes() for name, kind in _KINDS.items()]
    return zstandard.ZstdCompressor(level=1).compress(b"".join(parts))


def unpack(stored: bytes) -> Said:
    """Return what was said from its stored form."""
    raw = zstandard.ZstdDecompressor().decompress(stored)
    (size,) = _HEAD.unpack_from(raw)
    at = _HEAD.size + size
    said: Said = {}
    for name, n in json.loads(raw[_HEAD.size : at]).items():
        columns: list[NDArray[np.generic]] = []
        for kind in _KINDS.values():
            columns.append(np.frombuffer(raw, kind, n, at))
            at += n * np.dtype(kind).itemsize
        said[name] = Reports(*columns)  # type: ignore[arg-type]
    return said


def joined(parts: Iterable[Said]) -> Said:
    """Return all of it together."""
    found: Said = {}
    for part in parts:
        for name, reports in part.items():
            found[name] = found[name].joined(reports) if name in found else reports
    return found
