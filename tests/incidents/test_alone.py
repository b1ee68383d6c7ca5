"""What one person may do alone, what runs by itself, and what is loud about it."""

from datetime import timedelta

import pytest
from django.utils import timezone

from andon.permit import verify
from andon.postmortem.markdown import render
from evidence.models import Item
from incidents import actions, alone, approval, granting, ledger, review
from incidents.alarms import alarm_lines
from incidents.models import Incident, LedgerRow, Permit, ResumeRequest
from incidents.paging.models import Page
from incidents.postmortem import build
from incidents.refused import Refused
from runs.keys import trusted_keys
from runs.models import Role
from tests.incidents.world import person

pytestmark = pytest.mark.django_db
K = ResumeRequest.Kind


def digest(world, kind=K.RESUME) -> str:
    return approval.subject(world.incident(), kind=kind)[1]


def take(world, attempt=2, **more):
    return approval.exchange(
        run=world.run, incident_id=world.incident().pk, attempt=attempt, webhook_id="w", **more
    )


class TestBreakGlass:
    @pytest.fixture
    def root(self, project):
        return person(project, "root", Role.ADMIN)

    def break_it(self, world, who, **changes):
        given = {"why": "the cluster leaves at six", "run_name": world.run.slug}
        given |= {"digest": digest(world, K.BREAK_GLASS)} | changes
        return approval.break_glass(incident=world.incident(), person=who, **given)

    def test_the_named_role_resumes_alone_without_waiting_for_evidence(self, world, root):
        Item.objects.filter(dossier=world.incident().dossier, kind="norms").update(
            state="missing", why="the node is gone"
        )
        request = self.break_it(world, root)
        assert (request.kind, request.state) == (K.BREAK_GLASS, ResumeRequest.State.APPROVED)
        document = take(world)
        permit = verify(
            document, trusted=trusted_keys(), at=timezone.now().timestamp(), run=world.run.slug, attempt=2
        )
        assert permit.approval_digest == request.digest

    def test_everybody_hears_of_it_until_it_is_resolved(self, world, root, team):
        Item.objects.filter(dossier=world.incident().dossier, kind="norms").update(
            state="missing", why="the node is gone"
        )
        self.break_it(world, root)
        page = Page.objects.get(kind="break_glass")
        assert "without the usual approval: the cluster leaves at six" in page.says
        assert alarm_lines(team.vera)[0].glass == "root broke the glass: the cluster leaves at six"
        row = LedgerRow.objects.get(run=world.run, action="approve")
        assert row.decided_by == str(root.opaque_id)
        assert "breaking the glass" in row.why
        assert "one person alone" in row.why
        assert "the node is gone" in row.why
        world.launch(2, take(world)["permit"])
        text = render(build.of(world.incident()))
        assert "BREAK-GLASS" in text
        assert "alone" in text
        assert "Reason: the cluster leaves at six" in text
        assert ledger.verify(world.run) == []

    @pytest.mark.parametrize(
        ("changes", "code"),
        [
            ({"run_name": "another-run"}, "wrong-name"),
            ({"why": " "}, "reason-needed"),
            ({"digest": "0" * 64}, "changed"),
        ],
    )
    def test_it_takes_the_runs_name_a_reason_and_what_was_seen(self, world, root, changes, code):
        with pytest.raises(Refused) as refused:
            self.break_it(world, root, **changes)
        assert refused.value.code == code
        assert not Permit.objects.exists()

    def test_an_approver_is_not_the_named_role(self, world, team):
        with pytest.raises(Refused) as refused:
            self.break_it(world, team.jonas)
        assert refused.value.says == "Only a member with this role may break the glass: admin."

    def test_it_is_void_like_any_approval_when_the_plan_changes(self, world, root, team):
        self.break_it(world, root)
        actions.change_plan(incident=world.incident(), person=team.mira, checkpoint_step=800)
        with pytest.raises(Refused) as refused:
            take(world)
        assert refused.value.code == "changed-since-approval"

    def test_it_still_waits_until_the_run_has_stopped(self, world, root):
        self.break_it(world, root)
        world.stop(state="refused")
        with pytest.raises(Refused) as refused:
            take(world)
        assert refused.value.code == "not-contained"


