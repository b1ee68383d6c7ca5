"""The incident's page in a real browser: how long a zoom takes until it is drawn, and how large the heap is.

A zoom is what a person does: a key on the grid, or a box dragged over it. The clock runs from the key to the
frame in which the new figure, with its tile, is on the screen. `python -m benchmarks pages` calls it on the
run of 16,384 ranks.
"""

import statistics
from pathlib import Path
from typing import Any

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-precise-memory-info",
]
# In and out, to a few steps and to the whole attempt, in both directions of the grid.
KEYS = ("+", "+", "+", "-", "-", "-", "-", "-", "-", "-", "0", "+", "-", "0", "s", "s")
ZOOM_MS, HEAP_MB = 300.0, 150.0
_DRAWN = ".js-plotly-plot .main-svg"
_ZOOM = """key => new Promise((done, fail) => {
    const plot = document.querySelector('.plot'), grid = document.querySelector('.cells');
    const before = plot.layout.meta, began = performance.now();
    const look = () => {
        if (plot.layout.meta !== before) requestAnimationFrame(() => done(performance.now() - began));
        else if (performance.now() - began > 20000) fail(new Error('no new figure after ' + key));
        else requestAnimationFrame(look);
    };
    grid.dispatchEvent(new KeyboardEvent('keydown', {key: key, bubbles: true}));
    look();
})"""


def measured(port: int, session: str, path: str) -> dict[str, Any] | None:
    """Zoom on a page of an incident; None where no browser is installed.

    Args:
        session: the value of the session cookie of somebody who may see it.
        path: of the page, "/incidents/7".
    """
    if not Path(CHROMIUM).exists():
        return None
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        context = browser.new_context(viewport={"width": 1440, "height": 900})
        context.add_cookies([{"name": "sessionid", "value": session, "url": f"http://localhost:{port}"}])
        page = context.new_page()
        page.goto(f"http://localhost:{port}{path}")
        page.wait_for_selector(_DRAWN, timeout=60_000)
        page.wait_for_load_state("networkidle")
        page.focus(".cells")
        took = [float(page.evaluate(_ZOOM, key)) for key in KEYS]
        page.wait_for_load_state("networkidle")
        session_of = context.new_cdp_session(page)
        session_of.send("HeapProfiler.collectGarbage")
        heap = session_of.send("Runtime.getHeapUsage")
        page.goto("about:blank")
        browser.close()
    return {
        "zooms": len(took),
        "zoom_ms": {"p50": round(statistics.median(took), 1), "max": round(max(took), 1)},
        "heap_mb": round(heap["usedSize"] / 1e6, 1),
        "heap_total_mb": round(heap["totalSize"] / 1e6, 1),
    }


def goals(name: str, found: dict[str, Any] | None) -> dict[str, bool]:
    """Return the goals of a run's page in the browser; none where it could not be opened."""
    if found is None:
        return {}
    return {
        f"{name}: zoom in the browser, worst {ZOOM_MS:g} ms": found["zoom_ms"]["max"] <= ZOOM_MS,
        f"{name}: browser heap {HEAP_MB:g} MB": found["heap_total_mb"] <= HEAP_MB,
    }
