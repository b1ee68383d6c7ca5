"""Read the health of a frame: which of its rows are bad, in which phase, and whether locally.

Everything works on whole columns; a healthy frame costs one pass per judged column.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from andon.detect.cells import NO_MICRO_BATCH, BadCells, Phase

if TYPE_CHECKING:
    from andon.wire import Frame

INPUT, FORWARD, LOCAL_GRAD, REDUCED_GRAD, OPTIMIZER, WEIGHT, SKIPPED = 1, 2, 4, 8, 16, 32, 64
ORIGIN_BITS = INPUT | FORWARD | LOCAL_GRAD  # the only bits that may name a rank
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
_LOCAL_BY_DEFAULT = frozenset({"loss", "nonfinite"})

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


def axes(frame: "Frame") -> Axes:
    """Return the step and lane axes of a frame."""
    step = np.asarray(frame.step, dtype=np.int64)
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


def _lane_codes(lane: Any) -> tuple[NDArray[np.intp], NDArray[Any]]:
    if isinstance(lane, np.ndarray) and lane.dtype.kind in "iu":
        if not lane.shape[0]:
            return np.empty(0, dtype=np.intp), np.empty(0, dtype=np.int32)
        low, high = int(lane.min()), int(lane.max())
        if high - low < 4 * lane.shape[0] + 65_536:  # dense numbers: a table beats a sort
            present = np.zeros(high - low + 1, dtype=np.bool_)
            present[lane - low] = True
            lanes = np.flatnonzero(present) + low
            if len(lanes) == len(present):
                return (lane - low).astype(np.intp), lanes.astype(np.int32)
            position = np.cumsum(present) - 1
            return position[lane - low].astype(np.intp), lanes.astype(np.int32)
        lanes, code = np.unique(lane, return_inverse=True)
        return code.astype(np.intp), lanes.astype(np.int32)
    names = lane.tolist() if isinstance(lane, np.ndarray) else list(lane)
    index: dict[str, int] = {}
    code = np.fromiter(
        (index.setdefault(name, len(index)) for name in names), dtype=np.intp, count=len(names)
    )
    return code, np.array(list(index), dtype=object)


@dataclass(frozen=True, slots=True, eq=False)
class RowHealth:
    """Per row of a frame (n rows): what is bad about it.

    Attributes:
        axes: the frame's rectangle.
        bad, local: bool[n]; local implies bad and may be an origin.
        phase: int8[n], meaningful where bad.
        state: bool[n], weights or optimizer moments are nonfinite.
        skipped: bool[n], some rank says that this row's step was not applied (ranks skip together).
        columns: judged columns with at least one nonfinite value, with how many.
        healthy: no row is bad.
    """

    axes: Axes
    bad: NDArray[np.bool_]
    local: NDArray[np.bool_]
    phase: NDArray[np.int8]
    state: NDArray[np.bool_]
    skipped: NDArray[np.bool_]
    columns: dict[str, int]
    healthy: bool


def nonfinite_rows(column: NDArray[Any]) -> NDArray[np.bool_] | None:
    """Return where a metric is NaN or ±Inf, or None when nowhere. A masked value is not measured."""
    values = np.ma.getdata(column)
    if values.dtype.kind != "f":
        return None
    finite = np.isfinite(values)
    if finite.all():
        return None
    mask = np.ma.getmask(column)
    bad: NDArray[np.bool_] = ~finite if mask is np.ma.nomask else ~finite & ~mask
    return bad if bad.any() else None


def bit_sets(column: NDArray[Any]) -> NDArray[np.int64]:
    """Return the `nonfinite` column as bit sets 0 … 127, 0 where not measured or unreadable.

    A boolean column says that something was nonfinite and not in which phase: forward, as for a loss.
    """
    values = np.ma.getdata(column)
    if values.dtype.kind == "b":
        bits = values.astype(np.int64) * FORWARD
    elif values.dtype.kind == "f":
        known = np.isfinite(values) & (values >= 0) & (values < 128)
        bits = np.where(known, values, 0).astype(np.int64)
    else:
        bits = np.where(values >= 0, values, 0).astype(np.int64) & 127
    mask = np.ma.getmask(column)
    return bits if mask is np.ma.nomask else np.where(mask, 0, bits)


def is_local(frame: "Frame", column: str) -> bool:
    """Return whether values of `column` were computed by one rank before any collective."""
    if column in _NEVER_LOCAL:
        return False
    default = "local" if column in _LOCAL_BY_DEFAULT else "reduced"
    return bool(frame.views.get(column, default) == "local")


def row_health(frame: "Frame") -> RowHealth:
    """Judge every row of a frame.

    Where a row has a bit set, the phase is read from it and only bits 1, 2, 4 of a local column make
    the row an origin; without bits the columns decide.
    """
    n = int(np.asarray(frame.step).shape[0])
    where = axes(frame)
    false = np.zeros(n, dtype=np.bool_)
    columns: dict[str, int] = {}
    found: list[tuple[NDArray[np.bool_], Phase, bool]] = []
    state = false
    for name, (local_phase, shared_phase) in JUDGED.get(frame.stream, {}).items():
        column = frame.metrics.get(name)
        rows = None if column is None else nonfinite_rows(column)
        if rows is None:
            continue
        columns[name] = int(rows.sum())
        local = is_local(frame, name)
        found.append((rows, local_phase if local else shared_phase, local))
        if name in STATE_COLUMNS:
            state = state | rows
    bits: NDArray[np.int64] | None = None
    if "nonfinite" in frame.metrics and frame.stream in ("rank", "layer"):
        bits = bit_sets(frame.metrics["nonfinite"])
        if not bits.any():
            bits = None
    if not found and bits is None:
        return RowHealth(where, false, false, np.zeros(n, np.int8), false, false, {}, True)

    bad, local_rows, phase = false.copy(), false.copy(), np.full(n, Phase.OPTIMIZER, dtype=np.int8)
    for rows, column_phase, local in sorted(found, key=lambda item: (not item[2], item[1])):
        # Local columns first, earliest phase first: what came earlier in this order stands.
        fresh = rows & ~bad
        bad |= fresh
        phase[fresh] = column_phase
        if local:
            local_rows |= fresh
    skipped = false
    if bits is not None:
        told = (bits & BAD_BITS) != 0
        if told.any():
            columns["nonfinite"] = int(told.sum())
            bad |= told
            phase[told] = BIT_PHASE[bits[told]]
            local_rows = np.where(
                told, ((bits & ORIGIN_BITS) != 0) & is_local(frame, "nonfinite"), local_rows
            )
            state = state | ((bits & STATE_BITS) != 0)
        skip_rows = (bits & SKIPPED) != 0
        if skip_rows.any():
            skipped_step = np.zeros(len(where.steps), dtype=np.bool_)
            skipped_step[where.row[skip_rows]] = True
            skipped = skipped_step[where.row]
    return RowHealth(where, bad, local_rows, phase, state, skipped, columns, not bad.any())


def cells_of(frame: "Frame", health: RowHealth) -> BadCells:
    """Return the bad rows of a frame as cells."""
    at = np.flatnonzero(health.bad)
    micro_batch = frame.micro_batch
    if micro_batch is None:
        batches = np.full(len(at), NO_MICRO_BATCH, dtype=np.int32)
    else:
        chosen = np.asarray(np.ma.getdata(micro_batch))[at].astype(np.int32)
        mask = np.ma.getmaskarray(micro_batch)[at]
        batches = np.where(mask | (chosen < 0), NO_MICRO_BATCH, chosen).astype(np.int32)
    rank = getattr(frame, "rank", None)
    return BadCells(
        step=np.asarray(frame.step, dtype=np.int64)[at],
        lane=health.axes.lanes[health.axes.column[at]],
        micro_batch=batches,
        phase=health.phase[at],
        local=health.local[at],
        skipped=health.skipped[at] & ~health.state[at],
        rank=None if rank is None else np.asarray(np.ma.getdata(rank))[at].astype(np.int32),
    )
