"""What a run actually saw, from what trainers really report; page, API and command say the same."""

import io
import json
from datetime import UTC, datetime

import pytest
from django.core.management import CommandError, call_command
from django.test import Client

from andon.intervals import Window
from incidents import approval, attempt_history, seen
from runs.actions import create_token
from runs.models import Event
from tests.incidents.world import BATCH, World


def event(world, step, kind="step", attempt=1, **data):
    now = datetime.now(UTC)
    Event.objects.create(
        received_at=now,
        run_id=world.run.pk,
        attempt=attempt,
        type=kind,
        step=step,
        occurred_at=now,
        data=data,
        webhook_id=f"seen-{attempt}-{step}-{kind}",
    )


@pytest.fixture
def rolled_back(world, team):
    """The worked example: spike 1000 to 1002, back to step 900, samples skipped, attempt 2 runs on."""
    incident = world.incident()
    digest = approval.subject(incident)[1]
    approval.request_resume(incident=incident, person=team.mira, digest=digest)
    approval.approve(incident=incident, person=team.jonas, digest=digest)
    permit = world.permit()
    approval.exchange(run=world.run, incident_id=incident.pk, attempt=2, webhook_id="supervisor-1")
    world.launch(2, permit=str(permit.public_id))
    skip = permit.request.plan.skip
    for step in range(901, 931):
        event(world, step, attempt=2, loss=2.4, loader_position=skip["to"] + (step - 900) * BATCH)
    return world, skip


@pytest.mark.django_db
class TestWorkedExample:
    def test_what_was_trained_skipped_and_rolled_back(self, rolled_back):
        world, skip = rolled_back
        found = seen.of_run(world.run)
        assert (found.attempt, found.step) == (2, 930)
        assert found.lineage == ((1, 1, 900), (2, 901, 930))
        assert found.skipped == (Window(skip["from"], skip["to"]),)
        assert found.trained == (
            Window(0, 900 * BATCH),
            Window(skip["to"], skip["to"] + 30 * BATCH),
        )
        assert found.rolled_back == (Window(900 * BATCH, 1002 * BATCH),)
        assert found.replayed == found.unaccounted == ()
        assert found.unknown == ()

    def test_the_weights_of_an_earlier_checkpoint_can_be_asked_for(self, rolled_back):
        world, _ = rolled_back
        assert seen.of_run(world.run, attempt=1, step=950).trained == (Window(0, 950 * BATCH),)
        with pytest.raises(seen.NotKnown, match="attempt 1 has steps 1 to 1,002"):
            seen.of_run(world.run, attempt=1, step=5000)
        with pytest.raises(seen.NotKnown, match="no attempt 7"):
            seen.of_run(world.run, attempt=7)

    def test_page_api_and_command_say_the_same(self, rolled_back, team):
        world, skip = rolled_back
        client = Client()
        client.force_login(team.vera)
        words = client.get(f"/runs/{world.run.slug}/seen").content.decode()
        assert f"{skip['from']:,}–{skip['to'] - 1:,}" in words
        assert "attempt 1 steps 1–900, then attempt 2 steps 901–930" in words
        part = client.get(f"/runs/{world.run.slug}/seen", headers={"HX-Request": "true"}).content.decode()
        assert "<html" not in part
        assert "901–930" in part
        bearer = {"Authorization": f"Bearer {create_token(person=team.vera, name='t')}"}
        told = Client().get(f"/api/v1/runs/{world.run.slug}/seen", headers=bearer).json()
        assert told["skipped"] == [[skip["from"], skip["to"]]]
        wrong = Client().get(f"/api/v1/runs/{world.run.slug}/seen?attempt=9", headers=bearer)
        assert wrong.status_code == 404
        out = io.StringIO()
        call_command("seen", world.run.slug, "--json", stdout=out)
        assert json.loads(out.getvalue()) == told
        out = io.StringIO()
        call_command("seen", world.run.slug, stdout=out)
        assert (
            f"skipped: {skip['to'] - skip['from']:,}: {skip['from']:,}–{skip['to'] - 1:,}" in out.getvalue()
        )
        with pytest.raises(CommandError, match="no step of attempt 1"):
            call_command("seen", world.run.slug, "--attempt", "1", "--step", "9999")


@pytest.mark.django_db
class TestReports:
    def run_of(self, project):
        return World(project, "seen-here")

    def test_a_million_steps_are_few_marks_and_a_dropped_update_has_both_sides(self, project):
        world = self.run_of(project)
        for step in range(1, 41):
            event(world, step, loader_position=step * 8, consumed_samples=step * 8, skipped=step == 20)
        one = attempt_history.attempts_of(world.run)[0]
        assert [mark.step for mark in one.marks] == [1, 19, 20, 40]
        assert one.dropped == {20}
        found = seen.of_run(world.run)
        assert found.dropped == (Window(19 * 8, 20 * 8),)
        assert found.trained == (Window(0, 19 * 8), Window(20 * 8, 40 * 8))

    def test_bits_and_reported_skips_are_dropped_updates_too(self, project):
        world = self.run_of(project)
        for step in range(1, 11):
            event(world, step, loader_position=step * 8, nonfinite=64 + 4 if step == 5 else 0)
        event(world, 8, "action", action="skip", loader_before=56, loader_after=64)
        assert attempt_history.attempts_of(world.run)[0].dropped == {5, 8}

    def test_a_jump_nobody_declared_is_unaccounted_for(self, project):
        world = self.run_of(project)
        for step in range(1, 21):
            event(
                world,
                step,
                loader_position=step * 8 + (100 if step > 10 else 0),
                consumed_samples=step * 8,
            )
        found = seen.of_run(world.run)
        assert found.unaccounted == (Window(80, 188),)
        assert "the loader passed 108 samples" in found.unknown[0]

    def test_a_restart_from_a_checkpoint_replays_its_samples(self, project):
        world = self.run_of(project)
        for step in range(1, 31):
            event(world, step, loader_position=step * BATCH)
        kept = world.checkpoint(20)
        attempt = world.launch(2)
        attempt.began_from = {"uri": kept.uri}
        attempt.save()
        for step in range(21, 41):
            event(world, step, attempt=2, loader_position=step * BATCH)
        found = seen.of_run(world.run)
        assert found.lineage == ((1, 1, 20), (2, 21, 40))
        assert found.replayed == (Window(20 * BATCH, 30 * BATCH),)
        assert found.rolled_back == found.repeated == ()

    def test_a_loader_that_was_not_restored_repeats(self, project):
        world = self.run_of(project)
        for step in range(1, 21):
            event(world, step, loader_position=step * 8)
        attempt = world.launch(2)
        attempt.began_from = {"step": 20, "attempt": 1}
        attempt.save()
        for step in range(21, 31):
            event(world, step, attempt=2, loader_position=(step - 20) * 8)
        found = seen.of_run(world.run)
        assert found.trained == (Window(0, 160),)
        assert found.repeated == (Window(8, 80),)
        assert found.unknown == ("attempt 2, steps 21 to 21: no loader position before",)

    def test_a_run_without_positions_says_so(self, project, team):
        world = self.run_of(project)
        for step in range(1, 5):
            event(world, step, loss=2.0)
        client = Client()
        client.force_login(team.vera)
        words = client.get("/runs/seen-here/seen").content.decode()
        assert "no loader position was reported on both sides of any step" in words
        assert "attempt 1 steps 1–4" in words
