"""One mechanism proves that it is still the same person, for everything dangerous."""

import json
import re
from datetime import timedelta

import pytest
from allauth.account.internal.flows.login import AUTHENTICATION_METHODS_SESSION_KEY as RECORDS
from django.test import Client
from hypothesis import given
from hypothesis import strategies as st

from runs.accounts import passkeys
from runs.models import AccountEvent, Membership, Role, Token
from tests.accounts.conftest import signed_in, text_of
from tests.accounts.test_sign_in import with_codes

pytestmark = pytest.mark.django_db
K = AccountEvent.Kind
ADD = {"do": "add", "name": "charlie", "role": ["viewer"]}
PEOPLE = "/projects/default/people"


def older(client, seconds):
    """Make every proof of a session older, as time would."""
    session = client.session
    session[RECORDS] = [record | {"at": record["at"] - seconds} for record in session[RECORDS]]
    session.save()


class TestRecently:
    def test_signing_in_counts_for_five_minutes_and_no_longer(self, alice, charlie):
        client = signed_in("alice")
        older(client, 299)
        assert client.post(PEOPLE, ADD).status_code == 302
        older(client, 2)
        refused = client.post(PEOPLE, {**ADD, "do": "remove", "person": charlie.pk})
        assert refused.status_code == 403
        assert "give your password" in text_of(refused)
        assert Membership.objects.filter(person=charlie).exists()

    def test_a_proof_on_the_request_does_and_counts_for_the_next(self, alice, charlie):
        client = signed_in("alice")
        older(client, 9_000)
        wrong = client.post(PEOPLE, {**ADD, "password": "guess"})
        assert wrong.status_code == 403
        assert 'value="charlie"' in wrong.content.decode()  # what was typed is kept
        assert client.post(PEOPLE, {**ADD, "password": "alice-password"}).status_code == 302
        assert client.post(PEOPLE, {"do": "remove", "person": charlie.pk}).status_code == 302
        rows = AccountEvent.objects.filter(kind__in=[K.PROOF, K.PROOF_FAILED]).order_by("id")
        assert [(row.kind, row.data["method"], row.data["at"]) for row in rows] == [
            (K.PROOF_FAILED, "password", PEOPLE),
            (K.PROOF, "password", PEOPLE),
        ]

    def test_a_wrong_password_is_refused_even_while_a_proof_is_recent(self, alice, charlie):
        assert signed_in("alice").post(PEOPLE, {**ADD, "password": "guess"}).status_code == 403

    def test_a_session_without_a_record_of_how_it_began_has_proved_nothing(self, as_alice, charlie):
        assert as_alice.post(PEOPLE, ADD).status_code == 403

    def test_the_proof_of_one_person_is_not_anothers(self, alice, bob, charlie, project):
        Membership.objects.filter(person=bob).update(roles=[Role.ADMIN])
        client = signed_in("alice")
        client.force_login(bob)
        assert client.post(PEOPLE, ADD).status_code == 403

    def test_fields_ask_only_for_what_a_person_has_and_only_when_needed(self, alice):
        client = signed_in("alice")
        assert 'name="password"' not in client.get("/account/tokens").content.decode()
        older(client, 9_000)
        html = client.get("/account/tokens").content.decode()
        assert 'name="password"' in html
        assert 'name="code"' not in html
        assert "data-passkey=" not in html
        with_codes(alice)
        assert 'name="code"' in client.get("/account/tokens").content.decode()

    def test_a_page_that_could_lock_somebody_out_is_opened_by_a_proof_only(self, alice):
        client = signed_in("alice")
        for address in ("/account/password", "/account/codes", "/account/passkeys/add"):
            assert client.get(address).status_code == 200
        older(client, 9_000)
        for address in ("/account/password", "/account/codes", "/account/passkeys/add"):
            assert client.get(address)["Location"] == f"/account/prove?next={address.replace('/', '%2F')}"
            assert client.post(address).status_code == 302
        refused = client.post("/account/prove", {"next": "/account/codes", "password": "guess"})
        assert refused.status_code == 403
        done = client.post("/account/prove", {"next": "/account/codes", "password": "alice-password"})
        assert done["Location"] == "/account/codes"
        assert client.get("/account/codes").status_code == 200
        assert (
            client.post("/account/prove", {"next": "//evil", "password": "alice-password"})["Location"]
            == "/account"
        )


