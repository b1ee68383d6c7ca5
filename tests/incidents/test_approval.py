"""Request, approve, permit: who may, what voids, and every refusal in its words."""

import time
from typing import Any

import pytest
from django.utils import timezone

from andon.permit import verify
from evidence.actions import waive
from evidence.models import Item
from incidents import actions, approval, permits, plans
from incidents.models import Approval, Incident, Permit, ResumeRequest, StateChange
from incidents.refused import Refused
from runs.directives import current_document
from runs.keys import trusted_keys
from runs.models import Membership, Person

pytestmark = pytest.mark.django_db


def digest(incident: Incident) -> str:
    return approval.subject(incident)[1]


def ask(world, person):
    incident = world.incident()
    return approval.request_resume(incident=incident, person=person, digest=digest(incident))


def grant(world, person):
    incident = world.incident()
    return approval.approve(incident=incident, person=person, digest=digest(incident))


def take(world, attempt=2, webhook_id="w-1"):
    return approval.exchange(
        run=world.run, incident_id=world.incident().pk, attempt=attempt, webhook_id=webhook_id
    )


class TestSubject:
    def test_it_names_what_the_rules_list_and_nothing_else(self, world):
        signed, _ = approval.subject(world.incident())
        assert set(signed) == {
            "schema",
            "run",
            "incident",
            "attempt",
            "first_bad",
            "evidence",
            "plan",
            "policy",
        }
        assert signed["first_bad"]["step"] == 1000
        assert signed["plan"]["checkpoint"]["digest"] == f"{900:064x}"
        assert {"kind", "name", "digest"} <= set(signed["evidence"][0])

    def test_sealing_a_held_checkpoint_of_the_same_digest_changes_nothing(self, world):
        incident = world.incident()
        item = Item.objects.get(dossier=incident.dossier, kind="last_good_checkpoint")
        Item.objects.filter(pk=item.pk).update(state="held")
        before = digest(incident)
        Item.objects.filter(pk=item.pk).update(state="sealed")
        assert digest(incident) == before

    def test_optional_evidence_and_arrivals_are_not_in_it(self, world):
        incident = world.incident()
        before = digest(incident)
        Item.objects.filter(dossier=incident.dossier, required=False).update(digest="f" * 64)
        assert digest(incident) == before

    def test_another_digest_of_required_evidence_changes_it(self, world):
        incident = world.incident()
        before = digest(incident)
        Item.objects.filter(dossier=incident.dossier, kind="last_good_checkpoint").update(digest="f" * 64)
        assert digest(incident) != before


class TestRequest:
    def test_a_responder_may_ask_with_the_digest_the_page_showed(self, world, team):
        request = ask(world, team.tomas)
        assert request.state == ResumeRequest.State.OPEN
        assert world.directive() == "hold"

    @pytest.mark.parametrize("who", ["vera", "charlie"])
    def test_others_may_not(self, world, team, who):
        with pytest.raises(Refused) as refused:
            ask(world, getattr(team, who))
        assert refused.value.code == "not-allowed"
        assert "Only a responder, approver or admin" in refused.value.says

    def test_it_refuses_a_page_that_is_old(self, world, team):
        with pytest.raises(Refused) as refused:
            approval.request_resume(incident=world.incident(), person=team.tomas, digest="0" * 64)
        assert refused.value.says == "What you saw has changed since: look again, then request."

    def test_it_refuses_while_evidence_is_not_safe_and_names_it(self, world, team):
        Item.objects.filter(dossier=world.incident().dossier, kind="norms").update(
            state="missing", why="the node is gone"
        )
        with pytest.raises(Refused) as refused:
            ask(world, team.tomas)
        assert refused.value.code == "gate-shut"
        assert "the node is gone" in refused.value.says

    def test_it_refuses_an_incomplete_plan(self, world, team):
        incident = world.incident()
        plan = plans.newest(incident)
        plan.numbers = {**plan.numbers, "lacks": ["no verified checkpoint is known yet"]}
        plan.save()
        with pytest.raises(Refused) as refused:
            ask(world, team.tomas)
        assert refused.value.says == "The plan is not complete: no verified checkpoint is known yet."

    def test_there_is_one_live_request(self, world, team):
        ask(world, team.tomas)
        with pytest.raises(Refused) as refused:
            ask(world, team.mira)
        assert refused.value.says == "tomas asked already: approve or reject that."

    def test_the_requester_may_withdraw_and_others_may_not(self, world, team):
        ask(world, team.tomas)
        with pytest.raises(Refused):
            approval.withdraw(incident=world.incident(), person=team.mira)
        approval.withdraw(incident=world.incident(), person=team.tomas)
        assert ask(world, team.mira).state == ResumeRequest.State.OPEN


