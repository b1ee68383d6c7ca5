"""The same curve on MLflow's and TensorBoard's own page: time to the first plot, and if a spike survives.

Starts the servers of the peers' environment and reads what their pages were given to draw. MLflow's rows are
written into its database, since a million samples through its API take minutes.
"""

import contextlib
import http.client
import json
import math
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.bench_mlflow import Unavailable, install, tracking_server
from benchmarks.serving import ROOT
from config.embedded import processes
from config.embedded.valkey import free_port

TAG = "loss"


def value(step: int, spike: int) -> float:
    """Return the loss of a step: a slow fall, and one step that is far above it."""
    return 9.5 if step == spike else 2.0 + math.exp(-step / 2e5)


def plant_in_mlflow(port: int, database: Path, steps: int, spike: int) -> str:
    """Create a run and write its metric; returns the address of its page."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def post(path: str, document: dict[str, Any]) -> dict[str, Any]:
        body, headers = json.dumps(document), {"Content-Type": "application/json"}
        connection.request("POST", f"/api/2.0/mlflow/{path}", body, headers)
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise Unavailable(f"{path} answered {answer.status}: {text[:200]!r}")
        found: dict[str, Any] = json.loads(text)
        return found

    experiment = post("experiments/create", {"name": "curve"})["experiment_id"]
    run_id = post("runs/create", {"experiment_id": experiment})["run"]["info"]["run_id"]
    metric = {"key": TAG, "value": value(0, spike), "timestamp": 1, "step": 0}
    post("runs/log-batch", {"run_id": run_id, "metrics": [metric]})
    with contextlib.closing(sqlite3.connect(database, timeout=60)) as rows, rows:
        made = ((TAG, value(step, spike), 1 + step, run_id, step, 0) for step in range(1, steps))
        rows.executemany(
            "INSERT INTO metrics (key, value, timestamp, run_uuid, step, is_nan) VALUES (?, ?, ?, ?, ?, ?)",
            made,
        )
    return f"http://127.0.0.1:{port}/#/experiments/{experiment}/runs/{run_id}/model-metrics"


@contextlib.contextmanager
def tensorboard(python: Path, steps: int, spike: int) -> Iterator[str]:
    """Write an event file and run TensorBoard on it; yields the address of its page."""
    with tempfile.TemporaryDirectory(prefix="andon-bench-tensorboard-") as name:
        subprocess.run(
            [str(python), "-m", "benchmarks.run_page_events", name, str(steps), str(spike)],
            cwd=ROOT,
            check=True,
            timeout=900,
        )
        port = free_port()
        command = [str(python), "-m", "tensorboard.main", "--logdir", name, "--port", str(port)]
        log = Path(name) / "log"
        with log.open("wb") as output:
            child = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        try:
            _wait_for(port, child, log)
            yield f"http://127.0.0.1:{port}/#timeseries"
        finally:
            processes.stop(child, signal.SIGTERM, 15)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)


def _wait_for(port: int, child: "subprocess.Popen[bytes]", log: Path) -> None:
    """Wait until the server answers and has read the whole event file."""
    until = time.monotonic() + 300
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("GET", "/data/plugin/timeseries/tags")
            if TAG.encode() in connection.getresponse().read():
                break
        if child.poll() is not None or time.monotonic() > until:
            raise Unavailable(f"tensorboard did not start: {log.read_text()[-400:]}")
        time.sleep(0.5)


def pages(browser: Any, steps: int, spike: int) -> dict[str, Any]:
    """Open both pages; returns seconds to the first plot, points drawn, and whether the spike is there."""
    try:
        python = install()
    except Unavailable as error:
        print(f"run page: peers skipped: {error}", file=sys.stderr)
        return {"skipped": str(error)}
    found: dict[str, Any] = {}
    with tracking_server(python) as port:
        there = Path(tempfile.gettempdir()).glob("andon-bench-mlflow-*/mlflow.db")
        database = max(there, key=lambda path: path.stat().st_mtime)
        address = plant_in_mlflow(port, database, steps, spike)
        found["mlflow"] = opened(browser, address, ".js-plotly-plot .main-svg", "get-history")
    with tensorboard(python, steps, spike) as address:
        found["tensorboard"] = opened(
            browser, address, "line-chart canvas, line-chart svg path", "timeSeries"
        )
    return found


def opened(browser: Any, address: str, drawn: str, data: str) -> dict[str, Any]:
    """Open a page and wait for its plot.

    Args:
        drawn: selector of what is there once the curve is drawn.
        data: part of the address of the requests that bring the curve's points.
    """
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    page = context.new_page()
    answers: list[Any] = []
    page.on("response", lambda answer: answers.append(answer) if data in answer.url else None)
    begun = time.perf_counter()
    try:
        page.goto(address, wait_until="commit", timeout=120_000)
        page.wait_for_selector(drawn, timeout=120_000, state="attached")
        while not answers and time.perf_counter() - begun < 120:
            page.wait_for_timeout(20)
        took_s = time.perf_counter() - begun
        page.wait_for_timeout(2_000)
        text = " ".join(answer.text() for answer in answers if answer.ok)
        if TAG not in text:
            return {"skipped": "what its page was given to draw was not seen"}
    except Exception as error:
        return {"skipped": f"its plot never came: {error}"[:200]}
    finally:
        context.close()
    return {
        "first_plot_s": round(took_s, 2),
        "points": max(text.count('"step"'), text.count('"wallTime"'), text.count('"wall_time"')),
        "spike_survives": any(mark in text for mark in ("9.5,", "9.5}", "9.5]", '"9.5"')),
    }
