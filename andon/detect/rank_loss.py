"""Each rank's own loss against its own past: whose loss was it that moved the mean?

The mean over all ranks decides (the maximum over thousands of ranks halts healthy runs); this only says
which ranks' samples were odd in a step, so it never holds anything.
"""

import msgspec
import numpy as np

from andon.detect.finding import Finding, Number
from andon.detect.spike import RobustBaseline
from andon.policy import SpikeRules
from andon.wire import Frame

DETECTOR = "rank_loss"
VERSION = 1
RULE = "spike"
MAX_NAMED = 64  # of a step in which all ranks moved the first few say enough


class RankLoss:
    """Judges the local losses of one attempt. Kind `rank_loss_outlier`, "info": at most one per step.

    The rules are the spike rule's; a rank is named in every step in which its z is above `halt_z`, since
    among thousands of ranks one beyond `warn_z` is found in any healthy step.
    """

    def __init__(self, rules: SpikeRules) -> None:
        """Begin without any rank."""
        self.rules = rules
        self._baselines: dict[int, RobustBaseline] = {}

    def update(self, frame: Frame) -> list[Finding]:
        """Take in a rank frame of local losses, steps in the order of training."""
        loss = frame.metrics.get("loss")
        if frame.stream != "rank" or loss is None or frame.view_of("loss") != "local":
            return []
        usable = frame.measured("loss") & np.isfinite(loss) & (loss != -1)
        outliers: dict[int, dict[int, tuple[float, float, float]]] = {}
        lanes = np.asarray(frame.lane)
        for row in np.flatnonzero(usable)[np.argsort(frame.step[usable], kind="stable")].tolist():
            rank, value = int(lanes[row]), float(loss[row])
            baseline = self._baselines.get(rank)
            if baseline is None:
                baseline = self._baselines[rank] = RobustBaseline(self.rules)
            verdict = baseline.update(value)
            if verdict.z is not None and verdict.z > self.rules.halt_z and verdict.median is not None:
                outliers.setdefault(int(frame.step[row]), {})[rank] = (verdict.z, value, verdict.median)
        return [self._finding(step, ranks) for step, ranks in outliers.items()]

    def _finding(self, step: int, ranks: dict[int, tuple[float, float, float]]) -> Finding:
        worst = max(ranks, key=lambda rank: ranks[rank][0])
        z, value, usual = ranks[worst]
        numbers: dict[str, Number] = {"value": value, "median": usual, "z": z, "ranks": len(ranks)}
        numbers |= {"rank": worst, **msgspec.to_builtins(self.rules)}
        return Finding(
            kind="rank_loss_outlier",
            severity="info",
            rule=RULE,
            step=step,
            lanes=tuple(sorted(ranks, key=lambda rank: -ranks[rank][0])[:MAX_NAMED]),
            score=z,
            detector=DETECTOR,
            detector_version=VERSION,
            series="rank.loss",
            view="local",
            numbers=numbers,
            detail=f"loss of rank {worst} is {value:.4g} against its own median of {usual:.4g}, z {z:.1f}",
        )
