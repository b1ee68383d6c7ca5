"""From request to permit by people in windows of their own, and every refusal in the words they read."""

import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from django.conf import settings
from django.test import Client
from django.utils import timezone
from playwright.sync_api import Browser, Page

from evidence.models import Item
from incidents import approval
from incidents.models import Approval, Incident, Permit, ResumeRequest
from runs.models import Person, Project, Role
from tests.incidents.world import World, held, person
from tests.pages.window import CHROMIUM

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(not Path(CHROMIUM).exists(), reason="not run: needs chromium (apt-packages.txt)"),
]


_PLOTS = re.compile(r"plotly|stack|cells|grid\.png|layers\.png|figure\.json")


class Somebody:
    """A person in a window of their own.

    Deciding needs no script: only who approves runs those of the pages, without the plots. Windows that
    nobody looks at would ask for news all the while.
    """

    def __init__(self, browser: Browser, base: str, name: str) -> None:
        self.base, self.name = base, name
        scripts = name == "priya"
        context = browser.new_context(viewport={"width": 390, "height": 844}, java_script_enabled=scripts)
        if scripts:
            context.route(_PLOTS, lambda route: route.abort())
        session = Client()
        session.force_login(Person.objects.get(username=name))
        cookie = session.cookies[settings.SESSION_COOKIE_NAME].value
        context.add_cookies([{"name": settings.SESSION_COOKIE_NAME, "value": cookie, "url": base}])
        self.page: Page = context.new_page()

    def opens(self, incident: Incident, where: str = "") -> "Somebody":
        self.page.goto(f"{self.base}/incidents/{incident.pk}{where}", wait_until="domcontentloaded")
        return self

    def reads(self, *words: str) -> None:
        text = " ".join(self.page.inner_text("main").replace("\u00a0", " ").split())
        for one in words:
            assert one in text, f"{self.name} at {self.page.url} does not read {one!r} in:\n{text}"

    def is_told(self, *words: str) -> None:
        said = " ".join(" ".join(self.page.locator("[role=alert], [role=status]").all_inner_texts()).split())
        for one in words:
            assert one in said.replace("\u00a0", " "), f"{self.name} at {self.page.url} is told {said!r}"

    def sends(self, form: str, **fields: str) -> None:
        """Open the form's disclosure, fill it, and press its button."""
        chosen = self.page.locator(form)
        for summary in chosen.locator("xpath=ancestor::details/summary").all():
            if not summary.locator("xpath=..").evaluate("one => one.open"):
                summary.click()
        for summary in chosen.locator("details:not([open]) > summary").all():
            summary.click()
        for name, value in fields.items():
            chosen.locator(f"[name={name}]").first.fill(value)
        button = self.page.locator(f"button[form={form.removeprefix('#')}]") if form[0] == "#" else None
        (button if button is not None and button.count() else chosen.locator("button").last).click()

    def asks(self, incident: Incident) -> None:
        self.opens(incident)
        self.sends("form[action$='/request']", note="the batch is dropped")

    def approves(self, password: str = "") -> None:
        self.sends("#approve-form", password=password or f"{self.name}-password")


@pytest.fixture
def windows(browser: Browser, live_server, project: Project) -> dict[str, Somebody]:
    """Tomas responds, jonas and priya approve, root is admin; each is signed in."""
    people = {
        "tomas": [Role.RESPONDER],
        "jonas": [Role.APPROVER, Role.RESPONDER],
        "priya": [Role.APPROVER],
        "root": [Role.ADMIN],
    }
    for name, roles in people.items():
        person(project, name, *roles)
    return {name: Somebody(browser, live_server.url, name) for name in people}


def ask(world: World) -> None:
    """Tomas asks, as he did in his window in the first case."""
    incident = world.incident()
    tomas = Person.objects.get(username="tomas")
    approval.request_resume(incident=incident, person=tomas, digest=approval.subject(incident)[1])


def again(world: World) -> Incident:
    """Return the incident with no live request, so that the next case begins like the first."""
    incident = world.incident()
    live = incident.requests.filter(state__in=["open", "approved"]).first()
    if live is not None:
        approval.reject(incident=incident, person=Person.objects.get(username="priya"), why="next case")
    return world.incident()


def test_from_request_to_permit_and_every_refusal_in_words(windows: dict[str, Somebody], project: Project):
    world = held(project)
    tomas, jonas, priya, root = (windows[name] for name in ("tomas", "jonas", "priya", "root"))
    cases: list[Callable[..., None]] = [
        not_by_who_asked,
        not_with_a_wrong_password,
        not_when_the_plan_changed,
        not_when_evidence_changed,
        not_after_it_expired,
        not_after_it_was_rejected,
        not_by_who_edited,
        not_broken_under_another_name,
    ]
    for case in cases:
        again(world)
        case(world, tomas=tomas, jonas=jonas, priya=priya, root=root)
        assert not Permit.objects.filter(state__in=["issued", "exchanged"]).exists(), case.__name__
    again(world)
    it_takes_two(world, tomas=tomas, jonas=jonas, priya=priya)
    the_permit_is_taken(world, tomas)


