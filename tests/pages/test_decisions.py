"""What people decide on an incident's page, and each refusal with its words."""

import re

import pytest
from django.test import Client

from evidence.models import Item
from incidents.models import Incident
from runs.actions import create_run
from runs.models import Directive
from tests.pages import seed
from tests.pages.words import text_of

pytestmark = pytest.mark.django_db(transaction=True)


class TestDecisions:
    def _shut(self, incident):
        """Return the required items that keep the gate shut."""
        return Item.objects.filter(dossier=incident.row.dossier, required=True).exclude(
            state__in=["sealed", "not_applicable"]
        )

    def _waive_all(self, client, incident):
        for item in self._shut(incident):
            answer = client.post(
                f"/incidents/{incident.id}/waive", {"item": item.pk, "why": "not posted by this trainer"}
            )
            assert answer.status_code == 302, text_of(answer)[:600]

    def _digest(self, client, incident):
        page = client.get(f"/incidents/{incident.id}").content.decode()
        return re.search(r'name="digest" value="([0-9a-f]{64})"', page)[1]

    def test_acknowledging_names_who_has_it(self, as_bob, incident):
        answer = as_bob.post(f"/incidents/{incident.id}/acknowledge", follow=True)
        assert "acknowledged by bob" in text_of(answer)

    def test_a_shut_gate_shows_the_button_and_what_opens_it(self, as_bob, incident):
        as_bob.post(f"/incidents/{incident.id}/acknowledge")
        page = as_bob.get(f"/incidents/{incident.id}")
        assert re.search(r'aria-disabled="true"[^>]*>Request resume', page.content.decode())
        assert "Resume cannot be requested" in text_of(page)
        refused = as_bob.post(f"/incidents/{incident.id}/request", {"digest": "0" * 64})
        assert refused.status_code in {403, 409}
        assert 'role="alert"' in refused.content.decode()

    def test_two_people_resume_a_run(self, as_bob, as_alice, incident):
        self._waive_all(as_bob, incident)
        as_bob.post(f"/incidents/{incident.id}/acknowledge")
        done = as_bob.post(
            f"/incidents/{incident.id}/request",
            {"digest": self._digest(as_bob, incident), "note": "skip it"},
            follow=True,
        )
        assert "bob asked" in text_of(done)
        page = as_alice.get(f"/incidents/{incident.id}/approve")
        assert "bob asks" in text_of(page)
        assert "waived: batch ids" in text_of(page)
        shown = re.search(r'name="digest" value="([0-9a-f]{64})"', page.content.decode())[1]

        wrong = as_alice.post(f"/incidents/{incident.id}/approve", {"digest": shown, "password": "guess"})
        assert wrong.status_code == 403
        assert "the password does not fit" in text_of(wrong)
        other = as_alice.post(
            f"/incidents/{incident.id}/approve", {"digest": "0" * 64, "password": "alice-password"}
        )
        assert other.status_code == 409
        assert not incident.row.permits.exists()

        approved = as_alice.post(
            f"/incidents/{incident.id}/approve", {"digest": shown, "password": "alice-password"}, follow=True
        )
        assert "Approved by alice" in text_of(approved)
        assert "The permit is valid until" in text_of(approved)
        assert Incident.objects.get(pk=incident.id).state == "approved"

    def test_a_responder_sees_who_may_approve_and_no_button(self, as_bob, incident):
        page = as_bob.get(f"/incidents/{incident.id}/approve")
        assert "Approver: alice." in text_of(page)
        assert 'name="password"' not in page.content.decode()

    def test_the_requester_is_told_who_may_approve(self, as_alice, alice, bob, incident):
        from evidence.actions import waive

        for item in self._shut(incident):
            waive(item=item, person=bob, why="none")
        as_alice.post(f"/incidents/{incident.id}/request", {"digest": self._digest(as_alice, incident)})
        page = as_alice.get(f"/incidents/{incident.id}/approve")
        assert "You asked." in text_of(page)
        answer = as_alice.post(
            f"/incidents/{incident.id}/approve",
            {"digest": incident.row.requests.get().digest, "password": "alice-password"},
        )
        assert answer.status_code in {403, 409}
        assert "You asked" in text_of(answer)

    def test_rejecting_needs_a_reason_and_keeps_the_run_held(self, as_bob, as_alice, incident):
        self._waive_all(as_bob, incident)
        as_bob.post(f"/incidents/{incident.id}/request", {"digest": self._digest(as_bob, incident)})
        assert as_alice.post(f"/incidents/{incident.id}/reject", {"why": " "}).status_code == 409
        done = as_alice.post(f"/incidents/{incident.id}/reject", {"why": "wrong checkpoint"}, follow=True)
        assert "Rejected. The run stays held." in text_of(done)
        assert Directive.objects.filter(run=incident.run).latest("seq").kind == "hold"

    def test_changing_the_plan_makes_a_new_version(self, as_bob, incident):
        done = as_bob.post(
            f"/incidents/{incident.id}/plan",
            {"kind": "rollback_and_replay", "checkpoint_step": "60", "why": "hardware suspected"},
            follow=True,
        )
        assert "step 60, verified" in text_of(done)
        assert "rollback and replay" in text_of(done)

    def test_a_run_is_held_by_hand_with_a_reason(self, as_bob, incident):
        create_run(name="by-hand")
        seed.post_events("by-hand", create_run(name="by-hand").secret, [seed.launch(4)])
        refused = as_bob.post("/runs/by-hand/hold", {"why": ""})
        assert refused.status_code >= 400
        assert "Not held" in text_of(refused)
        done = as_bob.post("/runs/by-hand/hold", {"why": "loss looks wrong"}, follow=True)
        assert "Held by hand" in text_of(done)

    def test_a_false_alarm_needs_the_password_again(self, as_alice, incident):
        answer = as_alice.post(f"/incidents/{incident.id}/false-alarm", {"why": "sensor", "password": "no"})
        assert answer.status_code == 403
        assert Incident.objects.get(pk=incident.id).state == "open"

    @pytest.mark.parametrize(
        "name", ["acknowledge", "plan", "request", "false-alarm", "waive", "notes", "reject"]
    )
    def test_a_decision_is_never_made_by_a_link(self, as_alice, incident, name):
        assert as_alice.get(f"/incidents/{incident.id}/{name}").status_code == 405

    def test_a_form_without_its_token_is_refused_in_words(self, bob, incident):
        client = Client(enforce_csrf_checks=True)
        client.force_login(bob)
        answer = client.post(f"/incidents/{incident.id}/acknowledge")
        assert answer.status_code == 403
        assert "older than your sign-in" in text_of(answer)