class TestContained:
    def approved(self, world, team):
        incident = world.incident()
        approval.request_resume(incident=incident, person=team.tomas, digest=digest(world))
        approval.approve(incident=incident, person=team.jonas, digest=digest(world))

    def test_a_rank_that_runs_on_keeps_the_permit_back_and_voids_nothing(self, world, team):
        self.approved(world, team)
        world.stop(state="refused", ranks=[2])
        with pytest.raises(Refused) as refused:
            take(world)
        assert refused.value.says.startswith("Not yet: rank 2 did not say that they stopped, and steps still")
        world.stop(ranks=[2])
        assert take(world)["attempt"] == 2

    def test_the_launchers_word_is_enough(self, world, team):
        self.approved(world, team)
        world.stop(state="refused")
        world.run.attempts.update(exited_at=timezone.now())
        assert take(world)["attempt"] == 2

    def test_no_step_for_three_median_steps_and_the_supervisor_asks(self, world, team):
        self.approved(world, team)
        world.stop(state="refused")
        long_ago = timezone.now() - timedelta(seconds=11)
        world.run.attempts.update(launched_at=long_ago)
        world.run.progress.step_at = long_ago
        world.run.progress.save()
        assert take(world)["attempt"] == 2


class TestAgain:
    """The same supervisor comes back for a launch that the machines ended."""

    def resumed(self, world, team, supervisor="slurm-1"):
        incident = world.incident()
        approval.request_resume(incident=incident, person=team.tomas, digest=digest(world))
        approval.approve(incident=incident, person=team.jonas, digest=digest(world))
        world.launch(2, take(world, supervisor=supervisor)["permit"])

    def exits(self, world, number, **said):
        world.run.attempts.filter(number=number).update(exited_at=timezone.now(), exit=said)

    def come_back(self, world, number, supervisor="slurm-1"):
        return approval.exchange(
            run=world.run,
            incident_id=world.incident().pk,
            attempt=number,
            webhook_id=f"w-{number}",
            supervisor=supervisor,
        )

    def test_at_most_three_launches_with_the_same_permit(self, world, team):
        self.resumed(world, team)
        first = world.permit()
        for number in (3, 4):
            self.exits(world, number - 1, attributed_to="node_loss")
            document = self.come_back(world, number)
            assert (document["permit"], document["attempt"]) == (str(first.public_id), number)
            assert verify(document, trusted=trusted_keys(), at=timezone.now().timestamp(), attempt=number)
            world.launch(number, document["permit"])
        self.exits(world, 4, attributed_to="node_loss")
        with pytest.raises(Refused) as refused:
            self.come_back(world, 5)
        assert "at most 3 launches" in refused.value.says
        assert world.permit().launches == 3
        assert LedgerRow.objects.filter(action="restart").count() == 2
        assert ledger.verify(world.run) == []

    def test_the_same_post_gets_the_permit_it_got(self, world, team):
        self.resumed(world, team)
        self.exits(world, 2, attributed_to="preemption")
        assert self.come_back(world, 3) == self.come_back(world, 3)
        assert take(world)["attempt"] == 2  # the first post's own document

    @pytest.mark.parametrize(
        ("said", "supervisor", "why"),
        [
            ({"exit_code": 1}, "slurm-1", "was not ended by the machines"),
            ({"attributed_to": "node_loss"}, "slurm-2", "another supervisor has it"),
            ({"attributed_to": "node_loss"}, "", "another supervisor has it"),
        ],
    )
    def test_not_to_another_and_not_for_a_failure_of_the_job(self, world, team, said, supervisor, why):
        self.resumed(world, team)
        self.exits(world, 2, **said)
        with pytest.raises(Refused) as refused:
            self.come_back(world, 3, supervisor)
        assert why in refused.value.says

    def test_not_while_an_attempt_of_it_lives_or_once_it_got_past_its_window(self, world, team):
        self.resumed(world, team)
        with pytest.raises(Refused, match="has not exited"):
            self.come_back(world, 3)
        world.checkpoint(1102, attempt=2, state="committed")
        self.exits(world, 2, attributed_to="node_loss")
        with pytest.raises(Refused, match="a checkpoint past its window"):
            self.come_back(world, 3)


