"""Spike detector: a robust z-score over a trailing window of values that were not flagged.

z = (x − median) / (1.4826 · MAD): the factor makes the median absolute deviation estimate the standard
deviation of normal noise (Rousseeuw & Croux, "Alternatives to the Median Absolute Deviation", 1993).
Median and MAD, because the mean and standard deviation of a window with one spike in it hide the next.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from andon.detect.finding import Finding, Number, Severity
from andon.detect.quantum import BF16_QUANTUM, UNROUNDED, grid, places_of, quantum_of
from andon.policy import SpikeRules

DETECTOR = "spike"
VERSION = 1
CONSISTENCY = 1.4826
SETTLED = 3  # so many ordinary values in a row end an excursion


class Verdict(msgspec.Struct, frozen=True):
    """How one value was judged.

    Attributes:
        z: robust z, None during warm-up.
        median, mad: of the window before this value; None during warm-up.
        n: values in the window before this value.
        strikes: consecutive values above `warn_z`, this one included.
        severity: None for an ordinary value.
        shifted: this value completed a level shift and the baseline was restarted.
    """

    z: float | None
    median: float | None
    mad: float | None
    n: int
    strikes: int
    severity: Severity | None
    shifted: bool = False


class RobustBaseline:
    """The window and the strikes, free of findings: what loss, gradient norms and layers share.

    A window whose MAD is 0 has no scale of its own. Where its values are quantised the quantum is taken, else
    the floor: a loss printed as 2.31 that is 2.32 three times in a row has not moved by more than a digit.
    """

    def __init__(self, rules: SpikeRules, *, quantum: float | None = None, places: int | None = None) -> None:
        """Begin empty.

        Args:
            rules: window, thresholds, floor of the MAD.
            quantum: spacing of the values where it is known; 0: they are not quantised. None: found by
                looking, 1/128 where every value of the window is a multiple of it, else the last decimal of
                these values and of the one that is judged, where all are rounded.
            places: decimals that the values were printed with, where that is known: "2.30" has two.
        """
        self.rules = rules
        self.quantum = quantum
        self.places = places
        self._window: deque[float] = deque()
        self._sorted: list[float] = []
        self._flagged: deque[float] = deque(maxlen=rules.level_shift_after)
        self._strikes = 0
        self._calm = 0
        self._centre: tuple[float, float] | None = None  # median and MAD as they are
        self._off_grid = 0  # values of the window that are no multiple of 1/128
        self._by_places = [0] * (UNROUNDED + 1)  # values of the window by their decimals
        self._looks = quantum is None

    def __len__(self) -> int:
        return len(self._window)

    @property
    def centre(self) -> tuple[float, float]:
        """Median and MAD of the window; the MAD is never 0.

        Raises:
            ValueError: the window is empty.
        """
        middle, _ = self._measured()
        return middle, self._mad(middle)

    def values(self) -> list[float]:
        """Return the window, oldest first."""
        return list(self._window)

    def _measured(self) -> tuple[float, float]:
        if self._centre is None:
            self._centre = median_and_mad(self._sorted)
        return self._centre

    def _mad(self, value: float) -> float:
        """Return the MAD that `value` is judged with."""
        _, mad = self._measured()
        if mad == 0:
            mad = self._quantum(value)
        return max(mad, self.rules.mad_floor)

    def _quantum(self, value: float) -> float:
        if self.quantum is not None:
            return self.quantum
        if self.places is not None:
            return grid(self.places, bf16=not self._off_grid, printed=True)
        return grid(max(self._places(), places_of(value)), bf16=not self._off_grid)

    def _places(self) -> int:
        return max((places for places, count in enumerate(self._by_places) if count), default=0)

    def z(self, value: float) -> float | None:
        """Return the robust z of `value` against the window, None during warm-up."""
        if len(self._window) < self.rules.warm_up:
            return None
        return (value - self._measured()[0]) / (CONSISTENCY * self._mad(value))

    def update(self, value: float) -> Verdict:
        """Judge a finite value and take it in; a flagged value never enters the window."""
        rules, n = self.rules, len(self._window)
        if n < rules.warm_up:
            self._admit(value)
            return Verdict(None, None, None, n, 0, None)
        middle, mad = self._centre or self._measured()
        if mad < rules.mad_floor:
            mad = self._mad(value)
        z = (value - middle) / (CONSISTENCY * mad)
        if z <= rules.warn_z:
            self._strikes = 0
            self._calm += 1
            if self._calm >= SETTLED:
                self._flagged.clear()
            self._admit(value)
            return Verdict(z, middle, mad, n, 0, None)
        self._strikes += 1
        self._calm = 0
        self._flagged.append(value)
        if len(self._flagged) == rules.level_shift_after and is_stable(self._flagged, self._grain()):
            strikes = self._strikes
            self.restart(self._flagged)
            return Verdict(z, middle, mad, n, strikes, "warn", shifted=True)
        halt = z > rules.halt_z and self._strikes >= rules.strikes
        return Verdict(z, middle, mad, n, self._strikes, "halt" if halt else "warn")

    def _grain(self) -> float:
        """Return what two medians of flagged values may differ by for want of digits."""
        quantum = self.quantum
        if quantum is None:
            quantum = quantum_of(self._flagged, self.places)
        return max(quantum, self.rules.mad_floor)

    def _admit(self, value: float) -> None:
        window, ordered = self._window, self._sorted
        window.append(value)
        insort(ordered, value)
        if self._looks:
            self._count(value, 1)
        if len(window) > self.rules.window:
            old = window.popleft()
            del ordered[bisect_left(ordered, old)]
            if self._looks:
                self._count(old, -1)
        self._centre = None

    def _count(self, value: float, by: int) -> None:
        if value % BF16_QUANTUM:
            self._off_grid += by
        if self.places is None:
            self._by_places[places_of(value)] += by

    def restart(self, values: Iterable[float] = ()) -> None:
        """Forget the baseline; begin again from `values` (none: a new warm-up)."""
        kept = list(values)[-self.rules.window :]
        self._window = deque(kept)
        self._sorted = sorted(kept)
        self._off_grid = 0
        self._by_places = [0] * (UNROUNDED + 1)
        for value in kept if self._looks else ():
            self._count(value, 1)
        self._flagged.clear()
        self._strikes = self._calm = 0
        self._centre = None

    def state(self) -> dict[str, Any]:
        """Return the memory as JSON-ready data; floats survive the round trip exactly."""
        return {
            "window": list(self._window),
            "flagged": list(self._flagged),
            "strikes": self._strikes,
            "calm": self._calm,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken."""
        self.restart(float(value) for value in state["window"])
        self._flagged.extend(float(value) for value in state["flagged"])
        self._strikes, self._calm = int(state["strikes"]), int(state["calm"])


