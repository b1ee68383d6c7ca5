"""What a monitored rank posts: where it stands, what a step was, and the frames and events of it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from andon.batch_ring import BatchFacts, event_data
from andon.detect.finding import Finding
from andon.wire import Frame

__all__ = ["BatchFacts", "Place", "StepFacts", "batch_event", "layer_frames", "rank_frames", "verdict_event"]


@dataclass(frozen=True)
class Place:
    """Where this process stands. `node_ranks` are the global ranks that share its leader."""

    run: str
    attempt: int
    rank: int
    world_size: int
    node: str
    node_ranks: tuple[int, ...]
    node_group: Any = None  # a process group of `node_ranks`; None when the node has one rank

    @property
    def leads(self) -> bool:
        """Whether this rank posts for its node."""
        return self.rank == min(self.node_ranks)


class StepFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the loop knows when a step is over. `grad_norm` is global, after the reduce, before clipping;
    None: take the monitor's own."""

    step: int
    grad_norm: float | None
    lr: float
    step_time_s: float
    loader_position: int
    consumed_samples: int
    optimizer_step: int
    schedule_position: int
    batch: BatchFacts
    extra: dict[str, Any] = {}


def batch_event(rank: int, step: int, batch: BatchFacts, time_ns: int) -> dict[str, Any]:
    """Return the `batch.seen` event of one rank and step."""
    return {"type": "batch.seen", "step": step, "rank": rank, "time": time_ns, "data": event_data(batch)}


def verdict_event(finding: Finding, *, mode: str, would: str) -> dict[str, Any]:
    """Return the `verdict` event of one finding: what was said, and what it did or would have done."""
    data = finding.to_document() | {"mode": mode, "would": would}
    return {"type": "verdict", "step": finding.step, "data": data}


_RANK = {
    "loss": np.float32,
    "grad_norm": np.float32,
    "nonfinite": np.int16,
    "compute_s": np.float32,
    "wait_s": np.float32,
    "step_time_s": np.float32,
    "seq_len_max": np.int32,
    "tokens": np.int32,
}
_LAYER = {
    "grad_norm": np.float32,
    "weight_norm": np.float32,
    "update_ratio": np.float32,
    "act_norm": np.float32,
    "nonfinite": np.int16,
}


def rank_frames(place: Place, rows: list[dict[str, Any]]) -> list[Frame]:
    """Return the rank frames of these rows. Rows that know their micro-batch or could not see this rank's
    own gradients go into frames of their own: both are said per frame."""
    frames = []
    for view in ("local", "reduced"):
        views = {"loss": "local", "grad_norm": view, "nonfinite": view}
        frames += [
            Frame(
                stream="rank",
                lane=np.array([row["lane"] for row in part], np.int32),
                **_columns(place, part, _RANK),
                views=views,
            )
            for part in _by_micro_batch(row for row in rows if row["view"] == view)
        ]
    return frames


def layer_frames(place: Place, rows: list[dict[str, Any]]) -> list[Frame]:
    """Return the layer frames of these rows. Gradients are the rank's own where they could be seen; weights
    are replicated, or one rank's slice of them (view shard)."""
    frames = []
    for view in ("local", "reduced"):
        for weights in ("reduced", "shard"):
            views = {"grad_norm": view, "weight_norm": weights, "update_ratio": weights, "nonfinite": view}
            some = (row for row in rows if row["view"] == view and row["weights"] == weights)
            frames += [
                Frame(
                    stream="layer",
                    lane=[row["lane"] for row in part],
                    rank=np.array([row["rank"] for row in part], np.int32),
                    **_columns(place, part, _LAYER),
                    views=views,
                )
                for part in _by_micro_batch(some)
            ]
    return frames


def _by_micro_batch(rows: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    said: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    for row in rows:
        said[row.get("micro_batch") is not None].append(row)
    return [part for part in said if part]


def _columns(place: Place, rows: list[dict[str, Any]], kinds: dict[str, Any]) -> dict[str, Any]:
    """Return the axes and metrics of rows; a metric that no row has is left out, a gap is *not measured*."""
    metrics, missing = {}, {}
    for name, kind in kinds.items():
        values = [row.get(name) for row in rows]
        gaps = np.array([value is None for value in values], np.bool_)
        if gaps.all():
            continue
        blank = 0 if np.issubdtype(kind, np.integer) else math.nan
        with np.errstate(over="ignore"):  # a float64 norm beyond float32 is +Inf, which is bad enough
            metrics[name] = np.array([blank if value is None else value for value in values]).astype(kind)
        if gaps.any():
            missing[name] = gaps
    found: dict[str, Any] = {
        "attempt": place.attempt,
        "node": place.node,
        "step": np.array([row["step"] for row in rows], np.int64),
        "time_ns": np.array([row["time_ns"] for row in rows], np.int64),
        "metrics": metrics,
        "missing": missing,
    }
    if rows[0].get("micro_batch") is not None:
        found["micro_batch"] = np.array([row["micro_batch"] for row in rows], np.int16)
    return found
