"""Goodput over real rows: launches, steps, a hold, and who may look."""

from datetime import timedelta

import pytest
from django.test import Client
from django.utils import timezone

from incidents import goodput
from runs.actions import create_token
from runs.models import Attempt, Directive, Event, RunProgress
from tests.incidents.world import World

START = timezone.now().replace(microsecond=0) - timedelta(hours=6)  # in every period that a page shows


def train(world, attempt, first, last, *, launched, ended=None, began_from=None, every_s=60):
    """One attempt of 4 GPUs that takes a step a minute, the first of them five minutes after its launch."""
    Attempt.objects.update_or_create(
        run=world.run,
        number=attempt,
        defaults={
            "launched_at": START + timedelta(minutes=launched),
            "exited_at": START + timedelta(minutes=ended) if ended else None,
            "world_size": 4,
            "nodes": [{"node": "node-00", "ranks": [0, 1, 2, 3]}],
            "began_from": began_from or {},
            "first_step": first,
        },
    )
    begin = START + timedelta(minutes=launched + 5)
    Event.objects.bulk_create(
        Event(
            received_at=timezone.now(),
            run_id=world.run.pk,
            attempt=attempt,
            type="step",
            step=step,
            occurred_at=begin + timedelta(seconds=every_s * (step - first + 1)),
            data={"step_time_s": 60.0},
            webhook_id=f"goodput-{attempt}-{step}",
        )
        for step in range(first, last + 1)
    )
    at = begin + timedelta(seconds=every_s * (last - first + 1))
    RunProgress.objects.filter(run=world.run).update(attempt=attempt, step=last, last_post_at=at)


@pytest.fixture
def crashed(project):
    """100 steps, a crash that loses the last 20, ten minutes to the next launch, 50 steps more."""
    world = World(project, "goodput")
    train(world, 1, 1, 100, launched=0, ended=110)
    train(world, 2, 81, 130, launched=115, began_from={"step": 80})
    return world


def total(world, **window):
    counted = goodput.of_runs([world.run], START + timedelta(days=1))
    return goodput.line("", "", counted, START, START + timedelta(days=1)), counted


@pytest.mark.django_db
class TestRows:
    def test_every_minute_has_its_cause(self, crashed):
        line, counted = total(crashed)
        minutes = {cause: round(hours * 60 / 4, 3) for cause, hours in line.hours.items()}
        assert minutes == {
            "PRODUCTIVE": 130,
            "PROGRAM_STARTUP": 10,
            "WASTED_PROGRESS_FROM_DISRUPTION": 20,
            "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION": 10,
        }
        rates = goodput.rates(counted, START, START + timedelta(days=1))
        assert rates.failures == 1
        assert rates.new_step_min is not None
        assert list(rates.new_step_min) == pytest.approx([36, 36])  # the lost steps come again first
        assert rates.per_1000_node_hours == pytest.approx(1000 / (170 / 60))

    def test_a_hold_is_held_until_the_run_goes_on(self, crashed):
        for seq, kind, minute in ((2, "hold", 105), (3, "continue", 115)):
            Directive.objects.create(
                run=crashed.run,
                seq=seq,
                kind=kind,
                document={},
                incident="7",
                since=START + timedelta(minutes=minute),
            )
        line, counted = total(crashed)
        assert round(line.hours["HELD_FOR_APPROVAL"] * 60 / 4) == 10
        assert "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION" not in line.hours
        worst = goodput.causes(counted, START, START + timedelta(days=1))
        assert {one.cause: one.incident for one in worst}["HELD_FOR_APPROVAL"] == "7"

    def test_time_between_slow_steps_is_not_productive(self, project):
        world = World(project, "slow")
        train(world, 1, 1, 10, launched=0, every_s=120)
        line, _ = total(world)
        assert line.hours["PRODUCTIVE"] == pytest.approx(10 * 60 * 4 / 3600)
        assert line.hours["OTHER"] == pytest.approx((20 - 1 - 10) * 60 * 4 / 3600)

    def test_attempts_without_a_size_are_named_and_not_counted(self, project):
        world = World(project, "small")
        Attempt.objects.filter(run=world.run).update(world_size=None)
        line, counted = total(world)
        assert line.allocated == 0
        assert counted[0].unknown == [1]


@pytest.mark.django_db
class TestPages:
    def test_the_page_of_all_runs_and_of_one(self, crashed, team):
        client = Client()
        client.force_login(team.vera)
        for address in ("/goodput?period=30", "/runs/goodput/goodput?period=30"):
            words = client.get(address).content.decode()
            assert "76\u202f% in 30 days: 8.7 of 11.3" in words
            assert "WASTED_PROGRESS_FROM_DISRUPTION" in words
            assert "attempt followed by another" in words
        for by in ("run", "week"):
            assert "8.7" in client.get(f"/goodput?period=30&by={by}").content.decode()

    def test_an_empty_one_says_so(self, project, team):
        client = Client()
        client.force_login(team.vera)
        assert "No GPU time in this period" in client.get("/goodput").content.decode()

    def test_a_stranger_sees_nothing_of_it(self, crashed, team):
        client = Client()
        client.force_login(team.charlie)
        assert "No GPU time" in client.get("/goodput?period=30").content.decode()
        assert client.get("/runs/goodput/goodput").status_code == 404

    def test_the_api_gives_the_same_numbers(self, crashed, team):
        bearer = {"Authorization": f"Bearer {create_token(person=team.vera, name='t')}"}
        told = Client().get("/api/v1/runs/goodput/goodput?days=2", headers=bearer).json()
        assert told["goodput"] == pytest.approx(130 / 170)
        assert told["gpu_hours"]["PROGRAM_STARTUP"] == pytest.approx(10 * 4 / 60)
        assert Client().get("/api/v1/runs/goodput/goodput?days=0", headers=bearer).status_code == 422
