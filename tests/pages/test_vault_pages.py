"""The vault's pages: what is kept and for how long, one thing at its own address, and two people."""

import re
from datetime import timedelta

import pytest
from django.db import transaction
from django.test import Client
from django.utils import timezone

from evidence import custody
from evidence.models import CustodyRow, Dossier, Hold, Item, StoredObject, StoreProbe, VaultRequest
from evidence.pages import overview
from runs.actions import create_run
from runs.models import Membership, Project, Role, Work
from tests.pages.words import HOSTILE, is_inert, text_of

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def dossier(incident):
    return incident.row.dossier


def addresses(dossier):
    one = StoredObject.objects.filter(item__dossier=dossier).first()
    here = f"/vault/{dossier.pk}"
    return [
        here,
        f"{here}/items",
        f"{here}/items/{one.item_id}",
        f"{here}/items/{one.item_id}/read",
        f"{here}/custody",
        f"{here}/close",
        f"{here}/extend",
        f"{here}/compliance",
        f"{here}/erasure",
        f"{here}/release",
        f"{here}/deletion",
        f"/vault/objects/{one.sha256}",
    ]


class TestWhoSees:
    def test_every_address_answers_a_member_and_is_404_for_a_stranger(self, as_bob, as_charlie, dossier):
        for address in addresses(dossier):
            assert as_bob.get(address).status_code == 200, address
            assert as_charlie.get(address).status_code == 404, address
        assert "gpt-16" not in text_of(as_charlie.get("/vault"))
        assert "gpt-16" not in text_of(as_charlie.get("/vault/open?run=gpt-16"))
        assert as_charlie.post("/vault/open", {"run": "gpt-16", "why": "x"}).status_code == 404

    @pytest.mark.parametrize("address", ["objects/ABC", "objects/" + "0" * 64, "objects/" + "F" * 64])
    def test_an_object_that_is_not_there_is_404(self, as_bob, dossier, address):
        assert as_bob.get(f"/vault/{address}").status_code == 404

    def test_an_item_of_another_dossier_is_404(self, as_bob, dossier):
        other = Dossier.objects.create(run=dossier.run, label="other", opened_at=timezone.now())
        item = dossier.items.first()
        assert as_bob.get(f"/vault/{other.pk}/items/{item.pk}").status_code == 404


