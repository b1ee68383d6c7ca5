"""The buttons of a dossier: close it, keep it longer, lock it for good, erase its raw samples."""

from datetime import timedelta
from pathlib import Path

import pytest
from django.conf import LazySettings
from django.test import Client
from django.utils import timezone

from andon.policy import EvidenceRule, Policy, VaultRules
from evidence.models import Dossier, SampleKey, StoredObject, VaultRequest
from evidence.retention.dates import close_dossier
from runs.models import Membership, Person, Project, Role, Run
from runs.policies import set_policy
from runs.work import run_due
from tests.evidence import world
from tests.pages.words import text_of

pytestmark = pytest.mark.django_db(transaction=True)
SHUT = 'aria-disabled="true"'
STEPS = ("close", "extend", "compliance", "erasure", "release", "deletion")


@pytest.fixture(autouse=True)
def stores(settings: LazySettings, tmp_path: Path) -> None:
    """A directory vault, and a directory from which raw samples may be read."""
    settings.VAULT_URL = f"file://{tmp_path}/vault"
    settings.DATA_DIR = tmp_path / "data"
    settings.SOURCE_ROOTS = [tmp_path]


@pytest.fixture
def run(project: Project) -> Run:
    return world.make_run(project=project)


@pytest.fixture
def dossier(run: Run) -> Dossier:
    """Opened by hand, its topology sealed; the policy asks for COMPLIANCE."""
    return sealed(run, EvidenceRule("topology", retain_days=30, lock="compliance"))


@pytest.fixture
def as_viewer(charlie: Person, project: Project) -> Client:
    Membership.objects.create(project=project, person=charlie, roles=[Role.VIEWER])
    client = Client()
    client.force_login(charlie)
    return client


def sealed(run: Run, rule: EvidenceRule) -> Dossier:
    made = world.open_dossier(run, rules=Policy(evidence=(rule,)))
    Dossier.objects.filter(pk=made.pk).update(url="", label="by hand")
    world.work(made)
    assert {item.state for item in made.items.all()} == {"sealed"}
    return made


def words(answer) -> str:
    return text_of(answer).replace("\u00a0", " ")


def day(days: float) -> str:
    return f"{timezone.now() + timedelta(days=days):%Y-%m-%d}"


class TestWhoMay:
    def test_a_stranger_finds_none_of_them(self, as_charlie, dossier):
        for name in STEPS:
            address = f"/vault/{dossier.pk}/{name}"
            assert as_charlie.get(address).status_code == 404, name
            form = {"turn": "ask", "why": "x", "until": day(90)}
            assert as_charlie.post(address, form).status_code == 404, name
        dossier.refresh_from_db()
        assert (dossier.closed_at, VaultRequest.objects.count()) == (None, 0)

    def test_a_viewer_is_told_who_may_and_gets_no_button(self, as_viewer, dossier):
        for name in STEPS:
            address = f"/vault/{dossier.pk}/{name}"
            page = as_viewer.get(address)
            assert page.status_code == 200, name
            assert "of the project may" in words(page), name
            assert 'class="btn' not in page.content.decode().split("<h1>")[1].split("</main>")[0], name
            form = {"turn": "ask", "why": "x", "until": day(90)}
            assert as_viewer.post(address, form).status_code == 403, name
        dossier.refresh_from_db()
        assert (dossier.closed_at, VaultRequest.objects.count()) == (None, 0)

    def test_the_dossier_leads_to_each(self, as_bob, dossier):
        page = as_bob.get(f"/vault/{dossier.pk}").content.decode()
        for name in STEPS:
            assert f'href="/vault/{dossier.pk}/{name}"' in page, name


