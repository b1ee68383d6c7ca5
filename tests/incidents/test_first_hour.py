"""The first hour: duties, a checklist from facts, what the channel is told, and the link of a page."""

from datetime import timedelta

import pytest
from django.core import signing
from django.test import Client
from django.utils import timezone

from incidents import ack_links, actions, approval, duties, first_hour, queries
from incidents.models import Incident, Probe
from incidents.refused import Refused
from runs.models import DirectiveAck, Membership, Project
from tests.incidents.world import held

pytestmark = pytest.mark.django_db


def page(world, person):
    return queries.incident_page(person, world.incident().pk)


def steps(world, person):
    return {step.label: (step.glyph, step.says) for step in first_hour.of(page(world, person)).steps}


def signed_in(person):
    client = Client()
    client.force_login(person)
    return client


class TestChecklist:
    def test_it_fills_itself_from_facts(self, project, team):
        world = held(project, stopped=False)
        before = steps(world, team.mira)
        assert before["Stop the run"] == ("running", "0 of 4 ranks obey")
        assert before["Preserve the state"][0] == "done"
        assert before["Classify"] == ("done", "loss spike without recovery")
        assert before["Find the first divergence"] == ("running", "step 1,000, rank not known")
        assert before["Test one family at a time"] == ("not_yet", "0 of 7 closed by a probe")
        assert before["Recover from a known good state"] == ("not_yet", "plan drafted")
        DirectiveAck.objects.create(
            run=world.run,
            attempt=1,
            seq=2,
            state="held",
            step=1002,
            ranks=[0, 1, 2, 3],
            occurred_at=timezone.now(),
            received_at=timezone.now(),
        )
        digest = approval.subject(world.incident())[1]
        approval.request_resume(incident=world.incident(), person=team.mira, digest=digest)
        after = steps(world, team.mira)
        assert after["Stop the run"][0] == "done"
        assert after["Stop the run"][1].startswith("all ranks held ")
        assert after["Recover from a known good state"] == ("running", "resume requested")

    def test_minutes_count_from_the_opening_and_stop_at_the_end(self, world, team):
        Incident.objects.update(opened_at=timezone.now() - timedelta(minutes=9, seconds=5))
        assert first_hour.of(page(world, team.mira)).minutes == 9
        Incident.objects.update(state="resolved", resolved_at=timezone.now() - timedelta(minutes=5))
        hour = first_hour.of(page(world, team.mira))
        assert (hour.minutes, hour.over) == (4, True)

    def test_probes_of_the_board_fill_two_steps(self, world, team):
        probe = Probe.objects.create(
            incident=world.incident(),
            number=1,
            family="data",
            key="own",
            name="replay",
            owner=team.tomas,
            started_at=timezone.now() - timedelta(minutes=2),
        )
        running = steps(world, team.mira)
        assert running["Reproduce on fewer devices"] == ("running", "tomas, running 2\u00a0min")
        Probe.objects.filter(pk=probe.pk).update(
            state="done", result="gone", recorded_by=team.tomas, ended_at=timezone.now()
        )
        done = steps(world, team.mira)
        assert done["Reproduce on fewer devices"] == ("done", "1\u00a0probe with a result")
        assert done["Test one family at a time"] == ("running", "1 of 7 closed by a probe")


class TestDuties:
    @pytest.mark.parametrize("duty", list(duties.DUTIES))
    def test_taking_and_giving_stand_on_the_timeline(self, world, team, duty):
        duties.give(incident=world.incident(), duty=duty, person=team.mira, to="mira")
        duties.give(incident=world.incident(), duty=duty, person=team.mira, to="tomas")
        assert getattr(world.incident(), duty) == team.tomas
        said = list(
            world.incident().timeline.filter(kind="duty").order_by("id").values_list("text", flat=True)
        )
        assert said == [f"{duties.DUTIES[duty]} mira", f"{duties.DUTIES[duty]} tomas"]

    @pytest.mark.parametrize("name", ["vera", "charlie", "nobody"])
    def test_only_who_may_respond_is_given_one(self, world, team, name):
        with pytest.raises(Refused, match="Choose a responder"):
            duties.give(incident=world.incident(), duty="lead", person=team.mira, to=name)

    def test_a_viewer_gives_none(self, world, team):
        with pytest.raises(Refused, match="Only a responder"):
            duties.give(incident=world.incident(), duty="lead", person=team.vera, to="mira")

    def test_no_other_field_is_set_by_a_form(self, world, team):
        answer = signed_in(team.mira).post(
            f"/incidents/{world.incident().pk}/duties", {"duty": "acknowledged_by", "to": "mira"}
        )
        assert answer.status_code == 422
        assert world.incident().acknowledged_by is None


