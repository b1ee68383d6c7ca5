"""A launch under a hold: with its permit it goes on and is watched, without it the hold stands."""

import pytest
from django.utils import timezone

from incidents import approval, launches, ledger, watching
from incidents.models import Incident, LedgerRow, Permit, ResumeRequest
from incidents.refused import Refused
from runs.directives import current
from runs.models import Attempt, Finding

pytestmark = pytest.mark.django_db


def approve(world, team):
    incident = world.incident()
    digest = approval.subject(incident)[1]
    approval.request_resume(incident=incident, person=team.mira, digest=digest)
    approval.approve(incident=incident, person=team.jonas, digest=digest)
    return incident


def take(world, attempt=2):
    incident = world.incident()
    document = approval.exchange(run=world.run, incident_id=incident.pk, attempt=attempt, webhook_id="w")
    return document["permit"]


def resume(world, team):
    approve(world, team)
    world.launch(2, take(world))
    return world.incident()


class TestWithPermit:
    def test_it_continues_for_the_new_attempt_and_is_watched(self, world, team):
        incident = resume(world, team)
        assert incident.state == Incident.State.WATCHING
        directive = current(world.run.pk)
        assert (directive.kind, directive.attempt) == ("continue", 2)
        assert (incident.watch_attempt, incident.watch_until_step) == (2, 1502)
        assert ResumeRequest.objects.get().state == ResumeRequest.State.USED

    def test_the_ledger_shows_rollback_and_skip_with_all_positions(self, world, team):
        resume(world, team)
        rows = {row.action: row for row in LedgerRow.objects.filter(run=world.run)}
        assert list(rows) == ["hold", "approve", "permit", "rollback", "skip", "resume"]
        rollback = rows["rollback"]
        assert rollback.step == 1002
        assert rollback.ranks == [0, 1, 2, 3]
        assert rollback.before["loader_position"] == 1002 * 32
        assert rollback.after == {
            "loader_position": 28800,
            "consumed_samples": 28795,
            "optimizer_step": 900,
            "schedule_position": 907,
        }
        assert rollback.checkpoint["step"] == 900
        assert rollback.steps_lost == 102
        assert rollback.gpu_hours_lost == pytest.approx(102 * 2.0 / 3600 * 4)
        assert rollback.decided_by == str(team.jonas.opaque_id)
        assert rows["skip"].samples_skipped == 200 * 32
        assert ledger.verify(world.run) == []

    def test_reporting_the_launch_again_changes_nothing(self, world, team):
        resume(world, team)
        before = LedgerRow.objects.count()
        world.launch(2, str(world.permit().public_id))
        assert LedgerRow.objects.count() == before
        assert world.incident().state == Incident.State.WATCHING

    def test_the_permit_is_spent_by_the_first_verified_checkpoint_past_the_window(self, world, team):
        resume(world, team)
        world.checkpoint(901, attempt=2)  # its loader stands before the end of the window
        assert world.permit().state == Permit.State.EXCHANGED
        world.checkpoint(1101, attempt=2, state="committed")
        assert world.permit().state == Permit.State.EXCHANGED
        world.checkpoint(1102, attempt=2)
        assert world.permit().state == Permit.State.SPENT