class TestClose:
    def test_it_closes_with_a_reason_and_says_until_when_before(self, as_bob, bob, dossier):
        here = f"/vault/{dossier.pk}/close"
        page = as_bob.get(here)
        assert f"kept until {timezone.now() + timedelta(days=30):%d %b %Y}" in words(page)
        assert SHUT not in page.content.decode()
        refused = as_bob.post(here, {"why": " "})
        assert (refused.status_code, "Say why nothing more" in words(refused)) == (409, True)
        done = as_bob.post(here, {"why": "nothing more to come"})
        assert (done.status_code, done["Location"]) == (302, f"/vault/{dossier.pk}")
        row = dossier.custody.get(what="closed")
        assert (row.who, row.data["why"]) == (str(bob.opaque_id), "nothing more to come")
        assert "is kept until" in words(as_bob.get(f"/vault/{dossier.pk}/release"))

    def test_a_closed_one_and_one_of_an_incident_show_what_keeps_the_button_shut(self, as_bob, bob, dossier):
        close_dossier(dossier=dossier, person=bob, why="done")
        page = as_bob.get(f"/vault/{dossier.pk}/close")
        assert SHUT in page.content.decode()
        assert "It was closed on" in words(page)
        assert as_bob.post(f"/vault/{dossier.pk}/close", {"why": "again"}).status_code == 409
        Dossier.objects.filter(pk=dossier.pk).update(url="/incidents/7", label="incident 7", closed_at=None)
        page = as_bob.get(f"/vault/{dossier.pk}/close")
        assert SHUT in page.content.decode()
        assert "belongs to incident 7 and closes when that is resolved" in words(page)


class TestKeepLonger:
    def test_a_day_is_chosen_its_cost_is_read_and_then_it_is_kept(self, as_bob, run, dossier):
        StoredObject.objects.filter(item__dossier=dossier).update(bytes_total=5 * 10**9)
        prices = {"cost": {"storage_gb_month_price": 2.0, "currency": "EUR"}}
        set_policy(run=run, document=prices, person=None, why="dear")
        here, until = f"/vault/{dossier.pk}/extend", day(100)
        first = as_bob.get(here).content.decode()
        assert 'type="date"' in first
        assert SHUT in first
        read = as_bob.get(f"{here}?until={until}")
        assert "10.00 EUR a month for 5 GB in 1 item" in words(read)
        assert "up to 86 days longer" in words(read)
        assert SHUT not in read.content.decode()
        assert as_bob.post(here, {"until": until, "why": ""}).status_code == 409
        done = as_bob.post(here, {"until": until, "why": "an audit"})
        assert (done.status_code, done["Location"]) == (302, f"/vault/{dossier.pk}")
        assert f"{dossier.items.get().retain_until:%Y-%m-%d %H:%M:%S}" == f"{until} 23:59:59"

    @pytest.mark.parametrize(
        ("until", "says"),
        [
            (lambda: day(1), "kept that long already"),
            (lambda: day(3700), "More than ten years ahead"),
            (lambda: "soon", "must be a date like"),
            (lambda: "", "must be a date like"),
        ],
        ids=["earlier", "too far", "no date", "empty"],
    )
    def test_a_day_that_cannot_be_is_refused_in_words(self, as_bob, dossier, until, says):
        here, before = f"/vault/{dossier.pk}/extend", dossier.items.get().retain_until
        for answer in (
            as_bob.get(here, {"until": until()}),
            as_bob.post(here, {"until": until(), "why": "an audit"}),
        ):
            assert answer.status_code == 409
            assert says in words(answer)
        assert as_bob.post(here, {"why": "an audit"}).status_code == 409
        assert dossier.items.get().retain_until == before

    def test_a_responder_alone_may_not(self, as_bob, bob, dossier):
        Membership.objects.filter(person=bob).update(roles=[Role.RESPONDER])
        assert "An approver, vault officer or admin" in words(as_bob.get(f"/vault/{dossier.pk}/extend"))
        form = {"until": day(100), "why": "an audit"}
        assert as_bob.post(f"/vault/{dossier.pk}/extend", form).status_code == 403

    def test_a_released_one_shows_what_keeps_the_button_shut(self, as_bob, dossier):
        Dossier.objects.filter(pk=dossier.pk).update(released_at=timezone.now())
        page = as_bob.get(f"/vault/{dossier.pk}/extend")
        assert SHUT in page.content.decode()
        assert "It was released on" in words(page)