def median_and_mad(ordered: Sequence[float]) -> tuple[float, float]:
    """Return median and median absolute deviation of ascending values, with no second sort.

    The values nearest to the median are a run of the ordered ones. As the run moves up, its lower end
    comes nearer to the median and its upper end goes away from it, so bisection finds the run whose
    farther end is nearest: that end is the deviation in the middle. In a window of 200 that takes
    seven comparisons.

    Raises:
        ValueError: there is no value.
    """
    n = len(ordered)
    if n == 0:
        raise ValueError("no values: median and MAD do not exist")
    half = n // 2
    odd = n % 2
    middle = ordered[half] if odd else (ordered[half - 1] + ordered[half]) / 2
    last = half + odd - 1  # a run of so many and one holds the smaller half of the deviations
    low, high = 0, n - last - 1
    while low < high:
        at = (low + high) >> 1
        if ordered[at + last] - middle < middle - ordered[at]:
            low = at + 1
        else:
            high = at
    mad = ordered[low + last] - middle
    if low and middle - ordered[low - 1] < mad:
        low -= 1
        mad = middle - ordered[low]
    if odd:
        return middle, mad
    # The next deviation is at one of the run's two neighbours.
    after = low + last + 1
    larger = ordered[after] - middle if after < n else math.inf
    if low:
        larger = min(larger, middle - ordered[low - 1])
    return middle, (mad + larger) / 2


