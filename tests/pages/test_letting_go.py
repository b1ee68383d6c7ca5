"""A dossier's whole life by two people in a browser, carried out by a worker of its own process."""

import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from celery import Celery
from django.conf import LazySettings, settings
from django.db import connection
from playwright.sync_api import Browser, Page

from andon.bag_trees import open_tree
from andon.bag_verify import verify
from andon.policy import EvidenceRule, Policy
from config.embedded import processes
from config.management.commands import up
from evidence.custody import verify_custody
from evidence.models import Dossier, Item, SampleKey, StoredObject, VaultRequest
from runs.keys import server_key
from runs.models import Membership, Person, Role
from runs.policies import set_policy
from tests.config.up import ROOT, clean_environment
from tests.evidence import world
from tests.faults.shop import database_url
from tests.pages.window import CHROMIUM
from tests.servers import start_valkey

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(not Path(CHROMIUM).exists(), reason="not run: needs chromium (apt-packages.txt)"),
]
SOON_S = 60.0
Until = Callable[[str, Callable[[], object]], None]


@pytest.fixture
def vault(settings: LazySettings, tmp_path: Path) -> Path:
    """A directory vault, and a directory from which samples may be read."""
    settings.VAULT_URL = f"file://{tmp_path}/vault"
    settings.DATA_DIR = tmp_path / "data"
    settings.SOURCE_ROOTS = [tmp_path]
    return tmp_path / "vault"


@pytest.fixture
def until(transactional_db: None, vault: Path, tmp_path: Path) -> Iterator[Until]:
    """Wait for what a real worker does; it is rung as the scheduler rings it, only oftener."""
    broker = start_valkey(tmp_path)
    environment = {
        "ANDON_DATABASE_URL": database_url("andon_app"),
        "ANDON_DATABASE_OWNER_URL": database_url(""),
        "ANDON_BROKER_URL": broker.url(),
        "ANDON_VAULT_URL": settings.VAULT_URL,
        "ANDON_SOURCE_ROOTS": str(tmp_path),
        "ANDON_DATA_DIR": str(settings.DATA_DIR),
        "ANDON_SIGNING_KEY_FILE": str(settings.SIGNING_KEY_FILE),
    }
    with (tmp_path / "worker.log").open("ab") as log:
        worker = processes.spawn(
            [sys.executable, "-m", "celery", "-A", "config.celery", "worker", *up.WORKER_OPTIONS],
            environment=clean_environment(**environment),
            output=log,
            directory=ROOT,
        )
    scheduler = Celery("scheduler", broker=broker.url(), set_as_current=False)

    def waited(what: str, holds: Callable[[], object]) -> None:
        deadline = time.monotonic() + SOON_S
        while not holds():
            assert time.monotonic() < deadline, f"never: {what}\n{(tmp_path / 'worker.log').read_text()}"
            scheduler.send_task("runs.tasks.sweep_work", queue=settings.CELERY_TASK_DEFAULT_QUEUE, expires=5)
            time.sleep(0.2)

    yield waited
    scheduler.close()
    processes.stop(worker, signal.SIGKILL, 5)
    assert broker.process is not None
    processes.stop(broker.process, signal.SIGKILL, 5)


class Somebody:
    """A person in a window of their own, at one dossier."""

    def __init__(self, browser: Browser, base: str, name: str) -> None:
        self.base, self.name, self.dossier = base, name, 0
        self.page: Page = browser.new_context().new_page()
        self.page.goto(f"{base}/sign-in")
        self.page.fill("#username", name)
        self.page.fill("#password", f"{name}-password")
        self.page.click("button.main")

    def reads(self, step: str, *words: str) -> None:
        """Open a page of the dossier and find words on it."""
        self.page.goto(f"{self.base}/vault/{self.dossier}{step and '/'}{step}")
        self.finds(*words)

    def finds(self, *words: str) -> None:
        text = self.page.inner_text("main").replace("\u00a0", " ")
        for one in words:
            assert one in text, f"{self.name} at {self.page.url} does not read {one!r} in:\n{text}"

    def is_refused(self, *words: str) -> None:
        alert = self.page.inner_text("[role=alert]")
        for one in words:
            assert one in alert, f"{self.name} at {self.page.url} reads {alert!r}"

    def asks(self, step: str, why: str, *words: str) -> None:
        """Read a step's page, give a reason, and press its button."""
        self.reads(step, *words)
        self.page.fill("#ask-why", why)
        self.page.click("main form .btn.main")

    def agrees(self, step: str, password: str) -> None:
        self.reads(step)
        self.page.fill("#agree-pw", password)
        self.page.click("main form .btn.main")

    def finds_shut(self, step: str, *words: str) -> None:
        """Read why a step's button is shut."""
        self.reads(step, *words)
        shut = self.page.locator("main .btn[aria-disabled=true]")
        assert shut.count() == 1
        assert self.page.locator("main .btn.main:not([aria-disabled=true])").count() == 0


@pytest.fixture
def bob(bob: Person) -> Person:
    Membership.objects.filter(person=bob).update(roles=[Role.RESPONDER])
    return bob


