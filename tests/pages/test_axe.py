"""No page breaks a rule of WCAG 2.2 AA that axe-core sees: light, dark, wide, narrow, empty and full.

The pages are those of the URL map, so that a new one is looked at as soon as it has an address.
"""

from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.base import AXE_SCRIPT
from django.test import Client
from playwright.sync_api import Browser, Page

from evidence.models import Dossier
from runs.models import Person
from tests.pages.window import CHROMIUM, addresses, names

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(not Path(CHROMIUM).exists(), reason="not run: needs chromium (apt-packages.txt)"),
]
AA = {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]}
EVERYTHING = {"runOnly": AA}
NO_CONTRAST = {"runOnly": AA, "rules": {"color-contrast": {"enabled": False}}}
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
def page(browser: Browser) -> Page:
    """One window for all pages; axe-core is in each of them."""
    page = browser.new_context().new_page()
    page.add_init_script(AXE_SCRIPT)
    return page


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


def violations(page: Page, address: str) -> list[str]:
    """Return what axe finds at an address, in each theme and width, with every disclosure open."""
    page.goto(address)
    if page.locator("[data-stack]").count():
        page.wait_for_selector(".js-plotly-plot .main-svg", timeout=30_000)
    page.evaluate("document.querySelectorAll('main details').forEach(one => { one.open = true })")
    found = []
    path = address.split("/", 3)[3]
    for theme, width, options in VIEWS:
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=theme)
        found += [f"/{path} {theme} {width}: {line}" for line in page.evaluate(RUN, [PAGE, options])]
    return found


def sign_in(page: Page, base: str, name: str) -> None:
    page.goto(f"{base}/sign-in")
    page.fill("#username", name)
    page.fill("#password", f"{name}-password")
    page.click("button.main")
    page.wait_for_url("**/runs")


def test_an_empty_server(page: Page, live_server, as_alice: Client) -> None:
    found = violations(page, f"{live_server.url}/sign-in")
    sign_in(page, live_server.url, "alice")
    there = pages(as_alice, {})
    assert {"/runs", "/incidents", "/vault", "/vault/open", "/ledger", "/system"} <= set(there)
    for path in [*there, "/no-such-page"]:
        found += violations(page, live_server.url + path)
    assert found == []


def test_a_server_with_an_incident(page: Page, live_server, as_alice: Client, full: dict[str, Any]) -> None:
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
    sign_in(page, live_server.url, "alice")
    found = [line for path in there for line in violations(page, live_server.url + path)]
    assert found == []


def test_what_opens_over_a_page(page: Page, live_server, alice: Person) -> None:
    """The list of keys, and the menu of a narrow window."""
    page.set_viewport_size({"width": 390, "height": 844})
    sign_in(page, live_server.url, "alice")
    # What is behind it cannot be reached while it is open.
    page.click(".menu summary")
    assert page.evaluate(RUN, [".top", EVERYTHING]) == []
    page.click(".menu summary")
    page.click(".foot [data-keys]")
    assert page.locator("#keys").is_visible()
    assert page.evaluate(RUN, ["#keys", EVERYTHING]) == []
