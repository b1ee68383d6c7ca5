"""A whole server with a failing run, and people with a browser each."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from demo.__main__ import Demo
from demo.trainers import Trainer
from tests.conftest import needs
from tests.faults.demos import started
from tests.servers import S3

CHROMIUM = "/usr/bin/chromium"
QUIETLY = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SPEED = 3.0


@pytest.fixture
def browser() -> Iterator[Browser]:
    needs("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIETLY)
        yield browser
        browser.close()


@pytest.fixture
def vault(request: pytest.FixtureRequest) -> dict[str, str]:
    """Environment that chooses the vault: none for the embedded default, or a locked bucket."""
    if request.param == "directory":
        return {}
    endpoint: S3 = request.getfixturevalue("s3_endpoint")
    bucket = endpoint.new_bucket(locked=True)
    return {
        "ANDON_VAULT_URL": f"s3://{bucket}?endpoint={endpoint.url}&region=us-east-1",
        "AWS_ACCESS_KEY_ID": endpoint.access_key,
        "AWS_SECRET_ACCESS_KEY": endpoint.secret_key,
    }


@pytest.fixture
def demo(vault: dict[str, str], tmp_path: Path) -> Iterator[Demo]:
    """The demo's server, set up and empty; everything stops with the test."""
    with started(tmp_path / "d", speed=SPEED, **vault) as demo:
        yield demo


class SomebodySitting:
    """A person at a browser. What the page's console complains about is kept in `complaints`."""

    def __init__(self, browser: Browser, demo: Demo, name: str, width: int, height: int) -> None:
        self.base, self.password, self.name = demo.server.url, demo.passwords[name], name
        self.page: Page = browser.new_context(viewport={"width": width, "height": height}).new_page()
        self.complaints: list[str] = []
        self.page.on(
            "console", lambda said: self.complaints.append(said.text) if said.type == "error" else None
        )
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def open(self, path: str) -> Page:
        self.page.goto(self.base + path)
        return self.page

    def sign_in(self, then: str) -> Page:
        page = self.open(f"/sign-in?next={then}")
        page.fill("input[name=username]", self.name)
        page.fill("input[name=password]", self.password)
        page.press("input[name=password]", "Enter")
        page.wait_for_url(f"**{then}")
        return page


def supervise(demo: Demo, trainer: Trainer) -> tuple[threading.Thread, dict[str, Any]]:
    """Let the supervisor wait in a thread of its own; the permit it took lands in the dict."""
    taken: dict[str, Any] = {}

    def body() -> None:
        taken.update(demo.wait_and_continue(trainer, 2) or {})

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread, taken
