"""The API: the signed exchange of machines, and what a personal token reads, asks and approves."""

import hashlib
import json
import time
import uuid

import pytest
from django.test import Client

from andon.permit import verify
from andon.signing import new_secret, sign_webhook
from incidents import api, approval
from incidents.models import Incident
from runs import identity
from runs.keys import trusted_keys
from runs.models import RunSecret, Token

pytestmark = pytest.mark.django_db


@pytest.fixture
def secret(world):
    identity.forget()  # every test makes its run anew under the same name
    return RunSecret.objects.create(run=world.run, secret=new_secret()).secret


def post_resume(world, secret, document, *, webhook_id=None):
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    name, stamp = webhook_id or f"w-{uuid.uuid4()}", int(time.time())
    return Client().post(
        f"/api/v1/runs/{world.run.slug}/resume",
        body,
        content_type="application/json",
        headers={
            "webhook-id": name,
            "webhook-timestamp": str(stamp),
            "webhook-signature": sign_webhook(secret, name, stamp, body),
        },
    )


def token(person):
    text = f"andon-{uuid.uuid4().hex}"
    Token.objects.create(person=person, name="test", sha256=hashlib.sha256(text.encode()).hexdigest())
    return {"authorization": f"Bearer {text}"}


def approve(world, team):
    incident = world.incident()
    digest = approval.subject(incident)[1]
    approval.request_resume(incident=incident, person=team.mira, digest=digest)
    approval.approve(incident=incident, person=team.jonas, digest=digest)


class TestResume:
    def test_it_hands_out_a_permit_that_verifies_offline(self, world, team, secret):
        approve(world, team)
        answer = post_resume(world, secret, {"incident": str(world.incident().pk), "attempt": 2})
        assert answer.status_code == 200
        assert verify(answer.json()["permit"], trusted=trusted_keys(), at=time.time()).run == world.run.slug

    def test_the_same_id_again_gets_the_same_and_another_409(self, world, team, secret):
        approve(world, team)
        body = {"incident": world.incident().pk, "attempt": 2}
        first = post_resume(world, secret, body, webhook_id="sup-1")
        assert post_resume(world, secret, body, webhook_id="sup-1").json() == first.json()
        other = post_resume(world, secret, body, webhook_id="sup-2")
        assert other.status_code == 409
        assert other.json()["type"].endswith("already-exchanged")
        assert "sup-1" in other.json()["detail"]

    def test_nothing_approved_is_409(self, world, secret):
        answer = post_resume(world, secret, {"incident": str(world.incident().pk), "attempt": 2})
        assert (answer.status_code, answer.json()["type"].rsplit("/", 1)[-1]) == (409, "not-approved")

    def test_a_wrong_signature_is_401_and_takes_nothing(self, world, team, secret):
        approve(world, team)
        answer = post_resume(world, new_secret(), {"incident": world.incident().pk, "attempt": 2})
        assert answer.status_code == 401
        assert world.permit().state == "issued"

    @pytest.mark.parametrize(
        ("body", "status"),
        [
            (b"", 400),
            (b"[" * 60_000, 400),
            (b"[" * 100_000, 413),
            (b"\xff", 400),
            ([], 422),
            ({"incident": "x", "attempt": 2}, 422),
            ({"incident": -1, "attempt": 2}, 422),
            ({"incident": "9" * 40, "attempt": 2}, 422),
            ({"incident": 10**9, "attempt": 2}, 404),
            ({"incident": 1, "attempt": True}, 422),
        ],
    )
    def test_bad_bodies_get_a_problem_and_never_500(self, world, secret, body, status):
        answer = post_resume(world, secret, body)
        assert answer.status_code == status
        assert answer["content-type"].startswith("application/problem+json")


class TestRead:
    def test_the_list_has_the_fields_of_the_wire(self, world, team):
        answer = Client().get(f"/api/v1/incidents?run={world.run.slug}", headers=token(team.vera)).json()
        item = answer["items"][0]
        assert item["id"] == str(world.incident().pk)
        assert set(item["first_bad"]) == {"step", "ranks", "phase", "layer", "tie", "certainty"}
        assert set(item["evidence"]) == {"required", "held", "sealed", "missing"}
        assert item["directive"] == {"kind": "hold", "seq": 2, "obeyed": 4, "of": 4}

    def test_it_pages_by_cursor(self, world, team, monkeypatch):
        monkeypatch.setattr(api, "PAGE", 1)
        newest = world.incident()
        Incident.objects.filter(pk=newest.pk).update(state="resolved")
        world.finding("nonfinite", step=1002, attempt=1)
        one = Client().get("/api/v1/incidents", headers=token(team.vera)).json()
        two = Client().get(f"/api/v1/incidents?cursor={one['next']}", headers=token(team.vera)).json()
        assert [item["id"] for item in one["items"] + two["items"]] == [
            str(world.incident().pk),
            str(newest.pk),
        ]
        assert two["next"] is None

    def test_one_incident_shows_gate_plan_and_what_is_signed(self, world, team):
        answer = Client().get(f"/api/v1/incidents/{world.incident().pk}", headers=token(team.vera)).json()
        assert answer["approval"]["digest"] == approval.subject(world.incident())[1]
        assert {"line": "plan", "done": True, "says": "complete"} in answer["gate"]

    def test_the_ledger_is_read_with_its_chain_checked(self, world, team):
        answer = Client().get(f"/api/v1/runs/{world.run.slug}/ledger", headers=token(team.vera)).json()
        assert [row["action"] for row in answer["items"]] == ["hold"]
        assert answer["chain"] == {"verified": True, "wrong": []}

    @pytest.mark.parametrize("path", ["incidents/{incident}", "runs/{run}/ledger"])
    def test_a_stranger_gets_404_and_nobody_401(self, world, team, path):
        url = "/api/v1/" + path.format(incident=world.incident().pk, run=world.run.slug)
        assert Client().get(url, headers=token(team.charlie)).status_code == 404
        assert Client().get(url).status_code == 401


class TestAskAndApprove:
    def post(self, person, url, document):
        return Client().post(
            url, json.dumps(document), content_type="application/json", headers=token(person)
        )

    def test_both_by_the_same_functions_as_the_buttons(self, world, team):
        url = f"/api/v1/incidents/{world.incident().pk}"
        digest = approval.subject(world.incident())[1]
        assert self.post(team.mira, f"{url}/request", {"digest": digest}).status_code == 200
        own = self.post(team.mira, f"{url}/approve", {"digest": digest, "password": "mira-password"})
        assert (own.status_code, own.json()["detail"]) == (403, "You asked. jonas or priya may approve.")
        done = self.post(team.jonas, f"{url}/approve", {"digest": digest, "password": "jonas-password"})
        assert done.json()["state"] == "approved"

    def test_a_token_without_the_password_approves_nothing(self, world, team):
        url = f"/api/v1/incidents/{world.incident().pk}"
        digest = approval.subject(world.incident())[1]
        self.post(team.mira, f"{url}/request", {"digest": digest})
        answer = self.post(team.jonas, f"{url}/approve", {"digest": digest, "password": "guess"})
        assert answer.status_code == 403
        assert world.incident().state == Incident.State.OPEN

    def test_a_stranger_gets_404(self, world, team):
        url = f"/api/v1/incidents/{world.incident().pk}/request"
        assert self.post(team.charlie, url, {"digest": "0" * 64}).status_code == 404