class TestAgain:
    """What decides wants the proof on the very request, however fresh the session is."""

    def test_a_false_alarm_is_not_declared_by_a_session_that_just_signed_in(self, alice, incident):
        client = signed_in("alice")
        answer = client.post(f"/incidents/{incident.id}/false-alarm", {"why": "sensor"})
        assert answer.status_code == 403
        assert "Nothing was changed" in text_of(answer)

    def test_a_code_of_the_app_does_and_works_once(self, alice, incident):
        codes = with_codes(alice)
        client = Client()
        client.force_login(alice)
        address = f"/incidents/{incident.id}/approve"
        code = codes.code()
        # Proved: what is refused now is the request that nobody made.
        assert "Nothing is requested" in text_of(client.post(address, {"digest": "0" * 64, "code": code}))
        again = client.post(address, {"digest": "0" * 64, "code": code})
        assert again.status_code == 403
        assert "was used already" in text_of(again)

    @pytest.mark.parametrize(
        "given", ["{}", "[]", "x", '{"response": {}}', '{"id": 3, "response": {"a": []}}']
    )
    def test_a_passkey_that_nobody_asked_for_proves_nothing(self, alice, incident, given):
        client = signed_in("alice")
        address = f"/incidents/{incident.id}/approve"
        client.post("/account/challenge", {"for": address})
        assert client.post(address, {"digest": "0" * 64, "passkey": given}).status_code == 403
        assert AccountEvent.objects.latest("id").data["method"] == "passkey"

    def test_guessing_is_braked_together_with_signing_in(self, alice, incident):
        client = signed_in("alice")
        address = f"/incidents/{incident.id}/approve"
        for _ in range(5):
            client.post(address, {"digest": "0" * 64, "password": "guess"})
        answer = client.post(address, {"digest": "0" * 64, "password": "alice-password"})
        assert answer.status_code == 429
        assert re.search(r"Try again in \d+ s", text_of(answer))

    def test_the_password_field_is_in_every_form_that_decides(self, alice, incident):
        client = signed_in("alice")
        for address in ("", "/parts/plan"):
            html = client.get(f"/incidents/{incident.id}{address}").content.decode()
            assert 'id="fa-pw"' in html


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["id", "rawId", "type", "response", "signature", "x"]), inner)
        ),
    )
)
def test_only_what_has_the_shape_of_a_credential_is_read_as_one(document):
    read = passkeys.read(json.dumps(document))
    if read is not None:
        assert all(isinstance(read[name], str) for name in ("id", "rawId", "type"))
        assert all(isinstance(value, str) for name, value in read["response"].items() if name != "transports")


@pytest.mark.parametrize("text", ["", "[" * 9_000, '{"a":' * 3_000, '"' + "x" * 30_000 + '"', "\ud800"])
def test_nothing_that_is_no_document_breaks_the_reader(text):
    assert passkeys.read(text) is None


class TestByToken:
    """A token alone may leak: over the API too, an approval wants a proof in the call."""

    def call(self, person, address, body, scopes=None):
        from runs.actions import create_token

        token = create_token(person=person, scopes=scopes)
        client = Client(headers={"authorization": f"Bearer {token}"})
        return client.post(f"/api/v1{address}", body, content_type="application/json")

    def test_an_approval_wants_password_or_code_and_is_braked(self, alice, incident):
        address = f"/incidents/{incident.id}/approve"
        for body in ({"digest": "0" * 64}, {"digest": "0" * 64, "password": "guess"}):
            answer = self.call(alice, address, body)
            assert (answer.status_code, answer.json()["type"]) == (403, "/problems/password")
        right = {"digest": "0" * 64, "password": "alice-password"}
        assert self.call(alice, address, right).status_code == 409
        for _ in range(5):
            self.call(alice, address, {"digest": "0" * 64, "password": "guess"})
        assert self.call(alice, address, right).status_code == 429
        assert "sessionid" not in self.call(alice, address, right).cookies

    def test_a_token_does_no_more_than_it_was_made_for(self, alice, incident):
        body = {"digest": "0" * 64, "password": "alice-password"}
        address = f"/incidents/{incident.id}"
        for scopes, action in ((["read"], "request"), (["read", "respond"], "approve"), ([], "request")):
            answer = self.call(alice, f"{address}/{action}", body, scopes)
            assert (answer.status_code, answer.json()["type"]) == (403, "/problems/scope"), (scopes, action)

    def test_it_stops_working_when_it_is_over_revoked_or_its_person_may_not_sign_in(self, alice):
        from runs.actions import create_token

        def get(token):
            return Client(headers={"authorization": f"Bearer {token}"}).get("/api/v1/runs").status_code

        tokens = [create_token(person=alice) for _ in range(2)]
        over = create_token(person=alice, expires_in=timedelta(seconds=-1))
        assert [get(token) for token in (*tokens, over)] == [200, 200, 401]
        Token.objects.filter(person=alice).order_by("pk")[0].delete()
        assert get(tokens[0]) == 401
        alice.is_active = False
        alice.save()
        assert get(tokens[1]) == 401
