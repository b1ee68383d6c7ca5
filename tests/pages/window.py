"""How the tests of pages start a browser and wait for what it does."""

import shutil
import time

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def until(page, expression, seconds=30):
    """Wait until `expression` is true. (Playwright's own wait polls by eval, which our CSP forbids.)"""
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"never true: {expression}"
        page.wait_for_timeout(100)


def drawn(page):
    """Wait until the stack is drawn and its exact cells are known."""
    page.wait_for_selector(".js-plotly-plot .main-svg", timeout=30_000)
    until(page, "document.querySelector('[data-legend] b').textContent !== ''")
