"""A lost password: a link to an address its owner confirmed, and nobody learns who is here."""

import re

import pytest
from allauth.account.models import EmailAddress
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from config import mail as relay_settings
from runs import work
from runs.accounts import mail
from runs.models import AccountEvent, Person, Work
from tests.accounts.conftest import signed_in, text_of
from tests.accounts.relay import relay
from tests.accounts.test_sign_in import with_codes

pytestmark = pytest.mark.django_db
K = AccountEvent.Kind
NEW = {"password": "a-quite-new-one"}


@pytest.fixture
def post(settings):
    """A relay that the operator named."""
    with relay() as made:
        settings.EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
        settings.EMAIL_HOST, settings.EMAIL_PORT, settings.EMAIL_TIMEOUT = "127.0.0.1", made.port, 5
        settings.EMAIL_USE_TLS = settings.EMAIL_USE_SSL = False
        yield made


@pytest.fixture
def reached(alice):
    """Alice, who confirmed an address."""
    mail.give(alice, "alice@example.org")
    alice.refresh_from_db()
    return alice


def ask(email="alice@example.org", client=None):
    """Ask for a link as a person does, and let the worker do what came of it."""
    answer = (client or Client()).post("/sign-in/lost", {"email": email})
    work.run_due()
    return answer


def link_of(post, settings):
    found = re.search(rf"{re.escape(settings.PUBLIC_URL)}(/\S+)", post.text().partition("once:")[2])
    return found[1]


class TestLink:
    def test_it_sets_a_password_once_and_ends_every_session(self, reached, post, settings):
        before = signed_in("alice")
        ask(" Alice@Example.org ")
        (to, message), link = post.mails[0], link_of(post, settings)
        assert (to, message["Subject"]) == ("alice@example.org", "Andon: set a new password")
        client = Client()
        assert "New password for alice" in text_of(client.get(link))
        assert client.post(link, {"password": "alice"}).status_code == 400
        assert client.post(link, NEW)["Location"] == "/account"
        assert client.get("/runs").status_code == 200
        assert before.get("/runs").status_code == 302
        assert Client().post(link, NEW).status_code == 404
        assert Client().get(link).status_code == 404
        signed_in("alice", NEW["password"])
        told = list(AccountEvent.objects.filter(kind__in=[K.LINK_MAILED, K.PASSWORD]).order_by("id"))
        assert [(row.kind, row.by, row.about, row.address) for row in told] == [
            (kind, None, reached.opaque_id, "127.0.0.1") for kind in (K.LINK_MAILED, K.PASSWORD)
        ]

    def test_who_has_codes_still_needs_one(self, reached, post, settings):
        with_codes(reached)
        ask()
        client = Client()
        assert client.post(link_of(post, settings), NEW)["Location"].startswith("/sign-in/second-step")
        assert client.get("/runs").status_code == 302

    def test_it_ends_with_its_hour_a_sign_in_or_the_address(self, reached, post, settings):
        ask()
        link = link_of(post, settings)
        settings.PASSWORD_RESET_TIMEOUT = -1
        assert Client().get(link).status_code == 404
        settings.PASSWORD_RESET_TIMEOUT = 3600
        assert Client().get(link).status_code == 200
        EmailAddress.objects.filter(user=reached).delete()
        Person.objects.filter(pk=reached.pk).update(email="")
        assert Client().get(link).status_code == 404
        mail.give(reached, "alice@example.org")
        assert Client().get(link).status_code == 200
        signed_in("alice")
        assert Client().post(link, NEW).status_code == 404

    @pytest.mark.parametrize(
        "key", ["x", "1-", "-", "1-a-b", "zzzzzzzzzzzzz-a-b", "ZZ-a", "1-é-\x7f", "0" * 900]
    )
    def test_what_is_no_link_opens_nothing(self, reached, key):
        assert Client().get(f"/sign-in/lost/{key}").status_code == 404
        assert Client().post(f"/sign-in/lost/{key}", NEW).status_code == 404


class TestNobodyLearnsWhoIsHere:
    def test_every_address_gets_the_same_answer_after_the_same_work(self, reached, bob, charlie, post):
        mail.give(bob, "bob-gone@example.org")
        Person.objects.filter(pk=bob.pk).update(is_active=False)
        mail.give(charlie, "sso-only@example.org")
        charlie.set_unusable_password()
        charlie.save()
        EmailAddress.objects.create(user=reached, email="unconfirmed@example.org", verified=False)
        answers, queries = set(), set()
        for name in ("alice", "bob-gone", "sso-only", "unconfirmed", "nobody", "not-an-address"):
            Work.objects.all().delete()
            client = Client()
            with CaptureQueriesContext(
                connection,
            ) as captured:
                answer = client.post("/sign-in/lost", {"email": name + "@example.org" * (name[:3] != "not")})
            queries.add(tuple(re.sub(r"\d+", "n", one["sql"])[:40] for one in captured.captured_queries))
            words = re.sub(r'value="\w{64}"', "", answer.content.decode())
            answers.add((answer.status_code, words, Work.objects.count()))
            work.run_due()
        assert len(answers) == 1
        assert len(queries) == 1
        assert [to for to, _ in post.mails] == ["alice@example.org"]

    def test_a_mailbox_is_not_filled_and_a_place_is_braked(self, reached, post):
        client = Client()
        said = [text_of(ask(client=client)) for _ in range(4)]
        assert len(set(said)) == 1
        assert len(post.mails) == 3
        status = [ask(f"{n}@example.org", client).status_code for n in range(7)]
        assert status == [200] * 6 + [429]
        assert ask("last@example.org", Client(REMOTE_ADDR="192.0.2.8")).status_code == 200

    def test_people_who_share_a_mailbox_get_a_link_each(self, reached, bob, post):
        mail.give(bob, "alice@example.org")
        ask()
        assert sorted(re.search(r"for (\w+) at", m.get_payload())[1] for _, m in post.mails) == [
            "alice",
            "bob",
        ]


