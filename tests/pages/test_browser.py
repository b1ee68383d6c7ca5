"""The pages in a real browser: drawn, live, reachable by keyboard, and never wider than a phone."""

import re
from pathlib import Path

import pytest

from tests.pages import seed
from tests.pages.window import CHROMIUM, drawn, until

# The elements that reach past the right edge, apart from what may scroll by itself.
TOO_WIDE = """Array.from(document.querySelectorAll('body *'))
    .filter(e => e.getBoundingClientRect().right > innerWidth + 1)
    .map(e => e.tagName + ' ' + e.textContent.trim().slice(0, 40)).slice(-5)"""

META = "document.querySelector('.plot').layout.meta"

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(not Path(CHROMIUM).exists(), reason="not run: needs chromium (apt-packages.txt)"),
]


def test_hover_and_keys_name_the_right_cell(open_page, incident):
    page = open_page("bob", f"/incidents/{incident.id}")
    drawn(page)
    read = page.locator("#read")
    box = page.locator(".cells").bounding_box()
    shown = page.evaluate("document.querySelector('.plot').layout.meta.steps")
    steps = shown[1] - shown[0] + 1
    x = box["x"] + (incident.step - shown[0] + 0.5) / steps * box["width"]
    y = box["y"] + (13 + 0.5) / 16 * box["height"]
    page.mouse.move(x - 40, y - 60)
    page.mouse.move(x, y)
    until(page, "document.querySelector('#read').textContent.includes('rank 13 on node-01')")
    assert re.search(
        rf"step {incident.step}, rank 13 on node-01, GPU 5: nonfinite in backward", read.inner_text()
    )
    until(page, "document.querySelector('#read').textContent.includes('loss 2.113')")

    page.keyboard.press("f")
    until(page, "document.activeElement.getAttribute('role') === 'application'")
    page.keyboard.press("ArrowUp")
    until(page, f"document.querySelector('#read').textContent.includes('step {incident.step}, rank 12')")
    page.keyboard.press("n")
    assert "rank 13" in read.inner_text() or f"step {incident.step + 1}" in read.inner_text()


def test_the_tile_in_the_figure_is_the_one_the_server_made(open_page, incident):
    page = open_page("bob", f"/incidents/{incident.id}", theme="dark")
    drawn(page)
    sources = page.evaluate(
        "document.querySelector('.plot').data.filter(t => t.type === 'image').map(t => t.source.slice(0, 22))"
    )
    assert sources == ["data:image/png;base64,"] * 2
    assert page.evaluate("document.querySelector('.plot').data[0].meta.tile").count("theme=dark") == 1


def test_zoom_keeps_the_view_in_the_address_and_the_ring(open_page, incident):
    page = open_page("bob", f"/incidents/{incident.id}")
    drawn(page)
    page.focus(".cells")
    page.keyboard.press("+")
    until(page, "new URLSearchParams(location.search).get('steps') !== null")
    until(page, "document.querySelector('.plot').layout.meta.steps[0] > 60")
    rings = page.evaluate(
        "document.querySelector('.plot').layout.shapes.filter(s => s.type === 'circle').length"
    )
    assert rings >= 2
    page.click("[data-zoom=first]")
    until(page, "new URLSearchParams(location.search).get('steps') === null")


def test_a_change_by_another_person_appears_without_reloading(open_page, alice, incident):
    from incidents import actions, duties

    page = open_page("bob", f"/incidents/{incident.id}")
    assert "nobody has acknowledged it" in page.inner_text("#answers")
    page.evaluate("window.same = true")
    actions.acknowledge(incident=incident.row, person=alice)
    until(page, "document.querySelector('#answers').textContent.includes('acknowledged by alice')")
    assert page.evaluate("window.same")
    # Narrowed to what people did, it stays so in the address and when the part is swapped.
    page.click("[data-timeline=people]")
    assert "by=people" in page.url
    shown = "Array.from(document.querySelectorAll('#timeline tr[data-by]')).filter(r => r.offsetParent)"
    poll = "htmx.trigger(document.getElementById('timeline-part'), 'andon:tick')"
    page.evaluate(poll)
    until(page, f"{shown}.length === 1 && {shown}[0].textContent.includes('alice')")
    duties.give(incident=incident.row, duty="lead", person=alice, to="alice")
    page.evaluate(poll)
    until(page, f"{shown}.length === 2")
    assert page.evaluate(f"new Set({shown}.map(r => r.dataset.by)).size") == 1


def test_a_part_that_holds_an_edited_form_is_not_swapped(open_page, alice, incident):
    from incidents import actions

    page = open_page("bob", f"/incidents/{incident.id}")
    page.evaluate("document.querySelectorAll('#plan details').forEach(d => { d.open = true })")
    page.fill("#plan-why", "half a sentence")
    actions.change_plan(incident=incident.row, person=alice, kind="rollback_and_replay", why="other hands")
    until(page, "document.querySelector('#plan').textContent.includes('Changed since you opened it')")
    assert page.input_value("#plan-why") == "half a sentence"