def is_stable(values: Iterable[float], floor: float) -> bool:
    """Return whether values stand at a level of their own rather than climb or swing.

    The medians of the older and the newer half differ by no more than one robust deviation, and their
    MADs by no more than a factor of three. For noise around a level both hold in more than 98 % of
    windows of 50; for a straight climb of any slope the first fails (the medians lie half the climb
    apart, the deviation is 0.37 of it).
    """
    listed = list(values)
    half = len(listed) // 2
    older, older_mad = median_and_mad(sorted(listed[:half]))
    newer, newer_mad = median_and_mad(sorted(listed[half:]))
    _, mad = median_and_mad(sorted(listed))
    if abs(newer - older) > CONSISTENCY * max(mad, floor):
        return False
    small, large = sorted((max(older_mad, floor), max(newer_mad, floor)))
    return large <= 3 * small


class RobustSpike:
    """The loss-spike rule: one value per step in, a finding out when it is flagged.

    Every flagged value gives a finding with the severity of the rule: "halt" when its z is above
    `halt_z` and it is at least the `strikes`-th in a row above `warn_z`, else "warn". Findings of one
    excursion carry the same `since` in their numbers. Values must come in the order of training.
    """

    def __init__(
        self,
        rules: SpikeRules,
        series: str = "loss",
        rule: str = "spike",
        *,
        quantum: float | None = None,
        places: int | None = None,
    ) -> None:
        """Begin with an empty baseline for one curve of a run (`quantum`, `places`: see `RobustBaseline`)."""
        self.rules = rules
        self.series = series
        self.rule = rule
        self.baseline = RobustBaseline(rules, quantum=quantum, places=places)
        self.judged = 0
        self._since: int | None = None

    def update(self, step: int, value: float | None) -> Finding | None:
        """Judge the value of a step.

        None is not measured; a nonfinite value is the nonfinite rule's and touches nothing here; so is
        a loss of exactly −1, the sentinel of a pipeline stage without loss.
        """
        if value is None or value - value != 0 or (self.series == "loss" and value == -1.0):
            return None
        verdict = self.baseline.update(value)
        if verdict.z is not None:
            self.judged += 1
        if verdict.severity is None:
            self._since = None
            return None
        if self._since is None:
            self._since = step
        kind = "level_shift" if verdict.shifted else f"{self.series}_spike"
        numbers: dict[str, Number] = {
            "value": value,
            "median": verdict.median,
            "mad": verdict.mad,
            "z": verdict.z,
            "n": verdict.n,
            "strikes": verdict.strikes,
            "since": self._since,
            "warn_z": self.rules.warn_z,
            "halt_z": self.rules.halt_z,
            "halt_strikes": self.rules.strikes,
            "window": self.rules.window,
        }
        detail = f"{self.series} {value:.4g} against a median of {verdict.median:.4g}, z {verdict.z:.1f}"
        if verdict.shifted:
            middle, mad = self.baseline.centre
            numbers |= {"new_median": middle, "new_mad": mad, "values": self.rules.level_shift_after}
            detail = (
                f"{self.series} settled at {middle:.4g} after {verdict.median:.4g}: "
                f"new baseline from the last {self.rules.level_shift_after} values"
            )
            self._since = None
        elif verdict.severity == "halt":
            detail += f", {verdict.strikes} in a row"
        return Finding(
            kind=kind,
            severity=verdict.severity,
            rule=self.rule,
            step=step,
            score=verdict.z,
            detector=DETECTOR,
            detector_version=VERSION,
            series=self.series,
            numbers=numbers,
            detail=detail,
        )

    def reset(self) -> None:
        """Forget the baseline: a declared discontinuity, or a rollback. A new warm-up begins."""
        self.baseline.restart()
        self._since = None

    def state(self) -> dict[str, Any]:
        """Return the memory as JSON-ready data."""
        return {**self.baseline.state(), "since": self._since, "judged": self.judged}

    @classmethod
    def restore(
        cls,
        rules: SpikeRules,
        state: Mapping[str, Any],
        series: str = "loss",
        rule: str = "spike",
        *,
        quantum: float | None = None,
    ) -> "RobustSpike":
        """Return a detector that goes on where `state` was taken."""
        detector = cls(rules, series, rule, quantum=quantum)
        detector.baseline.load(state)
        detector._since = state["since"]
        detector.judged = int(state["judged"])
        return detector
