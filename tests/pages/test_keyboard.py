"""Everything without a mouse: from the runs to Approve, keys that can be switched off, focus in sight."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from playwright.sync_api import Page

from incidents.models import Incident
from runs.actions import create_run
from tests.pages import seed
from tests.pages.window import CHROMIUM, drawn, until

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(not Path(CHROMIUM).exists(), reason="not run: needs chromium (apt-packages.txt)"),
]
ACTIVE = "document.activeElement"

# How much of the focused element, in pixels of height, something that sticks to the window covers.
HIDDEN = """(() => {
    const at = document.activeElement, box = at.getBoundingClientRect();
    const stuck = Array.from(document.querySelectorAll('.bar, .act')).filter(one => !one.contains(at)
        && ['sticky', 'fixed'].includes(getComputedStyle(one).position) && one.offsetParent !== undefined);
    const over = stuck.map(one => one.getBoundingClientRect()).map(other =>
        Math.min(box.bottom, other.bottom) - Math.max(box.top, other.top)).filter(height => height > 0);
    const outside = Math.max(0, -box.top) + Math.max(0, box.bottom - innerHeight);
    return {name: at.tagName + '.' + at.className + ' ' + at.textContent.trim().slice(0, 30),
            seen: box.height - outside - over.reduce((sum, height) => sum + height, 0), height: box.height};
})()"""


def tab_to(page: Page, wanted: str, most: int = 120) -> None:
    """Press Tab until the focused element fits a selector."""
    for _ in range(most):
        page.keyboard.press("Tab")
        if page.evaluate(f"{ACTIVE}.matches({wanted!r})"):
            return
    raise AssertionError(f"Tab never reached {wanted}")


def test_triage_from_the_runs_to_approve(open_page, incident: SimpleNamespace) -> None:
    seed.ask_to_resume(incident.row, "bob")
    page = open_page("alice", "/runs")
    press = page.keyboard.press
    press("j")
    assert page.evaluate(f"{ACTIVE}.textContent") == "gpt-16"
    press("g")
    press("i")
    page.wait_for_url("**/incidents")
    press("j")
    press("Enter")
    page.wait_for_url(f"**/incidents/{incident.id}")
    drawn(page)

    # A letter after g is a place and nothing else; there is none under a.
    press("g")
    press("a")
    page.wait_for_timeout(300)
    assert Incident.objects.get(pk=incident.id).acknowledged_at is None
    with page.expect_navigation():
        press("a")
    assert "acknowledged by alice" in page.inner_text(".meta")
    drawn(page)
    press("f")
    until(page, f"{ACTIVE}.getAttribute('role') === 'application'")
    assert f"step {incident.step}, rank 13 on node-01" in page.inner_text("#read")
    press("ArrowUp")
    until(page, "document.querySelector('#read').textContent.includes('rank 12')")
    press("Escape")
    for key, part in (("e", "evidence"), ("t", "timeline"), ("p", "plan")):
        press(key)
        assert page.evaluate(f"{ACTIVE}.id") == part
    press("m")
    assert page.evaluate(f"{ACTIVE}.id") == "note-text"
    page.keyboard.type("looks like one bad sample. j k a")  # keys of the page are letters here
    tab_to(page, "#notes .btn")
    with page.expect_navigation():
        press("Enter")
    assert "one bad sample. j k a" in page.inner_text("#notes")

    press("p")
    tab_to(page, f"a[href='/incidents/{incident.id}/approve']")
    press("Enter")
    page.wait_for_url("**/approve")
    tab_to(page, "#password")
    page.keyboard.type("alice-password")
    tab_to(page, "button[form=approve-form]")
    with page.expect_navigation():
        press("Enter")
    assert "Approved by alice" in page.inner_text("main")
    assert Incident.objects.get(pk=incident.id).state == "approved"


def test_sections_rows_filters_and_the_link_of_a_page(open_page, incident: SimpleNamespace) -> None:
    here = f"/vault/{incident.row.dossier_id}"
    page = open_page("bob", here)
    names = page.evaluate("Array.from(document.querySelectorAll('.bar > a')).map(a => a.hash.slice(1))")
    seen = []
    for _ in names:
        page.keyboard.press("]")
        seen.append(page.evaluate(f"{ACTIVE}.id"))
    assert seen == names
    page.keyboard.press("[")
    assert page.evaluate(f"{ACTIVE}.id") == names[-2]

    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.keyboard.press(".")
    until(page, "document.querySelector('.keys').textContent === 'copied'")
    assert page.evaluate("navigator.clipboard.readText()").endswith(here)
    until(page, "document.querySelector('.keys').textContent.includes('keys')")
    # From http://host there is no such clipboard.
    page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    page.evaluate("history.replaceState(null, '', '?older')")
    page.keyboard.press(".")
    until(page, "document.querySelector('.keys').textContent === 'copied'")
    page.keyboard.press("/")
    page.keyboard.press("Control+v")
    assert page.input_value("#find").endswith(f"{here}?older")

    page.goto(page.url.split("/vault")[0] + "/vault")
    page.keyboard.press("j")
    assert page.evaluate(f"{ACTIVE}.getAttribute('href')") == here
    page.keyboard.press("2")
    page.wait_for_url("**/vault?only=not*sealed")


def test_single_keys_can_be_switched_off_and_on_again(open_page, bob) -> None:
    create_run(name="gpt-16")
    page = open_page("bob", "/runs")
    page.keyboard.press("?")
    tab_to(page, "#keys-off", most=5)
    page.keyboard.press("Space")
    page.keyboard.press("Escape")
    page.reload()
    for key in ("j", "?", "/", "1"):
        page.keyboard.press(key)
    assert page.evaluate(f"{ACTIVE} === document.body && !document.getElementById('keys').open")
    # The button stays, in the bar and in a narrow window at the foot.
    page.set_viewport_size({"width": 800, "height": 900})
    tab_to(page, ".foot [data-keys]")
    page.keyboard.press("Enter")
    tab_to(page, "#keys-off", most=5)
    page.keyboard.press("Space")
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    assert page.evaluate(f"{ACTIVE}.textContent") == "gpt-16"


def test_the_first_stop_skips_ahead_and_focus_is_never_under_what_sticks(
    open_page, incident: SimpleNamespace
) -> None:
    page = open_page("bob", f"/incidents/{incident.id}")
    drawn(page)
    page.evaluate("window.scrollTo(0, 0)")
    page.keyboard.press("Tab")
    assert page.evaluate(f"{ACTIVE}.matches('.skip') && {ACTIVE}.getBoundingClientRect().top >= 0")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate(f"{ACTIVE}.closest('#grid') !== null")

    for width, height in ((1440, 900), (390, 844)):
        page.set_viewport_size({"width": width, "height": height})
        page.reload()
        drawn(page)
        hidden = []
        for way, most in (("Tab", 80), ("Shift+Tab", 30)):
            for _ in range(most):
                page.keyboard.press(way)
                at = page.evaluate(HIDDEN)
                assert not at["name"].startswith("BODY")
                # A region that scrolls by itself is taller than the window: some of it has to be in sight.
                if at["seen"] < min(at["height"], 24) - 1:
                    hidden.append(at)
        assert hidden == []
