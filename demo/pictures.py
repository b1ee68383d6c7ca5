"""Pictures of pages: both themes, both widths, as palette PNGs that a repository can carry."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page

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
SIZES = {"": (1440, 900), "-390": (390, 844)}
THEMES = ("light", "dark")
SETTLE_MS = 500  # parts that are asked for once the page is there, and what is placed over a figure
LONGEST_PX = 3_000
COLOURS = 256  # flat tints, text and its anti-aliasing


class Camera:
    """Takes pictures of one server into a folder.

    Attributes:
        wrong: pages that answered with something else than was expected, or complained in the console.
    """

    def __init__(self, browser: Browser, url: str, folder: Path) -> None:
        self.browser, self.url, self.folder = browser, url, folder
        self.wrong: list[str] = []
        self._cookies: dict[str, Any] = {}
        folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def window(self, size: tuple[int, int], theme: str, who: tuple[str, str] | None) -> Iterator[Page]:
        """A window of `size` CSS pixels in the light or dark scheme, of somebody who signed in or nobody."""
        context = self.browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            color_scheme="dark" if theme == "dark" else "light",
        )
        page = context.new_page()
        page.on("pageerror", lambda error: self.wrong.append(f"{page.url}: {error}"))
        if who is not None:
            self._sign_in(page, *who)
        yield page
        context.close()

    def _sign_in(self, page: Page, name: str, password: str) -> None:
        """Sign somebody in; the second time with the cookies of the first."""
        if name in self._cookies:
            page.context.add_cookies(self._cookies[name])
            return
        page.goto(f"{self.url}/sign-in")
        page.fill("#username", name)
        page.fill("#password", password)
        page.click("button.main")
        page.wait_for_url("**/runs")
        self._cookies[name] = page.context.cookies()

    def take(
        self,
        who: tuple[str, str] | None,
        pages: dict[str, str],
        *,
        status: int = 200,
        themes: tuple[str, ...] = THEMES,
        whole: bool = False,
        blocked: str = "",
    ) -> None:
        """Take every page of `pages` (name → address) in every theme and width.

        Args:
            who: name and password; None: a stranger.
            status: what the pages answer.
            whole: the page to its foot, and not the first screen only.
            blocked: a pattern of addresses that do not answer, to show what the page says then.
        """
        for suffix, size in SIZES.items():
            for theme in themes:
                with self.window(size, theme, who) as page:
                    if blocked:
                        page.route(blocked, lambda route: route.abort())
                    for name, path in pages.items():
                        answer = page.goto(f"{self.url}{path}", wait_until="load")
                        if answer is None or answer.status != status:
                            self.wrong.append(f"{path}: {answer.status if answer else 'no answer'}")
                        self._settle(page)
                        dark = "-dark" if theme == "dark" else ""
                        self.keep(page, f"{name}{suffix}{dark}", whole=whole)

    def _settle(self, page: Page) -> None:
        if page.locator("[data-stack]").count():
            page.wait_for_selector(".js-plotly-plot .main-svg, .problem", timeout=30_000)
        page.wait_for_timeout(SETTLE_MS)

    def keep(self, page: Page, name: str, *, whole: bool = False) -> None:
        """Write what the window shows as `name`.png, in as few colours as it needs."""
        picture = Image.open(io.BytesIO(page.screenshot(full_page=whole))).convert("RGB")
        if picture.height > LONGEST_PX:
            picture = picture.crop((0, 0, picture.width, LONGEST_PX))
        small = picture.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        small.save(self.folder / f"{name}.png", optimize=True)
