"""Goodput over real rows: launches, steps, a hold, and who may look."""

from datetime import datetime, timedelta

import pytest
from django.test import Client
from django.utils import timezone

from incidents import actions, approval, goodput
from runs.actions import create_token
from runs.models import Attempt, Directive, Event, RunProgress
from tests.incidents.world import World

START = timezone.now().replace(microsecond=0) - timedelta(hours=6)  # in every period that a page shows


def train(world, attempt, first, last, *, launched, ended=None, began_from=None, every_s=60, start=START):
    """One attempt of 4 GPUs that takes a step a minute, the first of them five minutes after its launch."""
    Attempt.objects.update_or_create(
        run=world.run,
        number=attempt,
        defaults={
            "launched_at": start + timedelta(minutes=launched),
            "exited_at": start + timedelta(minutes=ended) if ended else None,
            "world_size": 4,
            "nodes": [{"node": "node-00", "ranks": [0, 1, 2, 3]}],
            "began_from": began_from or {},
            "first_step": first,
        },
    )
    begin = start + timedelta(minutes=launched + 5)
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


class Began(World):
    """A run that began at `start`."""

    start: datetime


@pytest.mark.django_db
class TestFalseAlarm:
    """The last step ten minutes ago, held now and let go on now; the first new step takes five minutes."""

    @pytest.fixture
    def held(self, project, team):
        world = Began(project, "goodput")
        world.start = timezone.now() - timedelta(minutes=115)
        train(world, 1, 1, 100, launched=0, start=world.start)
        world.spike(at=100, since=98)
        world.stop()
        return world

    def go_on(self, world, team):
        approval.false_alarm(incident=world.incident(), person=team.jonas, why="a known bump")
        document = approval.exchange(
            run=world.run, incident_id=world.incident().pk, attempt=2, webhook_id="w", supervisor="s"
        )
        world.launch(2, document["permit"])
        train(world, 2, 101, 150, launched=115, start=world.start)

    def test_it_is_charged_to_andon_and_to_the_rule_that_held(self, held, team):
        self.go_on(held, team)
        line, counted = total(held)
        assert {cause: round(hours * 60 / 4) for cause, hours in line.hours.items()} == {
            "PROGRAM_STARTUP": 5,
            "PRODUCTIVE": 150,
            "FALSE_ALARM": 15,
        }
        (charge,) = goodput.charges(counted, START, START + timedelta(days=1))
        assert (charge.rule, charge.incidents) == ("spike", [str(held.incident().pk)])
        assert charge.hours == pytest.approx(line.hours["FALSE_ALARM"])
        assert charge.hours == pytest.approx(1.0, rel=0.02)
        lost = goodput.causes(counted, START, START + timedelta(days=1))
        assert {one.cause: one.count for one in lost} == {"FALSE_ALARM": 1, "PROGRAM_STARTUP": 1}
        assert goodput.charges(counted, START, held.start + timedelta(minutes=105)) == []

    def test_its_pages_say_so(self, held, team):
        """Pages count until now: ten minutes of four GPUs."""
        self.go_on(held, team)
        client = Client()
        client.force_login(team.vera)
        words = " ".join(client.get("/goodput?period=30").content.decode().split())
        assert "Charged to Andon: 0.7 GPU\u2011hours" in words
        assert '<a href="/rules/spike">spike</a>: 0.7 GPU\u2011hours in 1 false alarm' in words
        rule = " ".join(client.get("/rules/spike/goodput").content.decode().split())
        assert "false alarms cost <b>0.7 GPU\u2011hours</b>, charged to Andon" in rule
        bearer = {"Authorization": f"Bearer {create_token(person=team.vera, name='t')}"}
        told = Client().get("/api/v1/runs/goodput/goodput?days=2", headers=bearer).json()
        (charged,) = told["charged_to_andon"]
        assert (charged["rule"], charged["incidents"]) == ("spike", [str(held.incident().pk)])
        assert charged["gpu_hours"] == pytest.approx(10 * 4 / 60, rel=0.05)

    def test_from_the_moment_it_is_declared_and_not_before_or_after_it_was_rejected(self, held, team):
        assert "FALSE_ALARM" not in total(held)[0].hours
        approval.false_alarm(incident=held.incident(), person=team.jonas, why="a known bump")
        assert total(held)[0].hours["FALSE_ALARM"] > 0
        approval.reject(incident=held.incident(), person=team.priya, why="it is real")
        assert "FALSE_ALARM" not in total(held)[0].hours

    def test_what_a_person_held_by_hand_is_not_andons(self, project, team):
        world = World(project, "goodput")
        train(world, 1, 1, 100, launched=0)
        actions.hold_by_hand(run=world.run, person=team.tomas, why="the curve looks odd")
        world.stop()
        approval.false_alarm(incident=world.incident(), person=team.jonas, why="it is fine")
        assert "FALSE_ALARM" not in total(world)[0].hours


@pytest.mark.django_db
class TestPages:
    def test_the_page_of_all_runs_and_of_one(self, crashed, team):
        client = Client()
        client.force_login(team.vera)
        for address in ("/goodput?period=30", "/runs/goodput/goodput?period=30"):
            words = " ".join(client.get(address).content.decode().split())
            assert "76 % in 30 days: 8.7 of 11.3" in words
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