class TestStatus:
    def test_one_tap_keeps_the_text_and_promises_the_next(self, world, team):
        client = signed_in(team.mira)
        address = f"/incidents/{world.incident().pk}"
        text = client.get(f"{address}/status.txt").content.decode()
        assert text.startswith("pt-13b-web3: Loss spike that did not recover. Held ")
        assert f"/incidents/{world.incident().pk}" in text
        assert "First bad: step 1,000, forward; the rank is not known." in text
        done = client.post(f"{address}/status", {"next": "30"})
        assert done["Location"] == f"{address}#first-hour"
        incident = world.incident()
        assert timedelta(minutes=29) < incident.next_update_at - timezone.now() <= timedelta(minutes=30)
        kept = incident.timeline.get(kind="status").text
        assert kept.startswith("told the channel: pt-13b-web3: Loss spike")
        assert "Next update to the channel" in client.get(address).content.decode()

    @pytest.mark.parametrize("minutes", ["7", "-1", "x", "99999"])
    def test_no_other_promise_is_taken(self, world, team, minutes):
        answer = signed_in(team.mira).post(f"/incidents/{world.incident().pk}/status", {"next": minutes})
        assert answer.status_code == 422
        assert world.incident().next_update_at is None

    def test_a_late_update_says_so(self, world, team):
        Incident.objects.update(next_update_at=timezone.now() - timedelta(minutes=2))
        html = signed_in(team.mira).get(f"/incidents/{world.incident().pk}").content.decode()
        assert "overdue" in html

    def test_handing_over_gives_the_lead_and_keeps_the_note(self, world, team):
        client = signed_in(team.mira)
        address = f"/incidents/{world.incident().pk}/hand-over"
        assert "- Evidence: " in client.get(address).content.decode()
        client.post(address, {"to": "tomas", "text": "watch layer 6"})
        incident = world.incident()
        assert incident.lead == team.tomas
        assert incident.notes.get().text == "**Hand-over to tomas**\n\nwatch layer 6"
        assert client.post(address, {"to": "charlie", "text": "x"}).status_code == 422


class TestLinkOfAPage:
    def link(self, world, person):
        return ack_links.address(world.incident(), person).partition("localhost")[2].partition("/")[2]

    def test_looking_changes_nothing_and_posting_acknowledges_as_who_was_paged(self, world, team):
        address, client = "/" + self.link(world, team.tomas), Client()
        shown = client.get(address)
        assert "Acknowledge as tomas" in shown.content.decode()
        assert "no-store" in shown["Cache-Control"]
        assert world.incident().acknowledged_at is None
        done = client.post(address)
        assert "Acknowledged by <b>tomas</b>" in done.content.decode()
        incident = world.incident()
        assert (incident.acknowledged_by, incident.lead) == (team.tomas, team.tomas)
        assert "_auth_user_id" not in client.session
        assert client.get(f"/incidents/{incident.pk}").status_code == 302

    def test_it_needs_the_token_of_its_form(self, world, team):
        client = Client(enforce_csrf_checks=True)
        assert client.post("/" + self.link(world, team.tomas)).status_code == 403
        assert world.incident().acknowledged_at is None

    def test_the_second_tap_learns_who_has_it(self, world, team):
        actions.acknowledge(incident=world.incident(), person=team.mira)
        answer = Client().post("/" + self.link(world, team.tomas))
        assert answer.status_code == 409
        assert "mira acknowledged at" in answer.content.decode()

    def test_it_is_over_after_a_night(self, world, team, monkeypatch):
        address = "/" + self.link(world, team.tomas)
        monkeypatch.setattr(ack_links, "VALID_FOR", timedelta(seconds=-1))
        assert "This link is over" in Client().get(address).content.decode()
        assert Client().post(address).status_code == 410
        assert world.incident().acknowledged_at is None

    def test_who_left_the_project_or_may_only_look_acknowledges_nothing(self, world, team):
        address = "/" + self.link(world, team.vera)
        assert Client().post(address).status_code == 403
        left = "/" + self.link(world, team.tomas)
        Membership.objects.filter(person=team.tomas).delete()
        assert Client().get(left).status_code == 404
        team.jonas.is_active = False
        team.jonas.save()
        assert Client().get("/" + self.link(world, team.jonas)).status_code == 404
        assert world.incident().acknowledged_at is None

    def test_no_other_signature_of_this_server_is_a_link(self, world, team):
        said = {"i": world.incident().pk, "p": str(team.tomas.opaque_id)}
        for forged in (
            signing.dumps(said),
            signing.dumps(said, salt="andon.approve/1"),
            signing.dumps(said, salt="andon.acknowledge/1", key="another key"),
            "nonsense",
            "x" * 5000,
        ):
            assert Client().get(f"/acknowledge/{forged}").status_code == 404

    def test_it_opens_nothing_of_another_incident(self, world, team):
        token = ack_links.token(world.incident(), team.tomas)
        Project.objects.create(slug="other", name="Other")
        for path in (
            f"/incidents/{world.incident().pk}/approve",
            f"/incidents/{world.incident().pk}/acknowledge",
        ):
            answer = Client().post(f"{path}?token={token}", {"token": token})
            assert answer.status_code == 302
            assert answer["Location"].startswith("/sign-in")
