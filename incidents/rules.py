"""What a finding does to its run: the hold table, as data.

Only failures whose cause may still be in the weights, the data or the code hold a run. What is
attributed to hardware, fabric or the scheduler does not: the supervisor restarts by itself.
"""

from enum import IntEnum

from andon.policy import Policy
from runs.formatting import count
from runs.models import Finding


class Effect(IntEnum):
    """What an incident does about a finding; the larger includes the smaller."""

    NOTE = 0  # shown with the run, opens nothing
    FREEZE = 1  # incident (warn): evidence is frozen, the run goes on, watched
    HOLD = 2  # incident: evidence is frozen and the run held


# Attributed to hardware or fabric, or not a failure: held by nothing, restarted by the supervisor.
NEVER_HOLDS = frozenset(
    {"crash", "node_loss", "hang", "preemption", "time_limit", "preflight_reject", "recovered_spike"}
)
# Rows of the table that hold whatever severity a detector gave them.
ALWAYS_HOLDS = frozenset(
    {"launch_without_permit", "replicas_differ", "restore_differs", "crash_loop", "cap_reached"}
)
# A new baseline is no failure: it is told and written to the ledger, and freezes nothing.
BASELINE_RESETS = frozenset({"level_shift", "grad_norm_level_shift"})
NOTED_ONLY = BASELINE_RESETS | {"layer_dead", "not_judged", "nonfinite_shown"}

HELD_BY_HAND = "held_by_hand"
LAUNCH_WITHOUT_PERMIT = "launch_without_permit"

NONFINITE_KINDS = frozenset({"nonfinite", "nonfinite_state", "nonfinite_skipped"})
SCALER_KINDS = frozenset({"scaler_overflows", "scaler_at_floor", "scaler_not_restored"})


def is_spike(kind: str) -> bool:
    """Return whether a finding is about a value out of its own history, for which a margin is kept."""
    return kind.endswith(("_spike", "_sustained", "_creep", "_collapse")) or kind.startswith("layer_")


def effect(finding: Finding) -> Effect:
    """Return what `finding` does. Observe and off never act; backfill never opens or holds."""
    if finding.mode != "act" or finding.backfill or finding.severity == Finding.Severity.INFO:
        return Effect.NOTE
    if finding.kind in NOTED_ONLY:
        return Effect.NOTE
    if finding.kind in ALWAYS_HOLDS:
        return Effect.HOLD
    if finding.kind in NEVER_HOLDS:
        return Effect.FREEZE
    return Effect.HOLD if finding.severity == Finding.Severity.HALT else Effect.FREEZE


def first_flagged_step(finding: Finding) -> int | None:
    """Return the step at which it began: a halt names the third strike, not the first."""
    since = finding.numbers.get("since") if isinstance(finding.numbers, dict) else None
    if isinstance(since, int) and not isinstance(since, bool) and finding.step is not None:
        return min(since, finding.step)
    return finding.step


def margin_steps(kind: str, policy: Policy) -> int:
    """Return how many steps before the first bad one the last good checkpoint must lie.

    A nonfinite value is bad from its step on; a spike, a creep or corruption had begun before anything
    was flagged (about 100 steps before, in PaLM's practice).
    """
    if is_spike(kind) or kind == "replicas_differ":
        return policy.rollback.spike_margin_steps
    return 0


def leading(findings: list[Finding]) -> Finding:
    """Return the finding an incident is about: the worst, then the earliest.

    Nonfinite outranks a spike of the same step: the spike is what the NaN did to a curve.
    """

    def key(finding: Finding) -> tuple[int, int, int, int]:
        step = first_flagged_step(finding)
        kind = 0 if finding.kind in NONFINITE_KINDS else 1
        return (-int(effect(finding)), 2**63 if step is None else step, kind, finding.pk or 0)

    return min(findings, key=key)


_VALUE_WORD = {"nan": "NaN", "+inf": "+Inf", "-inf": "\u2212Inf"}


def value_word(finding: Finding) -> str:
    """Return NaN, +Inf or −Inf as the finding saw it, "Nonfinite" when it only says bits."""
    for name in ("loss", "grad_norm", "value"):
        word = _VALUE_WORD.get(str(finding.numbers.get(name, "")).lower())
        if word:
            return word
    return "Nonfinite"


def title(
    finding: Finding | None, *, ranks: int, world_size: int | None, spread: int, held_by_hand: bool = False
) -> str:
    """Return what happened in at most eight words.

    Args:
        finding: the leading one; None for a hold by a person.
        ranks: how many ranks are first bad; 0: the rank is not known. Where they are known the title
            names them, also when the finding that leads is about the weights they spoilt.
        world_size: ranks of the attempt, None: not reported.
        spread: how many ranks went bad in the end.
    """
    if held_by_hand or finding is None:
        return "Held by hand"
    kind = finding.kind
    if kind == "nonfinite_state" and ranks == 0:
        return f"{value_word(finding)} in weights or optimizer state"
    if kind == "nonfinite_skipped":
        return "Nonfinite steps skipped" if finding.severity == "halt" else "One nonfinite step skipped"
    if kind in ("nonfinite", "nonfinite_state"):
        return _nonfinite_title(value_word(finding), ranks, world_size, spread)
    return _TITLES.get(kind) or _spike_title(finding)


def _nonfinite_title(word: str, ranks: int, world_size: int | None, spread: int) -> str:
    if ranks == 0:
        return f"{word} in a reduced value, rank unknown"
    if world_size == 1:
        return f"{word} on the only rank"
    if world_size is not None and ranks >= world_size:
        return f"{word} on all {count(world_size)} ranks at once"
    where = "one rank" if ranks == 1 else f"{count(ranks)} ranks"
    if world_size is not None and spread >= world_size:
        return f"{word} on {where}, then on all {count(world_size)}"
    return f"{word} on {where}"


def _spike_title(finding: Finding) -> str:
    what = {"loss": "Loss", "grad_norm": "Gradient norm"}.get(finding.series)
    if finding.kind.endswith("_spike") and what:
        return f"{what} spike" + (" that did not recover" if finding.severity == "halt" else "")
    if finding.kind.startswith("layer_"):
        return "Gradient norm of one layer out of range"
    words = finding.kind.replace("_", " ")
    return words[:1].upper() + words[1:]


_TITLES = {
    "scaler_overflows": "Loss scale overflows too often",
    "scaler_at_floor": "Loss scale at its floor",
    "scaler_not_restored": "Loss scaler not restored",
    "grad_norm_sustained": "Gradient norm stayed high",
    "grad_norm_creep": "Gradient norm creeps up",
    "grad_norm_collapse": "Gradient norm fell to nothing",
    LAUNCH_WITHOUT_PERMIT: "Launched while held, without a permit",
    "replicas_differ": "Replicas differ",
    "restore_differs": "Restored state differs from the save",
    "crash_loop": "Crash loop",
    "cap_reached": "Daily cap of automatic actions reached",
    "hang": "No progress",
}
