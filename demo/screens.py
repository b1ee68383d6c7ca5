"""`python -m demo.screens`: play the failures and take the pictures of README and docs.

Every page as it is on an empty server, on one with a held run, at 16,384 ranks, and when something fails;
light and dark, 1440 and 390 pixels wide. Pages that complained or answered otherwise make it fail.
"""

import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import sync_playwright

from demo.__main__ import APPROVER, REQUESTER, RUN, Demo
from demo.cases import HUGE
from demo.check import Checker
from demo.pictures import ARGUMENTS, CHROMIUM, SIZES, Camera
from demo.server import REPOSITORY
from demo.stages import say
from demo.teller import Teller

SCREENS = REPOSITORY / "docs" / "screens"
ADMIN = "ada"
# What people have of their own, and what an admin sees of a project and of a run.
ACCOUNTS = {
    "account": "/account",
    "account-tokens": "/account/tokens",
    "account-passkey": "/account/passkeys/add",
    "account-codes": "/account/codes",
    "people": "/projects/default/people",
    "hook-tokens": "/projects/default/hooks",
    "secrets": "/projects/default/secrets",
    "account-log": "/projects/default/log",
    "run-secrets": f"/runs/{RUN}/secrets",
}
MOST_BYTES = 15_000_000
# Pages that need no incident; each is taken on the empty server and on the one that has something to show.
LISTS = {
    "runs": "/runs",
    "incidents": "/incidents",
    "nodes": "/nodes",
    "vault": "/vault",
    "ledger": "/ledger",
    "goodput": "/goodput",
    "rules": "/rules",
    "standing": "/standing",
    "system": "/system",
    "on-call": "/on-call",
    "search": "/search?q=demo",
}


