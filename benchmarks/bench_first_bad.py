"""First-bad cell at fleet size: `python -m benchmarks.bench_first_bad`.

Two runs of 16,384 ranks, taken in frame by frame as the receiver does, in shuffled order: one of 10,000
steps whose rank 61 breaks at step 9,000, and one hour of a dead run (720 steps, 11.8 million bad cells).
What is timed as "first bad" is the question itself over the rows kept per lane; what keeping them costs per
frame is reported beside it. Every answer is checked. Prints JSON; exits 1 when a goal is missed.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np

from andon.detect.cells import BadCells, FirstBad, LaneMinima, concat, earliest_per_lane, first_bad
from andon.detect.nonfinite import bad_cells, judge_frame, row_health, state_plane
from andon.detect.topology import Topology
from andon.policy import Policy
from andon.wire import Frame

RANKS = 16_384
STEPS_PER_FRAME = 10
CULPRIT, BROKE_AT = 61, 9_000
GOAL_MS = 50.0
GOAL_SAMPLES_PER_S = 5e6


def frame(first_step: int, *, broke_at: int) -> Frame:
    """Build one frame of four metrics: healthy before `broke_at`, dead from it on."""
    steps = np.repeat(np.arange(first_step, first_step + STEPS_PER_FRAME, dtype=np.int64), RANKS)
    lane = np.tile(np.arange(RANKS, dtype=np.int32), STEPS_PER_FRAME)
    dead = steps > broke_at
    bits = np.where(dead, 2 | 4 | 8, 0).astype(np.int16)
    at = steps == broke_at
    bits[at] = 8
    bits[at & (lane == CULPRIT)] = 4 | 8
    loss = np.where(dead, np.nan, 2.1).astype(np.float32)
    norm = np.where(dead | at, np.nan, 0.4).astype(np.float32)
    return Frame(
        stream="rank",
        attempt=1,
        step=steps,
        lane=lane,
        metrics={
            "loss": loss,
            "grad_norm": norm,
            "nonfinite": bits,
            "compute_s": np.ones(len(lane), np.float32),
        },
        views={"loss": "local", "nonfinite": "local", "grad_norm": "reduced"},
    )


def run_frames(first_step: int, steps: int, *, broke_at: int) -> Iterator[Frame]:
    """Yield the frames of a run in shuffled order; the content is shifted, not built anew."""
    templates: dict[str, Frame] = {}
    starts = np.arange(first_step, first_step + steps, STEPS_PER_FRAME)
    np.random.default_rng(0).shuffle(starts)
    for start in starts.tolist():
        if start <= broke_at < start + STEPS_PER_FRAME:
            yield frame(start, broke_at=broke_at)
            continue
        kind = "healthy" if start < broke_at else "dead"
        if kind not in templates:
            templates[kind] = frame(start, broke_at=broke_at)
        kept = templates[kind]
        yield Frame(
            stream=kept.stream,
            attempt=1,
            step=kept.step + (start - int(kept.step[0])),
            lane=kept.lane,
            metrics=kept.metrics,
            views=kept.views,
        )


def timed_ms(ask: Callable[[], FirstBad | None], times: int) -> tuple[FirstBad | None, dict[str, float]]:
    """Ask `times` times; return the answer and the milliseconds at p50, p99 and worst."""
    took = []
    answer = None
    for _ in range(times):
        began = time.perf_counter()
        answer = ask()
        took.append((time.perf_counter() - began) * 1e3)
    return answer, spread(took)


def spread(took: list[float]) -> dict[str, float]:
    """Return p50, p99 and the worst of measured values, rounded."""
    middle, high = np.percentile(took, [50, 99]).tolist()
    return {"p50": round(middle, 2), "p99": round(high, 2), "max": round(max(took), 2)}


def bench_run(name: str, first_step: int, steps: int, broke_at: int) -> dict[str, object]:
    """Take a run in and ask for its first-bad cell."""
    topology = Topology.from_groups(
        {"tp": [f"{i}-{i + 7}" for i in range(0, RANKS, 8)], "dp": [f"0-{RANKS - 1}"]}
    )
    minima = LaneMinima()
    parts: list[BadCells] = []
    update_ms: list[float] = []
    for one in run_frames(first_step, steps, broke_at=broke_at):
        began = time.perf_counter()
        part = bad_cells(one)
        minima.update(part)
        if len(part):
            update_ms.append((time.perf_counter() - began) * 1e3)
            parts.append(part)
    answer, ask_ms = timed_ms(lambda: first_bad(minima.rows, topology=topology), 200)
    assert answer is not None
    assert (answer.step, answer.ranks) == (broke_at, (CULPRIT,)), answer
    everything = concat(parts)
    whole, whole_ms = timed_ms(lambda: first_bad(earliest_per_lane(everything), topology=topology), 3)
    assert whole == answer
    return {
        "run": name,
        "steps": steps,
        "bad_cells": len(everything),
        "rows_kept": len(minima.rows),
        "first_bad_ms": ask_ms,
        "keep_rows_per_bad_frame_ms": spread(update_ms),
        "all_bad_cells_in_one_call_ms": whole_ms,
        "goal_ms": GOAL_MS,
        "held": ask_ms["max"] <= GOAL_MS,
    }


def bench_frames() -> list[dict[str, object]]:
    """Judge one frame as the receiver does: health, state plane, bad cells, findings."""
    results: list[dict[str, object]] = []
    for name, broke_at in (("healthy", 10**6), ("dead", 0)):
        one = frame(100, broke_at=broke_at)
        took = []
        for _ in range(30):
            began = time.perf_counter()
            health = row_health(one)
            plane = state_plane(one, health)
            rows = earliest_per_lane(bad_cells(one, health))
            findings = judge_frame(one, Policy(), health=health)
            took.append(time.perf_counter() - began)
        assert plane.shape == (STEPS_PER_FRAME, RANKS)
        assert bool(len(rows)) == bool(findings) == (name == "dead")
        rate = RANKS * STEPS_PER_FRAME / statistics.median(took)
        results.append(
            {
                "frame": name,
                "rank_samples_per_s": round(rate),
                "goal_per_s": GOAL_SAMPLES_PER_S,
                "held": rate >= GOAL_SAMPLES_PER_S,
            }
        )
    return results


def main() -> int:
    """Run all; return the exit code."""
    results = [
        *bench_frames(),
        bench_run("16,384 ranks x 10,000 steps, rank 61 breaks at 9,000", 0, 10_000, BROKE_AT),
        bench_run("one hour of a dead run", BROKE_AT, 720, BROKE_AT),
    ]
    for result in results:
        print(json.dumps(result))
    return 0 if all(result["held"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
