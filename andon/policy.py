"""The policy: every threshold, cap, mode and required item, as versioned data.

A policy is plain data so that an operator can change any number per run, so that its version can
be recorded with each finding, and so that trainer and server decide by the same numbers. The
defaults come from public experience (PaLM, OPT, BLOOM, Llama 3 write-ups; PyTorch documentation);
the reason for a number stands beside it.
"""

import hashlib
from functools import lru_cache
from typing import Literal

import msgspec
import rfc8785

SCHEMA = "andon.policy/1"

Mode = Literal["off", "observe", "act"]
Lock = Literal["none", "governance", "compliance"]


class NonfiniteRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What NaN and Inf do (the table in the design's hold rules)."""

    skipped_in_a_row: int = 2  # bf16/fp32 updates skipped in a row that turn a warning into a hold
    skipped_in_window: int = 3  # ... or this many within `skipped_window_steps`
    skipped_window_steps: int = 100
    scaler_window_steps: int = 200  # fp16: the window over which skipped updates are counted
    scaler_fraction: float = 0.05  # fp16: about one overflow per growth interval (2,000) is normal
    scaler_in_a_row: int = 20
    scaler_search_steps: int = 100  # PyTorch starts at 2^16, Megatron at 2^32: the search is normal
    scale_floor: float = 1.0
    backfill_after_s: float = 300.0


class SpikeRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Robust z-score over a trailing window; the same shape serves loss and log gradient norm."""

    window: int = 200
    warm_up: int = 50
    warn_z: float = 6.0
    halt_z: float = 12.0
    strikes: int = 3
    level_shift_after: int = 50  # flagged values with a stable median become the new baseline
    mad_floor: float = 1e-8


class LayerRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Per-layer norms."""

    window: int = 200
    warm_up: int = 50
    warn_z: float = 6.0
    grad_norm_bad: float = 1000.0  # bad by itself, whatever the history
    dead_ratio_steps: int = 500  # update ratio 0 this long: dead, frozen or unregistered


class RollbackRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far to go back and what to skip."""

    spike_margin_steps: int = 100  # PaLM: restart about 100 steps before the first warning
    skip_batches_min: int = 200
    skip_batches_max: int = 500
    watch_steps: int = 500
    recovered_watch_steps: int = 50  # after a spike that recovered or one skipped step


class HoldRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How ranks wait."""

    mode: Literal["in_place", "exit"] = "in_place"
    deadline_s: float = 600.0


class ResumeRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What lets a held run go on."""

    approvers: int = 1
    approval_expires_s: float = 12 * 3600.0
    permit_expires_s: float = 12 * 3600.0  # queues are long
    launches_per_permit: int = 3
    # Who may resume alone, without the second person and without waiting for evidence: everybody is paged.
    break_glass_roles: tuple[str, ...] = ("admin",)
    # A sole approver on duty may resume in place or roll back and replay, unless vetoed in the delay.
    solo: bool = False
    solo_delay_s: float = 600.0


class CostRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prices used to say what waiting and keeping cost."""

    gpu_hour_price: float = 2.5
    currency: str = "USD"
    storage_gb_month_price: float = 0.023


# Samples and people's paths may be in these: they must stay erasable, so nothing locks them for good.
NEVER_COMPLIANCE = frozenset({"batch_ids", "batch_statistics", "rank_logs", "raw_samples"})
_MOST_RETAIN_DAYS = 3660  # ten years: beyond it is a typing mistake, and a lock cannot be taken back


class EvidenceRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of the freeze plan: what to keep, whether the gate needs it, how long, which lock.

    `retain_days` counts from close-out; `deadline_s` is how long a silent source is tried. A lock
    "compliance" is asked for here and set once two people have confirmed it.
    """

    kind: str
    required: bool = True
    retain_days: int = 30
    lock: Lock = "governance"
    deadline_s: float = 3600.0

    def __post_init__(self) -> None:
        if not 1 <= self.retain_days <= _MOST_RETAIN_DAYS:
            raise ValueError(f"{self.kind}: retain_days must be 1 to {_MOST_RETAIN_DAYS}")
        if self.lock == "compliance" and self.kind in NEVER_COMPLIANCE:
            raise ValueError(f"{self.kind}: never under compliance, it must stay erasable")


class VaultRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the vault may be made to keep."""

    compliance_gb_days: int = 30_000  # per run: 1 TB for 30 days, which no one can take back
    # A checkpoint up to this size a vault officer reads alone; weights and moments of a 1B model in
    # mixed precision have 14 GB, so from there on it takes a second person.
    read_alone_gb: float = 10.0


class Caps(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Automatic actions per run and day; past the cap a person is needed."""

    holds_per_day: int = 6
    rollbacks_per_day: int = 2
    skips_per_day: int = 20


class RateRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Token buckets per run: bodies up to 64 KiB, and larger ones."""

    small_per_s: float = 5000.0
    small_burst: int = 10000
    large_per_s: float = 200.0
    large_burst: int = 2000


class AgentRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the agents on the nodes may take of the network and of the disks while they keep evidence."""

    upload_mb_per_s: float = 0.0  # megabytes per second and node; 0 = as fast as it goes
    # How long a held tree stays on its node: until two people release its dossier, or until the vault has it.
    held_trees: Literal["until_released", "until_sealed"] = "until_released"


DEFAULT_MODES: dict[str, Mode] = {
    "nonfinite": "act",
    "spike": "observe",
    "grad_norm": "observe",
    "layer": "observe",
    "straggler": "observe",
    "congestion": "observe",
    "throttling": "observe",
    "corruption": "observe",
    "restore": "observe",  # a replay whose losses differ from the first time
}

# In order of volatility: what vanishes first is asked for first. A `required` item that is not
# applicable or not offered by the trainer is shown as such and satisfies or blocks the gate by
# its state, never by being left out. What no common trainer tells is optional: it is kept when it is
# there, and is shown as missing with a sentence when it is not. Raw samples are kept only where a
# policy names them (`raw_samples`).
DEFAULT_EVIDENCE: tuple[EvidenceRule, ...] = (
    EvidenceRule("halt_snapshot", required=False),
    EvidenceRule("flight_recorder", required=False),
    EvidenceRule("rank_logs", lock="none"),
    EvidenceRule("hardware_records", required=False, lock="none"),
    EvidenceRule("last_good_checkpoint"),
    EvidenceRule("first_bad_checkpoint"),
    EvidenceRule("checkpoint_ladder", required=False),
    *(
        EvidenceRule(f"{part}_state", required=False)
        for part in ("optimizer", "scaler", "rng", "loader", "ema", "router")
    ),
    EvidenceRule("batch_ids", lock="none"),
    EvidenceRule("batch_statistics", required=False, lock="none"),
    EvidenceRule("data_shards", required=False, lock="none"),
    EvidenceRule("tokenizer", required=False),
    EvidenceRule("mixture", required=False),
    EvidenceRule("norms"),
    EvidenceRule("schedule"),
    EvidenceRule("code_and_config", required=False),
    EvidenceRule("environment", required=False),
    EvidenceRule("topology"),
    EvidenceRule("event_log"),
)


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A whole policy. `Policy()` is the default; `decode` reads a stored or edited document."""

    schema: str = SCHEMA
    modes: dict[str, Mode] = msgspec.field(default_factory=lambda: dict(DEFAULT_MODES))
    nonfinite: NonfiniteRules = NonfiniteRules()
    spike: SpikeRules = SpikeRules()
    grad_norm: SpikeRules = SpikeRules()
    layer: LayerRules = LayerRules()
    rollback: RollbackRules = RollbackRules()
    hold: HoldRules = HoldRules()
    resume: ResumeRules = ResumeRules()
    cost: CostRules = CostRules()
    caps: Caps = Caps()
    rate: RateRules = RateRules()
    agent: AgentRules = AgentRules()
    vault: VaultRules = VaultRules()
    evidence: tuple[EvidenceRule, ...] = DEFAULT_EVIDENCE
    event_window_steps: int = 128  # how much of the event log and of the norms is frozen around b

    def mode(self, rule: str) -> Mode:
        """Return the mode of `rule`; a rule nobody named is observed, never acted on."""
        return self.modes.get(rule, "observe")

    def document(self) -> dict[str, object]:
        """Return the policy as JSON-ready data."""
        return msgspec.to_builtins(self)  # type: ignore[no-any-return]

    def digest(self) -> str:
        """Return the SHA-256 of the RFC 8785 form, lower-case hex: the policy's version name."""
        return _digest(msgspec.json.encode(self))


@lru_cache(maxsize=1024)
def _digest(encoded: bytes) -> str:
    # Asked for at every bad post; the canonical form of a whole policy costs a millisecond.
    return hashlib.sha256(rfc8785.dumps(msgspec.json.decode(encoded))).hexdigest()


def decode(document: dict[str, object]) -> Policy:
    """Read a policy document.

    Raises:
        ValueError: a field is unknown, has the wrong type, or the schema is another one.
    """
    if document.get("schema", SCHEMA) != SCHEMA:
        raise ValueError(f"schema: expected {SCHEMA!r}, got {document.get('schema')!r}")
    try:
        return msgspec.convert(document, Policy)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error


def merge(document: dict[str, object], changes: dict[str, object]) -> dict[str, object]:
    """Return `document` with the fields of `changes` laid over it, objects merged field by field.

    Raises:
        ValueError: `changes` is not an object.
    """
    if not isinstance(changes, dict):
        raise ValueError("a policy change is a JSON object")
    merged = dict(document)
    for name, value in changes.items():
        before = merged.get(name)
        merged[name] = merge(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return merged
