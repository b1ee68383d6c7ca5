"""The baseline band of a curve, and the z of layers against their own past.

The robust z of the playbook: (x − median) / (1.4826 · MAD) over the trailing window; flagged values
never enter the window. The factor makes MAD the standard deviation of a normal sample
(Rousseeuw and Croux 1993, doi:10.1080/01621459.1993.10476408).
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from andon.policy import LayerRules, SpikeRules
from runs.queries import Point

MAD_TO_SIGMA = 1.4826
MAX_STEPS = 2_000  # wider than this, points are decimated and a baseline of them would be another one


def band(
    points: Sequence[Point], rules: SpikeRules, *, log: bool, step_first: int
) -> tuple[list[int], list[float], list[float], list[float]]:
    """Return steps, lower edge, median and upper edge: median ± `warn_z` σ of the trailing window.

    Args:
        points: the series with a window's worth of points before `step_first`, not decimated.
        log: judge in natural log (gradient norms); values that are not positive are left out.
        step_first: first step to return.
    """
    window: list[float] = []
    steps: list[int] = []
    low: list[float] = []
    middle: list[float] = []
    high: list[float] = []
    centre = sigma = math.nan
    for number, point in enumerate(points):
        if len(window) >= rules.warm_up and (math.isnan(centre) or number % 4 == 0):
            recent = np.asarray(window[-rules.window :])
            centre = float(np.median(recent))
            sigma = MAD_TO_SIGMA * max(float(np.median(np.abs(recent - centre))), rules.mad_floor)
        if not math.isnan(centre) and point["step"] >= step_first:
            edges = (centre - rules.warn_z * sigma, centre, centre + rules.warn_z * sigma)
            below, at, above = (math.exp(edge) for edge in edges) if log else edges
            steps.append(point["step"])
            low.append(below)
            middle.append(at)
            high.append(above)
        value = point["value"]
        if value is None or (log and value <= 0):
            continue
        judged = math.log(value) if log else value
        if math.isnan(centre) or (judged - centre) / sigma <= rules.warn_z:
            window.append(judged)
    return steps, low, middle, high


def layer_z(values: NDArray[np.float64], rules: LayerRules) -> NDArray[np.float64]:
    """Return z of log values against each layer's own trailing window.

    Args:
        values: float64[layers, steps]; NaN where nonfinite or not posted.

    Returns:
        float64[layers, steps]; NaN where there is no value or no baseline yet.
    """
    layers, steps = values.shape
    logs = np.full(values.shape, np.nan)
    usable = np.isfinite(values) & (values > 0)
    logs[usable] = np.log(values[usable])
    result = np.full(values.shape, np.nan)
    # A median per step and layer over the window would cost seconds on wide views; the baseline of
    # the last 200 steps moves slowly, so it is taken anew every few steps.
    stride = max(1, steps // 128)
    with np.errstate(all="ignore"):
        for start in range(0, steps, stride):
            past = logs[:, max(0, start - rules.window) : start]
            known = np.isfinite(past).sum(axis=1)
            ready = known >= min(rules.warm_up, rules.window)
            if not ready.any():
                continue
            centre = np.full(layers, np.nan)
            centre[ready] = np.nanmedian(past[ready], axis=1)
            spread = np.full(layers, np.nan)
            spread[ready] = np.nanmedian(np.abs(past[ready] - centre[ready, None]), axis=1)
            sigma = MAD_TO_SIGMA * np.maximum(spread, 1e-8)
            part = slice(start, start + stride)
            result[:, part] = (logs[:, part] - centre[:, None]) / sigma[:, None]
    return result
