"""After the resume: how a watch ends, what a recurrence says, and the loss over the steps run again."""

import random
from datetime import UTC, datetime

import pytest
from django.test import Client

from incidents import actions, approval, ledger, opening, watching
from incidents.models import Incident, LedgerRow
from incidents.postmortem import build
from runs.models import Event, Finding, RunProgress
from tests.incidents.test_launches import resume
from tests.incidents.world import BATCH, World


def losses(world, attempt, first, last, value, **more):
    """Report steps with a loss of their own, and that the attempt reached the last of them."""
    now = datetime.now(UTC)
    Event.objects.bulk_create(
        Event(
            received_at=now,
            run_id=world.run.pk,
            attempt=attempt,
            type="step",
            step=step,
            occurred_at=now,
            data={"loss": value(step), **{name: of(step) for name, of in more.items()}},
            webhook_id=f"loss-{attempt}-{step}",
        )
        for step in range(first, last + 1)
    )
    RunProgress.objects.update_or_create(
        run=world.run, defaults={"attempt": attempt, "step": last, "step_at": now, "last_post_at": now}
    )


def curve(step):
    """The loss of a step, the same in every attempt; what the fixture reported from 998 on is 2.5."""
    return 2.5 if step >= 998 else 2.5 + random.Random(step).gauss(0, 0.01)


def replay(world, team):
    """Change the plan to a replay of the same data, and resume by it."""
    incident = world.incident()
    actions.change_plan(
        incident=incident,
        person=team.tomas,
        kind="rollback_and_replay",
        checkpoint_step=900,
        why="hardware: the data is innocent",
    )
    digest = approval.subject(world.incident())[1]
    approval.request_resume(incident=world.incident(), person=team.mira, digest=digest)
    approval.approve(incident=world.incident(), person=team.jonas, digest=digest)
    permit = world.permit()
    approval.exchange(run=world.run, incident_id=incident.pk, attempt=2, webhook_id="supervisor-1")
    world.launch(2, permit=str(permit.public_id))


@pytest.mark.django_db
class TestEnds:
    def test_a_clean_end_is_a_complete_row_and_stands_on_the_page(self, world, team):
        losses(world, 1, 880, 997, curve)
        resume(world, team)
        losses(world, 2, 901, 1502, curve, loader_position=lambda step: step * BATCH)
        assert watching.sweep() == 1
        assert world.incident().state == Incident.State.RESOLVED
        row = watching.ends(world.incident())[0]
        assert (row.action, row.step, row.attempt, row.ranks) == ("watch_end", 1502, 2, [0, 1, 2, 3])
        assert row.checkpoint["step"] == 900
        assert row.after["loader_position"] == 1502 * BATCH
        assert row.why.startswith(
            "clean to step 1,502, past its watch window; against attempt 1: loss on other"
        )
        assert row.detector["numbers"]["overlap"]["steps"] == 99
        assert ledger.verify(world.run) == []
        client = Client()
        client.force_login(team.vera)
        words = client.get(f"/incidents/{world.incident().pk}/parts/watch").content.decode()
        assert "Clean to step 1,502, past its watch window" in words
        assert words.count("<polyline") == 2
        assert "loss on other data" in words.lower()

    def test_the_postmortem_tells_how_the_watch_ended_and_draws_the_losses(self, world, team):
        losses(world, 1, 880, 997, curve)
        resume(world, team)
        losses(world, 2, 901, 1502, curve)
        watching.sweep()
        recovery = next(one for one in build.draft(world.incident()).sections if one.key == "recovery")
        text = str(recovery.items)
        assert "The watch ended: clean to step 1,502" in text
        assert "Figure 4, loss over the steps run again" in text

    def test_an_incident_that_held_nothing_ends_its_watch_in_the_ledger_too(self, project):
        world = World(project, "calm")
        world.steps(998, 1000)
        world.spike(at=1000, since=1000, severity="warn")
        world.steps(1050, 1050)
        assert watching.sweep() == 1
        row = LedgerRow.objects.get(run=world.run, action="watch_end")
        assert (row.step, row.incident_id) == (1050, world.incident().pk)
        assert row.none_because["before"] == "the watch began without a plan that names a position"

    def test_before_any_resume_there_is_nothing_to_show(self, world, team):
        client = Client()
        client.force_login(team.vera)
        words = client.get(f"/incidents/{world.incident().pk}/parts/watch").content.decode()
        assert "After the resume" not in words


@pytest.mark.django_db
class TestRecurrence:
    def test_other_data_at_another_step_is_optimisation_not_data(self, world, team):
        resume(world, team)
        world.steps(1295, 1302, attempt=2)
        world.spike(at=1302, since=1300, attempt=2)
        incident = world.incident()
        assert incident.recurrence == "other_step"
        row = watching.ends(incident)[0]
        assert "optimisation, not data" in row.why
        numbers = row.detector["numbers"]
        assert (numbers["outcome"], numbers["step_before"], numbers["step_after"]) == ("recurred", 1000, 1300)
        assert numbers["samples_before"] == [[999 * BATCH, 1002 * BATCH]]
        assert numbers["samples_after"] == [[1299 * BATCH, 1302 * BATCH]]
        assert incident.timeline.filter(kind="recurrence", text__contains="optimisation").exists()
        assert incident.family == "optimizer and schedule"

    def test_the_same_samples_again_lead_to_data(self, world, team):
        replay(world, team)
        world.steps(998, 1002, attempt=2)
        world.spike(at=1002, since=1000, attempt=2)
        incident = world.incident()
        assert incident.recurrence == "same_data"
        assert incident.family == "data"
        assert "the same samples failed again" in watching.ends(incident)[0].why


@pytest.mark.django_db
class TestReplay:
    def finding(self, world):
        return Finding.objects.filter(run=world.run, kind="restore_differs").first()

    def test_a_bit_equal_replay_is_said_once(self, world, team):
        losses(world, 1, 700, 997, curve)
        replay(world, team)
        losses(world, 2, 901, 1001, curve)
        watching.sweep()
        watching.sweep()
        told = list(world.incident().timeline.filter(kind="overlap").values_list("text", flat=True))
        assert told == ["attempt 2 against attempt 1: loss bit-equal over 99 common steps, 901 to 999"]
        assert self.finding(world) is None

    def test_a_replay_that_differs_is_a_finding_that_only_observes_by_default(self, world, team):
        losses(world, 1, 700, 997, curve)
        replay(world, team)
        losses(world, 2, 901, 1001, lambda step: curve(step) + (0.5 if step >= 950 else 0))
        watching.sweep()
        finding = self.finding(world)
        assert (finding.step, finding.mode, finding.needs_incident) == (950, "observe", False)
        assert world.incident().state == Incident.State.WATCHING

    def test_where_the_rule_acts_it_holds_the_run_again(self, world, team):
        losses(world, 1, 700, 997, curve)
        replay(world, team)
        world.policy(modes={"restore": "act"})
        losses(world, 2, 901, 1001, lambda step: curve(step) + (0.5 if step >= 950 else 0))
        watching.sweep()
        opening.sweep_findings()
        assert world.incident().state == Incident.State.OPEN
        assert world.directive() == "hold"