class TestApprove:
    def test_another_person_approves_and_the_permit_verifies_offline(self, world, team):
        ask(world, team.mira)
        grant(world, team.jonas)
        incident = world.incident()
        assert incident.state == Incident.State.APPROVED
        document = take(world)
        permit = verify(document, trusted=trusted_keys(), at=time.time(), run=world.run.slug, attempt=2)
        assert permit.checkpoint.step == 900
        assert permit.skip.from_ == 28800
        assert permit.approval_digest == Approval.objects.get().digest

    def test_the_directive_names_permit_and_plan_and_is_for_the_held_attempt(self, world, team):
        ask(world, team.mira)
        grant(world, team.jonas)
        document: dict[str, Any] = current_document(world.run.pk)
        assert document["kind"] == "rollback"
        assert document["permit"] == str(world.permit().public_id)
        assert document["plan"]["checkpoint"]["step"] == 900
        assert document["attempt"] == 1

    def test_the_requester_may_not_and_is_told_who_may(self, world, team):
        ask(world, team.mira)
        with pytest.raises(Refused) as refused:
            grant(world, team.mira)
        assert refused.value.says == "You asked. jonas or priya may approve."
        assert world.directive() == "hold"

    def test_a_responder_may_not_and_is_told_who_may(self, world, team):
        ask(world, team.mira)
        with pytest.raises(Refused) as refused:
            grant(world, team.tomas)
        assert refused.value.says == "Only an approver may approve. jonas, mira or priya may."

    def test_who_edited_the_plan_may_not(self, world, team):
        actions.change_plan(incident=world.incident(), person=team.jonas, checkpoint_step=800)
        ask(world, team.tomas)
        with pytest.raises(Refused) as refused:
            grant(world, team.jonas)
        assert refused.value.says == "You edited the plan. mira or priya may approve."

    def test_who_waived_evidence_may_not(self, world, team):
        item = Item.objects.get(dossier=world.incident().dossier, kind="norms")
        Item.objects.filter(pk=item.pk).update(state="missing", why="gone", digest="", sealed_at=None)
        waive(item=item, person=team.priya, why="the loss is enough")
        ask(world, team.tomas)
        with pytest.raises(Refused) as refused:
            grant(world, team.priya)
        assert refused.value.says == "You waived evidence. jonas or mira may approve."

    def test_nothing_asked_is_said(self, world, team):
        with pytest.raises(Refused) as refused:
            grant(world, team.jonas)
        assert refused.value.says == "Nobody has asked to resume."

    def test_two_approvers_by_policy_are_two_people(self, world, team):
        world.policy(resume={"approvers": 2})
        ask(world, team.tomas)
        grant(world, team.jonas)
        assert world.incident().state == Incident.State.OPEN
        with pytest.raises(Refused) as refused:
            grant(world, team.jonas)
        assert (
            refused.value.says
            == "You approved; 1 of 2 approvals are there, somebody else must give the next."
        )
        assert not Permit.objects.exists()
        grant(world, team.priya)
        assert world.incident().state == Incident.State.APPROVED

    def test_a_changed_plan_voids_and_says_what_changed(self, world, team):
        ask(world, team.tomas)
        old = digest(world.incident())
        actions.change_plan(incident=world.incident(), person=team.mira, checkpoint_step=800)
        request = ResumeRequest.objects.get()
        assert request.state == ResumeRequest.State.VOIDED
        assert any("checkpoint changed: step 900" in why and "step 800" in why for why in request.ended_why)
        with pytest.raises(Refused) as refused:
            approval.approve(incident=world.incident(), person=team.jonas, digest=old)
        assert refused.value.says.startswith("The last request was voided: the plan's checkpoint changed")

    def test_changed_evidence_voids_at_approval_and_the_void_stays(self, world, team):
        ask(world, team.tomas)
        old = digest(world.incident())
        Item.objects.filter(dossier=world.incident().dossier, kind="norms").update(digest="e" * 64)
        with pytest.raises(Refused) as refused:
            approval.approve(incident=world.incident(), person=team.jonas, digest=old)
        assert refused.value.code == "changed-since-approval"
        assert refused.value.says.startswith("Not approved: evidence “per-rank and per-layer norms")
        assert ResumeRequest.objects.get().state == ResumeRequest.State.VOIDED

    def test_a_changed_policy_voids(self, world, team):
        ask(world, team.tomas)
        old = digest(world.incident())
        world.policy(rollback={"watch_steps": 7})
        with pytest.raises(Refused) as refused:
            approval.approve(incident=world.incident(), person=team.jonas, digest=old)
        assert "the policy changed" in refused.value.says

    @pytest.mark.parametrize("taken", ["role", "account"])
    def test_who_may_approve_no_more_has_approved_nothing(self, world, team, taken):
        world.policy(resume={"approvers": 2})
        ask(world, team.tomas)
        grant(world, team.priya)
        if taken == "role":
            Membership.objects.filter(person=team.priya).update(roles=["viewer"])
        else:
            Person.objects.filter(pk=team.priya.pk).update(is_active=False)
        with pytest.raises(Refused) as refused:
            grant(world, team.jonas)
        assert refused.value.changes == ["priya approved and may not any more"]
        assert not Permit.objects.exists()

    def test_nor_does_the_permit_they_gave_leave(self, world, team):
        ask(world, team.tomas)
        grant(world, team.priya)
        Membership.objects.filter(person=team.priya).delete()
        with pytest.raises(Refused, match="priya approved and may not any more"):
            take(world)
        assert world.permit().state == Permit.State.VOIDED
        assert world.directive() == "hold"

    def test_an_expired_request_is_not_approved(self, world, team):
        ask(world, team.tomas)
        ResumeRequest.objects.update(expires_at=timezone.now())
        with pytest.raises(Refused) as refused:
            grant(world, team.jonas)
        assert refused.value.code == "expired"
        assert ResumeRequest.objects.get().state == ResumeRequest.State.EXPIRED

    def test_another_digest_than_the_requests_is_refused_and_voids_nothing(self, world, team):
        ask(world, team.tomas)
        with pytest.raises(Refused) as refused:
            approval.approve(incident=world.incident(), person=team.jonas, digest="0" * 64)
        assert refused.value.code == "changed"
        assert ResumeRequest.objects.get().state == ResumeRequest.State.OPEN

    def test_every_turn_is_in_the_history(self, world, team):
        ask(world, team.mira)
        grant(world, team.jonas)
        changes = [(change.before, change.after) for change in StateChange.objects.order_by("id")]
        assert changes == [("", "open"), ("open", "approved")]