class TestTrouble:
    def test_a_relay_that_is_busy_is_asked_again(self, reached, post):
        post.busy = True
        ask()
        row = Work.objects.get(kind=mail.LOST)
        assert (row.state, post.mails) == ("due", [])
        assert "example.org" not in row.error
        post.busy = False
        Work.objects.update(not_before=row.created_at)
        work.run_due()
        assert len(post.mails) == 1

    def test_a_mailbox_that_is_none_is_given_up_without_naming_it(self, reached, post):
        post.refuses = True
        ask()
        row = Work.objects.get(kind=mail.LOST)
        assert row.state == "failed"
        assert "example.org" not in row.error

    def test_a_relay_that_is_gone_keeps_no_page_waiting(self, reached, settings):
        settings.EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
        settings.EMAIL_HOST, settings.EMAIL_PORT = "127.0.0.1", 9
        assert "on its way" in text_of(ask())
        assert Work.objects.get(kind=mail.LOST).state == "due"


class TestAddress:
    def confirm(self, post, settings):
        return re.search(rf"{re.escape(settings.PUBLIC_URL)}(/account/mail/\S+)", post.text())[1]

    def test_it_counts_once_its_owner_pressed_the_button_behind_the_link(self, alice, post, settings):
        client = signed_in("alice")
        client.post("/account/mail", {"email": "Mira@Example.org"})
        work.run_due()
        link = self.confirm(post, settings)
        assert mail.of(alice) is None
        assert client.get(link).status_code == 200
        assert mail.of(alice) is None, "programs that follow links confirm nothing"
        assert client.post(link).status_code == 302
        assert mail.of(alice).email == "mira@example.org"
        assert client.get(link).status_code == 404
        assert "mira@example.org" in text_of(client.get("/account"))
        assert AccountEvent.objects.filter(kind=K.MAIL_SET, by=alice.opaque_id).count() == 1

    def test_a_link_is_its_owners_alone(self, alice, bob, post, settings):
        signed_in("alice").post("/account/mail", {"email": "mira@example.org"})
        work.run_due()
        link = self.confirm(post, settings)
        assert Client().get(link)["Location"].startswith("/sign-in?next=")
        assert signed_in("bob").post(link).status_code == 404
        assert mail.of(alice) is None
        assert mail.of(bob) is None

    def test_a_session_left_open_changes_no_address(self, alice):
        client = Client()
        client.force_login(alice)
        answer = client.post("/account/mail", {"email": "mallory@example.org"})
        assert answer["Location"].startswith("/account/prove")
        assert not EmailAddress.objects.exists()

    def test_the_one_before_stays_until_then_and_can_be_removed(self, reached, post):
        client = signed_in("alice")
        client.post("/account/mail", {"email": "new@example.org"})
        assert mail.of(reached).email == "alice@example.org"
        client.post("/account/mail", {"do": "remove"})
        assert mail.of(reached) is None
        ask()
        assert [to for to, _ in post.mails if to != "new@example.org"] == []

    def test_what_is_no_address_is_refused_in_words(self, alice):
        answer = signed_in("alice").post("/account/mail", {"email": "mira\n@example.org"})
        assert answer.status_code == 400
        assert "no mail address" in text_of(answer)

    def test_the_operator_gives_one(self, project, capsys):
        call_command("create_person", "mira", "--mail", "Mira@Example.org")
        assert mail.of(Person.objects.get(username="mira")).email == "mira@example.org"
        with pytest.raises(CommandError, match="no mail address"):
            call_command("create_person", "mira", "--mail", "mira")


class TestSettings:
    @pytest.mark.parametrize(
        ("address", "host", "port", "tls", "ssl"),
        [
            ("smtp://relay.example.org", "relay.example.org", 587, True, False),
            ("smtp://localhost:25", "localhost", 25, False, False),
            ("smtps://a%40b:p%3Aw@relay.example.org:4465", "relay.example.org", 4465, False, True),
        ],
    )
    def test_a_relay_is_spoken_to_in_private_unless_it_is_here(
        self, monkeypatch, address, host, port, tls, ssl
    ):
        monkeypatch.setenv("ANDON_MAIL_URL", address)
        read = relay_settings.read("andon.example.org")
        assert (read["EMAIL_HOST"], read["EMAIL_PORT"]) == (host, port)
        assert (read["EMAIL_USE_TLS"], read["EMAIL_USE_SSL"]) == (tls, ssl)
        assert read["DEFAULT_FROM_EMAIL"] == "Andon <andon@andon.example.org>"
        if ssl:
            assert (read["EMAIL_HOST_USER"], read["EMAIL_HOST_PASSWORD"]) == ("a@b", "p:w")

    @pytest.mark.parametrize(
        "address", ["relay", "http://relay", "smtp://", "smtp://u:pa55@h:x", "smtp://h/?a=b"]
    )
    def test_an_address_that_is_none_is_refused_without_printing_it(self, monkeypatch, address):
        monkeypatch.setenv("ANDON_MAIL_URL", address)
        with pytest.raises(ImproperlyConfigured, match="ANDON_MAIL_URL: expected smtp") as refused:
            relay_settings.read("localhost")
        assert "pa55" not in str(refused.value)

    def test_without_one_the_worker_prints_and_pages_say_so(self, monkeypatch, settings):
        monkeypatch.delenv("ANDON_MAIL_URL", raising=False)
        settings.EMAIL_BACKEND = relay_settings.read("localhost")["EMAIL_BACKEND"]
        assert "This server sends no mail" in text_of(Client().get("/sign-in/lost"))
