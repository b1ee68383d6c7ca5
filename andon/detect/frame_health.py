"""Read the health of a frame: which of its rows are bad, in which phase, and whether locally.

Everything works on whole columns; a healthy frame costs one pass per judged column.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from andon.detect.cells import NO_MICRO_BATCH, SOURCES, BadCells, Phase, lane_codes
from andon.wire import BITS, ORIGIN_BITS, Frame

INPUT, FORWARD, LOCAL_GRAD = BITS["input"], BITS["forward"], BITS["local_grad"]
REDUCED_GRAD, OPTIMIZER, WEIGHT = BITS["reduced_grad"], BITS["optimizer"], BITS["weight"]
SKIPPED = BITS["skipped"]
STATE_BITS = OPTIMIZER | WEIGHT  # weights or moments: a skipped update does not undo them
BAD_BITS = ORIGIN_BITS | REDUCED_GRAD | STATE_BITS

# Columns that may hold a run, per stream, with the phase of a local and of a shared value.
# A weight or an update is the result of the optimizer step, the same on every replica: no origin.
JUDGED: dict[str, dict[str, tuple[Phase, Phase]]] = {
    "rank": {"loss": (Phase.FORWARD, Phase.FORWARD), "grad_norm": (Phase.BACKWARD, Phase.REDUCE)},
    "layer": {
        "grad_norm": (Phase.BACKWARD, Phase.REDUCE),
        "weight_norm": (Phase.OPTIMIZER, Phase.OPTIMIZER),
        "update_ratio": (Phase.OPTIMIZER, Phase.OPTIMIZER),
    },
    "node": {},
}
STATE_COLUMNS = frozenset({"weight_norm"})  # nonfinite here is a nonfinite weight
_NEVER_LOCAL = frozenset({"weight_norm", "update_ratio"})

# Phase of the lowest set bit, for every value of the seven bits; −1 where none says anything.
_BIT_PHASES = {
    INPUT: Phase.DATA,
    FORWARD: Phase.FORWARD,
    LOCAL_GRAD: Phase.BACKWARD,
    REDUCED_GRAD: Phase.REDUCE,
    OPTIMIZER: Phase.OPTIMIZER,
    WEIGHT: Phase.OPTIMIZER,
}
BIT_PHASE: NDArray[np.int8] = np.array(
    [min((p for b, p in _BIT_PHASES.items() if value & b), default=-1) for value in range(128)], dtype=np.int8
)


@dataclass(frozen=True, slots=True, eq=False)
class Axes:
    """The rectangle a frame covers.

    Attributes:
        steps: int64[s] ascending.
        lanes: int32[l] ascending, or object[l] of str in order of first appearance (model order).
        row, column: index of each of the n rows in `steps` and in `lanes`.
        regular: the rows are exactly the rectangle, step by step, each lane once.
    """

    steps: NDArray[np.int64]
    lanes: NDArray[Any]
    row: NDArray[np.intp]
    column: NDArray[np.intp]
    regular: bool


def axes(frame: Frame) -> Axes:
    """Return the step and lane axes of a frame."""
    step = frame.step
    lane, lanes = _lane_codes(frame.lane)
    n, width = step.shape[0], len(lanes)
    if n and n % width == 0:
        block = step.reshape(-1, width)
        tall = block[:, 0]
        if (
            (block == tall[:, None]).all()
            and (tall[1:] > tall[:-1]).all()
            and (lane.reshape(-1, width) == np.arange(width)).all()
        ):
            row = np.repeat(np.arange(len(tall)), width)
            return Axes(tall.copy(), lanes, row, lane, True)
    steps, row = np.unique(step, return_inverse=True)
    return Axes(steps, lanes, row.astype(np.intp), lane, False)


def _lane_codes(lane: NDArray[np.int32] | list[str]) -> tuple[NDArray[np.intp], NDArray[Any]]:
    if isinstance(lane, np.ndarray):
        return lane_codes(lane)
    index: dict[str, int] = {}
    codes = (index.setdefault(name, len(index)) for name in lane)
    return np.fromiter(codes, dtype=np.intp, count=len(lane)), np.array(list(index), dtype=object)


@dataclass(frozen=True, slots=True, eq=False)
class RowHealth:
    """Per row of a frame (n rows): what is bad about it.

    Attributes:
        axes: the frame's rectangle.
        bad, local: bool[n]; local implies bad and may be an origin.
        phase: int8[n], meaningful where bad.
        state: bool[n], weights or optimizer moments are nonfinite.
        skipped: bool[n], some rank says that this row's step was not applied (ranks skip together).
        bits: int16[n], the bit sets; source: int8[n], which of `SOURCES` decided the phase.
        columns: judged columns with at least one nonfinite value, with how many.
        healthy: no row is bad.
    """

    axes: Axes
    bad: NDArray[np.bool_]
    local: NDArray[np.bool_]
    phase: NDArray[np.int8]
    state: NDArray[np.bool_]
    skipped: NDArray[np.bool_]
    bits: NDArray[np.int16]
    source: NDArray[np.int8]
    columns: dict[str, int]
    healthy: bool


def nonfinite_rows(frame: Frame, name: str) -> NDArray[np.bool_] | None:
    """Return where a metric was measured as NaN or ±Inf, or None when nowhere or no such metric."""
    values = frame.metrics.get(name)
    if values is None or values.dtype.kind != "f" or np.isfinite(values).all():
        return None
    bad = frame.nonfinite(name)
    return bad if bad.any() else None


def bit_sets(frame: Frame) -> NDArray[np.int64] | None:
    """Return the `nonfinite` column as bit sets 0 … 127, or None when no bit is set anywhere."""
    values = frame.metrics.get("nonfinite")
    if values is None or values.dtype.kind not in "iu" or not values.any():
        return None
    return values.astype(np.int64) & 127


def is_local(frame: Frame, name: str) -> bool:
    """Return whether values of a metric were computed by one rank before any collective."""
    return name not in _NEVER_LOCAL and frame.view_of(name) == "local"


def row_health(frame: Frame) -> RowHealth:
    """Judge every row of a frame.

    Where a row has a bit set, the phase is read from it and only bits 1, 2, 4 of a local column make
    the row an origin; without bits the columns decide.
    """
    n = frame.rows
    where = axes(frame)
    false = np.zeros(n, dtype=np.bool_)
    columns: dict[str, int] = {}
    found: list[tuple[NDArray[np.bool_], Phase, bool, int]] = []
    state = false
    for name, (local_phase, shared_phase) in JUDGED.get(frame.stream, {}).items():
        rows = nonfinite_rows(frame, name)
        if rows is None:
            continue
        columns[name] = int(rows.sum())
        local = is_local(frame, name)
        found.append((rows, local_phase if local else shared_phase, local, SOURCES.index(name)))
        if name in STATE_COLUMNS:
            state = state | rows
    bits = bit_sets(frame) if frame.stream in ("rank", "layer") else None
    if not found and bits is None:
        none = np.zeros(n, np.int8)
        return RowHealth(where, false, false, none, false, false, none.astype(np.int16), none, {}, True)

    bad, local_rows, phase = false.copy(), false.copy(), np.full(n, Phase.OPTIMIZER, dtype=np.int8)
    source = np.zeros(n, dtype=np.int8)
    for rows, column_phase, local, index in sorted(found, key=lambda item: (not item[2], item[1], item[3])):
        # Local columns first, earliest phase first: what came earlier in this order stands.
        fresh = rows & ~bad
        bad |= fresh
        phase[fresh] = column_phase
        source[fresh] = index
        if local:
            local_rows |= fresh
    skipped = false
    if bits is not None:
        told = (bits & BAD_BITS) != 0
        if told.any():
            columns["nonfinite"] = int(told.sum())
            bad |= told
            phase[told] = BIT_PHASE[bits[told]]
            source[told] = SOURCES.index("nonfinite")
            local_rows = np.where(
                told, ((bits & ORIGIN_BITS) != 0) & is_local(frame, "nonfinite"), local_rows
            )
            state = state | ((bits & STATE_BITS) != 0)
        skip_rows = (bits & SKIPPED) != 0
        if skip_rows.any():
            skipped_step = np.zeros(len(where.steps), dtype=np.bool_)
            skipped_step[where.row[skip_rows]] = True
            skipped = skipped_step[where.row]
    shown = np.zeros(n, dtype=np.int16) if bits is None else bits.astype(np.int16)
    return RowHealth(
        where, bad, local_rows, phase, state, skipped, shown, source, columns, healthy=not bad.any()
    )


def cells_of(frame: Frame, health: RowHealth) -> BadCells:
    """Return the bad rows of a frame as cells."""
    at = np.flatnonzero(health.bad)
    batches = np.full(len(at), NO_MICRO_BATCH, dtype=np.int32)
    if frame.micro_batch is not None:
        batches[:] = frame.micro_batch[at]
    source = health.source[at]
    value = np.zeros(len(at), dtype=np.int8)
    for name in health.columns.keys() - {"nonfinite"}:
        # Where bits decided the phase, the column beside them still says which value it was.
        seen = frame.metrics[name][at].astype(np.float64)
        kind = np.select([np.isnan(seen), seen == np.inf, seen == -np.inf], [1, 2, 3])
        kind[~frame.nonfinite(name)[at]] = 0
        mine = (source == SOURCES.index(name)) | ((source == 0) & (value == 0))
        value[mine] = kind[mine]
    return BadCells(
        step=frame.step[at],
        lane=health.axes.lanes[health.axes.column[at]],
        micro_batch=batches,
        phase=health.phase[at],
        local=health.local[at],
        skipped=health.skipped[at] & ~health.state[at],
        bits=health.bits[at],
        source=source,
        value=value,
        rank=None if frame.rank is None else frame.rank[at].astype(np.int32),
    )
