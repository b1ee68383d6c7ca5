"""A failing run as the pages see it: posted through the receiver, opened and frozen by the real code."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
from django.core.cache import cache
from django.db import connections
from django.utils import timezone

from runs.models import Membership, Role
from tests.pages import seed
from tests.pages.window import ARGS, CHROMIUM


@pytest.fixture(autouse=True)
def _no_failures_from_another_test() -> None:
    """Count no wrong password of the test before."""
    cache.clear()


@pytest.fixture
def source_root(settings, tmp_path):
    """A directory from which the server may read checkpoints, and a vault of its own."""
    settings.SOURCE_ROOTS = [tmp_path / "sources"]
    settings.VAULT_URL = f"file://{tmp_path}/vault"
    return tmp_path / "sources"


@pytest.fixture
def incident(project, alice, bob, source_root):
    """A held 16-rank run whose rank 13 went nonfinite; alice approves, bob responds."""
    from incidents.models import Incident

    Membership.objects.filter(person=bob).update(roles=[Role.RESPONDER])
    run, secret, step = seed.failing_run(
        "gpt-16", ranks=16, steps=150, root=source_root, bad_rank=13, saved=(60, 120)
    )
    found = Incident.objects.get(run=run)
    return SimpleNamespace(id=found.pk, row=found, run=run, secret=secret, step=step)


def signed_in_advance(run, writer, signer):
    """A standing approval that is in force, and one that waits for its signature."""
    from incidents.standing_approvals import actions

    made = {
        "project": run.project,
        "person": writer,
        "kinds": ["loss_spike", "crash"],
        "per_day": 2,
        "furthest_steps": 500,
        "widest_skip": 16_000,
        "expires_at": timezone.now() + timedelta(days=7),
        "why": "nights without an approver",
    }
    actions.create(**made)
    one = actions.create(**made, run=run)
    return actions.sign(standing=one, person=signer, digest=one.digest)


def would_have_held(run):
    """What the spike rule saw while it only observed: three strikes of one spike, and another."""
    from runs.models import Finding

    for step in (40, 41, 42, 120):
        last = Finding.objects.create(
            run=run,
            attempt=1,
            kind="loss_spike",
            rule="spike",
            mode="observe",
            severity="halt",
            step=step,
            series="loss",
            score=13.0,
            numbers={"z": 13.0},
            detail="loss 3.1 is 13 MAD above its median",
            detector="spike",
            detector_version="2",
            policy_digest="0" * 64,
            occurred_at=timezone.now(),
            received_at=timezone.now(),
        )
    return last


@pytest.fixture
def full(incident, alice, bob):
    """A held run with an incident and a request, a dossier of each kind, and what people did with them.

    Returns what stands for each name of the URL map.
    """
    from evidence.actions import note_access, open_dossier
    from evidence.models import StoredObject, VaultRequest
    from incidents import ack_links

    dossier = incident.row.dossier
    seed.work_through()
    seed.ask_to_resume(incident.row, "bob")
    standing = signed_in_advance(incident.run, bob, alice)
    finding = would_have_held(incident.run)
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
        "node": "node-01",
        "token": ack_links.token(incident.row, alice),
        "key": "nonsense",  # of mail: nobody's
        "page_id": 1,  # only posted to
        "project": "default",
        "provider_id": "sso",  # none is configured
        "passkey_id": 1,  # nobody's
        "rule": "spike",
        "standing_id": standing.pk,
        "finding_id": finding.pk,
    }


@pytest.fixture(scope="session")
def _collected():
    """Scripts and styles where the server serves them from."""
    from django.core.management import call_command

    call_command("collectstatic", interactive=False, verbosity=0)


@pytest.fixture
def browser(monkeypatch, _collected):
    """A headless Chromium."""
    # Playwright's own event loop must not make Django think that this is asynchronous code.
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "true")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        started = play.chromium.launch(executable_path=CHROMIUM, args=ARGS)
        yield started
        started.close()
        # Under Playwright's loop Django keeps a connection of its own, which nobody else would close.
        connections.close_all()


def _note(complaints, line):
    # A request that a test aborts on purpose is reported by the browser as an error of the network.
    if line.type == "error" and "net::ERR_FAILED" not in line.text:
        complaints.append(line.text)


@pytest.fixture
def open_page(browser, live_server):
    """Open a page as a person; what the console complained of fails the test at its end."""
    complaints: list[str] = []

    def opened(name, path, *, width=1440, height=900, theme="light"):
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda line: _note(complaints, line))
        page.goto(f"{live_server.url}/sign-in?next={path}")
        page.fill("#username", name)
        page.fill("#password", f"{name}-password")
        page.click("button.main")
        page.wait_for_load_state("networkidle")
        return page

    yield opened
    assert complaints == []
