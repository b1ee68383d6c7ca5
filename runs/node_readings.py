"""What frames of nodes say: kept per device, and taken together into the curves of the run.

A lane of a node frame is a node by its name, or, where the frame names its node, a device of it (a GPU by
its number or name). Counters count up from the node's boot (DCGM fields, NVIDIA's field identifiers); what is
shown is how far they rose, and one that fell began again at 0, as Prometheus' `increase` has it.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np

from andon.wire import Frame
from andon.wire_frames import NODE_METRICS
from runs.curve_columns import Reports
from runs.curve_values import CLOCK, LINK_ERRORS, RETRANSMITS, TEMPERATURE, Said
from runs.models import NodeReading
from runs.rows import raw_cursor

LINK_COUNTERS = ("nvlink_errors", "ib_symbol_errors", "pcie_replays")
COUNTERS = (
    *LINK_COUNTERS,
    "ecc_sbe",
    "ecc_dbe",
    "xid_count",
    "rx_pause",
    "tx_pause",
    "rx_drops",
    "retransmits",
)
HIGHEST, LOWEST = ("gpu_temp_c", "mem_temp_c", "power_w"), ("sm_clock_mhz",)
_NAME, _DEVICE = 200, 60

Lane = tuple[str, str]  # node, device


@dataclass(slots=True)
class _Reading:
    """One lane, as known and as these frames change it."""

    step: int = -1
    last: dict[str, float] = field(default_factory=dict)
    worst: dict[str, list[float]] = field(default_factory=dict)
    grown: dict[str, float] = field(default_factory=dict)

    def take(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Take in one row; returns how far each counter rose. A row that is late moves extremes only."""
        rose: dict[str, float] = {}
        for names, better in ((HIGHEST, float.__gt__), (LOWEST, float.__lt__)):
            for name in names:
                if name in values and (name not in self.worst or better(values[name], self.worst[name][0])):
                    self.worst[name] = [values[name], step]
        if step < self.step:
            return rose
        for name in COUNTERS:
            if name in values and name in self.last:
                before = self.last[name]
                rose[name] = values[name] - before if values[name] >= before else values[name]
                self.grown[name] = self.grown.get(name, 0.0) + rose[name]
        self.step = step
        self.last.update(values)
        return rose


def take(run_id: int, attempt: int, frames: Iterable[tuple[Frame, datetime]]) -> Said:
    """Keep what frames of nodes say, and return it as reports of the run's curves, with who said them."""
    rows, at = _rows(frames)
    if not rows:
        return {}
    known = _known(run_id, attempt, rows)
    said: list[tuple[str, int, float, Lane]] = []
    for lane, of_lane in rows.items():
        reading = known.setdefault(lane, _Reading())
        for step, values in sorted(of_lane, key=lambda row: row[0]):
            rose = reading.take(step, values)
            for series, metric in ((TEMPERATURE, "gpu_temp_c"), (CLOCK, "sm_clock_mhz")):
                if metric in values:
                    said.append((series, step, values[metric], lane))
            links = [rose[name] for name in LINK_COUNTERS if name in rose]
            if links:
                said.append((LINK_ERRORS, step, sum(links), lane))
            if "retransmits" in rose:
                said.append((RETRANSMITS, step, rose["retransmits"], lane))
    return _reports(said, _save(run_id, attempt, {lane: known[lane] for lane in rows}, at))


def _rows(
    frames: Iterable[tuple[Frame, datetime]],
) -> tuple[dict[Lane, list[tuple[int, dict[str, float]]]], dict[Lane, datetime]]:
    rows: dict[Lane, list[tuple[int, dict[str, float]]]] = defaultdict(list)
    at: dict[Lane, datetime] = {}
    for frame, received_at in frames:
        columns = {
            name: (np.ma.getdata(frame.metrics[name]).astype(np.float64), frame.measured(name))
            for name in NODE_METRICS
            if name in frame.metrics
        }
        lanes = frame.lane if isinstance(frame.lane, list) else frame.lane.tolist()
        for row, (lane, step) in enumerate(zip(lanes, frame.step.tolist(), strict=True)):
            values = {
                name: float(column[row])
                for name, (column, known) in columns.items()
                if known[row] and np.isfinite(column[row])
            }
            key = _lane(frame.node, str(lane))
            rows[key].append((int(step), values))
            at[key] = max(received_at, at.get(key, received_at))
    return rows, at


def _lane(node: str | None, lane: str) -> Lane:
    if not node or lane == node:
        return lane[:_NAME], ""
    return node[:_NAME], (f"GPU {lane}" if lane.isdecimal() else lane)[:_DEVICE]


def _known(run_id: int, attempt: int, lanes: Iterable[Lane]) -> dict[Lane, _Reading]:
    stored = NodeReading.objects.filter(
        run_id=run_id, attempt=attempt, node__in={node for node, _ in lanes}
    ).values_list("node", "device", "step", "last", "worst", "grown")
    return {(node, device): _Reading(*rest) for node, device, *rest in stored}


def _save(
    run_id: int, attempt: int, readings: Mapping[Lane, _Reading], at: Mapping[Lane, datetime]
) -> dict[Lane, int]:
    """Write them; returns the key of each row."""
    rows = [
        NodeReading(
            run_id=run_id,
            attempt=attempt,
            node=node,
            device=device,
            step=max(0, reading.step),
            at=at[node, device],
            last=reading.last,
            worst=reading.worst,
            grown=reading.grown,
        )
        for (node, device), reading in sorted(readings.items())
    ]
    changed = ["step", "at", "last", "worst", "grown"]
    unique: Any = ["run", "attempt", "node", "device"]
    NodeReading.objects.bulk_create(
        rows, batch_size=2_000, update_conflicts=True, update_fields=changed, unique_fields=unique
    )
    return {(row.node, row.device): int(row.pk) for row in rows}


def _reports(said: Iterable[tuple[str, int, float, Lane]], keys: Mapping[Lane, int]) -> Said:
    by_series: dict[str, list[tuple[int, float, int]]] = defaultdict(list)
    for series, step, value, lane in said:
        by_series[series].append((step, value, keys[lane] % 2**32))
    found: Said = {}
    for series, rows in by_series.items():
        steps, values, who = zip(*rows, strict=True)
        reports = Reports.of(np.array(steps, np.int64), np.array(values, np.float64), weight=1)
        reports.who[:] = who
        found[series] = reports
    return found


def names_of(keys: Iterable[int]) -> dict[int, str]:
    """Return the words for lanes by their key: `node-07`, `node-07 GPU 3`."""
    wanted = sorted({key for key in keys if key})
    if not wanted:
        return {}
    with raw_cursor() as cursor:
        cursor.execute("SELECT id, node, device FROM runs_nodereading WHERE id = ANY(%s)", (wanted,))
        return {int(key): f"{node} {device}".strip() for key, node, device in cursor}
