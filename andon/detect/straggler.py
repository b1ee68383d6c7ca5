"""One rank that computes longer than its peers, window after window.

Compute time is taken without waiting, so a rank that is slow shows as itself: it computes long and waits
short while its peers wait for it. Peers are the ranks of one pipeline stage, which do the same work.
(Playbook: "Liveness"; NVIDIA Resiliency Extension, straggler detection, relative scores.)
"""

from collections.abc import Mapping
from statistics import median
from typing import Any

import numpy as np

from andon.detect.finding import Finding, Number
from andon.detect.topology import Topology
from andon.wire import Frame

DETECTOR = "straggler"
VERSION = 1
RULE = "straggler"

WINDOW_STEPS = 5  # a median of five is not moved by two odd steps
WINDOWS = 3  # in a row: a rank that writes a checkpoint or meets a long batch is slow once
RATIO = 1.5  # times its peers' compute; NVRx calls a relative score of 0.7 a straggler


class Straggler:
    """Watches compute and wait time of one attempt's ranks. Kind `straggler`, a warning, once per excursion.

    A rank is slow in a window of steps when the median of its compute time is `RATIO` times the median of
    its peers', and it waits less than they do; after `WINDOWS` such windows in a row it is told.
    """

    def __init__(self, topology: Topology | None = None) -> None:
        """Begin; without a topology all ranks are peers."""
        self.topology = topology
        self._window: int | None = None
        self._compute: dict[int, list[float]] = {}
        self._wait: dict[int, list[float]] = {}
        self._strikes: dict[int, int] = {}
        self._told: set[int] = set()

    def update(self, frame: Frame) -> list[Finding]:
        """Take in a rank frame; other streams, and frames without both times, give nothing."""
        compute, wait = frame.metrics.get("compute_s"), frame.metrics.get("wait_s")
        if frame.stream != "rank" or compute is None or wait is None:
            return []
        usable = frame.measured("compute_s") & frame.measured("wait_s")
        rows: dict[int, dict[int, tuple[float, float]]] = {}
        lanes = np.asarray(frame.lane)
        for row in np.flatnonzero(usable).tolist():
            at = rows.setdefault(int(frame.step[row]), {})
            at[int(lanes[row])] = (float(compute[row]), float(wait[row]))
        findings: list[Finding] = []
        for step in sorted(rows):
            findings += self.update_step(step, rows[step])
        return findings

    def update_step(self, step: int, times: Mapping[int, tuple[float, float]]) -> list[Finding]:
        """Take in rank → (compute_s, wait_s) of a step, in the order of training; ranks may come in parts."""
        window = step // WINDOW_STEPS
        findings: list[Finding] = []
        if self._window is not None and window > self._window:
            findings = self._judge((self._window + 1) * WINDOW_STEPS - 1)
        if self._window is None or window > self._window:
            self._window, self._compute, self._wait = window, {}, {}
        if window == self._window:  # what comes for a window that is judged already changes nothing
            for rank, (compute_s, wait_s) in times.items():
                self._compute.setdefault(rank, []).append(compute_s)
                self._wait.setdefault(rank, []).append(wait_s)
        return findings

    def close(self) -> list[Finding]:
        """Judge the window that is not yet followed by another."""
        if self._window is None:
            return []
        findings = self._judge((self._window + 1) * WINDOW_STEPS - 1)
        self._window = None
        return findings

    def _judge(self, step: int) -> list[Finding]:
        findings = []
        for peers in self._peers():
            if any(len(self._compute[rank]) <= WINDOW_STEPS // 2 for rank in peers):
                continue  # the attempt began or ended in it: too few to say anything
            compute = {rank: median(self._compute[rank]) for rank in peers}
            wait = {rank: median(self._wait[rank]) for rank in peers}
            for rank in peers:
                others = [other for other in peers if other != rank]
                if not others:
                    continue
                usual, waited = median(compute[o] for o in others), median(wait[o] for o in others)
                slow = compute[rank] >= RATIO * usual > 0 and wait[rank] < waited
                self._strikes[rank] = self._strikes.get(rank, 0) + 1 if slow else 0
                if not slow:
                    self._told.discard(rank)
                elif self._strikes[rank] >= WINDOWS and rank not in self._told:
                    self._told.add(rank)
                    numbers: dict[str, Number] = {
                        "compute_s": compute[rank],
                        "peers_compute_s": usual,
                        "wait_s": wait[rank],
                        "peers_wait_s": waited,
                        "peers": len(others),
                        "ratio": RATIO,
                        "windows": self._strikes[rank],
                        "window_steps": WINDOW_STEPS,
                    }
                    findings.append(self._finding(rank, step, compute[rank] / usual, numbers))
        return findings

    def _peers(self) -> list[list[int]]:
        ranks = sorted(self._compute)
        if self.topology is None or not ranks:
            return [ranks] if ranks else []
        stages = self.topology.stages(np.array(ranks, np.int64)).tolist()
        by_stage: dict[int, list[int]] = {}
        for rank, stage in zip(ranks, stages, strict=True):
            by_stage.setdefault(stage, []).append(rank)
        return [by_stage[stage] for stage in sorted(by_stage)]

    def _finding(self, rank: int, step: int, times: float, numbers: dict[str, Any]) -> Finding:
        return Finding(
            kind="straggler",
            severity="warn",
            rule=RULE,
            step=step,
            lanes=(rank,),
            score=times,
            detector=DETECTOR,
            detector_version=VERSION,
            series="compute_s",
            view="local",
            numbers=numbers,
            detail=f"rank {rank} computes {times:.2g} times as long as its peers, "
            f"{numbers['windows']} windows of {WINDOW_STEPS} steps in a row",
        )
