"""`python -m demo.screens`: play the recorded failure and take the pictures of README and docs."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

from demo.__main__ import APPROVER, REQUESTER, RUN, Demo
from demo.check import Checker
from demo.server import REPOSITORY

SCREENS = REPOSITORY / "docs" / "screens"
CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WIDTHS = {"": 1440, "-390": 390}


@contextmanager
def signed_in(browser: Browser, demo: Demo, name: str, width: int, theme: str) -> Iterator[Page]:
    """A window of `name`, `width` CSS pixels wide, in the light or dark scheme."""
    context = browser.new_context(
        viewport={"width": width, "height": 900},
        color_scheme="dark" if theme == "dark" else "light",
    )
    page = context.new_page()
    page.goto(f"{demo.server.url}/sign-in")
    page.fill("#username", name)
    page.fill("#password", demo.passwords[name])
    page.click("button.main")
    page.wait_for_load_state("networkidle")
    yield page
    context.close()


def take(browser: Browser, demo: Demo, person: str, paths: dict[str, str]) -> None:
    """Take every page of `paths` (name → address) as `person`, in both schemes and both widths."""
    for suffix, width in WIDTHS.items():
        for theme in ("light", "dark"):
            with signed_in(browser, demo, person, width, theme) as page:
                for name, path in paths.items():
                    page.goto(f"{demo.server.url}{path}", wait_until="networkidle")
                    page.wait_for_timeout(700)  # the plots draw after their figure has come
                    dark = "-dark" if theme == "dark" else ""
                    page.screenshot(path=SCREENS / f"{name}{suffix}{dark}.png")


def main() -> int:
    """Take all pictures into docs/screens; returns the exit code."""
    SCREENS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="andon-screens-") as folder, sync_playwright() as play:
        demo = Demo(live=False, speed=3.0, data_dir=Path(folder) / "data")
        browser = play.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        try:
            demo.start()
            token = demo.server.manage("create_token", REQUESTER).strip().splitlines()[-1]
            trainer = demo.launch()
            checker = Checker(demo.server, RUN, token, trainer.answer)
            incident = checker.first_bad_is_right()["id"]
            checker.evidence_is_sealed()
            here = f"/incidents/{incident}"
            pages = {"runs": "/runs", "run": f"/runs/{RUN}", "incident": here, "vault": "/vault"}
            take(browser, demo, REQUESTER, pages)
            with signed_in(browser, demo, REQUESTER, 1440, "light") as page:
                page.goto(f"{demo.server.url}{here}")
                page.fill("#req-note", "skip the corrupt sample")
                page.click("form[action$='/request'] button.main")
                page.wait_for_load_state("networkidle")
            take(browser, demo, APPROVER, {"approve": f"{here}/approve"})
            with signed_in(browser, demo, APPROVER, 390, "light") as page:
                page.goto(f"{demo.server.url}{here}/approve")
                page.fill("#password", demo.passwords[APPROVER])
                page.click("button[form='approve-form']")
                page.wait_for_load_state("networkidle")
            if demo.wait_and_continue(trainer, 2) is None:
                return 1
            take(browser, demo, REQUESTER, {"ledger": f"/runs/{RUN}/ledger"})
        finally:
            browser.close()
            demo.close()
    total = sum(path.stat().st_size for path in SCREENS.glob("*.png"))
    print(f"{len(list(SCREENS.glob('*.png')))} pictures, {total:,} bytes in {SCREENS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
