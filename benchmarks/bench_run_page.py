"""The pages of runs at full size: `python -m benchmarks run_page`.

A run of a million steps with twelve series and one planted spike of one step, all but the newest of them
written by the store's own function, and a list of 200 runs. HTML and curve data are fetched over HTTP from a
warm server; a headless Chromium opens the page, zooms, and tells its heap. Beside it MLflow's and
TensorBoard's page of the same loss. `BENCH_RUN_STEPS` makes the run shorter.
"""

import json
import math
import os
import sys
import time
from typing import Any

import numpy as np

from andon.wire import encode_events
from benchmarks import run_page_peers
from benchmarks.bench_ingest import Posts, count
from benchmarks.bench_pages import WARM, Browser, new_run, post, seconds, vacuum
from benchmarks.serving import granian, worker

STEPS = int(os.environ.get("BENCH_RUN_STEPS", "1000000"))
POSTED = 1_000  # newest steps, through the receiver and the worker
SPIKE = STEPS * 2 // 3 + 77
RUNS = 200
TIMES = 20
PAGE_MS, LIST_MS, ZOOM_MS, HEAP_BYTES = 300.0, 200.0, 300.0, 150e6
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--enable-precise-memory-info",
]


def losses() -> np.ndarray:
    """Return the loss that the peers' curve has."""
    found: np.ndarray = 2.0 + np.exp(-np.arange(STEPS) / 2e5)
    found[SPIKE] = run_page_peers.value(SPIKE, SPIKE)
    return found


def store_history(posts: Posts) -> None:
    """Write what a worker would have taken in over weeks, by the function it uses."""
    from django.db import transaction

    from runs import curve_store, curve_values
    from runs.curve_columns import Reports

    random = np.random.default_rng(0)
    loss, old = losses(), STEPS - POSTED
    for first in range(0, old, 100_000):
        steps = np.arange(first, min(old, first + 100_000))
        n = len(steps)
        every: dict[str, np.ndarray] = {
            "loss": loss[steps],
            "grad_norm": np.exp(random.normal(-1, 0.1, n)),
            "lr": np.full(n, 2.4e-4),
            "loss_scale": np.full(n, 65_536.0),
            "step_time_s": random.normal(2.3, 0.05, n),
            curve_values.OCCURRED: 1.7e9 + 2.3 * steps,
            curve_values.SKIPPED: (random.random(n) < 1e-4).astype(float),
            curve_values.TEMPERATURE: random.normal(70, 3, n),
            curve_values.CLOCK: random.normal(1_900, 20, n),
            curve_values.LINK_ERRORS: random.poisson(0.01, n).astype(float),
            curve_values.RETRANSMITS: random.poisson(0.5, n).astype(float),
            curve_values.WAIT: random.normal(0.2, 0.02, n),
        }
        with transaction.atomic():
            curve_store.take(posts.run_id, 1, {name: Reports.of(steps, of) for name, of in every.items()})


