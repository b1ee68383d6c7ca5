"""What one step's agreed numbers mean: apply the update, drop it, or stop.

Pure: every rank gives it the same reduced numbers in the same order, so every rank reaches the same
verdict with no further word between them. It runs the server's own detectors (andon/detect), so that
the server can recompute each verdict and say when it would have decided otherwise.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from andon.detect.finding import Finding
from andon.detect.skips import SkipClass, SkipCounter, StepSeen
from andon.detect.spike import RobustSpike
from andon.policy import Policy

DETECTOR = "monitor"
VERSION = 1

Guard = Literal["off", "skip"]
Kind = Literal["ok", "skip", "halt"]


class Agreed(msgspec.Struct, frozen=True):
    """The reduced numbers of one step; equal on every rank.

    Attributes:
        loss: token-weighted mean over the ranks whose loss was finite; NaN when no rank had one.
        nonfinite_ranks: ranks with a nonfinite loss, output or gradient of their own.
        reduced_ranks: ranks with a nonfinite gradient after the reduce: after one rank's own, or an overflow
            of the sum.
        nonfinite_losses: ranks with a nonfinite loss.
        state_ranks: ranks that hold nonfinite weights or optimizer moments.
        suspects: ranks whose replicas or twins differed since the last step.
        loss_scale: of an fp16 scaler, else None.
    """

    step: int
    loss: float
    nonfinite_ranks: int = 0
    reduced_ranks: int = 0
    nonfinite_losses: int = 0
    state_ranks: int = 0
    suspects: int = 0
    loss_scale: float | None = None


class Decision(msgspec.Struct, frozen=True):
    """What all ranks do with a step.

    Attributes:
        skip: this step's update is dropped (a halt drops it too, where it can still be dropped).
        halt: stop at this step, by the trainer's own decision.
        reason: one sentence for a halt or a skip.
        findings: what the detectors said, acted on or not.
        would: what would have been done if the mode let it; "ok" where `skip` and `halt` say it all.
    """

    skip: bool = False
    halt: bool = False
    reason: str | None = None
    findings: tuple[Finding, ...] = ()
    would: Kind = "ok"


class Decider:
    """Decides step after step for one attempt.

    Arguments:
        acting: False under mode off or observe: everything is judged and nothing done.
        guard: "skip" drops updates of nonfinite steps within the policy's budget and halts past it, on
            nonfinite state and on a spike whose rule acts; "off" decides nothing (an fp16 scaler, which
            skips whatever anyone says, is still counted).
        first_step, previous_scale: where the attempt began, and the loss scale its checkpoint held.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        acting: bool,
        guard: Guard,
        first_step: int | None = None,
        previous_scale: float | None = None,
    ) -> None:
        self.policy = policy
        self.guard = guard
        self.nonfinite_acts = acting and guard == "skip" and policy.mode("nonfinite") == "act"
        self.spike_acts = acting and guard == "skip" and policy.mode("spike") == "act"
        self.corruption_acts = acting and guard == "skip" and policy.mode("corruption") == "act"
        self.skips = SkipCounter(
            policy.nonfinite, attempt_first_step=first_step, previous_scale=previous_scale
        )
        self.spike = RobustSpike(policy.spike)

    def decide(self, agreed: Agreed) -> Decision:
        """Judge a step. Call once a step, in the order of training."""
        bad = agreed.nonfinite_ranks > 0 or agreed.reduced_ranks > 0
        # A loss scaler drops an overflow by itself, under every mode.
        skip = bad and (self.nonfinite_acts or agreed.loss_scale is not None)
        findings: list[Finding] = []
        halting: list[Finding] = []
        if self.policy.mode("nonfinite") != "off":
            told = self._count(agreed, bad, skipped=skip or (bad and self.guard == "skip"))
            if agreed.state_ranks:
                told.append(_state_finding(agreed))
            findings += told
            halting += [one for one in told if one.severity == "halt" and self.nonfinite_acts]
        if not bad and self.policy.mode("spike") != "off" and math.isfinite(agreed.loss):
            spike = self.spike.update(agreed.step, agreed.loss)
            if spike is not None:
                findings.append(spike)
                if spike.severity == "halt" and self.spike_acts:
                    halting.append(spike)
        if agreed.suspects and self.policy.mode("corruption") != "off":
            findings.append(_corruption_finding(agreed))
            halting += findings[-1:] if self.corruption_acts else []
        reason = halting[0].detail if halting else None
        if skip and reason is None:
            who = f"on {agreed.nonfinite_ranks} rank(s)" if agreed.nonfinite_ranks else "after the reduce"
            reason = f"nonfinite {who}: the update is dropped"
        would: Kind = "ok"
        if not halting and any(one.severity == "halt" for one in findings):
            would = "halt"
        elif bad and not skip and self.guard == "skip":
            would = "skip"
        return Decision(skip or bool(halting), bool(halting), reason, tuple(findings), would)

    def _count(self, agreed: Agreed, bad: bool, *, skipped: bool) -> list[Finding]:
        what = SkipClass.NOT_SAID
        if bad:
            what = SkipClass.LOSS if agreed.nonfinite_losses else SkipClass.GRADIENT
        seen = StepSeen(step=agreed.step, skipped=skipped, what=what, loss_scale=agreed.loss_scale)
        return self.skips.update(seen)

    def boundary(self) -> None:
        """Begin a new baseline: a declared discontinuity is no spike."""
        self.spike.reset()

    def state(self) -> dict[str, Any]:
        """Return the memory as JSON-ready data, for a checkpoint."""
        return {"skips": self.skips.state(), "spike": self.spike.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; every rank must load the same."""
        self.skips = SkipCounter.restore(self.policy.nonfinite, state["skips"])
        self.spike = RobustSpike.restore(self.policy.spike, state["spike"])


def _state_finding(agreed: Agreed) -> Finding:
    return Finding(
        kind="nonfinite_state",
        severity="halt",
        rule="nonfinite",
        step=agreed.step,
        detector=DETECTOR,
        detector_version=VERSION,
        series="nonfinite",
        phase="optimizer",
        numbers={"ranks": agreed.state_ranks},
        detail="weights or optimizer moments are nonfinite: a skipped update does not undo that",
    )


def _corruption_finding(agreed: Agreed) -> Finding:
    return Finding(
        kind="corruption",
        severity="halt",
        rule="corruption",
        step=agreed.step,
        detector=DETECTOR,
        detector_version=VERSION,
        series="checksum",
        numbers={"ranks": agreed.suspects},
        detail="replicas that must be equal differ, or twins computed one step differently",
    )
