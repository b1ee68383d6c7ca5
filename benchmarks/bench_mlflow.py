"""For reference, MLflow's tracking server on the same samples: `python -m benchmarks mlflow`.

One client, one kept connection, REST log-batch with the 1,000 metrics a request may hold, the sqlite
backend that `mlflow server` takes by default. The samples are those of a rank frame: a metric per rank
and name. It runs in an environment of its own (.venv-peers), installed on demand from requirements with
hashes.
"""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serving import ROOT
from config.embedded import processes
from config.embedded.valkey import free_port

HOME = ROOT / ".venv-peers"
LOCK = ROOT / "benchmarks" / "peers.txt"
PER_REQUEST, REQUESTS = 1_000, 40
METRICS = ("loss", "grad_norm", "compute_s", "wait_s")


class Unavailable(Exception):
    """The peer cannot be installed or started here."""


def install() -> Path:
    """Return the Python of the peers' environment, made from the lock unless it was made from this one."""
    python, done = HOME / "bin" / "python", HOME / "installed-from"
    if python.exists() and done.exists() and done.read_text() == LOCK.read_text():
        return python
    try:
        venv.create(HOME, with_pip=True, clear=HOME.exists())
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run(
            [*pip, "--require-hashes", "-r", str(LOCK)], check=True, timeout=900, stderr=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"MLflow could not be installed into {HOME.name}: {error}") from error
    done.write_text(LOCK.read_text())
    return python


@contextlib.contextmanager
def tracking_server(python: Path) -> Iterator[int]:
    """Run `mlflow server` on sqlite in a directory of its own; yields the port."""
    with tempfile.TemporaryDirectory(prefix="andon-bench-mlflow-") as name:
        port = free_port()
        store = ["--backend-store-uri", f"sqlite:///{name}/mlflow.db", "--artifacts-destination", name]
        command = [str(python), "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), *store]
        quiet = os.environ | {
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "DO_NOT_TRACK": "true",
            "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}",
        }
        for secret in [
            name for name in quiet if name.startswith("ANDON_") or name == "DJANGO_SETTINGS_MODULE"
        ]:
            del quiet[secret]
        log = Path(name) / "log"
        with log.open("wb") as output:
            child = subprocess.Popen(
                command, cwd=name, env=quiet, stdout=output, stderr=output, start_new_session=True
            )
        try:
            until = time.monotonic() + 120
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                if child.poll() is not None or time.monotonic() > until:
                    raise Unavailable(f"mlflow server did not start: {log.read_text()[-400:]}")
                time.sleep(0.2)
            yield port
        finally:
            processes.stop(child, signal.SIGTERM, 15)
            # Its web workers are children of its own; the whole session is ours.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)


def bodies(run_id: str) -> list[bytes]:
    """Return the log-batch requests that say what rank frames say."""
    random = np.random.default_rng(0)
    at_ms = int(time.time() * 1e3)
    ranks = PER_REQUEST // len(METRICS)
    made = []
    for number in range(REQUESTS):
        values = random.normal(1.0, 0.1, (ranks, len(METRICS)))
        first = number * ranks
        metrics = [
            {"key": f"{name}/{first + rank}", "value": float(values[rank, m]), "timestamp": at_ms, "step": 0}
            for rank in range(ranks)
            for m, name in enumerate(METRICS)
        ]
        made.append(json.dumps({"run_id": run_id, "metrics": metrics}).encode())
    return made


def run(environment: dict[str, str]) -> dict[str, Any]:
    """Measure; returns figures, or why there are none."""
    try:
        with tracking_server(install()) as port:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

            def post(path: str, body: bytes) -> dict[str, Any]:
                headers = {"Content-Type": "application/json"}
                connection.request("POST", f"/api/2.0/mlflow/{path}", body, headers)
                answer = connection.getresponse()
                text = answer.read()
                if answer.status != 200:
                    raise Unavailable(f"{path} answered {answer.status}: {text[:200]!r}")
                found: dict[str, Any] = json.loads(text)
                return found

            experiment = post("experiments/create", b'{"name": "bench"}')["experiment_id"]
            made = post("runs/create", json.dumps({"experiment_id": experiment}).encode())
            requests = bodies(made["run"]["info"]["run_id"])
            post("runs/log-batch", requests[0])
            begun = time.perf_counter()
            for body in requests[1:]:
                post("runs/log-batch", body)
            wall_s = time.perf_counter() - begun
    except (Unavailable, OSError) as error:
        print(f"mlflow: skipped: {error}", file=sys.stderr)
        return {"bench": "mlflow", "skipped": str(error), "goals": {}}
    samples = (REQUESTS - 1) * PER_REQUEST
    return {"bench": "mlflow", "samples": samples, "rank_samples_per_s": round(samples / wall_s), "goals": {}}
