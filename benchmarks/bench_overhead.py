"""What the monitor costs a training step, beside a bare loop and the writers people know.

    python -m benchmarks overhead

Four ranks (gloo, DDP) train one small model, step for step the same, as a bare loop, under
`andon.watch.watch` at its default settings with a server to post to, and with W&B (offline), MLflow (file
store) and TensorBoard writing the same values on rank 0. One arm more does nothing but sum one float over
the ranks before the update: less than that no decision of all ranks can cost on this machine. The arms take
turns within one run (benchmarks/overhead_rank.py), and each block is compared with the bare block of its
own round, so that what else the machine does falls on all alike.

Reading a gradient costs by the parameter, a step by the parameter and the token. So there are two
workloads of 100 ms and more: the least batch of a language model, one sequence of 2,048 tokens a rank,
and one of 320 rows, where every look at a gradient weighs six times as much.
Needs torch (`make demo LIVE=1` installs it) and the peers' environment.
"""

import http.server
import importlib.util
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from andon.signing import new_secret
from benchmarks.bench_mlflow import Unavailable, install
from benchmarks.serving import ROOT

ROUNDS, STEPS = 18, 8
# (width, layers, rows): 50 ms of one core and more, so 100 ms and more for four ranks on two.
WORKLOADS = {"2048_tokens": (256, 5, 2048), "320_rows": (512, 6, 320)}
GOAL, STEP_MS = 0.01, 100.0
LIMIT_S = 240


class _Server(http.server.BaseHTTPRequestHandler):
    """Takes every post: what a server does with it is no part of a step, and would need the same cores."""

    protocol_version = "HTTP/1.1"
    answer = b'{"accepted": 1, "refused": [], "duplicate": false, "wanted": 0}'

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(202)
        self.send_header("content-length", str(len(self.answer)))
        self.end_headers()
        self.wfile.write(self.answer)


def _serve(port: Any) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    port.put(server.server_address[1])
    server.serve_forever()


def _launch(folder: Path, extra: str, url: str, sizes: tuple[int, ...]) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ANDON_")}
    environment |= {
        "ANDON_URL": url,
        "ANDON_RUN": "overhead",
        "ANDON_RUN_SECRET": new_secret(),
        "ANDON_SPOOL_DIR": str(folder / "spool"),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    command = [sys.executable, "-m", "benchmarks.overhead_rank"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(folder), extra, *map(str, sizes)], cwd=ROOT, env=environment
        )
        for rank in range(4)
    ]
    end = time.monotonic() + LIMIT_S
    try:
        for rank in ranks:
            if rank.wait(max(1.0, end - time.monotonic())):
                raise RuntimeError(f"a rank ended with {rank.returncode}")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    found: dict[str, Any] = json.loads((folder / "times.json").read_text())
    return found


def _share(arm: list[float], bare: list[float]) -> dict[str, Any]:
    """The median over the rounds of (arm / bare − 1), and its 90 % interval by the bootstrap."""
    ratios = [a / b - 1 for a, b in zip(arm, bare, strict=True)]
    draws = random.Random(1)
    medians = sorted(statistics.median(draws.choices(ratios, k=len(ratios))) for _ in range(2000))
    return {
        "median": round(statistics.median(ratios), 4),
        "from": round(medians[100], 4),
        "to": round(medians[1899], 4),
    }


def measure(shape: tuple[int, int, int], rounds: int = ROUNDS, steps: int = STEPS) -> dict[str, Any]:
    """Run all arms on a model of (width, layers, rows); returns milliseconds, and the share of the bare step
    that each adds."""
    try:
        extra = next(install().parent.parent.glob("lib/python*/site-packages"))
    except Unavailable as error:
        extra = Path(str(error))
    context = multiprocessing.get_context("spawn")
    port = context.Queue()
    server = context.Process(target=_serve, args=(port,), daemon=True)
    server.start()
    try:
        with tempfile.TemporaryDirectory(prefix="andon-bench-") as name:
            url = f"http://127.0.0.1:{port.get(timeout=30)}"
            found = _launch(Path(name), str(extra), url, (rounds, steps, *shape))
    finally:
        server.terminate()
        server.join()
    medians = {arm: [statistics.median(block) for block in blocks] for arm, blocks in found["times"].items()}
    means = {arm: [statistics.mean(block) for block in blocks] for arm, blocks in found["times"].items()}
    cpu = {
        arm: [sum(values) for values in zip(*(one[arm] for one in found["cpu"]), strict=True)]
        for arm in medians
    }
    others = [arm for arm in medians if arm != "bare"]
    return {
        "width, layers, rows": shape,
        "rounds": rounds,
        "steps_per_block": steps - 1,
        "bare_step_ms": round(statistics.median(medians["bare"]) * 1e3, 1),
        "adds_to_the_median_step": {arm: _share(medians[arm], medians["bare"]) for arm in others},
        "adds_to_the_mean_step": {arm: _share(means[arm], means["bare"]) for arm in others},
        "adds_to_cpu_time_of_all_ranks": {arm: _share(cpu[arm], cpu["bare"]) for arm in others},
        "client": found["client"],
        **({"missing": found["missing"]} if found["missing"] else {}),
    }


def run(_environment: dict[str, str]) -> dict[str, Any]:
    """See the module."""
    if importlib.util.find_spec("torch") is None:
        return {"skipped": "torch is not installed: make demo LIVE=1 does", "goals": {}}
    results: dict[str, Any] = {name: measure(shape) for name, shape in WORKLOADS.items()}
    goals = {}
    for name in WORKLOADS:
        added = results[name]["adds_to_the_median_step"]
        own = added["andon"]["median"]
        peers = [one["median"] for arm, one in added.items() if arm not in ("andon", "one_float")]
        goals[f"{name}: at most {GOAL:.0%} of the median step, at {STEP_MS:.0f} ms and more"] = (
            own <= GOAL and results[name]["bare_step_ms"] >= STEP_MS
        )
        goals[f"{name}: less than each of the writers"] = all(own < peer for peer in peers)
    return {**results, "goals": goals}


if __name__ == "__main__":
    measured = run({})
    print(json.dumps(measured, indent=2))
    sys.exit(0 if all(measured["goals"].values()) else 1)
