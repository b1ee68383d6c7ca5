"""The steps that two attempts both ran: whether the second does what the first did.

A rollback that replays its data must give the same losses: bit-equal on deterministic kernels, else within
four times the run's own noise. The first step that differs more says that something was not restored.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Literal

import msgspec

from andon.detect.quantum import BF16_QUANTUM, quantum_of

WITHIN = 4.0  # times the noise of the loss
NOISE_STEPS = 200
_MAD_TO_SIGMA = 1.4826
_FLOOR = 1e-8

Outcome = Literal["equal", "within", "differs", "not_comparable", "not_known"]
Other = Literal["", "other data", "a changed regime"]


class Overlap(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison. Losses are in the run's own unit; steps are optimizer steps.

    Args:
        steps: how many were compared: run by both, and before the first bad step of the older attempt.
        largest: the largest absolute difference, at step `largest_at`.
        typical: the median of the newer loss minus the older one.
        noise: standard deviation of the older attempt's loss from step to step; None: too few steps.
        differs_from: first step that differs by more than `WITHIN` × `noise`; None: none does.
    """

    first: int | None
    last: int | None
    steps: int
    largest: float | None
    largest_at: int | None
    typical: float | None
    noise: float | None
    differs_from: int | None
    outcome: Outcome
    other: Other = ""

    def says(self) -> str:
        """Return it in one sentence, without a full stop."""
        if not self.steps:
            return "no step was run by both attempts with a loss of each"
        by = self.typical or 0.0
        numbers = f"median difference {'−' if by < 0 else '+'}{abs(by):.4g}"
        numbers += f", largest {self.largest:.4g} at step {self.largest_at:,}"
        over = f"over {self.steps:,} common steps, {self.first:,} to {self.last:,}"
        if self.outcome == "equal":
            return f"loss bit-equal {over}"
        noise = "noise not known" if self.noise is None else f"noise {self.noise:.4g}"
        if self.outcome == "not_comparable":
            return f"loss on {self.other} {over}: {numbers}, {noise}"
        if self.outcome == "not_known":
            return f"loss {over}: {numbers}; too few steps to know its noise"
        if self.outcome == "differs":
            return f"loss differs from step {self.differs_from:,} on {over}: {numbers}, {noise}"
        return f"loss within {WITHIN:g} × noise {over}: {numbers}, {noise}"


def noise(values: Sequence[float]) -> float | None:
    """Return the standard deviation of a loss from step to step, its trend taken out; None under 8 steps.

    From the median of the absolute first differences: a difference of two steps has √2 times the
    deviation of one. Never below 1e-8, or the quantum of a loss that is quantised (bf16: 1/128; or rounded).
    """
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 8:
        return None
    steps = [later - earlier for earlier, later in pairwise(finite)]
    middle = median(steps)
    spread = _MAD_TO_SIGMA * median(abs(step - middle) for step in steps) / math.sqrt(2)
    if not any(steps) and finite[0] % BF16_QUANTUM:
        return _FLOOR  # one value over and over shows no rounding
    return max(spread, quantum_of(finite), _FLOOR)


def compare(
    old: Mapping[int, float | None],
    new: Mapping[int, float | None],
    *,
    after: int,
    until: int | None,
    other: Other = "",
) -> Overlap:
    """Compare the losses of two attempts, by step.

    Args:
        old, new: loss by step; None where it was nonfinite.
        after: the step of the checkpoint that the newer attempt began from.
        until: the first bad step of the older one, which is not compared; None: it had none.
        other: what else differs by intention, so that equal losses are not to be expected; "": nothing.
    """
    pairs = [
        (step, value, again)
        for step, value in sorted(old.items())
        if step > after and (until is None or step < until)
        if (again := new.get(step)) is not None and value is not None
    ]
    past = [
        value for step, value in sorted(old.items()) if value is not None and (until is None or step < until)
    ]
    level = noise(past[-NOISE_STEPS:])
    if not pairs:
        return Overlap(
            first=None,
            last=None,
            steps=0,
            largest=None,
            largest_at=None,
            typical=None,
            noise=level,
            differs_from=None,
            outcome="not_known",
            other=other,
        )
    differences = [(step, again - value) for step, value, again in pairs]
    largest_at, largest = max(differences, key=lambda one: (abs(one[1]), -one[0]))
    bound = None if level is None else WITHIN * level
    differs = next((step for step, by in differences if bound is not None and abs(by) > bound), None)
    outcome: Outcome = "within" if bound is not None else "not_known"
    if other:
        outcome, differs = "not_comparable", None
    elif largest == 0:
        outcome = "equal"
    elif differs is not None:
        outcome = "differs"
    return Overlap(
        first=pairs[0][0],
        last=pairs[-1][0],
        steps=len(pairs),
        largest=abs(largest),
        largest_at=largest_at,
        typical=float(median(by for _, by in differences)),
        noise=level,
        differs_from=differs,
        outcome=outcome,
        other=other,
    )
