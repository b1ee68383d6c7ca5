"""What a monitored rank posts: where it stands, what a step and its batch were, and the frames of them."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from andon.wire import Frame


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


@dataclass(frozen=True)
class BatchFacts:
    """What a rank trained on in one step, per sample and in order."""

    positions: tuple[int, ...]
    names: tuple[str, ...]
    lengths: tuple[int, ...]
    mask_density: tuple[float, ...]
    fingerprints: tuple[str, ...]


@dataclass(frozen=True)
class StepFacts:
    """What the loop knows when a step is over. `grad_norm` is global, after the reduce, before clipping."""

    step: int
    grad_norm: float
    lr: float
    step_time_s: float
    loader_position: int
    consumed_samples: int
    optimizer_step: int
    schedule_position: int
    batch: BatchFacts
    extra: dict[str, Any] = field(default_factory=dict)


def batch_event(rank: int, step: int, batch: BatchFacts, time_ns: int) -> dict[str, Any]:
    """Return the `batch.seen` event of one rank and step."""
    data = {
        "positions": list(batch.positions),
        "samples": list(batch.names),
        "lengths": list(batch.lengths),
        "mask_density": [round(value, 4) for value in batch.mask_density],
        "fingerprints": list(batch.fingerprints),
    }
    return {"type": "batch.seen", "step": step, "rank": rank, "time": time_ns, "data": data}


def rank_frame(place: Place, rows: list[dict[str, Any]]) -> Frame:
    """Return the rank frame of these rows; loss, gradient norm and bits are this rank's own."""
    return Frame(
        stream="rank",
        attempt=place.attempt,
        node=place.node,
        step=np.array([row["step"] for row in rows], np.int64),
        lane=np.array([row["lane"] for row in rows], np.int32),
        time_ns=np.array([row["time_ns"] for row in rows], np.int64),
        metrics={
            "loss": np.array([row["loss"] for row in rows], np.float32),
            "grad_norm": np.array([row["grad_norm"] for row in rows], np.float32),
            "nonfinite": np.array([row["nonfinite"] for row in rows], np.int16),
            "step_time_s": np.array([row["step_time_s"] for row in rows], np.float32),
            "seq_len_max": np.array([row["seq_len_max"] for row in rows], np.int32),
            "tokens": np.array([row["tokens"] for row in rows], np.int32),
        },
        views={"loss": "local", "grad_norm": "local", "nonfinite": "local"},
    )


def layer_frame(place: Place, rows: list[dict[str, Any]]) -> Frame:
    """Return the layer frame of these rows: gradients are the rank's own, weights are replicated."""
    return Frame(
        stream="layer",
        attempt=place.attempt,
        node=place.node,
        step=np.array([row["step"] for row in rows], np.int64),
        lane=[row["lane"] for row in rows],
        time_ns=np.array([row["time_ns"] for row in rows], np.int64),
        rank=np.array([row["rank"] for row in rows], np.int32),
        metrics={
            "grad_norm": np.array([row["grad_norm"] for row in rows], np.float32),
            "weight_norm": np.array([row["weight_norm"] for row in rows], np.float32),
            "update_ratio": np.array([row["update_ratio"] for row in rows], np.float32),
            "nonfinite": np.array([row["nonfinite"] for row in rows], np.int16),
        },
        views={
            "grad_norm": "local",
            "weight_norm": "reduced",
            "update_ratio": "reduced",
            "nonfinite": "local",
        },
    )