class TestVault:
    def test_it_says_what_is_kept_until_when_and_what_the_store_enforces(self, as_bob, dossier):
        words = text_of(as_bob.get("/vault"))
        assert f"incident {dossier.label.split()[-1]}" in words
        assert "Not locked" in words  # a directory
        assert re.search(r"next to expire \d+ \w{3}", words)
        assert "a month" in words
        assert "never" in words  # fixity: no object was read back yet

    def test_it_finds_and_filters(self, as_bob, dossier):
        Dossier.objects.create(run=dossier.run, label="frozen by hand: odd loss", opened_at=timezone.now())
        row = f'<a href="/vault/{dossier.pk}" data-open>'
        assert "odd loss" in text_of(as_bob.get("/vault?q=ODD"))
        assert row not in as_bob.get("/vault?q=ODD").content.decode()
        assert row in as_bob.get("/vault?only=not sealed").content.decode()
        assert "No dossier fits" in text_of(as_bob.get("/vault?only=released"))
        Item.objects.filter(dossier=dossier).update(retain_until=timezone.now() + timedelta(days=900))
        assert "No dossier fits" in text_of(as_bob.get("/vault?only=expires soon&q=incident"))

    def test_hundreds_of_dossiers_take_the_same_queries_and_stand_on_pages(
        self, as_bob, dossier, django_assert_max_num_queries
    ):
        now = timezone.now()
        made = [Dossier(run=dossier.run, label=f"by hand {n}", opened_at=now) for n in range(300)]
        Dossier.objects.bulk_create(made)
        with django_assert_max_num_queries(36):
            first = as_bob.get("/vault")
        assert "by hand 299" in text_of(first)
        older = re.search(r'href="(\?before=\d+[^"]*)"', first.content.decode())[1].replace("&amp;", "&")
        second = text_of(as_bob.get(f"/vault{older}"))
        assert "by hand 249" in second
        assert "by hand 250" not in second

    def test_a_probe_that_fails_makes_the_store_unknown(self, as_bob, dossier):
        StoreProbe.objects.all().delete()
        StoreProbe.objects.create(
            store=overview.store().name[:300],
            probed_at=timezone.now() - timedelta(minutes=5),
            result={"says": "locked until the date, shortening refused", "tries": []},
        )
        assert overview.store().known
        Work.objects.create(
            kind="evidence.probe", key="vault", not_before=timezone.now(), error="connection refused"
        )
        words = text_of(as_bob.get("/vault"))
        assert "Unknown since" in words
        assert "shortening refused" not in words
        answer = as_bob.get("/system/probe.json").json()
        assert answer["known"] is False
        assert answer["result"]["says"].startswith("locked")

    def test_an_old_answer_is_not_claimed(self, dossier):
        StoreProbe.objects.all().delete()
        StoreProbe.objects.create(
            store=overview.store().name[:300],
            probed_at=timezone.now() - timedelta(days=3),
            result={"says": "locked", "tries": []},
        )
        assert overview.store().says.startswith("Unknown since")

    def test_the_price_is_the_policys(self, dossier):
        from runs.policies import set_policy

        StoredObject.objects.filter(item__dossier=dossier).update(bytes_total=10**9)
        number = StoredObject.objects.filter(item__dossier=dossier).count()
        document = {"cost": {"storage_gb_month_price": 2.0, "currency": "EUR"}}
        set_policy(run=dossier.run, document=document, person=None, why="dear")
        priced = overview.prices({dossier.run})[dossier.run_id]
        assert str(overview.cost_of(number * 10**9, priced)) == f"{number * 2:.2f}\u00a0EUR a month"


