"""The kinds of evidence: their words, and in which order their sources vanish."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """One kind. `order` is of volatility, 1 vanishes first; `says` is its name for people."""

    order: int
    says: str


# 1 in the processes, 2 on the nodes, 3 at the scheduler, 4 stored checkpoints, 5 what the database keeps.
KINDS: dict[str, Kind] = {
    "halt_snapshot": Kind(1, "halt snapshot"),
    "batch_ids": Kind(1, "batch ids"),
    "rank_logs": Kind(2, "rank logs"),
    "hardware_records": Kind(3, "hardware and scheduler records"),
    "last_good_checkpoint": Kind(4, "last good checkpoint"),
    "first_bad_checkpoint": Kind(4, "first bad checkpoint"),
    "checkpoint_ladder": Kind(4, "ladder checkpoint"),
    "norms": Kind(5, "per-rank and per-layer norms"),
    "schedule": Kind(5, "learning rate and schedule"),
    "code_and_config": Kind(5, "code revision and config"),
    "environment": Kind(5, "environment"),
    "topology": Kind(5, "topology and groups"),
    "event_log": Kind(5, "event log"),
}

CHECKPOINT_KINDS = frozenset(
    {"last_good_checkpoint", "first_bad_checkpoint", "checkpoint_ladder", "halt_snapshot"}
)

# Names under which trainers and agents offer files of a kind (`artifact.available`, data.kind).
ARTIFACT_KINDS: dict[str, str] = {
    "halt_snapshot": "halt_snapshot",
    "snapshot": "halt_snapshot",
    "batch_ids": "batch_ids",
    "rank_log": "rank_logs",
    "rank_logs": "rank_logs",
    "log": "rank_logs",
    "hardware_record": "hardware_records",
    "hardware_records": "hardware_records",
    "scheduler_record": "hardware_records",
    "kernel_log": "hardware_records",
    "config": "code_and_config",
    "code": "code_and_config",
    "code_and_config": "code_and_config",
    "environment": "environment",
    "topology": "topology",
}


def words(kind: str) -> str:
    """Return the name of a kind for people; a kind nobody described is shown as it is."""
    known = KINDS.get(kind)
    return known.says if known else kind.replace("_", " ")