def test_two_people_keep_take_out_lock_erase_release_and_delete(
    browser: Browser,
    live_server,
    alice: Person,
    bob: Person,
    vault: Path,
    until: Until,
    tmp_path: Path,
) -> None:
    run = world.make_run()
    samples = tmp_path / "batch.jsonl"
    samples.write_bytes(b"what somebody wrote")
    world.post(run, "artifact.available", data={"kind": "raw_samples", "uri": samples.as_uri()})
    rules = (EvidenceRule("topology", lock="compliance"), EvidenceRule("raw_samples"))
    set_policy(run=run, document=Policy(evidence=rules).document(), person=None, why="short")
    asker, other = Somebody(browser, live_server.url, "bob"), Somebody(browser, live_server.url, "alice")

    # Opened by hand: a reason of blanks is refused, then the worker collects.
    page = asker.page
    page.goto(f"{live_server.url}/vault/open?run=pt-13b")
    page.fill("#open-why", "  ")
    page.click("main .btn.main")
    asker.is_refused("Say why this is kept.")
    page.fill("#open-why", "a smell")
    page.click("main .btn.main")
    page.wait_for_url(re.compile(r"/vault/\d+$"))
    dossier = Dossier.objects.get()
    asker.dossier = other.dossier = dossier.pk
    until("sealed", lambda: {item.state for item in dossier.items.all()} == {"sealed"})
    page.wait_for_selector("#items-part li:nth-child(2) [aria-label=sealed]", timeout=30_000)

    # While it is open nothing else can be pressed; it is closed with a reason.
    other.finds_shut("release", "It is still open")
    other.finds_shut("compliance", "its dates are not final")
    other.finds_shut("deletion", "It has to be released first")
    asker.asks("close", " ", "the last of its items is kept until")
    asker.is_refused("Say why nothing more will be collected.")
    asker.asks("close", "nothing more to come")
    asker.reads("", "Closed")
    other.finds_shut("close", "It was closed on")
    other.finds_shut("release", "is kept until")

    # Kept longer: not by a responder, not to an earlier day, and at a price that was read.
    asker.reads("extend", "An approver, vault officer or admin of the project may keep it longer.")
    other.reads("extend", "Opens once you chose a day and read what it costs.")
    for day, words in (("2026-01-01", "kept that long already"), ("2099-01-01", "More than ten years ahead")):
        other.page.fill("#step-until", day)
        other.page.click("main .btn.main")
        other.is_refused(words)
    other.page.fill("#step-until", f"{world.now().year + 2}-03-01")
    other.page.click("main .btn.main")
    other.finds("Costs longer", "in 2 items")
    other.page.fill("#ask-why", "an audit")
    other.page.click("main form .btn.main")
    other.finds(f"1 Mar {world.now().year + 2} 23:59 UTC, the last of its items")

    # COMPLIANCE: never alone, never without the password.
    asker.asks("compliance", "the regulator asks", "topology", "GB × days")
    asker.finds("You asked.", "alice may agree.")
    assert page.locator("#agree-pw").count() == 0
    other.agrees("compliance", "a guess")
    other.is_refused("the password does not fit")
    assert Item.objects.get(kind="topology").lock == "legal_hold"
    other.agrees("compliance", "alice-password")
    until("locked", lambda: Item.objects.get(kind="topology").lock == "compliance")
    other.finds_shut("compliance", "or all have it")

    # What is taken out checks without the server.
    asker.reads("", "what people took out")
    bag = saved(page, "Export bag", tmp_path)
    report = verify(open_tree(bag), server_key().key_id)
    assert (report.problems, report.pinned, report.not_checked) == ([], True, [])
    asker.reads(f"items/{Item.objects.get(kind='topology').pk}", "secrets were masked before")
    assert '"world_size"' in saved(page, "Download", tmp_path).read_text()
    asker.reads("", "exported bag", "downloaded", "topology.json")

    # Raw samples: gone as soon as the second person agrees.
    asker.asks("erasure", "a person asked", "files of raw samples")
    other.agrees("erasure", "alice-password")
    other.finds_shut("erasure", "their key is erased")
    assert SampleKey.objects.get().key is None

    # Release: declined once, then agreed to, and the worker lets go.
    dates_pass()
    other.finds_shut("deletion", "It has to be released first")
    asker.asks("release", "the cause is known", "nothing")
    other.reads("release", "bob asked", "the cause is known")
    other.page.click("main summary")
    other.page.fill("#decline-why", "not before Friday")
    other.page.click("main details .btn")
    asker.reads("release", "Declined by alice", "not before Friday")
    asker.asks("release", "it is Friday")
    other.agrees("release", "alice-password")
    done = VaultRequest.objects.filter(state="done")
    until("released", lambda: done.filter(kind="release").exists())
    asker.reads("", "Released")
    asker.finds_shut("release", "It was released on")

    # Deletion: the bytes go, what was there stays readable, and the chain holds.
    asker.asks("deletion", "no longer needed", "This cannot be undone.")
    asker.finds("You asked.")
    other.agrees("deletion", "alice-password")
    until("deleted", lambda: done.filter(kind="deletion").exists())
    other.reads("", "Deleted", "objects deleted", "deletion agreed")
    other.finds_shut("deletion", "Its objects were deleted on")
    other.reads(f"items/{Item.objects.get(kind='topology').pk}", "topology.json", "deleted")
    assert not [path for path in (vault / "objects").rglob("*") if path.is_file()]
    assert not StoredObject.objects.filter(deleted_at=None).exists()
    assert verify_custody(dossier) == []


def saved(page: Page, button: str, into: Path) -> Path:
    """Press a button and return what the browser saved, under the name it was given."""
    with page.expect_download() as got:
        page.get_by_role("button", name=button).click()
    path = into / got.value.suggested_filename
    got.value.save_as(path)
    return path


def dates_pass() -> None:
    """Set the dates back, which no role of the server may: a test cannot wait for two years."""
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE evidence_item DISABLE TRIGGER USER")
        cursor.execute("UPDATE evidence_item SET retain_until = now() - interval '1 day'")
        cursor.execute("ALTER TABLE evidence_item ENABLE TRIGGER USER")
