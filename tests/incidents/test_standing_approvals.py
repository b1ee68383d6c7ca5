"""Standing approvals: two people, limits, a count, and what is never covered."""

from datetime import timedelta

import pytest
from django.utils import timezone

from andon.signing import verify_document
from evidence.models import Item
from incidents import approval, caps, launches, ledger, review
from incidents.models import Incident, LedgerRow, Permit, ResumeRequest
from incidents.paging import raising
from incidents.paging.models import Page
from incidents.refused import Refused
from incidents.standing_approvals import actions, granting
from incidents.standing_approvals.models import StandingApproval
from runs.keys import trusted_keys
from runs.models import Attempt, Finding
from tests.incidents.world import World, held

pytestmark = pytest.mark.django_db


def write(project, team, **changes) -> StandingApproval:
    given = {
        "project": project,
        "person": team.mira,
        "kinds": ["loss_spike", "crash"],
        "per_day": 1,
        "furthest_steps": 200,
        "widest_skip": 10_000,
        "expires_at": timezone.now() + timedelta(days=7),
        "why": "nights",
    }
    return actions.create(**(given | changes))


def signed(project, team, **changes) -> StandingApproval:
    one = write(project, team, **changes)
    return actions.sign(standing=one, person=team.jonas, digest=one.digest)


def automatic(world, action):
    """Write down what the run did by itself before."""
    ledger.append(
        run=world.run,
        action=action,
        why="node lost",
        decided_by="supervisor",
        attempt=1,
        none_because=dict.fromkeys(
            (*ledger.REQUIRED, "samples_skipped", "steps_lost", "gpu_hours_lost"), "not told"
        ),
        cap=1,
    )


class TestSigning:
    def test_another_approver_signs_exactly_what_it_says(self, project, team):
        one = signed(project, team)
        content = verify_document(one.document, trusted_keys())
        assert content["kinds"] == ["crash", "loss_spike"]
        assert content["signed_by"] == str(team.jonas.opaque_id)
        assert content["digest"] == one.digest

    def test_not_its_writer(self, project, team):
        one = write(project, team)
        with pytest.raises(Refused) as refused:
            actions.sign(standing=one, person=team.mira, digest=one.digest)
        assert refused.value.says == "You wrote it. jonas or priya may sign."

    def test_not_a_responder_and_not_another_text(self, project, team):
        one = write(project, team)
        with pytest.raises(Refused, match="Only an approver"):
            actions.sign(standing=one, person=team.tomas, digest=one.digest)
        with pytest.raises(Refused, match="not what it says"):
            actions.sign(standing=one, person=team.jonas, digest="0" * 64)

    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"kinds": ["nonfinite"]}, "No standing approval is valid for nonfinite."),
            ({"kinds": []}, "at least one kind"),
            ({"per_day": 21}, "0 to 20 a day"),
            ({"expires_at": timezone.now() + timedelta(days=15)}, "within 14 days"),
            ({"why": " "}, "what it is for"),
        ],
    )
    def test_its_limits(self, project, team, changes, says):
        with pytest.raises(Refused, match=says):
            write(project, team, **changes)


