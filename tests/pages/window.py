"""How the tests of pages start a browser, wait for what it does, and find every page there is."""

import re
import shutil
import time

from django.urls import URLPattern, URLResolver, get_resolver

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


def sign_in(page, base, name):
    """Sign a person of the fixtures in."""
    page.goto(f"{base}/sign-in")
    page.fill("#username", name)
    page.fill("#password", f"{name}-password")
    page.click("button.main")
    page.wait_for_url("**/runs")


def drawn(page):
    """Wait until the stack is drawn and its exact cells are known."""
    page.wait_for_selector(".js-plotly-plot .main-svg", timeout=30_000)
    until(page, "document.querySelector('[data-legend] b').textContent !== ''")


_NAME = re.compile(r"<(?:\w+:)?(\w+)>")


def routes() -> list[str]:
    """Return every route of the URL map that is neither a machine's nor a file's."""
    found: list[str] = []

    def walk(patterns: list[URLPattern | URLResolver], before: str) -> None:
        for pattern in patterns:
            route = before + str(pattern.pattern)
            if isinstance(pattern, URLResolver):
                walk(pattern.url_patterns, route)
            elif not re.search(r"^(api/|static|\.well-known)|\.\w+$", route):
                found.append(f"/{route}")

    walk(get_resolver().url_patterns, "")
    return found


def names() -> set[str]:
    """Return what the routes name in brackets."""
    return {name for route in routes() for name in _NAME.findall(route)}


def addresses(values: dict[str, object]) -> list[str]:
    """Return the routes whose names have a value, with the values in them."""
    known = [route for route in routes() if set(_NAME.findall(route)) <= set(values)]
    return [_NAME.sub(lambda match: str(values[match[1]]), route) for route in known]