class TestWithoutPermit:
    def test_the_hold_stands_and_reaches_the_new_attempt(self, world):
        world.launch(2)
        directive = current(world.run.pk)
        assert (directive.kind, directive.attempt) == ("hold", 2)
        finding = Finding.objects.get(kind="launch_without_permit")
        assert (finding.severity, finding.incident) == ("halt", str(world.incident().pk))
        assert LedgerRow.objects.filter(action="refused_launch").count() == 1
        assert world.incident().timeline.filter(kind="launch").exists()

    def test_each_node_reports_it_and_it_is_refused_once(self, world):
        world.launch(2)
        world.launch(2, "made-up")
        assert Finding.objects.filter(kind="launch_without_permit").count() == 1

    def test_a_permit_named_but_never_taken_does_not_do(self, world, team):
        approve(world, team)
        world.launch(2, str(world.permit().public_id))
        assert world.directive() == "hold"
        assert world.permit().state == Permit.State.VOIDED
        assert "nobody had taken" in Finding.objects.get(kind="launch_without_permit").detail

    def test_it_voids_the_approval_since_its_attempt_is_used_up(self, world, team):
        approve(world, team)
        world.launch(2)
        with pytest.raises(Refused) as refused:
            take(world)
        assert "attempt 2 was launched while the run is held, without a permit" in refused.value.says

    def test_an_expired_permit_does_not_do(self, world, team):
        approve(world, team)
        permit = take(world)
        Permit.objects.update(expires_at=timezone.now())
        world.launch(2, permit)
        assert world.directive() == "hold"

    def test_posts_that_overtake_the_report_wait_for_it(self, world, team):
        approve(world, team)
        permit = take(world)
        world.launch(2, reported=False)
        assert not Finding.objects.filter(kind="launch_without_permit").exists()
        world.launch(2, permit)
        assert world.incident().state == Incident.State.WATCHING

    def test_a_report_that_never_comes_is_refused_by_the_sweep(self, world, team):
        approve(world, team)
        take(world)
        attempt = world.launch(2, reported=False)
        type(attempt).objects.filter(pk=attempt.pk).update(
            launched_at=timezone.now() - 2 * launches.REPORT_WITHIN
        )
        launches.sweep_launches()
        assert Finding.objects.filter(kind="launch_without_permit").count() == 1

    def test_a_launch_the_receiver_missed_is_judged_by_the_sweep(self, world, team):
        approve(world, team)
        permit = take(world)
        Attempt.objects.create(run=world.run, number=2, launched_at=timezone.now(), permit_id=permit)
        launches.sweep_launches()
        assert world.incident().state == Incident.State.WATCHING


class TestWatching:
    def test_it_resolves_after_the_window_and_not_before(self, world, team):
        resume(world, team)
        world.steps(1501, 1501, attempt=2)
        assert watching.sweep() == 0
        world.steps(1502, 1502, attempt=2)
        assert watching.sweep() == 1
        assert world.incident().state == Incident.State.RESOLVED
        assert watching.sweep() == 0

    def test_steps_of_the_attempt_before_do_not_count(self, world, team):
        resume(world, team)
        world.steps(1600, 1600, attempt=1)
        assert watching.sweep() == 0

    def test_a_nonfinite_value_reopens_and_holds(self, world, team):
        resume(world, team)
        first = world.incident()
        world.steps(950, 955, attempt=2)
        world.finding("nonfinite", attempt=2, step=955)
        incident = world.incident()
        assert incident.pk == first.pk
        assert (incident.state, incident.attempt) == (Incident.State.OPEN, 2)
        assert world.directive() == "hold"
        assert incident.dossier_id != first.dossier_id
        assert incident.earlier_dossiers == [first.dossier_id]
        assert world.permit().state == Permit.State.VOIDED

    def test_a_second_spike_at_another_step_is_optimisation_not_data(self, world, team):
        resume(world, team)
        world.steps(1295, 1302, attempt=2)
        world.spike(at=1302, since=1300, attempt=2)
        incident = world.incident()
        assert incident.family == "optimizer and schedule"
        assert "optimisation, not data" in incident.family_why
        assert incident.plans.last().kind == "rollback_and_replay"

    def test_a_late_value_of_the_attempt_before_reopens_nothing(self, world, team):
        resume(world, team)
        world.finding("nonfinite", attempt=1, step=1003, backfill=True, severity="info")
        assert world.incident().state == Incident.State.WATCHING
        assert world.directive() == "continue"


class TestExpiry:
    def test_a_permit_nobody_took_ends_and_the_run_stays_held(self, world, team):
        approve(world, team)
        Permit.objects.update(expires_at=timezone.now())
        assert launches.sweep_expired() == 1
        assert world.incident().state == Incident.State.OPEN
        assert world.directive() == "hold"
        assert launches.sweep_expired() == 0

    def test_a_request_nobody_approved_ends(self, world, team):
        incident = world.incident()
        approval.request_resume(incident=incident, person=team.mira, digest=approval.subject(incident)[1])
        ResumeRequest.objects.update(expires_at=timezone.now())
        assert launches.sweep_expired() == 1
        assert ResumeRequest.objects.get().state == ResumeRequest.State.EXPIRED