class TestSolo:
    @pytest.fixture
    def alone_on_duty(self, world, team):
        world.policy(resume={"solo": True})
        for other in (team.jonas, team.priya):
            other.is_active = False
            other.save()
        actions.change_plan(
            incident=world.incident(), person=team.tomas, kind="rollback_and_replay", why="the link was bad"
        )
        return team.mira

    def ask(self, world, who):
        return approval.solo(incident=world.incident(), person=who, digest=digest(world, K.SOLO))

    def later(self):
        ResumeRequest.objects.update(grants_at=timezone.now())
        return alone.sweep_solo()

    def test_it_takes_effect_after_the_delay(self, world, alone_on_duty):
        request = self.ask(world, alone_on_duty)
        assert request.grants_at - request.requested_at == timedelta(minutes=10)
        assert alone.sweep_solo() == 0
        assert not Permit.objects.exists()
        assert self.later() == 1
        assert take(world)["plan"] == "rollback_and_replay"
        assert granting.who(request) == str(alone_on_duty.opaque_id)

    def test_any_approver_can_veto_it(self, world, alone_on_duty, team):
        self.ask(world, alone_on_duty)
        team.jonas.is_active = True
        team.jonas.save()
        approval.reject(incident=world.incident(), person=team.jonas, why="wait for me")
        assert self.later() == 0
        assert not Permit.objects.exists()

    def test_it_is_void_when_somebody_else_comes_on_duty(self, world, alone_on_duty, team):
        self.ask(world, alone_on_duty)
        team.jonas.is_active = True
        team.jonas.save()
        assert self.later() == 0
        assert "not the sole approver on duty" in ResumeRequest.objects.get().ended_why[0]

    def test_it_is_off_unless_the_policy_says_so(self, world, team):
        with pytest.raises(Refused) as refused:
            self.ask(world, team.mira)
        assert refused.value.code == "solo-off"

    def test_a_skip_needs_a_second_person(self, world, alone_on_duty, team):
        actions.change_plan(
            incident=world.incident(), person=team.tomas, kind="rollback_and_skip", why="data"
        )
        with pytest.raises(Refused) as refused:
            self.ask(world, alone_on_duty)
        assert refused.value.says == "Not alone: a plan to rollback and skip needs a second person."

    def test_nor_may_a_new_regime(self, world, alone_on_duty, team):
        changes = [{"what": "lr", "was": "3e-4", "to": "9e-5", "changes_regime": True}]
        actions.change_plan(incident=world.incident(), person=team.tomas, changes=changes, why="lower")
        with pytest.raises(Refused, match="changes the training regime"):
            self.ask(world, alone_on_duty)


class TestAfterARestore:
    def test_nothing_that_was_approved_lets_a_run_go_on(self, world, team):
        from incidents import unfinished

        incident = world.incident()
        approval.request_resume(incident=incident, person=team.tomas, digest=digest(world))
        approval.approve(incident=incident, person=team.jonas, digest=digest(world))
        assert unfinished.void_all() == 1
        assert unfinished.void_all() == 0
        assert (world.incident().state, world.directive()) == (Incident.State.OPEN, "hold")
        with pytest.raises(Refused, match="restored from a backup"):
            take(world)
        review.again(incident.pk)
        assert not Permit.objects.filter(state__in=["issued", "exchanged"]).exists()
