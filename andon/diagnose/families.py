"""Which failure family leads, why, and what to do by default.

A first answer for the person on call, from what is known when the incident opens. It ranks, it never
rules out: only a probe does. Data faults that look numeric are the commonest misdiagnosis, so data comes
before numerics whenever a value went bad on one rank before any exchange.
"""

from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import Literal

import msgspec

from andon.detect.cells import FirstBad, Phase
from andon.detect.finding import SEVERITY_ORDER, Finding
from andon.wire_values import fold_ranks


class Family(StrEnum):
    """Failure families, in the order in which their layers are checked."""

    DATA = "data"
    NUMERICS = "numerics"
    OPTIMIZER = "optimizer and schedule"
    DISTRIBUTED = "distributed state"
    COMMUNICATION = "communication"
    HARDWARE = "hardware"
    DRIFT = "code/config drift"
    UNKNOWN = "cause unknown"


PlanKind = Literal[
    "resume_in_place",
    "skip_and_continue",
    "rollback_and_replay",
    "rollback_and_skip",
    "rollback_one_further",
]


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What the caller knows beyond the findings; every field may be left at "not known".

    Attributes:
        update_applied: whether the first bad update reached the weights.
        restarted_at: first step of the attempt, when it is not the run's first.
        recurrence: the same failure before in this run: "same_data" (the same samples), "same_step",
            "other_step" (with other data), "other_nodes" (it came back although the suspects were excluded),
            "same_node".
        hardware_nodes: nodes with a hardware record (Xid, ECC, link) near the first bad step.
        bad_nodes: nodes of the first-bad ranks.
        checkpoint_suspect: the checkpoint a rollback would use is itself suspect.
        held_by_hand, false_alarm: what a person said.
    """

    update_applied: bool | None = None
    restarted_at: int | None = None
    recurrence: Literal["none", "same_data", "same_step", "other_step", "other_nodes", "same_node"] = "none"
    hardware_nodes: frozenset[str] = frozenset()
    bad_nodes: frozenset[str] = frozenset()
    checkpoint_suspect: bool = False
    held_by_hand: bool = False
    false_alarm: bool = False


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """A symptom class and the leading family.

    Attributes:
        symptom: key of `SYMPTOMS`.
        family: the one that leads.
        why: one sentence, from the facts used.
        others: families that stay open, most likely first, each with its reason.
    """

    symptom: str
    family: Family
    why: str
    others: tuple[tuple[Family, str], ...] = ()


class PlanChoice(msgspec.Struct, frozen=True):
    """The default plan and its reason in words."""

    kind: PlanKind
    why: str


_NONFINITE = ("nonfinite", "nonfinite_state")
_SKIPPED = ("nonfinite_skipped", "scaler_overflows", "scaler_at_floor")
_AFTER_RESTART_STEPS = 100  # trouble this soon after a restart suspects what the restart restored

# Kinds of detectors that watch ranks, nodes and attempts rather than numbers.
_BY_KIND: dict[str, tuple[str, Family, str]] = {
    "checksum_differs": ("silent_corruption", Family.HARDWARE, "replicas that must be equal differ"),
    "twin_differs": ("silent_corruption", Family.HARDWARE, "two ranks computed one step differently"),
    "corruption": ("silent_corruption", Family.HARDWARE, "replicas that must be equal differ"),
    "restore_differs": ("creep", Family.DISTRIBUTED, "the restored state differs from the saved one"),
    "hang": ("no_progress", Family.COMMUNICATION, "no rank advanced"),
    "node_loss": ("no_progress", Family.HARDWARE, "a node is lost"),
    "congestion": ("all_ranks_at_once", Family.COMMUNICATION, "collectives slowed on all ranks at once"),
    "straggler": ("slow", Family.HARDWARE, "one rank computes slower than its peers"),
    "throttling": ("slow", Family.HARDWARE, "clocks fell while temperature or power stood at its limit"),
}


def diagnose(findings: Sequence[Finding], first: FirstBad | None, facts: Facts = Facts()) -> Diagnosis:  # noqa: B008
    """Return symptom class and leading family of one incident.

    Args:
        findings: the incident's, in any order.
        first: its first-bad cell, when there is one.
        facts: what else is known.
    """
    if facts.held_by_hand:
        return Diagnosis(symptom="held_by_hand", family=Family.UNKNOWN, why="a person held the run")
    kinds = {finding.kind for finding in findings if finding.severity != "info"}
    if facts.recurrence == "same_node":
        return Diagnosis(
            symptom="follows_node",
            family=Family.HARDWARE,
            why="the same node failed in an earlier attempt too",
            others=((Family.DATA, "its shard may have followed it"),),
        )
    if facts.recurrence in _AGAIN and not _hardware_agrees(facts) and kinds & {*_NONFINITE, "loss_spike"}:
        return _again(kinds, facts)
    if kinds & set(_NONFINITE):
        return _nonfinite(kinds, first, facts)
    for kind, (symptom, family, why) in _BY_KIND.items():
        if kind in kinds:
            return Diagnosis(symptom=symptom, family=family, why=why)
    if "scaler_not_restored" in kinds:
        return Diagnosis(
            symptom="scaler_not_restored",
            family=Family.OPTIMIZER,
            why="the loss scale was searched again after a restart",
            others=((Family.DISTRIBUTED, "other parts may not have been restored either"),),
        )
    if kinds & set(_SKIPPED):
        return _skipped(first, facts)
    spikes = [finding for finding in findings if finding.kind == "loss_spike"]
    if spikes:
        return _spike(spikes, kinds, facts)
    return _curves(kinds, findings)


# What a failure that came back says whatever it looks like; the other ways leave the first answer standing.
_AGAIN: dict[str, tuple[Family, str, tuple[tuple[Family, str], ...]]] = {
    "other_step": (
        Family.OPTIMIZER,
        "it came back at another step with other data: optimisation, not data",
        ((Family.NUMERICS, "growing attention logits"), (Family.HARDWARE, "not cleared")),
    ),
    "same_data": (
        Family.DATA,
        "the same samples failed again",
        ((Family.NUMERICS, "an overflow on ordinary data looks the same"), (Family.DRIFT, "not cleared")),
    ),
}


def _again(kinds: set[str], facts: Facts) -> Diagnosis:
    family, why, others = _AGAIN[facts.recurrence]
    symptom = "instant_nonfinite" if kinds & set(_NONFINITE) else "repeated_spikes"
    return Diagnosis(symptom=symptom, family=family, why=why, others=others)


def _hardware_agrees(facts: Facts) -> Collection[str]:
    if facts.recurrence == "other_nodes":
        return ()
    return sorted(facts.hardware_nodes & facts.bad_nodes)


def _after_restart(facts: Facts, step: int | None) -> bool:
    at = facts.restarted_at
    return at is not None and step is not None and at <= step < at + _AFTER_RESTART_STEPS


def _soon(facts: Facts) -> str:
    return f"within {_AFTER_RESTART_STEPS} steps of a restart at step {facts.restarted_at}"


def _nonfinite(kinds: Collection[str], first: FirstBad | None, facts: Facts) -> Diagnosis:
    nodes = _hardware_agrees(facts)
    if nodes:
        return Diagnosis(
            symptom="one_rank_nonfinite" if first is not None and first.ranks else "instant_nonfinite",
            family=Family.HARDWARE,
            why=f"hardware records on {', '.join(nodes)} near the first bad step",
            others=((Family.DATA, "the batch of the first bad step is not cleared"),),
        )
    if first is None or not first.ranks:
        if first is not None and _after_restart(facts, first.step):
            return Diagnosis(
                symptom="instant_nonfinite",
                family=Family.DISTRIBUTED,
                why=f"nonfinite {_soon(facts)}",
                others=((Family.NUMERICS, "only reduced values are known"), (Family.DATA, "not cleared")),
            )
        state = "nonfinite_state" in kinds and "nonfinite" not in kinds
        return Diagnosis(
            symptom="instant_nonfinite",
            family=Family.OPTIMIZER if state else Family.NUMERICS,
            why="weights or optimizer moments are nonfinite and no gradient was"
            if state
            else "nonfinite after the reduce; no rank-local value says where it began",
            others=((Family.DATA, "a batch can overflow any of this"), (Family.HARDWARE, "not cleared")),
        )
    where = f"rank {first.ranks[0]}" if not first.tie else f"ranks {fold_ranks(list(first.ranks))}"
    layer = "" if first.layer is None else f", layer {first.layer}"
    said = f"{where} went nonfinite by itself in {first.phase.name.lower()} of step {first.step}{layer}"
    others: tuple[tuple[Family, str], ...] = (
        (Family.NUMERICS, "an overflow on ordinary data looks the same; replay in fp32 tells"),
        (Family.HARDWARE, f"the device of {where} is not cleared"),
    )
    if first.tie and not first.tie_reason.startswith("ranks ") and len(first.ranks) > 2:
        return Diagnosis(
            symptom="instant_nonfinite",
            family=Family.NUMERICS,
            why=f"{said}; {len(first.ranks)} ranks at once, so not one shard",
            others=((Family.DATA, "a common bad range of samples"), (Family.OPTIMIZER, "weights before it")),
        )
    if first.phase == Phase.DATA:
        said += ": its input was already nonfinite"
    return Diagnosis(
        symptom="one_rank_nonfinite",
        family=Family.DATA,
        why=f"{said}, before any exchange with other ranks; its batch comes first",
        others=others,
    )


def _skipped(first: FirstBad | None, facts: Facts) -> Diagnosis:
    nodes = _hardware_agrees(facts)
    if nodes:
        return Diagnosis(
            symptom="skipped_nonfinite",
            family=Family.HARDWARE,
            why=f"hardware records on {', '.join(nodes)} near the skipped steps",
        )
    if first is not None and len(first.ranks) == 1:
        return Diagnosis(
            symptom="skipped_nonfinite",
            family=Family.DATA,
            why=f"rank {first.ranks[0]} went nonfinite by itself; the update was skipped",
            others=((Family.NUMERICS, "an overflow on ordinary data looks the same"),),
        )
    return Diagnosis(
        symptom="skipped_nonfinite",
        family=Family.NUMERICS,
        why="gradients overflowed and the updates were skipped; no single rank stands out",
        others=((Family.DATA, "an overlong or odd sample"),),
    )


def _spike(spikes: Sequence[Finding], kinds: Collection[str], facts: Facts) -> Diagnosis:
    first = min((s for s in spikes if s.step is not None), key=lambda s: s.step or 0, default=spikes[0])
    halt = any(spike.severity == "halt" for spike in spikes)
    if _after_restart(facts, first.step):
        return Diagnosis(
            symptom="spike_stays" if halt else "spike_recovers",
            family=Family.DISTRIBUTED,
            why=f"the spike began {_soon(facts)}",
            others=((Family.OPTIMIZER, "scheduler or moments not restored"), (Family.DATA, "data order")),
        )
    return Diagnosis(
        symptom="spike_stays" if halt else "spike_recovers",
        family=Family.DATA,
        why=f"the loss rose from step {first.step} on with no restart or hardware record before it: "
        "first a batch together with this state of the weights",
        others=(
            (Family.OPTIMIZER, "the learning rate may be too high"),
            *(((Family.NUMERICS, "layers left their range"),) if "layer_outlier" in kinds else ()),
        ),
    )


def _curves(kinds: Collection[str], findings: Sequence[Finding]) -> Diagnosis:
    table: tuple[tuple[str, str, Family, str], ...] = (
        ("layer_grad_norm_bad", "layer_outlier", Family.NUMERICS, "one layer's gradient is bad by itself"),
        ("grad_norm_collapse", "vanishing_gradient", Family.NUMERICS, "the gradient norm fell to nothing"),
        ("layer_dead", "vanishing_gradient", Family.OPTIMIZER, "a layer is not updated"),
        ("grad_norm_creep", "creep", Family.NUMERICS, "the gradient norm rose over many steps"),
        ("level_shift", "level_shift", Family.DRIFT, "the loss settled at another level"),
        ("grad_norm_level_shift", "level_shift", Family.DRIFT, "the gradient norm settled at another level"),
        ("layer_outlier", "layer_outlier", Family.NUMERICS, "one layer left its own range"),
        ("grad_norm_sustained", "gradient_spike", Family.DATA, "the gradient norm stayed high"),
        ("grad_norm_spike", "gradient_spike", Family.DATA, "the gradient norm jumped for a step or two"),
    )
    for kind, symptom, family, why in table:
        if kind in kinds:
            return Diagnosis(symptom=symptom, family=family, why=why)
    shown = {f.series.lower() for f in findings if f.kind == "nonfinite_shown"}
    if shown and all("eval" in name or "val" in name or "perplexity" in name for name in shown):
        return Diagnosis(
            symptom="only_evaluation",
            family=Family.DATA,
            why=f"only {', '.join(sorted(shown))} is nonfinite, training is not: evaluation data or code",
        )
    return Diagnosis(symptom="unknown", family=Family.UNKNOWN, why="cause unknown: no finding leads")


def default_plan(diagnosis: Diagnosis, facts: Facts = Facts()) -> PlanChoice:  # noqa: B008
    """Return the plan kind that follows from the leading family, and why.

    Good weights come first (an update that was not applied needs no rollback); then whether data is
    innocent (replay) or not (skip). With the cause unknown the data of the failure is skipped: a replay
    would meet it again unwatched.
    """
    family = diagnosis.family
    if facts.false_alarm:
        return PlanChoice("resume_in_place", "false alarm: nothing is wrong with weights or data")
    if facts.held_by_hand:
        return PlanChoice("resume_in_place", "held by hand: nothing failed")
    if facts.checkpoint_suspect:
        return PlanChoice("rollback_one_further", "the newest checkpoint is itself suspect")
    if facts.update_applied is False and family in (
        Family.DATA,
        Family.NUMERICS,
        Family.OPTIMIZER,
        Family.UNKNOWN,
    ):
        return PlanChoice(
            "skip_and_continue", "the update was not applied: weights are good, that batch is dropped"
        )
    if family == Family.HARDWARE and facts.recurrence == "other_nodes":
        return PlanChoice(
            "rollback_and_skip", "it recurred on other nodes, so hardware is disproved: skip the data"
        )
    if family in (Family.HARDWARE, Family.COMMUNICATION, Family.DISTRIBUTED):
        return PlanChoice(
            "rollback_and_replay", f"{family}: the data is innocent, run it again without the suspects"
        )
    if family == Family.OPTIMIZER:
        return PlanChoice(
            "rollback_and_replay",
            "optimisation, not data: skipping would not help; declare the change (lr × 0.3, warm-up)",
        )
    if family == Family.DRIFT:
        return PlanChoice("rollback_and_replay", "code or configuration changed: same data, change undone")
    if family == Family.UNKNOWN:
        return PlanChoice("rollback_and_skip", "cause unknown: the data of the failure is not cleared")
    return PlanChoice(
        "rollback_and_skip", f"{family}: skip from the checkpoint's loader position past the last bad step"
    )


def worst(findings: Sequence[Finding]) -> Finding | None:
    """Return the worst finding: highest severity, then earliest step."""
    return min(
        findings,
        key=lambda f: (-SEVERITY_ORDER[f.severity], f.step is None, f.step or 0),
        default=None,
    )