class TestDossier:
    def test_an_item_shows_its_progress_and_objects(self, as_bob, dossier):
        item = dossier.items.filter(kind="last_good_checkpoint").first()
        words = text_of(as_bob.get(f"/vault/{dossier.pk}/items/{item.pk}"))
        assert "stored in 1 object, 1 checked part" in words.replace("\u00a0", " ")
        assert "model.bin" in words
        assert "nothing is being retried" in words

    def test_sealed_logs_with_next_to_nothing_in_them_do_not_look_like_full_ones(self, as_bob, dossier):
        item = Item.objects.create(
            dossier=dossier,
            kind="rank_logs",
            name="rank logs of old",
            order=2,
            state="sealed",
            digest="0" * 64,
            sealed_at=timezone.now(),
        )
        for number, size in enumerate((133, 0, 90)):
            StoredObject.objects.create(
                item=item,
                path=f"rank-{number}/log",
                key=f"k{number}",
                bytes_total=size,
                sha256="0" * 64,
                stored_at=timezone.now(),
            )
        for address in (f"/vault/{dossier.pk}", f"/vault/{dossier.pk}/items/{item.pk}"):
            page = as_bob.get(address)
            said = (
                "nearly empty: none of its 3 files has more than 133 B; look whether the ranks log elsewhere"
            )
            assert said in text_of(page).replace("\u00a0", " "), address
            assert 'aria-label="sealed, nearly empty"' in page.content.decode()
        StoredObject.objects.filter(item=item, path="rank-0/log").update(bytes_total=40_000)
        page = text_of(as_bob.get(f"/vault/{dossier.pk}/items/{item.pk}"))
        assert "1 of its 3 files are empty" in page.replace("\u00a0", " ")
        assert "nearly empty" not in page

    def test_a_retried_item_says_how_often_and_why(self, as_bob, dossier):
        item = dossier.items.filter(kind="last_good_checkpoint").first()
        Work.objects.create(
            kind="evidence.item",
            key=str(item.pk),
            payload={"item": item.pk},
            attempts=3,
            not_before=timezone.now(),
            error="the store answered 503",
        )
        words = text_of(as_bob.get(f"/vault/{dossier.pk}/items/{item.pk}")).replace("\u00a0", " ")
        assert "3 tries, next" in words
        assert "the store answered 503" in words

    def test_trouble_of_the_vault_itself_says_what_and_since_when(self, as_bob, dossier):
        kept = dossier.items.filter(kind="last_good_checkpoint")
        kept.update(
            state="collecting",
            sealed_at=None,
            why="vault: it answers 503",
            trouble_since=timezone.now() - timedelta(minutes=3),
        )
        for address in (f"/vault/{dossier.pk}", f"/vault/{dossier.pk}/items/{kept.get().pk}"):
            words = text_of(as_bob.get(address)).replace("\u00a0", " ")
            assert re.search(r"vault: it answers 503, since .* UTC \(3 min\); still trying", words), address

    def test_a_shared_object_names_every_dossier_that_keeps_it(self, as_bob, dossier):
        one = StoredObject.objects.filter(item__dossier=dossier).first()
        other = Dossier.objects.create(run=dossier.run, label="a second dossier", opened_at=timezone.now())
        copy = Item.objects.create(dossier=other, kind="x", name="copy of it", order=1)
        one.pk, one.item = None, copy
        one.save(force_insert=True)
        assert "a second dossier" in text_of(as_bob.get(f"/vault/{dossier.pk}"))
        words = text_of(as_bob.get(f"/vault/objects/{one.sha256}")).replace("\u00a0", " ")
        assert "2 stored copies" in words
        assert dossier.label in words

    def test_custody_pages_by_cursor_and_each_row_is_checked(self, as_bob, dossier, monkeypatch):
        from django.db import connection

        monkeypatch.setattr("evidence.views.PAGE_ROWS", 5)
        first = as_bob.get(f"/vault/{dossier.pk}/custody")
        newest = CustodyRow.objects.filter(dossier=dossier).order_by("-seq").first().seq
        assert f'?before={newest - 4}"' in first.content.decode()
        assert "changed after" not in text_of(first)
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE evidence_custodyrow DISABLE TRIGGER append_only")
            cursor.execute("UPDATE evidence_custodyrow SET who = 'mallory' WHERE seq = %s", [newest - 1])
            cursor.execute("ALTER TABLE evidence_custodyrow ENABLE TRIGGER append_only")
        words = text_of(as_bob.get(f"/vault/{dossier.pk}/custody"))
        assert words.count("changed after it was written") == 1

    def test_many_items_are_groups_with_what_is_not_sealed_first(self, as_bob, dossier):
        for n in range(45):
            Item.objects.create(
                dossier=dossier, kind="rank_logs_x", name=f"log {n}", order=9, state="not_applicable"
            )
        words = text_of(as_bob.get(f"/vault/{dossier.pk}/items")).replace("\u00a0", " ")
        assert "rank logs x" in words
        assert "45 items" in words
        waiting = dossier.items.exclude(state__in=["sealed", "not_applicable"]).first()
        assert words.index(waiting.name) < words.index("45 items")


