"""The kinds of evidence: their words, where each comes from, and in which order the sources vanish."""

from dataclasses import dataclass
from typing import Literal

# files:    offered by the trainer or an agent (`artifact.available`), and only they have it
# records:  events, frames and facts in the database; offered files are kept beside them
# stored:   a checkpoint that lies in a store; held where it lies, then copied
# view:     keys in the metadata of the last good checkpoint; its bytes are not copied again
Source = Literal["files", "records", "stored", "view"]


@dataclass(frozen=True)
class Kind:
    """One kind. `order` is of volatility, 1 vanishes first; `says` is its name for people."""

    order: int
    says: str
    source: Source = "records"


# 1 in the processes, 2 on the nodes, 3 at the scheduler, 4 stored checkpoints, 5 what the database keeps.
KINDS: dict[str, Kind] = {
    # W(b-1), moments, gradients, scaler and fp8 scales, RNG, batch: what replays the failure.
    "halt_snapshot": Kind(1, "halt snapshot", "files"),
    "batch_ids": Kind(1, "batch ids"),
    "batch_statistics": Kind(1, "batch lengths, token counts, mask density, domains, fingerprints"),
    "flight_recorder": Kind(1, "flight-recorder dumps and stacks"),
    # Only where a policy names it: people's text, encrypted with the dossier's own key.
    "raw_samples": Kind(1, "raw samples, encrypted", "files"),
    "rank_logs": Kind(2, "rank logs", "files"),
    "hardware_records": Kind(3, "hardware and scheduler records"),
    "last_good_checkpoint": Kind(4, "last good checkpoint", "stored"),
    "first_bad_checkpoint": Kind(4, "first bad checkpoint", "stored"),
    "checkpoint_ladder": Kind(4, "ladder checkpoint", "stored"),
    "optimizer_state": Kind(5, "optimizer state", "view"),
    "scaler_state": Kind(5, "loss scaler and fp8 scales", "view"),
    "rng_state": Kind(5, "RNG state of every tracker", "view"),
    "loader_state": Kind(5, "loader state and positions", "view"),
    "ema_state": Kind(5, "EMA weights", "view"),
    "router_state": Kind(5, "router state", "view"),
    "norms": Kind(5, "per-rank and per-layer norms"),
    "schedule": Kind(5, "learning rate and schedule"),
    "data_shards": Kind(5, "data shards: dataset version, file, offset, digest"),
    "tokenizer": Kind(5, "tokenizer and packing version"),
    "mixture": Kind(5, "mixture state"),
    "code_and_config": Kind(5, "code revision and config"),
    "environment": Kind(5, "environment"),
    "topology": Kind(5, "topology and groups"),
    "event_log": Kind(5, "event log"),
}

CHECKPOINT_KINDS = frozenset(
    {"last_good_checkpoint", "first_bad_checkpoint", "checkpoint_ladder", "halt_snapshot"}
)
VIEW_KINDS = frozenset(kind for kind, about in KINDS.items() if about.source == "view")
# Files only a process or a node has: they are waited for until the run is contained.
OFFERED_KINDS = frozenset(kind for kind, about in KINDS.items() if about.source == "files")
# Written from the window around b; written once more when b moves earlier.
WINDOW_KINDS = frozenset(
    {"norms", "schedule", "batch_ids", "batch_statistics", "data_shards", "mixture", "event_log"}
)

# Names under which trainers and agents offer files of a kind (`artifact.available`, data.kind).
ARTIFACT_KINDS: dict[str, str] = {
    "halt_snapshot": "halt_snapshot",
    "snapshot": "halt_snapshot",
    "gradients": "halt_snapshot",
    "batch_ids": "batch_ids",
    "batch_ring": "batch_ids",
    "batch_statistics": "batch_statistics",
    "flight_recorder": "flight_recorder",
    "stacks": "flight_recorder",
    "stack": "flight_recorder",
    "raw_samples": "raw_samples",
    "rank_log": "rank_logs",
    "rank_logs": "rank_logs",
    "log": "rank_logs",
    "hardware_record": "hardware_records",
    "hardware_records": "hardware_records",
    "scheduler_record": "hardware_records",
    "kernel_log": "hardware_records",
    "counters": "hardware_records",
    "pod_events": "hardware_records",
    "data_shard": "data_shards",
    "data_shards": "data_shards",
    "tokenizer": "tokenizer",
    "mixture": "mixture",
    "config": "code_and_config",
    "code": "code_and_config",
    "diff": "code_and_config",
    "code_and_config": "code_and_config",
    "environment": "environment",
    "topology": "topology",
}


def words(kind: str) -> str:
    """Return the name of a kind for people; a kind nobody described is shown as it is."""
    known = KINDS.get(kind)
    return known.says if known else kind.replace("_", " ")