class TestReject:
    def test_a_reason_is_needed_and_kept(self, world, team):
        ask(world, team.mira)
        with pytest.raises(Refused) as refused:
            approval.reject(incident=world.incident(), person=team.jonas, why=" ")
        assert refused.value.code == "reason-needed"
        approval.reject(incident=world.incident(), person=team.jonas, why="skip is too wide")
        request = ResumeRequest.objects.get()
        assert (request.state, request.ended_why) == ("rejected", ["skip is too wide"])

    def test_an_approved_resume_can_still_be_rejected_until_the_permit_is_taken(self, world, team):
        ask(world, team.mira)
        grant(world, team.jonas)
        approval.reject(incident=world.incident(), person=team.priya, why="node-01 is not clean")
        assert world.incident().state == Incident.State.OPEN
        assert world.directive() == "hold"
        with pytest.raises(Refused) as refused:
            take(world)
        assert refused.value.code == "changed-since-approval"


class TestExchange:
    @pytest.fixture
    def approved(self, world, team):
        ask(world, team.mira)
        grant(world, team.jonas)
        return world

    def test_the_same_id_gets_the_same_permit_again(self, approved):
        assert take(approved) == take(approved)
        assert approved.incident().state == Incident.State.RESUMING

    def test_another_id_is_told_when_and_by_whom(self, approved):
        take(approved, webhook_id="supervisor-a")
        with pytest.raises(Refused) as refused:
            take(approved, webhook_id="supervisor-b")
        assert (refused.value.code, refused.value.status) == ("already-exchanged", 409)
        assert "supervisor-a" in refused.value.says
        assert f"{timezone.now():%Y-%m-%dT%H}" in refused.value.says

    def test_nothing_approved_is_said(self, world, team):
        with pytest.raises(Refused) as refused:
            take(world)
        assert refused.value.says == f"Nobody has asked to resume incident {world.incident().pk} yet."
        ask(world, team.mira)
        with pytest.raises(Refused) as refused:
            take(world)
        assert (refused.value.code, refused.value.says) == ("not-approved", "Requested, 0 of 1 approved.")

    def test_what_changed_since_the_approval_voids_it_and_holds_again(self, approved):
        Item.objects.filter(dossier=approved.incident().dossier, kind="norms").update(digest="e" * 64)
        with pytest.raises(Refused) as refused:
            take(approved)
        assert refused.value.code == "changed-since-approval"
        assert refused.value.changes
        assert approved.incident().state == Incident.State.OPEN
        assert approved.directive() == "hold"
        assert approved.permit().state == Permit.State.VOIDED

    def test_an_expired_permit_is_gone_and_holds_again(self, approved):
        Permit.objects.update(expires_at=timezone.now())
        with pytest.raises(Refused) as refused:
            take(approved)
        assert (refused.value.code, refused.value.status) == ("expired", 410)
        assert approved.directive() == "hold"
        assert approved.incident().state == Incident.State.OPEN

    def test_another_attempt_number_gets_nothing(self, approved):
        with pytest.raises(Refused) as refused:
            take(approved, attempt=5)
        assert refused.value.says == "The permit is for attempt 2, not for attempt 5."
        assert take(approved)["attempt"] == 2

    def test_an_unknown_incident_is_404(self, approved):
        with pytest.raises(Refused) as refused:
            approval.exchange(run=approved.run, incident_id=10**9, attempt=2, webhook_id="x")
        assert refused.value.status == 404

    def test_a_plan_cannot_change_once_the_permit_is_out(self, approved, team):
        take(approved)
        with pytest.raises(Refused) as refused:
            actions.change_plan(incident=approved.incident(), person=team.tomas, checkpoint_step=800)
        assert refused.value.code == "taken"
        assert permits.revalidate(approved.incident()) == []