def test_keys_reach_every_page_and_list_themselves(open_page, incident):
    page = open_page("bob", "/runs")
    page.keyboard.press("?")
    assert page.locator("#keys").is_visible()
    page.keyboard.press("Escape")
    until(page, "!document.getElementById('keys').open")
    for _ in range(10):  # Chromium gives the focus back in its own time after a dialog closed
        page.keyboard.press("/")
        if page.evaluate("document.activeElement.id") == "find":
            break
        page.wait_for_timeout(100)
    assert page.evaluate("document.activeElement.id") == "find"
    page.keyboard.press("Escape")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/runs/gpt-16")
    page.keyboard.press("g")
    page.keyboard.press("i")
    page.wait_for_url("**/incidents")


@pytest.mark.parametrize("width", [390, 320])
def test_no_page_scrolls_sideways_on_a_phone(open_page, incident, width):
    page = open_page("bob", "/runs", width=width, height=844)
    for path in (
        "/runs",
        "/runs/gpt-16",
        "/incidents",
        f"/incidents/{incident.id}",
        f"/incidents/{incident.id}/approve",
        "/vault",
        f"/vault/{incident.row.dossier_id}",
        f"/vault/{incident.row.dossier_id}/items/{incident.row.dossier.items.first().pk}",
        f"/vault/{incident.row.dossier_id}/custody",
        f"/vault/{incident.row.dossier_id}/release",
        f"/vault/{incident.row.dossier_id}/extend",
        f"/vault/{incident.row.dossier_id}/compliance",
        "/vault/open?run=gpt-16",
        "/runs/gpt-16/ledger",
        "/ledger",
        "/system",
        "/search?q=gpt",
    ):
        page.goto(page.url.split("/", 3)[0] + "//" + page.url.split("/", 3)[2] + path)
        page.wait_for_load_state("networkidle")
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, f"{path} is {wide} px wide: {page.evaluate(TOO_WIDE)}"


def test_a_phone_shows_the_four_answers_and_the_main_button_at_once(open_page, incident):
    page = open_page("bob", f"/incidents/{incident.id}", width=390, height=844)
    main = page.locator(".act .btn.main")
    assert main.inner_text() == "Acknowledge"
    assert main.bounding_box()["height"] >= 44
    last = page.locator(".answers > div").nth(3).bounding_box()
    assert last["y"] + last["height"] < main.bounding_box()["y"] + 1


def test_the_stack_says_when_it_cannot_be_loaded_and_tries_again(open_page, incident):
    page = open_page("bob", f"/incidents/{incident.id}")
    drawn(page)
    page.route("**/figure.json**", lambda route: route.abort())
    page.focus(".cells")
    page.keyboard.press("-")
    page.wait_for_selector(".problem")
    assert "Could not load" in page.inner_text(".problem")
    page.unroute("**/figure.json**")
    page.click(".problem button")
    page.wait_for_selector(".problem", state="detached")


def test_an_empty_server_shows_what_to_do_first(open_page, alice):
    page = open_page("alice", "/runs")
    assert "No runs yet" in page.inner_text("main")


def test_the_password_that_signs_is_never_under_the_bar(open_page, incident):
    seed.ask_to_resume(incident.row, "bob")
    page = open_page("alice", f"/incidents/{incident.id}/approve", width=390, height=844)
    on_top = """(() => {
        const box = document.getElementById('password').getBoundingClientRect();
        const there = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
        return box.bottom <= innerHeight && there.id === 'password';
    })()"""
    assert page.evaluate(on_top)
    page.evaluate("window.scrollTo(0, document.documentElement.scrollHeight)")
    assert page.evaluate(on_top)
    # The last thing in the flow stands clear of the bar.
    last = page.locator("#reject summary").bounding_box()
    assert last["y"] + last["height"] <= page.locator(".act").bounding_box()["y"]


def test_a_phone_may_acknowledge_and_then_reach_request_and_approve(open_page, incident):
    page = open_page("bob", f"/incidents/{incident.id}", width=390, height=844)
    there = page.locator(".act .btn")
    assert {"Acknowledge", "Request resume"} <= set(there.all_inner_texts())
    assert not page.locator(".answers .btns").is_visible()  # each button stands once
    assert min(button.bounding_box()["height"] for button in there.all()) >= 44
    there.filter(has_text="Acknowledge").click()
    page.wait_for_load_state("networkidle")
    assert "acknowledged by bob" in page.inner_text(".meta")
    assert "Request resume" in page.inner_text(".act")


