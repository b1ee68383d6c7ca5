"""Bad cells and the first of them.

A cell is (step, lane) of one attempt. Which bad cell came first is decided by what the trainer says
happened inside the step, never by when a post arrived: arrival is a race between networks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from andon.detect.topology import Topology
from andon.wire_values import fold_ranks

NO_MICRO_BATCH = -1  # the sender did not say in which micro-batch
NO_LANE = -1  # a reduced value posted without any rank

LOCAL_VALUE = "local value"
REDUCED_ONLY = "reduced values only: the rank is not known"
AT_OR_BEFORE = "at or before: already bad in the first record"

_LAST = np.iinfo(np.int32).max


class Phase(IntEnum):
    """Order of what happens inside one step of training."""

    DATA = 0
    FORWARD = 1
    BACKWARD = 2
    REDUCE = 3
    OPTIMIZER = 4


SOURCES = ("nonfinite", "loss", "grad_norm", "weight_norm", "update_ratio")  # columns that may be bad
VALUES = ("", "nan", "+inf", "-inf")  # a bit set says that something was nonfinite, not what


@dataclass(frozen=True, slots=True, eq=False)
class BadCells:
    """Bad cells as columns of equal length n.

    Attributes:
        step: int64[n], optimizer step.
        lane: int32[n] ranks (`NO_LANE` where a reduced value named none), or object[n] of str.
        micro_batch: int32[n], `NO_MICRO_BATCH` where not reported.
        phase: int8[n], values of `Phase`.
        local: bool[n], the cell may be an origin; False: spread, or a parameter shard.
        skipped: bool[n], the update of that step was not applied.
        bits: int16[n], the `nonfinite` bit set, 0 where none was sent.
        source: int8[n], index into `SOURCES` of the column that decided the phase.
        value: int8[n], index into `VALUES`.
        rank: int32[n] for layer cells that say which rank computed them, else None.
    """

    step: NDArray[np.int64]
    lane: NDArray[Any]
    micro_batch: NDArray[np.int32]
    phase: NDArray[np.int8]
    local: NDArray[np.bool_]
    skipped: NDArray[np.bool_]
    bits: NDArray[np.int16]
    source: NDArray[np.int8]
    value: NDArray[np.int8]
    rank: NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return int(self.step.shape[0])

    def take(self, which: NDArray[Any]) -> "BadCells":
        """Return the cells selected by an index array or a boolean mask."""
        taken: dict[str, Any] = {}
        for name in _COLUMNS:
            column = getattr(self, name)
            taken[name] = None if column is None else column[which]
        return BadCells(**taken)


_COLUMNS = tuple(field.name for field in fields(BadCells))


def cells(
    *,
    step: Sequence[int] | NDArray[Any],
    lane: Sequence[int | str] | NDArray[Any],
    phase: Sequence[int] | NDArray[Any],
    local: Sequence[bool] | NDArray[Any],
    micro_batch: Sequence[int | None] | NDArray[Any] | None = None,
    skipped: Sequence[bool] | NDArray[Any] | None = None,
    bits: Sequence[int] | NDArray[Any] | None = None,
    source: Sequence[int] | NDArray[Any] | None = None,
    value: Sequence[int] | NDArray[Any] | None = None,
    rank: Sequence[int] | NDArray[Any] | None = None,
) -> BadCells:
    """Build `BadCells` from plain sequences, such as the rows of a database query.

    Raises:
        ValueError: columns differ in length or a phase is none of `Phase`.
    """
    steps = np.asarray(step, dtype=np.int64)
    n = steps.shape[0]
    if micro_batch is None:
        batches = np.full(n, NO_MICRO_BATCH, dtype=np.int32)
    elif isinstance(micro_batch, np.ndarray):
        batches = micro_batch.astype(np.int32)
    else:
        batches = np.asarray([NO_MICRO_BATCH if m is None else m for m in micro_batch], dtype=np.int32)
    lanes = np.asarray(lane) if isinstance(lane, np.ndarray) else np.array(list(lane), dtype=object)
    if lanes.dtype.kind != "i" and all(isinstance(item, (int, np.integer)) for item in lanes):
        lanes = lanes.astype(np.int32)

    def column(given: Any, dtype: Any) -> NDArray[Any]:
        return np.zeros(n, dtype=dtype) if given is None else np.asarray(given, dtype=dtype)

    built = BadCells(
        step=steps,
        lane=lanes,
        micro_batch=batches,
        phase=np.asarray(phase, dtype=np.int8),
        local=np.asarray(local, dtype=np.bool_),
        skipped=column(skipped, np.bool_),
        bits=column(bits, np.int16),
        source=column(source, np.int8),
        value=column(value, np.int8),
        rank=None if rank is None else np.asarray(rank, dtype=np.int32),
    )
    for name in _COLUMNS:
        shape = getattr(getattr(built, name), "shape", (n,))
        if shape != (n,):
            raise ValueError(f"{name}: {shape} does not match {n} steps")
    if n and (built.phase.min() < Phase.DATA or built.phase.max() > Phase.OPTIMIZER):
        raise ValueError("phase: expected 0 (data) to 4 (optimizer)")
    return built


def no_cells() -> BadCells:
    """Return zero bad cells with integer lanes."""
    return cells(step=[], lane=np.empty(0, dtype=np.int32), phase=[], local=[])


def concat(parts: Iterable[BadCells]) -> BadCells:
    """Join bad cells; rank numbers are dropped unless every part has them."""
    kept = [part for part in parts if len(part)]
    if not kept:
        return no_cells()
    if len(kept) == 1:
        return kept[0]
    joined: dict[str, Any] = {}
    for name in _COLUMNS:
        columns = [getattr(part, name) for part in kept]
        joined[name] = None if any(column is None for column in columns) else np.concatenate(columns)
    return BadCells(**joined)


def order_key(*, step: int, micro_batch: int | None, phase: int, skipped: bool) -> tuple[bool, int, int, int]:
    """Return the key by which one lane (and view) keeps one cell: the smaller is the earlier.

    An applied value comes before a skipped one, because a search of the loss scale in step 3 must not
    hide the failure of step 18,003. A value with a micro-batch comes before one without: it says more.
    Reduction ends a step, so from there on the micro-batch orders nothing.
    """
    known = micro_batch is not None and micro_batch >= 0 and phase < Phase.REDUCE
    return (skipped, step, micro_batch if known and micro_batch is not None else _LAST, phase)


def _micro_batch_key(part: BadCells) -> NDArray[np.int32]:
    known = (part.micro_batch >= 0) & (part.phase < Phase.REDUCE)
    return np.where(known, part.micro_batch, _LAST).astype(np.int32)


def earliest_per_lane(part: BadCells) -> BadCells:
    """Reduce to the smallest cell by `order_key` per (lane, rank of a layer lane, local or not).

    Two passes: the minimum step per lane over all cells, then a sort of what is left, which in a dead
    run is 1 of 720 cells. Linear in the cells; the result is ordered by lane.
    """
    if not len(part):
        return part
    code, lanes = lane_codes(part.lane)
    count = len(lanes)
    if part.rank is not None:
        rank_code, ranks = lane_codes(part.rank)
        pair, code = np.unique(code * len(ranks) + rank_code, return_inverse=True)
        count = len(pair)
    code = code * 2 + ~part.local
    count *= 2
    if part.skipped.any():
        applied = np.zeros(count, dtype=np.bool_)
        applied[code[~part.skipped]] = True
        keep = ~(part.skipped & applied[code])
        part, code = part.take(keep), code[keep]
    first = np.full(count, np.iinfo(np.int64).max, dtype=np.int64)
    np.minimum.at(first, code, part.step)
    at_first = np.flatnonzero(part.step == first[code])
    part, code = part.take(at_first), code[at_first]
    # What a cell shows beyond its place (bits, column, value) breaks the last ties: two posts of one
    # cell must leave the same row whichever comes first.
    shown = (part.value, part.source, part.bits, part.micro_batch)
    order = np.lexsort((*shown, part.phase, _micro_batch_key(part), code))
    _, starts = np.unique(code[order], return_index=True)
    return part.take(order[starts])


def lane_codes(lane: NDArray[Any]) -> tuple[NDArray[np.intp], NDArray[Any]]:
    """Return a dense code per row, and the lanes in ascending order of their code (str: sorted)."""
    if lane.dtype.kind in "iu":
        if not lane.shape[0]:
            return np.empty(0, dtype=np.intp), np.empty(0, dtype=np.int32)
        low, high = int(lane.min()), int(lane.max())
        if high - low < 4 * lane.shape[0] + 65_536:  # dense numbers: a table beats a sort
            table = np.zeros(high - low + 1, dtype=np.bool_)
            table[lane - low] = True
            lanes = np.flatnonzero(table) + low
            if len(lanes) == len(table):
                return (lane - low).astype(np.intp), lanes.astype(np.int32)
            position = np.cumsum(table) - 1
            return position[lane - low].astype(np.intp), lanes.astype(np.int32)
        found, code = np.unique(lane, return_inverse=True)
        return code.astype(np.intp), found.astype(np.int32)
    names = sorted(set(lane.tolist()), key=str)
    index = {name: i for i, name in enumerate(names)}
    codes = (index[name] for name in lane.tolist())
    return np.fromiter(codes, dtype=np.intp, count=lane.shape[0]), np.array(names, dtype=object)


class LaneMinima:
    """The first bad cells of every lane, kept up to date frame by frame: what the database keeps.

    The result does not depend on the order of `update` calls.
    """

    def __init__(self, rows: BadCells | None = None) -> None:
        """Begin with `rows` or with none."""
        self.rows = earliest_per_lane(rows) if rows is not None else no_cells()

    def update(self, part: BadCells) -> None:
        """Take in bad cells of one frame or event; linear in their number plus the rows kept."""
        if len(part):
            self.rows = earliest_per_lane(concat([self.rows, earliest_per_lane(part)]))


class FirstBad(msgspec.Struct, frozen=True, kw_only=True):
    """The first-bad cell, or the tie of cells, of one attempt.

    Attributes:
        step: optimizer step.
        micro_batch: where it decided or is the same for all, else None.
        phase: where inside the step.
        ranks: ascending; empty when the rank is not known.
        tie: more than one rank.
        tie_reason: why they are not told apart, or how the choice was narrowed; "" when neither.
        certainty: `LOCAL_VALUE`, `REDUCED_ONLY` or one of them joined with `AT_OR_BEFORE`.
        layer: first nonfinite layer in the direction of the phase, None when no layer value says.
        stage: pipeline stage when the topology has stages, else None.
        skipped: the update of that step was not applied.
    """

    step: int
    micro_batch: int | None
    phase: Phase
    ranks: tuple[int, ...]
    tie: bool
    tie_reason: str
    certainty: str
    layer: int | str | None = None
    stage: int | None = None
    skipped: bool = False

    def to_document(self) -> dict[str, Any]:
        """Return JSON-ready data with the phase by name."""
        return {
            "step": self.step,
            "micro_batch": self.micro_batch,
            "phase": self.phase.name.lower(),
            "ranks": list(self.ranks),
            "tie": self.tie,
            "tie_reason": self.tie_reason,
            "certainty": self.certainty,
            "layer": self.layer,
            "stage": self.stage,
            "skipped": self.skipped,
        }


def first_bad(
    rows: BadCells,
    *,
    topology: Topology | None = None,
    layers: BadCells | None = None,
    first_recorded_step: int | None = None,
    since_step: int | None = None,
) -> FirstBad | None:
    """Return the first-bad cell among `rows`, or None when there is none.

    Earliest by (step, micro-batch, phase), then pipeline stage in the direction of the phase (data and
    forward: lowest, backward: highest). A local value of a later step than the first bad reduced one is
    a consequence of it, so then the rank is not known.

    Args:
        rows: cells of rank lanes, any number per lane (one per lane is enough: `order_key`).
        topology: groups of the attempt; without it neither stages nor exchange groups are known.
        layers: cells of layer lanes of the same attempt.
        first_recorded_step: first step of the attempt with any record; a run that was bad in it was bad
            "at or before" it.
        since_step: leave out earlier cells, such as those of an incident that is resolved.
    """
    if since_step is not None and len(rows):
        rows = rows.take(rows.step >= since_step)
    if not len(rows):
        return None
    applied = ~rows.skipped
    skipped = not bool(applied.any())
    if not skipped:
        rows = rows.take(applied)
    step = int(rows.step.min())
    rows = rows.take(rows.step == step)
    bounded = first_recorded_step is not None and step <= first_recorded_step
    at_or_before = f"; {AT_OR_BEFORE}" if bounded else ""
    if not rows.local.any():
        phase = Phase(int(rows.phase.min()))
        return FirstBad(
            step=step,
            micro_batch=None if phase >= Phase.REDUCE else _only(rows.micro_batch[rows.phase == phase]),
            phase=phase,
            ranks=(),
            tie=False,
            tie_reason="",
            certainty=REDUCED_ONLY + at_or_before,
            layer=_first_layer(layers, step=step, phase=phase, ranks=None),
            skipped=skipped,
        )
    rows = rows.take(rows.local & (rows.lane != NO_LANE))
    notes: list[str] = []
    if (rows.micro_batch >= 0).all():
        rows = rows.take(rows.micro_batch == rows.micro_batch.min())
    elif (rows.micro_batch >= 0).any():
        notes.append("micro-batches not compared: some ranks report none")
    rows = rows.take(rows.phase == rows.phase.min())
    phase = Phase(int(rows.phase[0]))
    ranks = np.unique(rows.lane.astype(np.int64))
    stage: int | None = None
    if topology is not None:
        stages = topology.stages(ranks)
        if (stages >= 0).all():
            stage = int(stages.max() if phase == Phase.BACKWARD else stages.min())
            ranks = ranks[stages == stage]
    if len(ranks) > 1:
        notes.insert(0, _tie_reason(ranks, topology, phase))
    return FirstBad(
        step=step,
        micro_batch=_only(rows.micro_batch),
        phase=phase,
        ranks=tuple(ranks.tolist()),
        tie=len(ranks) > 1,
        tie_reason="; ".join(notes),
        certainty=LOCAL_VALUE + at_or_before,
        layer=_first_layer(layers, step=step, phase=phase, ranks=ranks),
        stage=stage,
        skipped=skipped,
    )


def _only(micro_batch: NDArray[np.int32]) -> int | None:
    first = int(micro_batch[0])
    return first if first >= 0 and bool((micro_batch == first).all()) else None


def _tie_reason(ranks: NDArray[np.int64], topology: Topology | None, phase: Phase) -> str:
    where = f"in {phase.name.lower()}"
    if topology is None:
        return f"{len(ranks)} equal cells {where}; no topology was reported"
    cells_of, kinds = topology.exchange_cells(ranks)
    if len(cells_of) == 1:
        named = fold_ranks(ranks.tolist())
        return f"ranks {named} exchange values {where} ({' and '.join(kinds)} group): one cell"
    return f"{len(cells_of)} equal cells {where}"


def _first_layer(
    layers: BadCells | None, *, step: int, phase: Phase, ranks: NDArray[np.int64] | None
) -> int | str | None:
    """Return the first nonfinite layer of `step` in the direction of `phase`.

    A nonfinite loss makes every layer's gradient nonfinite, so gradients say nothing about where a
    forward failure began: only layer values of the forward pass do.
    """
    if layers is None or not len(layers):
        return None
    mask = layers.step == step
    if phase <= Phase.FORWARD:
        mask &= layers.phase <= Phase.FORWARD
    elif phase <= Phase.REDUCE:
        mask &= (layers.phase == Phase.BACKWARD) | (layers.phase == Phase.REDUCE)
    else:
        mask &= layers.phase == Phase.OPTIMIZER
    if ranks is not None and layers.rank is not None:
        named = mask & layers.local & np.isin(layers.rank, ranks)
        if named.any():
            mask = named
    found = set(layers.lane[mask].tolist())
    if not found:
        return None
    pick = max if phase in (Phase.BACKWARD, Phase.REDUCE) else min
    chosen: int | str = pick(found, key=depth_key)
    return chosen


# Beginnings of words, so that "unembed" (a head) is not taken for an embedding.
_BEFORE_BLOCKS = ("emb", "wte", "wpe", "patch")


def depth_key(layer: int | str) -> tuple[float, str]:
    """Return where a layer lies in the direction of the forward pass.

    The first number in a module name is its block ("layers.6.attn.qkv" → 6). Names without one are
    embeddings (before block 0) or final norm and head (after the last block).
    """
    if isinstance(layer, int):
        return (float(layer), "")
    pieces = layer.lower().replace("_", ".").replace("/", ".").split(".")
    for piece in pieces:
        if piece.isdigit():
            return (float(piece), layer)
    return (-1.0 if any(piece.startswith(_BEFORE_BLOCKS) for piece in pieces) else float("inf"), layer)
