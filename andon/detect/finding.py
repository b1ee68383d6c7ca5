"""What a detector says."""

import math
from typing import Any, Literal

import msgspec

Severity = Literal["info", "warn", "halt"]
View = Literal["local", "reduced"]
Number = float | int | str | bool | None

SEVERITY_ORDER: dict[str, int] = {"info": 0, "warn": 1, "halt": 2}


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """One statement of one detector about one step; the caller adds run, attempt and policy version.

    Attributes:
        kind: what was seen ("nonfinite", "loss_spike", "level_shift", …).
        severity: "halt" is what the rule asks for; whether it may act is the policy's mode of `rule`.
        rule: the name under which the policy switches it off, observes it or lets it act.
        step: optimizer step, or None when the finding is about no single step.
        lanes: ranks (int) or layers and nodes (int or str) it names; empty when it names none.
        score: the number compared with the thresholds (a robust z where there is one), else None.
        numbers: every number used: value, median, MAD, z, window length, thresholds. Nonfinite values
            are the strings "nan", "+inf", "-inf", so that the whole is valid JSON.
        detector, detector_version: which code said it.
        series: the column or curve it read ("loss", "grad_norm", "layer.grad_norm", …).
        view: only a local value may name a rank.
        phase: lower-case phase of the step ("data" … "optimizer") where one is known.
        micro_batch: micro-batch inside the step where one was reported.
        detail: one plain sentence.
    """

    kind: str
    severity: Severity
    rule: str
    step: int | None
    detector: str
    detector_version: int
    series: str
    detail: str
    lanes: tuple[int | str, ...] = ()
    score: float | None = None
    numbers: dict[str, Number] = msgspec.field(default_factory=dict)
    view: View = "reduced"
    phase: str | None = None
    micro_batch: int | None = None

    def to_document(self) -> dict[str, Any]:
        """Return the finding as JSON-ready data: no NaN, no tuple."""
        document: dict[str, Any] = msgspec.to_builtins(self)
        document["lanes"] = list(self.lanes)
        document["score"] = finite_or_text(self.score)
        document["numbers"] = {name: finite_or_text(value) for name, value in self.numbers.items()}
        return document


def finite_or_text(value: Number) -> Number:
    """Return `value`, or its spelling "nan", "+inf", "-inf" when JSON has no number for it."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("+inf" if value > 0 else "-inf")
    return value