class TestByHand:
    def test_a_responder_opens_one_and_a_viewer_is_told_who_may(self, as_bob, incident, alice):
        made = as_bob.post("/vault/open", {"run": "gpt-16", "step": "100", "why": "a smell"})
        found = Dossier.objects.order_by("-pk").first()
        assert made["Location"] == f"/vault/{found.pk}"
        assert (found.first_bad_step, found.why) == (100, "a smell")
        Membership.objects.filter(person=alice).update(roles=[Role.VIEWER])
        viewer = Client()
        viewer.force_login(alice)
        assert "There is no run whose evidence you may freeze" in text_of(viewer.get("/vault/open"))
        assert viewer.post("/vault/open", {"run": "gpt-16", "why": "x"}).status_code == 403

    @pytest.mark.parametrize(
        ("field", "value", "says"),
        [
            ("why", " ", "Say why this is kept"),
            ("step", "-1", "must be a whole number"),
            ("step", "9" * 19, "must be a whole number"),
            ("attempt", "77", "has no attempt 77"),
        ],
    )
    def test_what_cannot_be_is_refused_in_words_and_the_text_is_kept(
        self, as_bob, incident, field, value, says
    ):
        before = Dossier.objects.count()
        form = {"run": "gpt-16", "why": "odd <loss>", "step": "100"} | {field: value}
        answer = as_bob.post("/vault/open", form)
        assert answer.status_code == 409
        assert says in text_of(answer)
        if field != "why":
            assert "odd &lt;loss&gt;" in answer.content.decode()
        assert Dossier.objects.count() == before


class TestTwoPeople:
    @pytest.fixture
    def ready(self, dossier):
        """A closed dossier whose dates have passed: a test may not wait for a month."""
        from django.db import connection

        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE evidence_item DISABLE TRIGGER USER")
            cursor.execute(
                "UPDATE evidence_item SET retain_until = now() - interval '1 day',"
                " state = CASE WHEN state IN ('sealed', 'not_applicable') THEN state ELSE 'missing' END"
            )
            cursor.execute("ALTER TABLE evidence_item ENABLE TRIGGER USER")
        Dossier.objects.filter(pk=dossier.pk).update(closed_at=timezone.now())
        return dossier

    def test_a_date_that_has_not_passed_shuts_the_button_and_says_so(self, as_bob, dossier):
        page = as_bob.get(f"/vault/{dossier.pk}/release")
        assert 'aria-disabled="true"' in page.content.decode()
        assert "still open" in text_of(page)
        refused = as_bob.post(f"/vault/{dossier.pk}/release", {"turn": "ask", "why": "done"})
        assert refused.status_code == 409
        assert not VaultRequest.objects.exists()

    def test_one_asks_and_another_agrees_with_the_password(self, as_bob, as_alice, ready):
        here = f"/vault/{ready.pk}/release"
        as_bob.post(here, {"turn": "ask", "why": "the cause is known"})
        asked = VaultRequest.objects.get()
        turn = {"turn": "agree", "request": asked.pk}
        own = as_bob.post(here, {**turn, "password": "bob-password"})
        assert own.status_code == 403
        assert "You asked" in text_of(as_bob.get(here))
        page = as_alice.get(here)
        assert "the cause is known" in text_of(page)
        assert 'name="password"' in page.content.decode()
        wrong = as_alice.post(here, {**turn, "password": "guess"})
        assert wrong.status_code == 403
        assert VaultRequest.objects.get().state == "open"
        done = as_alice.post(here, {**turn, "password": "alice-password"})
        assert done.status_code == 302
        assert VaultRequest.objects.get().state in {"approved", "done"}
        assert Dossier.objects.get(pk=ready.pk).released_at is not None

    def test_a_request_that_was_replaced_is_not_agreed_to(self, as_bob, as_alice, ready):
        here = f"/vault/{ready.pk}/release"
        as_bob.post(here, {"turn": "ask", "why": "one"})
        seen = VaultRequest.objects.get().pk
        as_bob.post(here, {"turn": "decline", "request": seen, "why": "not yet"})
        as_bob.post(here, {"turn": "ask", "why": "two"})
        turn = {"turn": "agree", "request": seen, "password": "alice-password"}
        answer = as_alice.post(here, turn)
        assert answer.status_code == 409
        assert "What you saw is not open any more" in text_of(answer)

    def test_deletion_waits_for_the_release(self, as_bob, ready):
        assert "has to be released first" in text_of(as_bob.get(f"/vault/{ready.pk}/deletion"))