def post_newest(port: int, posts: Posts) -> None:
    """Launch, and post the newest steps."""
    launched = {"type": "attempt.launched", "attempt": 1, "data": {"world_size": 64}}
    events: list[dict[str, Any]] = [launched]
    for step in range(STEPS - POSTED, STEPS):
        data = {"loss": 2.0 + math.exp(-step / 2e5), "grad_norm": 0.37, "lr": 2.4e-4, "step_time_s": 2.3}
        events.append({"type": "step", "step": step, "attempt": 1, "data": data})
    for step in range(0, STEPS, STEPS // 200):
        kept = {"uri": f"s3://bench/step-{step}", "files": [{"path": "model", "bytes": 1_000}]}
        events.append({"type": "checkpoint.committed", "step": step, "attempt": 1, "data": kept})
    post(port, [posts.signed("events", encode_events(part), "application/json") for part in _parts(events)])


def _parts(events: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    return [events[at : at + 400] for at in range(0, len(events), 400)]


def fill_list(port: int) -> None:
    """Make the other runs of the list, each with a few hundred steps."""
    for number in range(RUNS - 1):
        posts = new_run(f"small-{number:03d}")
        events = [
            {
                "type": "step",
                "step": step,
                "attempt": 1,
                "data": {"loss": 2.0 + step % 7 / 100, "grad_norm": 0.4},
            }
            for step in range(300)
        ]
        post(port, [posts.signed("events", encode_events(events), "application/json")])


def taken_in() -> None:
    """Wait until a worker has looked at all that was posted and has taken it into the blocks."""
    while count("runs_pending") or count("runs_gridwaiting"):
        time.sleep(0.2)


def measured(browser: Browser, slug: str) -> dict[str, Any]:
    """Fetch the page, its curves at every zoom, and the list."""
    paths = {"html": f"/runs/{slug}?range=attempt", "list": "/runs"}
    figure = f"/runs/{slug}/figure.json?width=1300&"
    paths["whole"] = f"{figure}range=attempt"
    half = STEPS // 2
    while half >= 50:
        paths[f"zoom {2 * half:,}"] = f"{figure}steps={max(0, SPIKE - half)}-{min(STEPS - 1, SPIKE + half)}"
        half //= 10
    took: dict[str, Any] = {}
    for name, path in paths.items():
        for _ in range(WARM):
            browser.get(path)
        body, took[name] = browser.timed(path, TIMES)
        took[name]["bytes"] = len(body)
        if name == "whole" or name.startswith("zoom"):
            traces = json.loads(body)["data"]
            loss = next(trace for trace in traces if trace.get("name") == "Loss")
            took[name]["spike_survives"] = (SPIKE, run_page_peers.value(SPIKE, SPIKE)) in set(
                zip(loss["x"], loss["y"], strict=True)
            )
    return took


# Each zoom is timed in the page: from the change of the axis to the new curve on the screen.
_ZOOM = """async ([first, last]) => {
  const plot = document.querySelector('.plot'), begun = performance.now();
  const before = plot.layout.meta.steps.join();
  Plotly.relayout(plot, {'xaxis.range[0]': first, 'xaxis.range[1]': last});
  while (plot.layout.meta.steps.join() === before) await new Promise((go) => setTimeout(go, 4));
  await new Promise((go) => requestAnimationFrame(() => requestAnimationFrame(go)));
  return performance.now() - begun;
}"""
_DRAWN = (
    "!!document.querySelector('.js-plotly-plot .main-svg') && !!document.querySelector('.plot').layout.meta"
)


def in_browser(browser: Any, port: int, cookie: str, slug: str) -> dict[str, Any]:
    """Open the page in Chromium: seconds to the first plot, zooms, heap, and whether the spike is drawn."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    name, _, text = cookie.partition("=")
    context.add_cookies([{"name": name, "value": text.split(";")[0], "url": f"http://localhost:{port}"}])
    page = context.new_page()
    begun = time.perf_counter()
    page.goto(f"http://localhost:{port}/runs/{slug}?range=attempt", wait_until="commit")
    while not page.evaluate(_DRAWN):
        time.sleep(0.01)
    first_s = time.perf_counter() - begun
    drawn = "document.querySelector('.plot').data.find(t => t.name === 'Loss').y"
    survives = page.evaluate(f"Math.max(...{drawn})") == run_page_peers.value(SPIKE, SPIKE)
    zooms, half = [], STEPS // 4
    while half >= 50:
        zooms.append(page.evaluate(_ZOOM, [max(0, SPIKE - half), min(STEPS - 1, SPIKE + half)]))
        survives = survives and page.evaluate(f"Math.max(...{drawn})") == run_page_peers.value(SPIKE, SPIKE)
        half //= 4
    session = context.new_cdp_session(page)
    session.send("Performance.enable")
    metrics = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
    context.close()
    return {
        "first_plot_s": round(first_s, 2),
        "zoom_ms": [round(ms) for ms in zooms],
        "heap_mb": round(metrics["JSHeapUsedSize"] / 1e6),
        "spike_survives": survives,
    }


def run(environment: dict[str, str]) -> dict[str, Any]:
    """Measure on running servers; returns figures with their goals."""
    from django.core.management import call_command

    from runs.models import Grid

    call_command("collectstatic", interactive=False, verbosity=0)
    with granian("config.wsgi", environment) as port:
        long = new_run("long")
        setup: dict[str, Any] = {"history_s": seconds(lambda: store_history(long))}
        with worker(environment):
            setup["newest_s"] = seconds(lambda: post_newest(port, long))
            setup["list_s"] = seconds(lambda: fill_list(port))
            setup["taken_in_s"] = seconds(taken_in)
            Grid.objects.filter(run_id=long.run_id).update(step_first=0)  # as if all of it had been posted
        setup["vacuum_s"] = seconds(lambda: vacuum(environment))
        print(setup, flush=True)
        asking = Browser(port)
        took = measured(asking, long.slug)
        print(took, flush=True)
        windows = _in_windows(port, asking.cookie, long.slug)
    goals = {
        f"run page, HTML, p99 {PAGE_MS:g} ms": took["html"]["p99"] <= PAGE_MS,
        f"run page, curves of {STEPS:,} steps, p99 {PAGE_MS:g} ms": took["whole"]["p99"] <= PAGE_MS,
        f"list of {RUNS} runs, p99 {LIST_MS:g} ms": took["list"]["p99"] <= LIST_MS,
        "the spike of one step is in the data of every zoom": all(
            one.get("spike_survives", True) for one in took.values()
        ),
    }
    ours = windows.get("andon", {})
    if "zoom_ms" in ours:
        goals |= {
            f"zoom in the browser, worst {ZOOM_MS:g} ms": max(ours["zoom_ms"]) <= ZOOM_MS,
            f"browser heap {HEAP_BYTES / 1e6:g} MB": ours["heap_mb"] <= HEAP_BYTES / 1e6,
            "the spike is drawn at every zoom": ours["spike_survives"],
        }
        for peer in ("mlflow", "tensorboard"):
            if "first_plot_s" in windows.get(peer, {}):
                ours[f"of_{peer}"] = round(ours["first_plot_s"] / windows[peer]["first_plot_s"], 2)
    return {
        "bench": "run_page",
        "steps": STEPS,
        "setup": setup,
        "took_ms": took,
        "browser": windows,
        "goals": goals,
    }


def _in_windows(port: int, cookie: str, slug: str) -> dict[str, Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        print(f"run page: no browser: {error}", file=sys.stderr)
        return {"skipped": str(error)}
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path="/usr/bin/chromium", args=ARGUMENTS)
        try:
            found: dict[str, Any] = {"andon": in_browser(browser, port, cookie, slug)}
            print(found, flush=True)
            if "BENCH_NO_PEERS" not in os.environ:
                found |= run_page_peers.pages(browser, STEPS, SPIKE)
        finally:
            browser.close()
    return found
