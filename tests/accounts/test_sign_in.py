"""Signing in by password, the second step, invitations, and what the log says of it."""

import re
import threading
from types import SimpleNamespace

import pytest
from allauth.mfa.models import Authenticator
from allauth.mfa.recovery_codes.internal.auth import RecoveryCodes
from allauth.mfa.totp.internal.auth import TOTP, format_hotp_value, generate_totp_secret, hotp_value
from allauth.mfa.totp.internal.auth import yield_hotp_counters_from_time as counters
from django.core.management import CommandError, call_command
from django.db import connection
from django.test import Client

from runs.models import AccountEvent, Invitation, Membership, Person
from tests.accounts.conftest import signed_in, text_of

pytestmark = pytest.mark.django_db(transaction=True)
K = AccountEvent.Kind


def kinds(person=None):
    rows = AccountEvent.objects.order_by("id")
    return list((rows.filter(about=person.opaque_id) if person else rows).values_list("kind", flat=True))


def with_codes(person):
    """Give a person codes of an app; returns what makes the code of now, and a recovery code."""
    secret = generate_totp_secret()
    TOTP.activate(person, secret)
    recovery = RecoveryCodes.activate(person).generate_codes()

    def code(steps=0):
        return format_hotp_value(hotp_value(secret, list(counters())[1] + steps))

    return SimpleNamespace(code=code, recovery=recovery)


class TestPassword:
    def test_it_is_written_down_with_how_and_from_where(self, alice):
        signed_in("alice")
        row = AccountEvent.objects.get(kind=K.SIGN_IN)
        assert (row.by, row.about, row.address) == (alice.opaque_id, alice.opaque_id, "127.0.0.1")
        assert row.data == {"method": "password"}

    def test_a_wrong_pair_is_written_down_without_what_was_typed(self, alice):
        for name in ("alice", "hunter2-typed-as-a-name"):
            assert Client().post("/sign-in", {"username": name, "password": "wrong"}).status_code == 400
        rows = list(AccountEvent.objects.filter(kind=K.SIGN_IN_FAILED).order_by("id"))
        assert [row.about for row in rows] == [alice.opaque_id, None]
        assert "hunter2" not in str([vars(row) for row in rows])

    def test_failures_from_one_place_keep_nobody_out_who_is_elsewhere(self, alice):
        attacker, home = Client(REMOTE_ADDR="192.0.2.7"), Client(REMOTE_ADDR="192.0.2.8")
        for _ in range(6):
            last = attacker.post("/sign-in", {"username": "alice", "password": "wrong"})
        assert last.status_code == 429
        assert kinds(alice)[-1] == K.BRAKED
        pair = {"username": "alice", "password": "alice-password"}
        assert attacker.post("/sign-in", pair).status_code == 429
        assert home.post("/sign-in", pair).status_code == 302

    def test_addresses_of_one_ipv6_network_are_one_place(self, alice):
        for number in range(6):
            client = Client(REMOTE_ADDR=f"2001:db8::{number + 1}")
            last = client.post("/sign-in", {"username": "alice", "password": "wrong"})
        assert last.status_code == 429

    def test_behind_a_proxy_the_address_is_the_one_the_proxy_wrote(self, alice, settings):
        settings.BEHIND_PROXY = True
        client = Client(REMOTE_ADDR="10.0.0.1", headers={"x-forwarded-for": "203.0.113.9, 192.0.2.7"})
        client.post("/sign-in", {"username": "alice", "password": "wrong"})
        assert AccountEvent.objects.get().address == "192.0.2.7"
        settings.BEHIND_PROXY = False
        client.post("/sign-in", {"username": "alice", "password": "wrong"})
        assert AccountEvent.objects.latest("id").address == "10.0.0.1"

    def test_a_person_who_may_not_sign_in_hears_what_every_wrong_pair_hears(self, alice):
        Person.objects.filter(pk=alice.pk).update(is_active=False)
        answer = Client().post("/sign-in", {"username": "alice", "password": "alice-password"})
        assert answer.status_code == 400
        assert "do not fit" in text_of(answer)

    def test_signing_out_is_written_down(self, alice):
        signed_in("alice").post("/sign-out")
        assert kinds(alice) == [K.SIGN_IN, K.SIGN_OUT]

    def test_nobody_signs_up_by_a_form(self, db):
        assert Client().get("/sign-up").status_code == 404
        assert Client().get("/accounts/signup/").status_code == 404