def test_thousands_of_files_stand_on_pages(as_bob, dossier):
    item = dossier.items.get(kind="rank_logs")
    now = timezone.now()
    StoredObject.objects.bulk_create(
        StoredObject(
            item=item, path=f"rank-{n:04d}.log", key=f"k{n}", bytes_total=n, sha256=f"{n:064x}", stored_at=now
        )
        for n in range(2_500)
    )
    here, seen = f"/vault/{dossier.pk}/items/{item.pk}", []
    page = as_bob.get(here).content.decode()
    seen += re.findall(r">(rank-\d{4}\.log)<", page)
    second = re.search(r'href="(\?after=\d+)">Further', page)[1]
    seen += re.findall(r">(rank-\d{4}\.log)<", as_bob.get(here + second).content.decode())
    assert seen == [f"rank-{n:04d}.log" for n in range(200)]
    assert "those after rank-0099.log" in text_of(as_bob.get(here + second))
    # The dossier's own page stays short, whatever its items hold.
    assert len(re.findall(r">(rank-\d{4}\.log)<", as_bob.get(f"/vault/{dossier.pk}").content.decode())) <= 20


def test_hostile_names_are_inert_on_every_page_of_the_vault(as_bob, bob, dossier):
    one = StoredObject.objects.filter(item__dossier=dossier).first()
    item = one.item
    Dossier.objects.filter(pk=dossier.pk).update(label=HOSTILE[:200], why=HOSTILE)
    says = {"says": HOSTILE, "over": HOSTILE, "mode": HOSTILE}
    Item.objects.filter(pk=item.pk).update(
        name=HOSTILE[:200], why=HOSTILE, protected_by=says, waived_why=HOSTILE, state="missing"
    )
    StoredObject.objects.filter(pk=one.pk).update(
        path=HOSTILE, key=HOSTILE, version_id=HOSTILE[:200], protected_by=says, mismatch=HOSTILE
    )
    Item.objects.filter(pk=dossier.items.get(kind="rank_logs").pk).update(
        files=[{"path": HOSTILE, "bytes": 1, "sha256": ""}], why=HOSTILE
    )
    Hold.objects.filter(pk=dossier.holds.first().pk).update(uri=HOSTILE)
    with transaction.atomic():
        custody.append(
            dossier, HOSTILE[:64], who=str(bob.opaque_id), item_name=HOSTILE[:240], data={"path": HOSTILE}
        )
        custody.append(
            dossier, "downloaded", who=HOSTILE[:64], item_name=HOSTILE[:240], data={"path": HOSTILE}
        )
    Work.objects.create(
        kind="evidence.item",
        key="x",
        payload={"item": item.pk},
        attempts=1,
        not_before=timezone.now(),
        error=HOSTILE,
    )
    for state in ("open", "declined"):
        VaultRequest.objects.create(
            dossier=dossier,
            kind="release",
            state=state,
            why=HOSTILE,
            decided_why=HOSTILE,
            subject={"items": [{"item": HOSTILE, "bytes": 1, "until": ""}]},
            requested_by=HOSTILE[:64],
            requested_at=timezone.now(),
        )
    logs = dossier.items.get(kind="rank_logs").pk
    for address in [
        *addresses(dossier),
        "/vault",
        f"/vault/{dossier.pk}/items/{logs}",
        "/vault?q=%3Cscript%3E",
    ]:
        answer = as_bob.get(address)
        assert answer.status_code == 200, address
        is_inert(answer.content.decode(), address)
    for path in (f"/vault/{dossier.pk}/objects/{one.pk}", f"/vault/{dossier.pk}/bag"):
        is_inert(as_bob.post(path).content.decode(), path)


def test_a_run_of_another_project_cannot_be_opened_by_hand(as_bob, incident):
    other = Project.objects.create(slug="other", name="Other")
    create_run(name="theirs", project=other.slug)
    assert "theirs" not in text_of(as_bob.get("/vault/open"))
    assert as_bob.post("/vault/open", {"run": "theirs", "why": "x"}).status_code == 404