def not_by_who_asked(world: World, *, jonas: Somebody, **others: Somebody) -> None:
    jonas.asks(world.incident())
    jonas.reads("jonas asked")
    jonas.opens(world.incident(), "/approve").reads("You asked. priya may approve.")
    assert jonas.page.locator("button.main:not([aria-disabled=true])").count() == 0


def not_with_a_wrong_password(world: World, *, tomas: Somebody, priya: Somebody, **others: Somebody) -> None:
    ask(world)
    tomas.opens(world.incident(), "/approve").reads("Approver: jonas or priya.")
    priya.opens(world.incident(), "/approve").reads("tomas asks", "step 900, verified")
    priya.approves("not-mine")
    priya.is_told("does not fit")
    assert not Approval.objects.exists()


def not_when_the_plan_changed(world: World, *, tomas: Somebody, priya: Somebody, **others: Somebody) -> None:
    ask(world)
    priya.opens(world.incident(), "/approve")
    tomas.opens(world.incident())
    tomas.page.click("summary:has-text('Change the plan')")
    tomas.page.select_option("#plan-step", "800")
    tomas.sends("form[action$='/plan']", why="one further", change_what="lr", change_to="9e-5")
    tomas.reads("step 800, verified")
    priya.approves()
    priya.is_told("The last request was voided", "checkpoint changed: step 900", "Request again.")


def not_when_evidence_changed(world: World, *, tomas: Somebody, priya: Somebody, **others: Somebody) -> None:
    ask(world)
    priya.opens(world.incident(), "/approve")
    Item.objects.filter(dossier=world.incident().dossier, kind="norms").update(digest="e" * 64)
    priya.approves()
    priya.is_told("Not approved: evidence “", "changed: digest", "Review again.")


def not_after_it_expired(world: World, *, tomas: Somebody, priya: Somebody, **others: Somebody) -> None:
    ask(world)
    priya.opens(world.incident(), "/approve")
    ResumeRequest.objects.filter(state="open").update(expires_at=timezone.now() - timedelta(seconds=1))
    priya.approves()
    priya.is_told("The request expired before it was approved: request again.")


def not_after_it_was_rejected(world: World, *, tomas: Somebody, priya: Somebody, **others: Somebody) -> None:
    ask(world)
    priya.opens(world.incident(), "/approve")
    priya.page.click("#reject summary")
    priya.sends("form[action$='/reject']", why="look at node-00 first")
    priya.is_told("Rejected. The run stays held.")
    tomas.opens(world.incident(), "/approve").reads("nobody has asked yet")
    tomas.opens(world.incident(), "#approval")
    tomas.page.click("summary:has-text('All requests')")
    tomas.reads("look at node-00 first")


def not_by_who_edited(world: World, *, tomas: Somebody, jonas: Somebody, **others: Somebody) -> None:
    jonas.opens(world.incident())
    jonas.page.click("summary:has-text('Change the plan')")
    jonas.sends("form[action$='/plan']", why="leave it out", nodes="node-01")
    jonas.reads("nodes node-01")
    ask(world)
    jonas.opens(world.incident(), "/approve").reads("You edited the plan. priya may approve.")


def not_broken_under_another_name(world: World, *, root: Somebody, **others: Somebody) -> None:
    root.opens(world.incident())
    glass = "form[action$='/break-glass']"
    root.sends(glass, why="the cluster leaves", run_name="another", password="root-password")
    root.is_told(f"Type the run's name, {world.run.slug}, to break the glass.")


def it_takes_two(world: World, *, tomas: Somebody, jonas: Somebody, priya: Somebody) -> None:
    """Two approvers by policy; who edited may not be one of them, so another joins."""
    world.policy(resume={"approvers": 2})
    person(world.run.project, "vera", Role.APPROVER)
    tomas.asks(world.incident())
    priya.opens(world.incident(), "/approve").reads("0 of 2 approved")
    priya.approves()
    priya.is_told("Your approval is recorded.")
    priya.reads("You approved; another approver is needed.")
    assert not Permit.objects.filter(state="issued").exists()
    browser = jonas.page.context.browser
    assert browser is not None
    vera = Somebody(browser, jonas.base, "vera")
    vera.opens(world.incident(), "/approve").reads("1 of 2 approved")
    vera.approves()
    vera.is_told("Approved by priya", "by vera", "The permit is valid until")
    assert Permit.objects.filter(state="issued").count() == 1


def the_permit_is_taken(world: World, tomas: Somebody) -> None:
    incident = world.incident()
    document = approval.exchange(
        run=world.run, incident_id=incident.pk, attempt=2, webhook_id="w", supervisor="slurm-7"
    )
    assert document["exclusions"]["nodes"] == ["node-01"]
    assert [change["what"] for change in document["changes"]] == ["lr"]
    tomas.opens(incident).reads("Permit taken", "its launch is not reported yet")
    world.launch(2, document["permit"])
    tomas.opens(world.incident()).reads("lr = 9e-5 (changes the regime: not comparable)")