class TestCompliance:
    def test_an_open_dossier_or_no_budget_keeps_the_button_shut(self, as_bob, bob, run, dossier):
        here = f"/vault/{dossier.pk}/compliance"
        page = as_bob.get(here)
        assert SHUT in page.content.decode()
        assert "its dates are not final" in words(page)
        close_dossier(dossier=dossier, person=bob, why="done")
        none = Policy(vault=VaultRules(compliance_gb_days=0))
        set_policy(run=run, document=none.document(), person=bob, why="nothing for good")
        page = as_bob.get(here)
        assert SHUT in page.content.decode()
        assert "It needs 1 GB × days; 0 of the run's 0 are used" in words(page)
        assert as_bob.post(here, {"turn": "ask", "why": "the regulator"}).status_code == 409

    def test_two_people_confirm_what_both_read(self, as_bob, as_alice, bob, dossier):
        close_dossier(dossier=dossier, person=bob, why="done")
        here = f"/vault/{dossier.pk}/compliance"
        item = dossier.items.get()
        until, size = f"until {item.retain_until:%d %b %Y %H:%M} UTC", item.stored_objects.get().bytes_total
        before = words(as_bob.get(here))
        assert "0 of the run's 30,000 GB × days are used" in before
        as_bob.post(here, {"turn": "ask", "why": "the regulator asks"})
        asked = VaultRequest.objects.get()
        assert asked.subject["bytes"] == size
        after = words(as_alice.get(here))
        for page in (before, after):
            assert until in page
            assert "1 GB × days" in page
            assert "0.00 USD a month" in page
        turn = {"turn": "agree", "request": asked.pk}
        assert as_bob.post(here, {**turn, "password": "bob-password"}).status_code == 403
        assert as_alice.post(here, {**turn, "password": "guess"}).status_code == 403
        assert dossier.items.get().lock == "legal_hold"
        assert as_alice.post(here, {**turn, "password": "alice-password"}).status_code == 302
        run_due()
        assert dossier.items.get().lock == "compliance"
        page = words(as_bob.get(here))
        assert "1 of the run's 30,000 GB × days are used" in page
        assert "all have it" in page
        assert "It has no item whose date can move" in words(as_bob.get(f"/vault/{dossier.pk}/extend"))


class TestErasure:
    @pytest.fixture
    def samples(self, run, tmp_path):
        """A dossier with raw samples that can be read."""
        file = tmp_path / "batch.jsonl"
        file.write_bytes(b"what somebody wrote")
        world.post(run, "artifact.available", data={"kind": "raw_samples", "uri": file.as_uri()})
        return sealed(run, EvidenceRule("raw_samples"))

    def test_without_raw_samples_the_button_is_shut(self, as_bob, dossier):
        page = as_bob.get(f"/vault/{dossier.pk}/erasure")
        assert SHUT in page.content.decode()
        assert "holds no raw samples" in words(page)

    def test_two_people_erase_them_while_the_dossier_is_open(self, as_bob, as_alice, samples):
        here = f"/vault/{samples.pk}/erasure"
        assert "files of raw samples 1" in words(as_bob.get(here))
        as_bob.post(here, {"turn": "ask", "why": "a person asked"})
        turn = {"turn": "agree", "request": VaultRequest.objects.get().pk}
        assert as_bob.post(here, {**turn, "password": "bob-password"}).status_code == 403
        assert SampleKey.objects.get(dossier=samples).key is not None
        assert as_alice.post(here, {**turn, "password": "alice-password"}).status_code == 302
        assert SampleKey.objects.get(dossier=samples).key is None
        assert "their key is erased" in words(as_alice.get(here))

    def test_who_asked_may_withdraw_and_nothing_is_erased(self, as_bob, samples):
        here = f"/vault/{samples.pk}/erasure"
        as_bob.post(here, {"turn": "ask", "why": "a person asked"})
        asked = VaultRequest.objects.get()
        as_bob.post(here, {"turn": "decline", "request": asked.pk, "why": "it was another run"})
        assert "it was another run" in words(as_bob.get(here))
        assert SampleKey.objects.get(dossier=samples).key is not None
