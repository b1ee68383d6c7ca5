"""Global gradient norm, judged in log space, where noise is multiplicative and a spike is a factor.

Five different findings, all warnings: with clipping a training survives large norms (BLOOM-176B saw 0.24
→ 960 within seven steps and recovered by itself), so the norm announces trouble and the loss decides.
"""

import math
from collections import deque
from collections.abc import Mapping
from itertools import combinations, pairwise
from statistics import median
from typing import Any

from andon.detect.finding import Finding, Number
from andon.detect.quantum import UNROUNDED, places_of
from andon.detect.spike import CONSISTENCY, RobustBaseline, Verdict, median_and_mad
from andon.policy import SpikeRules

DETECTOR = "grad_norm"
VERSION = 1

COLLAPSE_FACTOR = 1e-3  # below a thousandth of the median, three in a row
CREEP_STEPS = 10  # a published NaN was announced by ten steps of creep
CREEP_AGREEMENT = 31  # of 45 pairs, rising minus falling (Kendall's S; p < 0.003 for noise) …
CREEP_Z = 3.0  # … and the median of the last three beyond three deviations
SLOW_CREEP = math.log(2)  # doubling inside one window that absorbs it value by value
EARLY_ABSOLUTE = 1000.0  # during warm-up: bad by itself, when also …
EARLY_FACTOR = 100.0  # … a hundred times the median of at least …
EARLY_VALUES = 5


