"""All benchmarks: `python -m benchmarks [NAME …]`.

All but the last two run on servers of their own.
Prints figures, ratios and goals; writes all of it to bench-results/ as JSON. Exits 1 when a goal was missed.
"""

import argparse
import contextlib
import json
import os
import platform
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from benchmarks import (
    bench_detect,
    bench_ingest,
    bench_mlflow,
    bench_overhead,
    bench_pages,
    bench_race,
    bench_run_page,
    bench_stored_first_bad,
    bench_storm,
    bench_vault,
)
from benchmarks.serving import ROOT, servers

BENCHES: dict[str, Callable[[dict[str, str]], dict[str, Any]]] = {
    "ingest": bench_ingest.run,
    "mlflow": bench_mlflow.run,
    "storm": bench_storm.run,
    "first_bad": bench_stored_first_bad.run,
    "vault": bench_vault.run,
    "pages": bench_pages.run,
    "run_page": bench_run_page.run,
    "detect": bench_detect.run,
    "overhead": bench_overhead.run,
    "race": bench_race.run,
}
WITHOUT_SERVERS = {"detect", "overhead"}


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("bench", nargs="*", help=f"any of {', '.join(BENCHES)} (all)")
    chosen: list[str] = parser.parse_args().bench or list(BENCHES)
    if unknown := [name for name in chosen if name not in BENCHES]:
        parser.error(f"there is no bench {unknown[0]!r}: expected any of {', '.join(BENCHES)}")
    begun = datetime.now(UTC)
    load_before = os.getloadavg()[0]
    results: dict[str, dict[str, Any]] = {}
    alone = set(chosen) <= WITHOUT_SERVERS
    with contextlib.ExitStack() as stack:
        environment = {} if alone else stack.enter_context(servers())
        for name in chosen:
            print(f"--- {name}", flush=True)
            results[name] = BENCHES[name](environment)
            print(json.dumps(results[name], indent=2), flush=True)
    compare_with_mlflow(results)
    document = {
        "began": begun.isoformat(timespec="seconds"),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "load_before": load_before,
        "results": results,
    }
    directory = ROOT / "bench-results"
    directory.mkdir(exist_ok=True)
    file = directory / f"{begun:%Y%m%dT%H%M%SZ}.json"
    file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    goals = {f"{name}: {goal}": met for name, one in results.items() for goal, met in one["goals"].items()}
    print("--- goals")
    for goal, met in goals.items():
        print(f"{'met   ' if met else 'MISSED'} {goal}")
    print(f"written to {file.relative_to(ROOT)}; load before the start {load_before:.1f}")
    return 0 if all(goals.values()) else 1


def compare_with_mlflow(results: dict[str, dict[str, Any]]) -> None:
    """Add how many times MLflow's rate Andon's frames are, where both were measured."""
    peer = results.get("mlflow", {}).get("rank_samples_per_s")
    if not peer or "ingest" not in results:
        return
    ratios = {
        part: round(results["ingest"][part]["andon"]["drained_rank_samples_per_s"] / peer, 1)
        for part in ("rank_frames", "rank_frames_json", "node_frames")
    }
    results["mlflow"]["andon_times_faster"] = ratios
    print("Andon's rank-samples/s, drained, as multiples of MLflow's:", ratios)


if __name__ == "__main__":
    sys.exit(main())