def _cell(page, step, row):
    """Return where a cell of the grid lies on the page."""
    box = page.locator(".cells").bounding_box()
    steps, rows = page.evaluate(f"{META}.steps"), page.evaluate(f"{META}.ranks")
    x = box["x"] + (step - steps[0] + 0.5) / (steps[1] - steps[0] + 1) * box["width"]
    return x, box["y"] + (row - rows[0] + 0.5) / (rows[1] - rows[0] + 1) * box["height"]


def test_a_box_zooms_the_overview_pans_and_hover_names_the_rank_in_any_order(open_page, incident):
    page = open_page("bob", f"/incidents/{incident.id}")
    drawn(page)
    _zoom_and_pan(page, incident)
    page.click("text=First failure on top")
    until(page, f"{META}.order.sort === 'failure'")
    # node-01 failed first, so its ranks 8 to 15 stand above those of node-00.
    x, y = _cell(page, incident.step, 5)
    page.mouse.move(x - 30, y + 30)
    page.mouse.move(x, y)
    until(
        page, "document.querySelector('#read').textContent.includes('rank 13 on node-01, GPU 5: nonfinite')"
    )
    assert "sort=failure" in page.url
    rings = page.evaluate(
        "document.querySelector('.plot').layout.shapes.filter(s => s.type === 'circle' && s.yref === 'y2')"
        ".map(s => [s.xanchor, s.yanchor])"
    )
    assert {tuple(ring) for ring in rings} == {(incident.step, 5)}
    page.focus(".cells")
    page.keyboard.press("s")
    until(page, f"{META}.order.sort === 'rank'")
    page.select_option("#rows", "rank")
    until(page, f"{META}.order.rows === 'rank'")
    assert "rows=rank" in page.url


def _zoom_and_pan(page, incident):
    before = page.evaluate(f"{META}.steps")
    (x0, y0), (x1, y1) = _cell(page, incident.step - 60, 4), _cell(page, incident.step - 20, 11)
    page.mouse.move(x0, y0)
    page.mouse.down()
    page.mouse.move((x0 + x1) / 2, (y0 + y1) / 2)
    page.mouse.move(x1, y1)
    page.mouse.up()
    until(page, f"{META}.steps[1] - {META}.steps[0] < {before[1] - before[0] - 50}")
    steps, ranks = page.evaluate(f"{META}.steps"), page.evaluate(f"{META}.ranks")
    assert abs(steps[0] - (incident.step - 60)) <= 1
    assert abs(steps[1] - (incident.step - 20)) <= 1
    assert ranks[0] in (4, 5)
    assert ranks[1] in (10, 11)
    lane = page.locator("[data-over]").bounding_box()
    page.mouse.click(lane["x"] + lane["width"] * 0.2, lane["y"] + 7)
    until(page, f"{META}.steps[1] < {incident.step - 60}")
    page.focus(".cells")
    page.keyboard.press("0")
    until(page, f"{META}.steps[0] === {before[0]} && {META}.ranks[0] === 0")


def test_the_right_edge_follows_and_a_tile_that_does_not_come_is_hatched(open_page, incident):
    page = open_page("bob", f"/incidents/{incident.id}?steps=140-160")
    drawn(page)
    _follows(page, incident)
    page.route("**/grid.png**", lambda route: route.abort())
    page.focus(".cells")
    page.keyboard.press("-")
    page.wait_for_selector(".problem")
    assert "A tile could not be loaded" in page.inner_text(".problem")
    assert page.locator("text=Bad cells as text").is_visible()
    page.unroute("**/grid.png**")
    page.click(".problem button")
    page.wait_for_selector(".problem", state="detached")


def _follows(page, incident):
    page.evaluate("window.same = true")
    name = "document.querySelector('.plot').data.find(t => t.type === 'image').meta.tile"
    before = page.evaluate(name)
    seed.post_events(
        incident.run.slug,
        incident.secret,
        [
            {
                "type": "step",
                "step": incident.step + 2,
                "rank": 3,
                "attempt": 1,
                "data": {"loss": float("nan")},
            }
        ],
    )
    until(page, f"{name} !== {before!r}")
    assert page.evaluate("window.same")


def test_layers_show_another_number_and_a_click_adds_the_line_of_one(open_page, incident):
    page = open_page("bob", f"/incidents/{incident.id}")
    drawn(page)
    page.select_option("#layers-shown", "norm")
    until(page, f"{META}.layers.shown === 'norm'")
    assert page.inner_text("[data-ramp] li:first-child span") != "below 1.5"
    top, height = page.evaluate(f"{META}.rows.layers")
    plot = page.locator(".plot").bounding_box()
    page.mouse.click(plot["x"] + plot["width"] / 2, plot["y"] + top + height * 6.5 / 12)
    until(page, f"{META}.layers.lines.length === 1")
    assert "layers=norm" in page.url
    assert "line=layers.6.attn.qkv" in page.url
    assert "band is median" in page.inner_text("[data-line]")
    page.click("[data-line] button")
    until(page, f"{META}.layers.lines.length === 0")
    assert "line=" not in page.url