class Screens:
    """One sitting: a demo, its people, and a camera."""

    def __init__(self, demo: Demo, camera: Camera) -> None:
        self.demo, self.camera = demo, camera
        self.asks = (REQUESTER, demo.passwords[REQUESTER])
        self.approves = (APPROVER, demo.passwords[APPROVER])

    def parts(self) -> tuple[Callable[[], None], ...]:
        """What is taken, in the order it comes to be."""
        return (self.empty, self.held, self.failures, self.going_on, self.accounts, self.huge)

    def empty(self) -> None:
        """Before any run."""
        self.camera.take(None, {"sign-in": "/sign-in"})
        self.camera.take(self.asks, {f"empty-{name}": path for name, path in LISTS.items()})

    def failures(self) -> None:
        """What a page says that is not there, may not be seen, or whose plot does not come."""
        self.camera.take(self.asks, {"error-not-found": "/incidents/4711"}, status=404)
        self.camera.take(self.asks, {"error-plot": f"/incidents/{self.incident}"}, blocked="**/figure.json**")
        self.camera.take(self.asks, {"error-tile": f"/incidents/{self.incident}"}, blocked="**/grid.png**")

    def held(self) -> None:
        """A held run with sealed evidence, and everything that belongs to it."""
        trainer = self.demo.launch()
        token = self.demo.server.manage("create_token", REQUESTER).strip().splitlines()[-1]
        checker = Checker(self.demo.server, RUN, token, trainer.answer)
        self.incident = int(checker.first_bad_is_right()["id"])
        checker.evidence_is_sealed()
        here = f"/incidents/{self.incident}"
        dossier = self._linked(here, r"/vault/\d+")
        in_advance = ("--kind", "loss_spike", "--per-day", "2", "--furthest-steps", "500")
        why = ("--why", "nights without an approver")
        self.demo.server.manage("standing_approval", "create", "--as", REQUESTER, *in_advance, *why)
        pages = {
            "run": f"/runs/{RUN}",
            "incident": here,
            "page-someone": f"{here}/page",
            "status-text": f"{here}/status",
            "hand-over": f"{here}/hand-over",
            "raw-log": f"{here}/raw/log",
            "dossier": dossier,
            "item": self._linked(dossier, rf"{dossier}/items/\d+"),
            "node": self._linked("/nodes", '/nodes/[^"?]+'),
            "rule": f"/rules/nonfinite/{RUN}",
            "standing-one": self._linked("/standing", r"/standing/\d+"),
            "custody": f"{dossier}/custody",
            "postmortem": f"{here}/postmortem",
            "postmortem-edit": f"{here}/postmortem/edit",
        }
        self.camera.take(self.asks, pages)
        self.camera.take(self.asks, LISTS)
        self.camera.take(self.asks, {"incident-whole": here}, themes=("light",), whole=True)

    def _linked(self, path: str, pattern: str) -> str:
        """Return the first address like `pattern` that a page's own part links to."""
        with self.camera.window((1440, 900), "light", self.asks) as page:
            page.goto(f"{self.camera.url}{path}")
            found = re.search(f'href="({pattern})"', page.inner_html("main"))
        if found is None:
            raise RuntimeError(f"{path} links to nothing like {pattern}")
        return found[1]

    def accounts(self) -> None:
        """Everybody's own pages, and what an admin gives and takes; a wrong password."""
        made = self.demo.server.manage_json("create_person", ADMIN, "--role", "admin")
        self.camera.take((ADMIN, str(made["password"])), ACCOUNTS)
        for suffix, size in SIZES.items():
            with self.camera.window(size, "light", None) as page:
                page.goto(f"{self.camera.url}/sign-in")
                page.fill("#username", REQUESTER)
                page.fill("#password", "not the password")
                page.click("button.main")
                page.wait_for_load_state()
                self.camera.keep(page, f"error-sign-in{suffix}")

    def going_on(self) -> None:
        """Asked, approved, and what the ledger says of it."""
        here = f"/incidents/{self.incident}"
        with self.camera.window((1440, 900), "light", self.asks) as page:
            page.goto(f"{self.camera.url}{here}")
            page.fill("#req-note", "skip the corrupt sample")
            page.click("form[action$='/request'] button.main")
            page.wait_for_load_state("networkidle")
        self.camera.take(self.approves, {"approve": f"{here}/approve"})
        with self.camera.window((390, 844), "light", self.approves) as page:
            page.goto(f"{self.camera.url}{here}/approve")
            page.fill("#password", self.demo.passwords[APPROVER])
            page.click("button[form='approve-form']")
            page.wait_for_load_state("networkidle")
        if self.demo.wait_and_continue(self.demo.trainers[-1], 2) is None:
            raise RuntimeError("no permit came")
        self.camera.take(
            self.asks,
            {
                "run-ledger": f"/runs/{RUN}/ledger",
                "run-goodput": f"/runs/{RUN}/goodput",
                "incident-watching": here,
            },
        )

    def huge(self) -> None:
        """16,384 ranks, one of which broke."""
        secret = self.demo.create_run(HUGE.run, json.dumps(HUGE.policy))
        teller = Teller(
            self.demo.server.url, HUGE.run, secret, self.demo.trainer_dir / HUGE.run, **HUGE.layout
        )
        stops_at = HUGE.tell(teller)
        if stops_at is not None:
            teller.obey(stops_at)
        teller.close()
        incident = self._linked(f"/incidents?run={HUGE.run}", r"/incidents/\d+")
        self.camera.take(
            self.asks,
            {
                "huge-run": f"/runs/{HUGE.run}",
                "huge-incident": incident,
                "huge-incident-by-failure": f"{incident}?rows=node&sort=failure",
            },
        )


def main() -> int:
    """Take all pictures into docs/screens; returns the exit code."""
    for old in SCREENS.glob("*.png"):
        old.unlink()
    with tempfile.TemporaryDirectory(prefix="andon-screens-") as folder, sync_playwright() as play:
        demo = Demo(live=False, speed=3.0, data_dir=Path(folder) / "data")
        browser = play.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        try:
            demo.start()
            camera = Camera(browser, demo.server.url, SCREENS)
            screens = Screens(demo, camera)
            parts = (
                screens.empty,
                screens.held,
                screens.failures,
                screens.going_on,
                screens.accounts,
                screens.huge,
            )
            for part in parts:
                part()
        finally:
            browser.close()
            demo.close()
    pictures = list(SCREENS.glob("*.png"))
    total = sum(path.stat().st_size for path in pictures)
    say(f"{len(pictures)} pictures, {total:,} bytes in {SCREENS}")
    for line in camera.wrong:
        say(f"  wrong: {line}")
    if total > MOST_BYTES:
        say(f"  wrong: more than {MOST_BYTES:,} bytes")
    return 1 if camera.wrong or total > MOST_BYTES else 0


if __name__ == "__main__":
    sys.exit(main())
