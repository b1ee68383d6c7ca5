"""Skipped updates: when a careful trainer's skipping becomes a failure of its own.

A skip keeps the weights good, so one of them holds nothing. What matters is how many, how close
together, and whether a loss scaler was looking for its scale.
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import msgspec

from andon.detect.finding import Finding, Number, Severity
from andon.policy import NonfiniteRules

DETECTOR = "skips"
VERSION = 1
RULE = "nonfinite"

# A search begins in the first steps after a restart and halves the scale several times; one overflow
# per growth interval is normal, so neither a single skip nor a later pair says "not restored".
RESTART_STEPS = 10
RESTART_SKIPS = 3


class SkipClass(IntEnum):
    """What was nonfinite in a step, the worst of all its posts."""

    NOT_SAID = 0
    GRADIENT = 1
    LOSS = 2


class StepSeen(msgspec.Struct, frozen=True, kw_only=True):
    """One post about one step. `loss_scale` is None where no scaler was posted (−1 is a sentinel)."""

    step: int
    skipped: bool
    what: SkipClass = SkipClass.NOT_SAID
    loss_scale: float | None = None
    ranks: tuple[int, ...] = ()


class _Mark(IntEnum):
    APPLIED = 0
    UNSAID = 1  # skipped, no scaler, nothing nonfinite reported: not judged
    SEARCH = 2  # the scale search at the start of a run
    SCALER = 3
    NONFINITE = 4


class SkipCounter:
    """Counts the skipped steps of one attempt.

    Rules (NonfiniteRules): a nonfinite step skipped without a scaler, or with a nonfinite loss under
    one, is a warning, and a halt when `skipped_in_a_row` in a row or `skipped_in_window` within
    `skipped_window_steps`. An overflow skipped by a scaler is counted: a warning above
    `scaler_fraction` of the last `scaler_window_steps` steps or at the floor of the scale, a halt at
    `scaler_in_a_row` in a row; steps up to `scaler_search_steps` of the run are exempt. A search after
    a restart is "scaler_not_restored".

    "In a row" runs over the steps that were seen. Many ranks may post one step; it counts once.
    """

    def __init__(
        self,
        rules: NonfiniteRules,
        *,
        attempt_first_step: int | None = None,
        previous_scale: float | None = None,
    ) -> None:
        """Begin an attempt.

        Args:
            rules: thresholds.
            attempt_first_step: first step of the attempt; by default the first one seen.
            previous_scale: last loss scale of the attempt before, where known.
        """
        self.rules = rules
        self.first_step = attempt_first_step
        self.previous_scale = previous_scale
        self.scaler_seen = False
        self._marks: dict[int, int] = {}
        self._newest = -1
        self._fired: set[str] = set()

    def update(self, seen: StepSeen | None) -> list[Finding]:
        """Take in one post; return what it newly means. Repeats of a step return nothing."""
        if seen is None:
            return []
        rules = self.rules
        findings: list[Finding] = []
        if self.first_step is None:
            self.first_step = seen.step
        if seen.loss_scale is not None:
            if not self.scaler_seen:
                findings += self._restored_scale(seen)
            self.scaler_seen = True
            if seen.loss_scale > rules.scale_floor:
                self._fired.discard("floor")
        mark = self._mark(seen)
        known = self._marks.get(seen.step)
        if known is not None and known >= mark:
            return findings
        self._marks[seen.step] = int(mark)
        if seen.step > self._newest:
            self._newest = seen.step
            self._forget()
        if mark == _Mark.NONFINITE:
            findings.append(self._nonfinite(seen))
        elif mark == _Mark.SCALER:
            findings += self._scaler(seen)
        elif (
            mark == _Mark.APPLIED
            and "rate" in self._fired
            and self._rate(self._newest) <= rules.scaler_fraction
        ):
            self._fired.discard("rate")
        return findings

    def _mark(self, seen: StepSeen) -> _Mark:
        if not seen.skipped:
            return _Mark.APPLIED
        scaler = self.scaler_seen or seen.loss_scale is not None
        if seen.what == SkipClass.LOSS or (seen.what == SkipClass.GRADIENT and not scaler):
            return _Mark.NONFINITE
        if not scaler:
            return _Mark.UNSAID
        return _Mark.SEARCH if seen.step <= self.rules.scaler_search_steps else _Mark.SCALER

    def _forget(self) -> None:
        keep = max(self.rules.scaler_window_steps, self.rules.skipped_window_steps)
        # Sparse logs keep few steps, so forgetting by count would break a row of skips.
        if len(self._marks) > 2 * keep:
            self._marks = {step: mark for step, mark in self._marks.items() if step > self._newest - keep}

    def _in_a_row(self, step: int, at_least: _Mark) -> int:
        count = 0
        for earlier in sorted((s for s in self._marks if s <= step), reverse=True):
            if self._marks[earlier] < at_least:
                break
            count += 1
        for later in sorted(s for s in self._marks if s > step):
            if self._marks[later] < at_least:
                break
            count += 1
        return count

    def _within(self, step: int, window: int, at_least: _Mark) -> int:
        return sum(mark >= at_least and step - window < s <= step for s, mark in self._marks.items())

    def _rate(self, step: int) -> float:
        window = self.rules.scaler_window_steps
        return self._within(step, window, _Mark.SCALER) / window

    def _nonfinite(self, seen: StepSeen) -> Finding:
        rules = self.rules
        row = self._in_a_row(seen.step, _Mark.NONFINITE)
        # A post may arrive late, so the window is judged where its newest skip lies.
        newest = max(s for s, mark in self._marks.items() if mark == _Mark.NONFINITE)
        within = self._within(max(newest, seen.step), rules.skipped_window_steps, _Mark.NONFINITE)
        halt = row >= rules.skipped_in_a_row or within >= rules.skipped_in_window
        return self._finding(
            seen,
            kind="nonfinite_skipped",
            severity="halt" if halt else "warn",
            numbers={
                "in_a_row": row,
                "in_window": within,
                "halt_in_a_row": rules.skipped_in_a_row,
                "halt_in_window": rules.skipped_in_window,
                "window_steps": rules.skipped_window_steps,
            },
            detail=f"nonfinite {'loss' if seen.what == SkipClass.LOSS else 'gradient'}, update skipped; "
            f"{row} in a row, {within} in {rules.skipped_window_steps} steps",
        )

    def _scaler(self, seen: StepSeen) -> list[Finding]:
        rules = self.rules
        findings = self._search_after_restart(seen)
        row = self._in_a_row(seen.step, _Mark.SCALER)
        if row >= rules.scaler_in_a_row:
            findings.append(
                self._finding(
                    seen,
                    kind="scaler_overflows",
                    severity="halt",
                    numbers={"in_a_row": row, "halt_in_a_row": rules.scaler_in_a_row},
                    detail=f"{row} updates in a row skipped by the loss scaler",
                )
            )
        rate = self._rate(max(self._newest, seen.step))
        if rate > rules.scaler_fraction and "rate" not in self._fired:
            self._fired.add("rate")
            findings.append(
                self._finding(
                    seen,
                    kind="scaler_overflows",
                    severity="warn",
                    numbers={
                        "fraction": rate,
                        "warn_fraction": rules.scaler_fraction,
                        "window_steps": rules.scaler_window_steps,
                    },
                    detail=f"{rate:.1%} of the last {rules.scaler_window_steps} updates skipped",
                )
            )
        if (
            seen.loss_scale is not None
            and seen.loss_scale <= rules.scale_floor
            and "floor" not in self._fired
        ):
            self._fired.add("floor")
            findings.append(
                self._finding(
                    seen,
                    kind="scaler_at_floor",
                    severity="warn",
                    numbers={"floor": rules.scale_floor},
                    detail=f"overflow with the loss scale at its floor ({seen.loss_scale:g})",
                )
            )
        return findings

    def _restarted(self) -> bool:
        return self.first_step is not None and self.first_step > self.rules.scaler_search_steps

    def _restored_scale(self, seen: StepSeen) -> list[Finding]:
        scale, before = seen.loss_scale, self.previous_scale
        if not self._restarted() or before is None or scale is None or scale < 4 * before:
            return []
        return self._not_restored(
            seen,
            {"previous_scale": before},
            f"the attempt began with loss scale {scale:g}, the one before ended with {before:g}",
        )

    def _search_after_restart(self, seen: StepSeen) -> list[Finding]:
        if not self._restarted() or self.first_step is None:
            return []
        end = self.first_step + self.rules.scaler_search_steps
        skips = sorted(s for s, mark in self._marks.items() if mark == _Mark.SCALER and s < end)
        early = [s for s in skips if s < self.first_step + RESTART_STEPS]
        pair = len(early) >= 2 and self._in_a_row(early[1], _Mark.SCALER) >= 2
        if seen.step >= end or not (pair or len(skips) >= RESTART_SKIPS):
            return []
        return self._not_restored(
            seen,
            {"skips": len(skips), "attempt_first_step": self.first_step},
            f"{len(skips)} overflows in the first steps after a restart at step {self.first_step}: "
            "the scaler searches again",
        )

    def _not_restored(self, seen: StepSeen, numbers: dict[str, Number], detail: str) -> list[Finding]:
        if "restored" in self._fired:
            return []
        self._fired.add("restored")
        return [
            self._finding(seen, kind="scaler_not_restored", severity="warn", numbers=numbers, detail=detail)
        ]

    def _finding(
        self, seen: StepSeen, *, kind: str, severity: Severity, numbers: dict[str, Number], detail: str
    ) -> Finding:
        if seen.loss_scale is not None:
            numbers = {**numbers, "loss_scale": seen.loss_scale}
        return Finding(
            kind=kind,
            severity=severity,
            rule=RULE,
            step=seen.step,
            lanes=seen.ranks,
            detector=DETECTOR,
            detector_version=VERSION,
            series="skipped",
            view="local" if seen.ranks else "reduced",
            numbers=numbers,
            detail=detail,
        )

    def state(self) -> dict[str, Any]:
        """Return the memory as JSON-ready data."""
        return {
            "first_step": self.first_step,
            "previous_scale": self.previous_scale,
            "scaler_seen": self.scaler_seen,
            "newest": self._newest,
            "marks": sorted(self._marks.items()),
            "fired": sorted(self._fired),
        }

    @classmethod
    def restore(cls, rules: NonfiniteRules, state: Mapping[str, Any]) -> "SkipCounter":
        """Return a counter that goes on where `state` was taken."""
        counter = cls(rules, attempt_first_step=state["first_step"], previous_scale=state["previous_scale"])
        counter.scaler_seen = bool(state["scaler_seen"])
        counter._newest = int(state["newest"])
        counter._marks = {int(step): int(mark) for step, mark in state["marks"]}
        counter._fired = set(state["fired"])
        return counter
