"""Per-layer norms: the layer that grows by orders of magnitude shows the cause before the total moves."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from andon.detect.finding import Finding, Number
from andon.detect.frame_health import axes, is_local
from andon.detect.spike import RobustBaseline
from andon.policy import LayerRules, SpikeRules
from andon.wire import Frame

DETECTOR = "layers"
VERSION = 1
RULE = "layer"
METRICS = ("grad_norm", "weight_norm", "update_ratio")
MAX_LAYERS = 20_000  # names come from outside; a sender of ever new names must not fill the memory
SETTLED = 3  # so many ordinary values in a row end an excursion

Lane = int | str


class LayerWatch:
    """Watches the norms of every layer of one run, one step after the other.

    Kinds: `layer_outlier` (robust z of the log value above `warn_z` against the layer's own window),
    `layer_grad_norm_bad` (gradient norm above `grad_norm_bad`, whatever the history), `layer_dead`
    (update ratio exactly 0 for `dead_ratio_steps` steps: dead, frozen or unregistered). All warnings,
    told once when an excursion begins. Where several ranks report one layer the largest value counts.
    """

    def __init__(self, rules: LayerRules) -> None:
        """Begin without any layer."""
        self.rules = rules
        self._spike_rules = SpikeRules(window=rules.window, warm_up=rules.warm_up, warn_z=rules.warn_z)
        self._baselines: dict[tuple[str, Lane], RobustBaseline] = {}
        self._excursions: dict[tuple[str, Lane], int] = {}  # ordinary values since the last flagged
        self._bad: set[Lane] = set()
        self._zero_since: dict[Lane, int] = {}
        self._dead: set[Lane] = set()

    def update(self, frame: Frame) -> list[Finding]:
        """Take in a layer frame; other streams give nothing. Steps must come in order of training."""
        if frame.stream != "layer":
            return []
        where = axes(frame)
        findings: list[Finding] = []
        lanes: list[Lane] = where.lanes.tolist()
        grids: dict[str, Any] = {}
        for metric in METRICS:
            column = frame.metrics.get(metric)
            if column is None or column.dtype.kind not in "fiu":
                continue
            values = column.astype(np.float64)
            usable = np.isfinite(values) & frame.measured(metric)
            grid = np.full((len(where.steps), len(lanes)), -np.inf)
            np.maximum.at(grid, (where.row[usable], where.column[usable]), values[usable])
            grids[metric] = grid
        for i, step in enumerate(where.steps.tolist()):
            for metric, grid in grids.items():
                row = {lane: value for lane, value in zip(lanes, grid[i].tolist(), strict=True) if value >= 0}
                findings += self.update_step(step, metric, row, local=is_local(frame, metric))
        return findings

    def update_step(
        self, step: int, metric: str, values: Mapping[Lane, float], *, local: bool = False
    ) -> list[Finding]:
        """Judge one metric of one step: layer → finite value ≥ 0. At most one finding per kind."""
        outliers: dict[Lane, tuple[float, dict[str, Number]]] = {}
        bad: dict[Lane, float] = {}
        dead: dict[Lane, int] = {}
        for lane, value in values.items():
            if metric == "grad_norm":
                if value <= self.rules.grad_norm_bad:
                    self._bad.discard(lane)
                elif lane not in self._bad:
                    self._bad.add(lane)
                    bad[lane] = value
            if metric == "update_ratio":
                since = self._zeros(step, lane, value)
                if since is not None:
                    dead[lane] = since
            if value > 0:
                outlier = self._outlier(metric, lane, value)
                if outlier is not None:
                    outliers[lane] = outlier
        findings = []
        if outliers:
            worst = max(outliers, key=lambda lane: outliers[lane][0])
            z, numbers = outliers[worst]
            detail = (
                f"{metric} of {worst}: {numbers['value']:.3g} against a median of {numbers['median']:.3g}"
            )
            findings.append(
                self._finding(
                    kind="layer_outlier",
                    step=step,
                    metric=metric,
                    lanes=outliers,
                    score=z,
                    numbers=numbers,
                    detail=detail,
                    local=local,
                )
            )
        if bad:
            worst = max(bad, key=lambda lane: bad[lane])
            numbers = {"value": bad[worst], "bad_above": self.rules.grad_norm_bad, "layer": worst}
            detail = f"gradient norm of {worst} is {bad[worst]:.4g}: bad by itself"
            findings.append(
                self._finding(
                    kind="layer_grad_norm_bad",
                    step=step,
                    metric=metric,
                    lanes=bad,
                    score=None,
                    numbers=numbers,
                    detail=detail,
                    local=local,
                )
            )
        if dead:
            steps = self.rules.dead_ratio_steps
            first = min(dead.values())
            numbers = {"value": 0.0, "since": first, "dead_after_steps": steps, "layers": len(dead)}
            detail = f"update ratio 0 for {steps} steps: dead, frozen or not given to the optimizer"
            findings.append(
                self._finding(
                    kind="layer_dead",
                    step=step,
                    metric=metric,
                    lanes=dead,
                    score=None,
                    numbers=numbers,
                    detail=detail,
                    local=local,
                )
            )
        return findings

    def _zeros(self, step: int, lane: Lane, value: float) -> int | None:
        if value != 0:
            self._zero_since.pop(lane, None)
            self._dead.discard(lane)
            return None
        if lane not in self._zero_since and len(self._zero_since) >= MAX_LAYERS:
            return None
        since = self._zero_since.setdefault(lane, step)
        if step - since + 1 < self.rules.dead_ratio_steps or lane in self._dead:
            return None
        self._dead.add(lane)
        return since

    def _outlier(self, metric: str, lane: Lane, value: float) -> tuple[float, dict[str, Number]] | None:
        key = (metric, lane)
        baseline = self._baselines.get(key)
        if baseline is None:
            if len(self._baselines) >= MAX_LAYERS * len(METRICS):
                return None
            baseline = self._baselines[key] = RobustBaseline(self._spike_rules, quantum=0.0)
        verdict = baseline.update(math.log(value))
        if verdict.severity is None:
            calm = self._excursions.get(key)
            if calm is not None:
                if calm + 1 >= SETTLED:
                    del self._excursions[key]
                else:
                    self._excursions[key] = calm + 1
            return None
        fresh = key not in self._excursions
        self._excursions[key] = 0
        if not fresh or verdict.z is None or verdict.median is None:
            return None
        return verdict.z, {
            "value": value,
            "median": math.exp(verdict.median),
            "log_median": verdict.median,
            "log_mad": verdict.mad,
            "z": verdict.z,
            "n": verdict.n,
            "warn_z": self.rules.warn_z,
            "window": self.rules.window,
            "layer": lane,
        }

    def _finding(
        self,
        *,
        kind: str,
        step: int,
        metric: str,
        lanes: Mapping[Lane, Any],
        score: float | None,
        numbers: dict[str, Number],
        detail: str,
        local: bool,
    ) -> Finding:
        if len(lanes) > 1:
            numbers = {**numbers, "layers": len(lanes)}
        return Finding(
            kind=kind,
            severity="warn",
            rule=RULE,
            step=step,
            lanes=tuple(lanes),
            score=score,
            detector=DETECTOR,
            detector_version=VERSION,
            series=f"layer.{metric}",
            view="local" if local else "reduced",
            numbers=numbers,
            detail=detail,
        )

    def reset(self) -> None:
        """Forget every baseline: a declared discontinuity, or a rollback. Counts of zeros stay."""
        self._baselines.clear()
        self._excursions.clear()

    def state(self) -> dict[str, Any]:
        """Return the memory as JSON-ready data."""
        return {
            "baselines": [[metric, lane, b.state()] for (metric, lane), b in self._baselines.items()],
            "excursions": [[metric, lane, calm] for (metric, lane), calm in self._excursions.items()],
            "bad": list(self._bad),
            "zero_since": [[lane, since] for lane, since in self._zero_since.items()],
            "dead": list(self._dead),
        }

    @classmethod
    def restore(cls, rules: LayerRules, state: Mapping[str, Any]) -> "LayerWatch":
        """Return a watch that goes on where `state` was taken."""
        watch = cls(rules)
        for metric, lane, kept in state["baselines"]:
            baseline = RobustBaseline(watch._spike_rules, quantum=0.0)
            baseline.load(kept)
            watch._baselines[metric, lane] = baseline
        watch._excursions = {(metric, lane): int(calm) for metric, lane, calm in state["excursions"]}
        watch._bad = set(state["bad"])
        watch._zero_since = {lane: int(since) for lane, since in state["zero_since"]}
        watch._dead = set(state["dead"])
        return watch
