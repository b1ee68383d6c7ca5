"""Signing in by an OIDC provider: linked by the person, by subject, never by an address."""

import html
import re
from urllib.parse import urlsplit

import pytest
from allauth.socialaccount.models import SocialAccount
from django.test import Client

from runs.models import AccountEvent, Membership, Person, Role
from tests.accounts.conftest import signed_in, text_of
from tests.accounts.provider import CLIENT_ID, CLIENT_SECRET, provider

pytestmark = pytest.mark.django_db
K = AccountEvent.Kind
HOST = {"host": "localhost"}


@pytest.fixture
def sso(settings):
    """A provider that the operator configured; nobody is let in whom this server does not know."""
    with provider() as made:
        settings.SOCIALACCOUNT_PROVIDERS = {
            "openid_connect": {
                "APPS": [
                    {
                        "provider_id": "sso",
                        "name": "Acme",
                        "client_id": CLIENT_ID,
                        "secret": CLIENT_SECRET,
                        "settings": {"server_url": made.url, "oauth_pkce_enabled": True},
                    }
                ]
            }
        }
        yield made


def through(client, sso, **fields):
    """Press the button, go through the provider and come back; returns the answer to the callback."""
    page = client.post("/sign-in/sso/go", fields)
    assert page.status_code == 200, text_of(page)
    # A form may not lead away from this server, so the page does: no redirect, nothing for CSP to refuse.
    address = html.unescape(re.search(r'content="0;url=([^"]+)"', page.content.decode())[1])
    assert address.startswith(f"{sso.url}/authorize?")
    back = urlsplit(sso.authorize(address))
    assert back.path == "/sign-in/sso/callback"
    return client.get(f"{back.path}?{back.query}")


def link(person, sso):
    client = signed_in(person.username)
    done = through(client, sso, process="connect", next="/account")
    assert done["Location"] == "/account"
    return client


class TestLinked:
    def test_a_person_links_it_and_signs_in_by_it(self, alice, sso):
        client = link(alice, sso)
        assert "linked" in text_of(client.get("/account"))
        fresh = Client()
        assert "Sign in with Acme" in text_of(fresh.get("/sign-in"))
        done = through(fresh, sso, next="/incidents?state=open")
        assert done["Location"] == "/incidents?state=open"
        assert fresh.get("/runs").wsgi_request.user == alice
        assert AccountEvent.objects.latest("id").data == {"method": "socialaccount"}
        assert AccountEvent.objects.filter(kind=K.SSO_LINKED, about=alice.opaque_id).count() == 1

    def test_linking_wants_a_proof(self, alice, sso):
        client = Client()
        client.force_login(alice)
        done = through(client, sso, process="connect", next="/account")
        assert done["Location"].startswith("/account/prove")
        assert not SocialAccount.objects.exists()
        client.post("/account/prove", {"password": "alice-password"})
        assert SocialAccount.objects.get().user == alice

    def test_a_subject_belongs_to_one_person(self, alice, bob, sso):
        link(alice, sso)
        through(signed_in("bob"), sso, process="connect", next="/account")
        assert SocialAccount.objects.get().user == alice

    def test_it_is_unlinked_while_another_way_is_left(self, alice, sso):
        client = link(alice, sso)
        client.post("/account/sso/unlink")
        assert not SocialAccount.objects.exists()
        client = link(alice, sso)
        alice.set_unusable_password()
        alice.save()
        only_sso = Client()
        through(only_sso, sso)
        only_sso.post("/account/sso/unlink")
        assert SocialAccount.objects.exists()

    def test_who_signs_in_by_it_alone_proves_nothing_by_it(self, alice, bob, sso):
        link(alice, sso)
        alice.set_unusable_password()
        alice.save()
        client = Client()
        through(client, sso)
        Membership.objects.filter(person=alice).update(roles=[Role.ADMIN, Role.APPROVER])
        # Fresh from the provider they may add a passkey, which is how they come to prove anything.
        assert client.get("/account/passkeys/add").status_code == 200
        from tests.accounts.test_proof import older

        older(client, 301)
        assert client.get("/account/passkeys/add")["Location"].startswith("/account/prove")
        page = client.get("/account/prove")
        assert "SSO only" in text_of(page)


class TestUnknown:
    def test_nobody_becomes_a_person_unless_the_operator_says_so(self, alice, sso):
        done = through(Client(), sso)
        assert "Not known here" in text_of(done)
        assert Person.objects.count() == 1

    def test_an_address_alone_links_nobody(self, alice, sso, settings):
        settings.SIGN_UP = "sso"
        Person.objects.filter(pk=alice.pk).update(email="mira@example.org")
        client = Client()
        through(client, sso)
        assert client.get("/runs").wsgi_request.user != alice

    def test_whom_the_provider_lets_in_belongs_to_nothing(self, alice, project, sso, settings):
        settings.SIGN_UP = "sso"
        sso.name = "alice"
        client = Client()
        through(client, sso)
        made = Person.objects.exclude(pk=alice.pk).get()
        assert made.username != "alice"
        assert not Membership.objects.filter(person=made).exists()
        assert not made.has_usable_password()
        assert "You belong to no project" in text_of(client.get("/account"))
        assert AccountEvent.objects.filter(kind=K.SIGNED_UP, about=made.opaque_id).exists()


class TestTrouble:
    def test_a_provider_that_does_not_answer_keeps_nobody_out(self, alice, sso):
        sso.down = True
        answer = Client().post("/sign-in/sso/go")
        assert answer.status_code == 502
        assert "Use your passkey or password" in text_of(answer)
        signed_in("alice")

    def test_an_answer_nobody_asked_for_signs_nobody_in(self, alice, sso):
        for query in ("", "?code=x&state=y", "?error=access_denied"):
            client = Client()
            assert client.get(f"/sign-in/sso/callback{query}").status_code in {401, 302}
            assert client.get("/runs").status_code == 302

    def test_a_wrong_code_signs_nobody_in(self, alice, sso):
        link(alice, sso)
        client = Client()
        page = client.post("/sign-in/sso/go").content.decode()
        sso.authorize(html.unescape(re.search(r'content="0;url=([^"]+)"', page)[1]))
        state = re.search(r"state=([\w-]+)", page)[1]
        assert client.get(f"/sign-in/sso/callback?code=guess&state={state}").status_code == 401
        assert client.get("/runs").status_code == 302

    def test_without_a_provider_there_is_no_such_address(self, db):
        assert Client().post("/sign-in/sso/go").status_code == 404
        assert Client().get("/sign-in/sso/callback").status_code == 404
