"""The spike rule as one would first write it down, and the values that are hard on it.

Two medians over the whole window for every value. It shares no line with andon/detect/spike.py, so that
equal verdicts mean something; `benchmarks/bench_detect.py` times it beside the real one.
"""

import math
from decimal import Decimal
from statistics import median

import numpy as np

WINDOW, WARM_UP, WARN_Z, HALT_Z, STRIKES = 200, 50, 6.0, 12.0, 3
SHIFT_AFTER, CALM, FLOOR = 50, 3, 1e-8


class Textbook:
    """Judges one value after the other; `update` says None, "warn", "halt" or "level_shift"."""

    def __init__(self):
        self.kept: list[float] = []
        self.flagged: list[float] = []
        self.strikes = self.calm = 0

    def update(self, value):
        if value is None or not math.isfinite(value) or value == -1.0:
            return None
        if len(self.kept) < WARM_UP:
            self.kept.append(value)
            return None
        middle = median(self.kept)
        deviation = median([abs(one - middle) for one in self.kept])
        if deviation == 0:
            deviation = _quantum(self.kept, [*self.kept, value])
        z = (value - middle) / (1.4826 * max(deviation, FLOOR))
        if z <= WARN_Z:
            self.strikes = 0
            self.calm += 1
            if self.calm >= CALM:
                self.flagged = []
            self.kept.append(value)
            del self.kept[:-WINDOW]
            return None
        self.strikes += 1
        self.calm = 0
        self.flagged = [*self.flagged, value][-SHIFT_AFTER:]
        if len(self.flagged) == SHIFT_AFTER and _is_level(self.flagged, _quantum(self.flagged, self.flagged)):
            self.kept, self.flagged = self.flagged, []
            self.strikes = 0
            return "level_shift"
        return "halt" if z > HALT_Z and self.strikes >= STRIKES else "warn"


def _quantum(on_bf16, rounded):
    """What values are spaced by: bf16's 1/128, else the last of up to four decimals, else nothing."""
    if all((one * 128).is_integer() for one in on_bf16):
        return 1 / 128
    places = max(max(0, -int(Decimal(repr(one)).normalize().as_tuple().exponent)) for one in rounded)
    return 10.0**-places if places <= 4 else 0.0


def _is_level(values, grain):
    def spread(part):
        middle = median(part)
        return middle, max(median([abs(one - middle) for one in part]), FLOOR, grain)

    older, newer = values[: len(values) // 2], values[len(values) // 2 :]
    (low, low_spread), (high, high_spread) = spread(older), spread(newer)
    if abs(high - low) > 1.4826 * spread(values)[1]:
        return False
    return max(low_spread, high_spread) <= 3 * min(low_spread, high_spread)


def hard_values(count, seed):
    """Return `count` values in stretches of 100 to 1,500: noise, ties, constants, quantised to bf16 and to
    two digits, heavy tails, climbs, level shifts, spikes; NaN, ±inf, −1 and "not measured" strewn in."""
    rng = np.random.default_rng(seed)
    values: list[float | None] = []
    while len(values) < count:
        stretch = _stretch(rng, int(rng.integers(100, 1500)))
        for place in np.flatnonzero(rng.random(len(stretch)) < 0.01).tolist():
            stretch[place] = (math.nan, math.inf, -math.inf, -1.0, None)[rng.integers(5)]
        values += stretch
    return values[:count]


def _stretch(rng, n):
    level, sigma = rng.uniform(1, 4), 10 ** rng.uniform(-5, -0.5)
    at = np.arange(n)
    noisy = level + sigma * rng.standard_normal(n)
    kinds = (
        lambda: noisy,
        lambda: rng.choice([level, level + sigma, level + 2 * sigma, level + 9 * sigma], n),
        lambda: np.full(n, rng.choice([level, 1.5, 2.3, 0.0])),
        lambda: np.round(noisy * 128) / 128,
        lambda: np.round(noisy, 2),
        lambda: level + sigma * rng.standard_t(2, n),
        lambda: noisy + at * sigma * rng.uniform(-1, 1),
        lambda: noisy + (at > n // 2) * sigma * rng.uniform(-40, 40),
        lambda: noisy + (rng.random(n) < 0.03) * sigma * rng.uniform(0, 60, n),
    )
    return kinds[rng.integers(len(kinds))]().tolist()


def said(finding):
    """Return a finding of the real detector in the textbook's words."""
    if finding is None:
        return None
    return "level_shift" if finding.kind == "level_shift" else finding.severity