class TestHeldSpike:
    @pytest.fixture
    def world(self, project, team):
        signed(project, team)
        return held(project)

    def test_it_is_rolled_back_by_itself_once_the_gate_is_open(self, world):
        review.again(world.incident().pk)
        permit = world.permit()
        one = StandingApproval.objects.get()
        assert permit.document["approval"] == f"standing-{one.pk}"
        assert world.directive() == "rollback"
        document = approval.exchange(
            run=world.run, incident_id=world.incident().pk, attempt=2, webhook_id="w"
        )
        world.launch(2, document["permit"])
        assert world.incident().state == Incident.State.WATCHING
        rows = {row.action: row for row in LedgerRow.objects.filter(run=world.run)}
        assert rows["rollback"].decided_by == rows["approve"].decided_by == f"standing approval {one.pk}"
        assert "1 of 1 today" in rows["approve"].why
        assert ledger.verify(world.run) == []

    def test_not_before_the_evidence_is_safe_and_the_ranks_stopped(self, world):
        items = Item.objects.filter(dossier=world.incident().dossier, kind="norms")
        items.update(state="collecting", sealed_at=None, held_at=None)
        review.again(world.incident().pk)
        items.update(state="sealed", sealed_at=timezone.now(), held_at=timezone.now())
        world.stop(state="refused")
        review.again(world.incident().pk)
        assert not Permit.objects.exists()
        world.stop()
        review.again(world.incident().pk)
        assert Permit.objects.count() == 1

    def test_the_days_count_is_over_all_runs_and_then_a_person_is_needed(self, project, world):
        review.again(world.incident().pk)
        other = held(project, "other")
        review.again(other.incident().pk)
        assert Permit.objects.count() == 1
        assert granting.covering(other.incident())[1] == "used 1 of 1 today"

    def test_revoking_it_voids_what_nobody_took(self, world, team):
        review.again(world.incident().pk)
        actions.revoke(standing=StandingApproval.objects.get(), person=team.priya, why="look first")
        assert world.permit().state == Permit.State.VOIDED
        assert world.directive() == "hold"
        review.again(world.incident().pk)
        assert Permit.objects.count() == 1

    def test_its_rollback_and_its_skip_count_against_the_caps_of_the_day(self, world):
        review.again(world.incident().pk)
        self.launch(world)
        assert {one.action: one.used for one in caps.today(world.run)} == {
            "hold": 1,
            "rollback": 1,
            "skip": 1,
        }
        rows = {row.action: row for row in LedgerRow.objects.filter(run=world.run)}
        assert rows["rollback"].budget == {"used": 1, "of": 2}
        assert rows["skip"].budget == {"used": 1, "of": 20}
        assert rows["resume"].budget is None

    @pytest.mark.parametrize("action", ["rollback", "skip"])
    def test_past_a_cap_of_the_run_a_person_must_approve(self, world, action):
        world.policy(caps={f"{action}s_per_day": 1})
        automatic(world, action)
        review.again(world.incident().pk)
        assert not Permit.objects.exists()
        assert world.directive() == "hold"
        assert granting.covering(world.incident())[1] == f"{action}s of the run today: 1 of 1 used"
        raising.look({"incident": world.incident().pk})
        assert Page.objects.get(kind="incident").urgent

    def test_a_cap_used_up_between_permit_and_launch_holds_what_was_launched(self, world):
        world.policy(caps={"rollbacks_per_day": 1})
        review.again(world.incident().pk)
        automatic(world, "rollback")
        self.launch(world)
        assert world.directive() == "hold"
        incident = world.incident()
        assert incident.state == Incident.State.OPEN
        assert Finding.objects.filter(kind="cap_reached", incident=str(incident.pk)).count() == 1
        row = LedgerRow.objects.filter(run=world.run, action="rollback").latest("seq")
        assert row.budget == {"used": 2, "of": 1}
        review.again(incident.pk)
        assert Permit.objects.count() == 1

    def launch(self, world):
        document = approval.exchange(
            run=world.run, incident_id=world.incident().pk, attempt=2, webhook_id="w"
        )
        world.launch(2, document["permit"])

    def test_a_persons_rejection_stands(self, world, team):
        review.again(world.incident().pk)
        approval.reject(incident=world.incident(), person=team.priya, why="I want to see it")
        review.again(world.incident().pk)
        assert Permit.objects.count() == 1
        assert world.directive() == "hold"

    def test_a_bad_update_beside_the_spike_is_a_persons_matter(self, world):
        world.finding("nonfinite", step=1002)
        review.again(world.incident().pk)
        assert not Permit.objects.exists()
        assert "nonfinite is a person's matter" in granting.covering(world.incident())[1]

    def test_nobody_is_woken_unless_it_takes_too_long(self, world):
        raising.look({"incident": world.incident().pk})
        assert not Page.objects.get(kind="incident").urgent
        Incident.objects.update(opened_at=timezone.now() - granting.PATIENCE)
        raising.look({"incident": world.incident().pk})
        assert Page.objects.get(kind="incident").urgent


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"furthest_steps": 101}, "steps run again: 102, allowed 101"),
        ({"widest_skip": 6_399}, "samples skipped: 6,400, allowed 6,399"),
        ({"per_day": 0}, "used 0 of 0 today"),
    ],
)
def test_beyond_a_limit_a_person_must_approve(project, team, changes, why):
    signed(project, team, **changes)
    world = held(project)
    review.again(world.incident().pk)
    assert not Permit.objects.exists()
    assert granting.covering(world.incident())[1] == why


class TestRestart:
    """A crash holds nothing; going back further than the newest verified checkpoint needs it all the same."""

    @pytest.fixture
    def world(self, project):
        world = World(project)
        for step in (800, 900):
            world.checkpoint(step)
        world.steps(998, 1002)
        world.finding("crash", severity="warn", step=1002, rule="watch", numbers={})
        Attempt.objects.update(exited_at=timezone.now(), exit={"attributed_to": "node_loss"})
        return world

    def further(self, world):
        incident = world.incident()
        plan = incident.plans.last()
        plan.kind, plan.checkpoint = "rollback_and_replay", {**plan.checkpoint, **self.at(world, 800)}
        plan.numbers = {**plan.numbers, "steps_lost": 202, "lacks": []}
        plan.save()
        return incident

    def at(self, world, step):
        kept = world.run.checkpoints.get(step=step)
        return {"step": step, "uri": kept.uri, "digest": kept.digest, "attempt": 1}

    def ask(self, world):
        return approval.exchange(
            run=world.run, incident_id=world.incident().pk, attempt=2, webhook_id="w", supervisor="s"
        )

    def test_the_newest_checkpoint_needs_no_permit(self, world, project, team):
        signed(project, team)
        with pytest.raises(Refused, match="Nothing is held"):
            self.ask(world)

    def test_further_back_it_runs_under_a_standing_approval_and_is_counted(self, world, project, team):
        one = signed(project, team, furthest_steps=300)
        self.further(world)
        document = self.ask(world)
        assert document["checkpoint"]["step"] == 800
        assert world.directive() == "continue"
        world.launch(2, document["permit"])
        assert world.permit().launches == 1
        assert granting.used_today(one) == 1
        assert ResumeRequest.objects.get().state == ResumeRequest.State.USED
        actions_ = [row.action for row in LedgerRow.objects.filter(run=world.run).order_by("seq")]
        assert actions_[-3:] == ["permit", "rollback", "resume"]
        assert launches.sweep_expired() == 0
        assert world.directive() == "continue"

    def test_without_one_it_does_not(self, world, project, team):
        self.further(world)
        with pytest.raises(Refused, match="a standing approval must allow it"):
            self.ask(world)
