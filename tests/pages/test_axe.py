"""No page breaks a rule of WCAG 2.2 AA that axe-core sees: light, dark, wide, narrow, empty and full.

The pages are those of the URL map, so that a new one is looked at as soon as it has an address.
"""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from axe_playwright_python.base import AXE_SCRIPT
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver
from playwright.sync_api import Browser, Page

from evidence.actions import note_access, open_dossier
from evidence.models import Dossier, StoredObject, VaultRequest
from incidents import ack_links
from runs.models import Person
from tests.pages import seed
from tests.pages.window import CHROMIUM

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(not Path(CHROMIUM).exists(), reason="not run: needs chromium (apt-packages.txt)"),
]
AA = {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]}
# All that another theme can change; the rest of the page is the same in both.
COLOURS = {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}
WIDTHS = (1440, 390)
RUN = """async (only) => (await axe.run({exclude: [['.menu']]}, {runOnly: only, resultTypes: ['violations']}))
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


def pages(client: Client, values: dict[str, Any]) -> list[str]:
    """Return the addresses that answer a person with a whole page; parts, data, files and posts are none."""
    named = [route for route in routes() if set(re.findall(r"<(?:\w+:)?(\w+)>", route)) <= set(values)]
    filled = [re.sub(r"<(?:\w+:)?(\w+)>", lambda match: str(values[match[1]]), route) for route in named]
    return [
        address
        for address in filled
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
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        for theme, only in (("light", AA), ("dark", COLOURS)):
            page.emulate_media(color_scheme=theme)
            found += [f"/{path} {theme} {width}: {line}" for line in page.evaluate(RUN, only)]
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


@pytest.fixture
def full(incident: SimpleNamespace, alice: Person, bob: Person) -> dict[str, Any]:
    """A held run with an incident and a request, a dossier of each kind, and what people did with them."""
    dossier = incident.row.dossier
    seed.work_through()
    seed.ask_to_resume(incident.row, "bob")
    one = StoredObject.objects.filter(item__dossier=dossier).first()
    note_access(dossier=dossier, person=bob, what="downloaded", object_sha256=one.sha256, path="rank-0.log")
    by_hand = open_dossier(run=incident.run, person=alice, why="the loss looks odd")
    VaultRequest.objects.create(
        dossier=by_hand,
        kind="release",
        why="the cause is known",
        subject={"holds": 2, "objects": 3, "bytes": 10_000},
        requested_by=str(bob.opaque_id),
        requested_at=by_hand.opened_at,
    )
    return {
        "slug": "gpt-16",
        "incident_id": incident.id,
        "dossier_id": dossier.pk,
        "item_id": one.item_id,
        "object_id": one.pk,
        "sha256": one.sha256,
        "name": "evidence",
        "token": ack_links.token(incident.row, alice),
        "page_id": 1,  # only posted to
    }


def test_a_server_with_an_incident(page: Page, live_server, as_alice: Client, full: dict[str, Any]) -> None:
    unknown = {name for route in routes() for name in re.findall(r"<(?:\w+:)?(\w+)>", route)} - set(full)
    assert unknown == set(), "say in `full` what stands for it"
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
    over = "{exclude: [['.menu']]}"
    page.set_viewport_size({"width": 390, "height": 844})
    sign_in(page, live_server.url, "alice")
    # What is behind it cannot be reached while it is open.
    page.click(".menu summary")
    assert page.evaluate(RUN.replace(over, "'.top'"), AA) == []
    page.click(".menu summary")
    page.click(".foot [data-keys]")
    assert page.locator("#keys").is_visible()
    assert page.evaluate(RUN.replace(over, "'#keys'"), AA) == []