class TestFalseAlarm:
    def test_one_approver_with_a_reason_resumes_in_place(self, world, team):
        approval.false_alarm(incident=world.incident(), person=team.jonas, why="the logger wrote nonsense")
        assert current_document(world.run.pk)["kind"] == "resume"
        document = take(world)
        assert document["plan"] == "resume_in_place"
        assert document["checkpoint"] is None
        world.launch(2, document["permit"])
        assert world.incident().state == Incident.State.FALSE_ALARM
        assert world.directive() == "continue"
        assert world.permit().state == Permit.State.SPENT

    def test_evidence_need_not_be_sealed(self, world, team):
        Item.objects.filter(dossier=world.incident().dossier).update(state="held", sealed_at=None)
        approval.false_alarm(incident=world.incident(), person=team.jonas, why="nonsense")
        assert take(world)["plan"] == "resume_in_place"

    def test_who_asked_to_resume_may_not_declare_it_instead(self, world, team):
        ask(world, team.mira)
        with pytest.raises(Refused) as refused:
            approval.false_alarm(incident=world.incident(), person=team.mira, why="nonsense")
        assert refused.value.says == "You asked to resume. jonas or priya may."

    def test_a_reason_is_needed(self, world, team):
        with pytest.raises(Refused) as refused:
            approval.false_alarm(incident=world.incident(), person=team.jonas, why="")
        assert refused.value.code == "reason-needed"