class GradNorm:
    """Judges the gradient norm of one run, one value per step in the order of training.

    Kinds: `grad_norm_spike` (flagged, fewer than `strikes` in a row), `grad_norm_sustained` (at least
    `strikes` in a row), `grad_norm_level_shift` (settled at a new level; baseline restarted),
    `grad_norm_creep` (a steady rise over ten values, or doubling within the window; once per rise),
    `grad_norm_collapse` (three in a row below a thousandth of the median; once).
    """

    def __init__(self, rules: SpikeRules, series: str = "grad_norm", rule: str = "grad_norm") -> None:
        """Begin with an empty baseline."""
        self.rules = rules
        self.series = series
        self.rule = rule
        self.baseline = RobustBaseline(rules, quantum=0.0)
        self.judged = 0
        self._places = 0  # most decimals seen: what a rounded norm is known to
        self._recent: deque[float] = deque(maxlen=CREEP_STEPS)
        self._since: int | None = None
        self._low = 0
        self._admitted = 0
        self._creeping = False
        self._slow = False

    def update(self, step: int, value: float | None) -> list[Finding]:
        """Judge the norm of a step (global L2, unscaled, before clipping).

        Not measured: None, a negative value (−1 is a sentinel), and 0 as long as the series has no
        baseline, since a logger without the norm writes 0.000 throughout. A nonfinite norm is the
        nonfinite rule's.
        """
        if value is None or value - value != 0 or value < 0:
            return []
        known = len(self.baseline)
        ready = known >= self.rules.warm_up
        if value == 0 and not ready:
            return []
        if ready and value < COLLAPSE_FACTOR * math.exp(self.baseline.centre[0]):
            self.judged += 1
            return self._collapse(step, value)
        self._low = 0
        log = math.log(value)
        if EARLY_VALUES <= known < self.rules.warm_up and value >= EARLY_ABSOLUTE:
            middle, _ = self.baseline.centre
            if log - middle >= math.log(EARLY_FACTOR):
                return [self._early(step, value, math.exp(middle), known)]
        self._places = max(self._places, places_of(value))
        if ready and self._places < UNROUNDED:
            # Rounded norms may all be one: their last digit is the least that they can differ by.
            self.baseline.quantum = 10.0**-self._places / math.exp(self.baseline.centre[0])
        else:
            self.baseline.quantum = 0.0
        verdict = self.baseline.update(log)
        if verdict.z is None:
            self._recent.append(log)
            return []
        self.judged += 1
        return self._flagged(step, value, verdict) + self._creep(step, value, log, verdict)

    def _flagged(self, step: int, value: float, verdict: Verdict) -> list[Finding]:
        if verdict.severity is None or verdict.z is None or verdict.median is None:
            self._since = None
            return []
        self._since = step if self._since is None else self._since
        usual = math.exp(verdict.median)
        numbers = self._numbers(value, verdict) | {"since": self._since, "strikes": verdict.strikes}
        if verdict.shifted:
            kind, settled = "grad_norm_level_shift", math.exp(self.baseline.centre[0])
            numbers |= {"new_median": settled, "values": self.rules.level_shift_after}
            detail = f"gradient norm settled at {settled:.3g} after {usual:.3g}: new baseline"
            self._since = None
            self._recent.clear()
        elif verdict.strikes >= self.rules.strikes:
            kind = "grad_norm_sustained"
            detail = (
                f"gradient norm {value:.3g}, {value / usual:.3g} times its median, {verdict.strikes} in a row"
            )
        else:
            kind = "grad_norm_spike"
            detail = f"gradient norm {value:.3g}, {value / usual:.3g} times its median"
        return [self._finding(kind, step, verdict.z, numbers, detail)]

    def _numbers(self, value: float, verdict: Verdict) -> dict[str, Number]:
        return {
            "value": value,
            "median": None if verdict.median is None else math.exp(verdict.median),
            "log_median": verdict.median,
            "log_mad": verdict.mad,
            "z": verdict.z,
            "n": verdict.n,
            "warn_z": self.rules.warn_z,
            "window": self.rules.window,
        }

    def _creep(self, step: int, value: float, log: float, verdict: Verdict) -> list[Finding]:
        self._recent.append(log)
        findings: list[Finding] = []
        if verdict.median is None or verdict.mad is None or verdict.shifted:
            return findings
        agreement = 0
        if len(self._recent) == CREEP_STEPS:
            agreement = sum((b > a) - (b < a) for a, b in combinations(self._recent, 2))
        late = (median(list(self._recent)[-3:]) - verdict.median) / (CONSISTENCY * verdict.mad)
        rising = agreement >= CREEP_AGREEMENT and late > CREEP_Z
        if rising and not self._creeping:
            numbers = self._numbers(value, verdict) | {
                "steps": CREEP_STEPS,
                "agreement": agreement,
                "least_agreement": CREEP_AGREEMENT,
                "late_z": late,
                "least_late_z": CREEP_Z,
            }
            detail = f"gradient norm rose steadily over {CREEP_STEPS} values to {value:.3g}"
            findings.append(self._finding("grad_norm_creep", step, late, numbers, detail))
        self._creeping = rising or (self._creeping and late > CREEP_Z)
        if verdict.severity is None:
            self._admitted += 1
            if self._admitted % (self.rules.window // 4 or 1) == 0:
                findings += self._slow_creep(step, value, verdict)
        return findings

    def _slow_creep(self, step: int, value: float, verdict: Verdict) -> list[Finding]:
        """Compare the oldest quarter of a full window with the newest.

        The deviation comes from successive differences: the MAD of a window that climbs measures the
        climb.
        """
        logs = self.baseline.values()
        quarter = len(logs) // 4
        if len(logs) < self.rules.window or quarter < 2:
            return []
        rise = median(logs[-quarter:]) - median(logs[:quarter])
        _, mad = median_and_mad(sorted(b - a for a, b in pairwise(logs)))
        noise = CONSISTENCY * mad / math.sqrt(2)
        slow = rise >= SLOW_CREEP and rise > CREEP_Z * noise
        again, self._slow = self._slow, slow
        if not slow or again:
            return []
        numbers = self._numbers(value, verdict) | {
            "log_rise": rise,
            "log_noise": noise,
            "least_log_rise": SLOW_CREEP,
        }
        detail = f"gradient norm grew {math.exp(rise):.3g} times within {len(logs)} values"
        return [self._finding("grad_norm_creep", step, None, numbers, detail)]

    def _collapse(self, step: int, value: float) -> list[Finding]:
        self._low += 1
        if self._low != self.rules.strikes:
            return []
        middle = math.exp(self.baseline.centre[0])
        numbers: dict[str, Number] = {
            "value": value,
            "median": middle,
            "factor": value / middle,
            "warn_factor": COLLAPSE_FACTOR,
            "in_a_row": self._low,
            "n": len(self.baseline),
        }
        detail = f"gradient norm {value:.3g} against a median of {middle:.3g}, {self._low} in a row"
        return [self._finding("grad_norm_collapse", step, None, numbers, detail)]

    def _early(self, step: int, value: float, middle: float, known: int) -> Finding:
        numbers: dict[str, Number] = {
            "value": value,
            "median": middle,
            "factor": value / middle,
            "n": known,
            "bad_value": EARLY_ABSOLUTE,
            "bad_factor": EARLY_FACTOR,
        }
        detail = (
            f"gradient norm {value:.5g}, {value / middle:.3g} times the median of the {known} values before; "
            "too few values for a z"
        )
        return self._finding("grad_norm_spike", step, None, numbers, detail)

    def _finding(
        self, kind: str, step: int, score: float | None, numbers: dict[str, Number], detail: str
    ) -> Finding:
        return Finding(
            kind=kind,
            severity="warn",
            rule=self.rule,
            step=step,
            score=score,
            detector=DETECTOR,
            detector_version=VERSION,
            series=self.series,
            numbers=numbers,
            detail=detail,
        )

    def reset(self) -> None:
        """Forget the baseline: a declared discontinuity, or a rollback."""
        self.baseline.restart()
        self._recent.clear()
        self._since = None
        self._low = self._admitted = self._places = 0
        self._creeping = self._slow = False

    def state(self) -> dict[str, Any]:
        """Return the memory as JSON-ready data."""
        return {
            "baseline": self.baseline.state(),
            "judged": self.judged,
            "places": self._places,
            "recent": list(self._recent),
            "since": self._since,
            "low": self._low,
            "admitted": self._admitted,
            "creeping": self._creeping,
            "slow": self._slow,
        }

    @classmethod
    def restore(
        cls, rules: SpikeRules, state: Mapping[str, Any], series: str = "grad_norm", rule: str = "grad_norm"
    ) -> "GradNorm":
        """Return a detector that goes on where `state` was taken."""
        detector = cls(rules, series, rule)
        detector.baseline.load(state["baseline"])
        detector.judged = int(state["judged"])
        detector._places = int(state.get("places", UNROUNDED))
        detector._recent.extend(float(value) for value in state["recent"])
        detector._since = state["since"]
        detector._low, detector._admitted = int(state["low"]), int(state["admitted"])
        detector._creeping, detector._slow = bool(state["creeping"]), bool(state["slow"])
        return detector