class TestSecondStep:
    def test_a_password_alone_does_not_sign_in_who_has_codes(self, alice):
        codes = with_codes(alice)
        client = signed_in("alice")
        assert client.get("/runs").status_code == 302
        assert client.get("/sign-in/second-step").status_code == 200
        wrong = client.post("/sign-in/second-step", {"code": "000000"})
        assert wrong.status_code == 400
        assert "did not fit" in text_of(wrong)
        done = client.post("/sign-in/second-step", {"code": codes.code()})
        assert (done.status_code, done["Location"]) == (302, "/runs")
        assert client.get("/runs").status_code == 200
        assert AccountEvent.objects.get(kind=K.SIGN_IN).data == {"method": "password and totp"}
        assert kinds(alice) == [K.SIGN_IN_FAILED, K.SIGN_IN]

    def test_next_is_kept_over_both_steps(self, alice):
        codes = with_codes(alice)
        client = Client()
        pair = {"username": "alice", "password": "alice-password", "next": "/incidents?state=open"}
        client.post("/sign-in", pair)
        done = client.post("/sign-in/second-step", {"code": codes.code()})
        assert done["Location"] == "/incidents?state=open"

    def test_a_code_works_once(self, alice):
        codes = with_codes(alice)
        code = codes.code()
        assert signed_in("alice").post("/sign-in/second-step", {"code": code}).status_code == 302
        assert signed_in("alice").post("/sign-in/second-step", {"code": code}).status_code == 400

    def test_a_recovery_code_works_once_and_is_written_down(self, alice):
        codes = with_codes(alice)
        first = codes.recovery[0]
        assert signed_in("alice").post("/sign-in/second-step", {"code": first}).status_code == 302
        assert AccountEvent.objects.get(kind=K.RECOVERY_USED).data["left"] == 9
        assert signed_in("alice").post("/sign-in/second-step", {"code": first}).status_code == 400

    def test_guessing_codes_is_braked(self, alice):
        codes = with_codes(alice)
        client = signed_in("alice")
        for number in range(10):
            client.post("/sign-in/second-step", {"code": f"{number:06d}"})
        assert client.post("/sign-in/second-step", {"code": codes.code()}).status_code == 400

    def test_seeds_are_not_in_the_database_as_they_are(self, alice):
        secret = generate_totp_secret()
        TOTP.activate(alice, secret)
        with connection.cursor() as cursor:
            cursor.execute("SELECT data::text FROM mfa_authenticator")
            assert secret not in cursor.fetchone()[0]

    @pytest.mark.parametrize(
        "given", ["[]", "3", "{}", '{"response": []}', '{"response": {"userHandle": 3}}', "{"]
    )
    def test_no_credential_a_stranger_makes_up_breaks_anything(self, alice, given):
        with_codes(alice)
        client = Client()
        client.post("/sign-in/challenge")
        assert client.post("/sign-in/passkey", {"passkey": given}).status_code == 400
        client = signed_in("alice")
        assert client.post("/sign-in/second-step", {"credential": given}).status_code == 400


class TestInvitations:
    def test_an_admin_invites_and_the_link_works_once(self, alice, project):
        page = signed_in("alice").post(
            "/projects/default/people", {"do": "invite", "name": "mira.k", "role": ["responder"]}
        )
        address = re.search(r"/invitations/[\w-]+", page.content.decode())[0]
        token = address.rsplit("/", 1)[1]
        assert not Invitation.objects.filter(sha256=token).exists()
        guest = Client()
        assert "mira.k" in text_of(guest.get(address))
        weak = guest.post(address, {"password": "12345"})
        assert weak.status_code == 400
        assert "too short" in text_of(weak)
        done = guest.post(address, {"password": "correct horse battery"})
        assert done["Location"].startswith("/account")
        assert guest.get("/runs").status_code == 200
        assert Client().get(address).status_code == 404
        assert Client().post(address, {"password": "another good one"}).status_code == 404
        mira = Person.objects.get(username="mira.k")
        assert Membership.objects.get(person=mira).roles == ["responder"]
        assert kinds(mira) == [K.ROLES, K.INVITED, K.INVITATION_USED, K.SIGN_IN]
        invited = AccountEvent.objects.get(kind=K.INVITED)
        assert (invited.by, invited.project) == (alice.opaque_id, project)

    def test_two_who_open_a_link_at_once_are_not_both_let_in(self, project):
        address = str(command("invite", "mira.k", "--role", "viewer")).strip()
        path = "/" + address.split("/", 3)[3]
        answers = []

        def use(number):
            answers.append(Client().post(path, {"password": f"correct horse {number}"}).status_code)
            connection.close()

        threads = [threading.Thread(target=use, args=[number]) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(answers) == [302, 404, 404, 404]

    def test_an_invitation_ends_when_it_is_over_or_withdrawn(self, alice, project):
        client = signed_in("alice")
        page = client.post("/projects/default/people", {"do": "invite", "name": "mira", "role": ["viewer"]})
        address = re.search(r"/invitations/[\w-]+", page.content.decode())[0]
        row = Invitation.objects.get()
        client.post("/projects/default/people", {"do": "withdraw", "invitation": row.pk})
        assert Client().get(address).status_code == 404
        assert not Membership.objects.filter(person__username="mira").exists()
        address = "/" + command("invite", "mira").strip().split("/", 3)[3]
        Invitation.objects.filter(ended_at=None).update(expires_at=row.made_at)
        assert Client().get(address).status_code == 404

    @pytest.mark.parametrize("name", ["", "alice", "Alice", "a b", "<b>", "аlice", "x" * 65])
    def test_a_name_that_is_taken_or_reads_like_another_is_refused(self, alice, name):
        answer = signed_in("alice").post(
            "/projects/default/people", {"do": "invite", "name": name, "role": ["viewer"]}
        )
        assert answer.status_code == 409
        assert Person.objects.count() == 1

    def test_only_the_operator_resets_and_that_takes_everything_away_at_once(self, alice):
        with_codes(alice)
        client = Client()
        client.force_login(alice)
        address = "/" + command("invite", "alice", "--reset").strip().split("/", 3)[3]
        assert not Authenticator.objects.filter(user=alice).exists()
        assert client.get("/runs").status_code == 302  # the session of who had the password ended
        assert (
            Client().post("/sign-in", {"username": "alice", "password": "alice-password"}).status_code == 400
        )
        assert Client().post(address, {"password": "a new good password"}).status_code == 302
        assert AccountEvent.objects.get(kind=K.RESET).data == {"factors": True}
        with pytest.raises(CommandError, match="create_person"):
            command("invite", "alice", "--role", "admin")


def command(*arguments):
    from io import StringIO

    out = StringIO()
    call_command(*arguments, stdout=out)
    return out.getvalue()
