"""No page breaks a rule of WCAG 2.2 AA or of landmarks that axe-core sees: light, dark, wide, narrow.

The pages are those of the URL map, so that a new one is looked at as soon as it has an address.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.base import AXE_SCRIPT
from django.test import Client
from playwright.async_api import BrowserContext, Page, async_playwright

from evidence.models import Dossier
from runs.models import Person
from tests.pages.window import ARGS, CHROMIUM, addresses, names

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("_collected"),
    pytest.mark.skipif(not Path(CHROMIUM).exists(), reason="not run: needs chromium (apt-packages.txt)"),
]
WINDOWS = 3  # pages looked at at once: each is a process of the browser, and the server answers beside them
AA = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
# Not of WCAG, but what a screen reader goes by: one main, every landmark once or with a name of its own.
LANDMARKS = [
    *("landmark-unique", "landmark-one-main", "landmark-no-duplicate-main", "landmark-main-is-top-level"),
    *("landmark-no-duplicate-banner", "landmark-banner-is-top-level"),
    *("landmark-no-duplicate-contentinfo", "landmark-contentinfo-is-top-level"),
    *("landmark-complementary-is-top-level", "region", "page-has-heading-one", "heading-order"),
]
RULES = {name: {"enabled": True} for name in LANDMARKS}
EVERYTHING = {"runOnly": {"type": "tag", "values": AA}, "rules": RULES}
NO_CONTRAST = {**EVERYTHING, "rules": {**RULES, "color-contrast": {"enabled": False}}}
COLOURS = {"runOnly": {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}}
# Contrast takes most of the time and depends on the theme alone: light is judged wide, dark narrow.
VIEWS = (("light", 1440, EVERYTHING), ("light", 390, NO_CONTRAST), ("dark", 390, COLOURS))
# The figure is an image to axe, and has its words in the list below it; the menu is looked at by itself.
PAGE = {"exclude": [[".menu"], [".plot"]]}
RUN = """async ([where, options]) => (await axe.run(where, {...options, resultTypes: ['violations']}))
    .violations.flatMap(one => one.nodes.map(node => [
        one.id, node.target.join(' '), node.html.slice(0, 120),
        [...node.any, ...node.all, ...node.none].map(check => check.message).join('; ').slice(0, 200),
    ].join(' | ')))"""


@pytest.fixture
def as_alice(alice: Person) -> Client:
    """Signed in by her password: some pages want a proof that it is her, and a forced session has none."""
    client = Client()
    client.post("/sign-in", {"username": "alice", "password": "alice-password"})
    return client


def pages(client: Client, values: dict[str, Any]) -> list[str]:
    """Return the addresses that answer a person with a whole page; parts, data, files and posts are none."""
    return [
        address
        for address in addresses(values)
        if (answer := client.get(address)).status_code == 200
        and answer["Content-Type"].startswith("text/html")
        and "Content-Disposition" not in answer
        and answer.content.lstrip()[:9].lower() == b"<!doctype"
    ]


@asynccontextmanager
async def signed_in(base: str) -> AsyncIterator[BrowserContext]:
    """One browser in which alice is signed in; axe-core is in each of its pages."""
    async with async_playwright() as play:
        browser = await play.chromium.launch(executable_path=CHROMIUM, args=ARGS)
        context = await browser.new_context()
        await context.add_init_script(AXE_SCRIPT)
        page = await context.new_page()
        await page.goto(f"{base}/sign-in")
        await page.fill("#username", "alice")
        await page.fill("#password", "alice-password")
        await page.click("button.main")
        await page.wait_for_url("**/runs")
        await page.close()
        yield context
        await browser.close()


async def violations(page: Page, base: str, path: str) -> list[str]:
    """Return what axe finds at an address, in each theme and width, with every disclosure open."""
    await page.goto(base + path)
    if await page.locator("[data-stack]").count():
        await page.wait_for_selector(".js-plotly-plot .main-svg", timeout=30_000)
    await page.evaluate("document.querySelectorAll('main details').forEach(one => { one.open = true })")
    found = []
    for theme, width, options in VIEWS:
        await page.set_viewport_size({"width": width, "height": 900})
        await page.emulate_media(color_scheme=theme)
        found += [f"{path} {theme} {width}: {line}" for line in await page.evaluate(RUN, [PAGE, options])]
    return found


async def every_violation(base: str, paths: Iterable[str], *, as_stranger: Iterable[str] = ()) -> list[str]:
    """Return what axe finds on all these pages, in as many windows at once as there is room for."""
    async with signed_in(base) as context:

        async def window(waiting: Iterator[str]) -> list[str]:
            page = await context.new_page()
            return [line for path in waiting for line in await violations(page, base, path)]

        shared = iter(paths)  # each window takes the next
        found = await asyncio.gather(*(window(shared) for _ in range(WINDOWS)))
        await context.clear_cookies()
        return [*chain.from_iterable(found), *await window(iter(as_stranger))]


def test_an_empty_server(live_server, as_alice: Client) -> None:
    there = pages(as_alice, {})
    assert {"/runs", "/incidents", "/vault", "/vault/open", "/ledger", "/system"} <= set(there)
    paths = [*there, "/no-such-page"]
    assert asyncio.run(every_violation(live_server.url, paths, as_stranger=["/sign-in"])) == []


def test_a_server_with_an_incident(live_server, as_alice: Client, full: dict[str, Any]) -> None:
    assert names() <= set(full), "say in the fixture `full` what stands for it"
    by_hand = Dossier.objects.exclude(pk=full["dossier_id"]).get().pk
    there = pages(as_alice, full)
    assert len(there) >= 20
    there += [
        "/vault/open?run=gpt-16",
        f"/vault/{by_hand}",
        f"/vault/{by_hand}/close",
        f"/vault/{by_hand}/release",
        f"/vault/{by_hand}/extend?until=2099-01-01",
        "/search?q=gpt",
        "/runs?q=nothing-fits",
    ]
    # The longest page first, so that no window waits for it alone at the end.
    there.sort(key=lambda path: path != f"/incidents/{full['incident_id']}")
    assert asyncio.run(every_violation(live_server.url, there)) == []


def test_what_opens_over_a_page(live_server, alice: Person) -> None:
    """The list of keys, and the menu of a narrow window."""
    assert asyncio.run(_over(live_server.url)) == []


async def _over(base: str) -> list[str]:
    async with signed_in(base) as context:
        page = await context.new_page()
        await page.set_viewport_size({"width": 390, "height": 844})
        await page.goto(f"{base}/runs")
        # What is behind it cannot be reached while it is open.
        await page.click(".menu summary")
        found: list[str] = await page.evaluate(RUN, [".top", EVERYTHING])
        await page.click(".menu summary")
        await page.click(".foot [data-keys]")
        assert await page.locator("#keys").is_visible()
        return found + list(await page.evaluate(RUN, ["#keys", EVERYTHING]))
