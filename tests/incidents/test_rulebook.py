"""Modes with their record, people's judgement, who changed what, and the breaker."""

import pytest
from django.test import Client
from django.utils import timezone

from incidents import approval
from incidents.models import Incident
from incidents.paging.models import Page
from incidents.refused import Refused
from incidents.rulebook import breaker, modes, record, views
from incidents.rulebook.models import BreakerTrip, RuleJudgement
from runs.models import Role, RunProgress
from runs.policies import policy_for
from runs.work import run_due
from tests.incidents.world import World, person, seal
from tests.pages.words import text_of

pytestmark = pytest.mark.django_db


@pytest.fixture
def observed(project):
    """A run whose spike rule only observes: two spikes, the first in three strikes."""
    world = World(project, "observed")
    for step in (400, 401, 402, 700):
        world.spike(at=step, since=step, mode="observe", needs_incident=False)
    return world


class TestRecord:
    def test_what_it_would_have_held_is_told_once_per_episode(self, observed):
        found = record.of(observed.run, "spike")
        assert [(one.step, one.last_step, one.count) for one in found.would] == [(700, 700, 1), (400, 402, 3)]
        assert (found.held, found.judged) == ([], 0)

    def test_people_say_whether_it_was_right(self, observed, team):
        first, second = record.of(observed.run, "spike").would
        given = {"run": observed.run, "rule": "spike"}
        modes.judge(**given, finding_id=first.finding, right=True, person=team.tomas)
        modes.judge(**given, finding_id=second.finding, right=False, person=team.tomas, why="a new mixture")
        found = record.of(observed.run, "spike")
        assert (found.right, found.false, found.judged) == (1, 1, 2)
        modes.judge(**given, finding_id=second.finding, right=True, person=team.mira)
        assert record.of(observed.run, "spike").false == 0  # the newest word counts
        assert RuleJudgement.objects.count() == 3

    def test_a_false_one_needs_a_reason_and_a_viewer_says_nothing(self, observed, team):
        given = {"run": observed.run, "rule": "spike", "right": False}
        finding = record.of(observed.run, "spike").would[0].finding
        with pytest.raises(Refused, match="Say why nothing was wrong"):
            modes.judge(**given, finding_id=finding, person=team.tomas)
        with pytest.raises(Refused, match="Only a responder"):
            modes.judge(**given, finding_id=finding, person=team.vera, why="x")

    def test_a_false_alarm_counts_against_the_rule_that_held(self, world, team):
        assert [one.verdict for one in record.of(world.run, "spike").held] == [""]
        approval.false_alarm(incident=world.incident(), person=team.jonas, why="the mixture changed")
        found = record.of(world.run, "spike")
        assert [one.verdict for one in found.held] == ["false"]
        assert (found.false, found.judged) == (1, 1)


class TestModes:
    def set_mode(self, world, who, mode, **more):
        return modes.set_mode(run=world.run, rule="spike", mode=mode, person=who, why="seen it", **more)

    def test_to_act_one_has_read_the_record(self, observed, team):
        seen = record.of(observed.run, "spike").digest
        observed.spike(at=900, since=900, mode="observe", needs_incident=False)
        with pytest.raises(Refused) as refused:
            self.set_mode(observed, team.jonas, "act", seen=seen)
        assert refused.value.code == "record-first"
        self.set_mode(observed, team.jonas, "act", seen=record.of(observed.run, "spike").digest)
        assert policy_for(observed.run.pk).mode("spike") == "act"

    def test_who_changed_what_when(self, observed, team):
        self.set_mode(observed, team.jonas, "off")
        (change,) = views.history(observed.run, "spike")
        assert (change.by, change.changes, change.why) == (
            "jonas",
            ["observe → off"],
            "spike: observe → off. seen it",
        )
        assert views.history(observed.run, "nonfinite") == []

    @pytest.mark.parametrize(
        ("who", "mode", "why", "code"),
        [
            ("tomas", "off", "x", "not-allowed"),
            ("jonas", "loud", "x", "bad-mode"),
            ("jonas", "off", " ", "reason-needed"),
            ("jonas", "observe", "x", "no-change"),
        ],
    )
    def test_refusals(self, observed, team, who, mode, why, code):
        with pytest.raises(Refused) as refused:
            modes.set_mode(run=observed.run, rule="spike", mode=mode, person=getattr(team, who), why=why)
        assert refused.value.code == code


class TestPages:
    def test_the_record_is_read_judged_and_switched_in_the_browser(self, observed, team):
        client = Client()
        client.force_login(team.jonas)
        assert b"observe" in client.get("/rules").content
        assert client.get("/rules/spike").status_code == 200
        here = "/rules/spike/observed"
        page = client.get(here)
        assert "would have held 2 times in 90 d" in text_of(page)
        seen = record.of(observed.run, "spike")
        assert f'name="seen" value="{seen.digest}"' in page.content.decode()
        judged = {"finding": seen.would[0].finding, "verdict": "false", "why": "a new mixture"}
        assert client.post(f"{here}/judge", judged).status_code == 302
        assert "false-hold rate 100" in text_of(client.get(here))
        old = client.post(f"{here}/mode", {"mode": "act", "why": "x", "seen": seen.digest})
        assert old.status_code == 409
        assert "the record is another than you saw" in old.content.decode()

    def test_a_stranger_sees_no_run(self, observed, team):
        client = Client()
        client.force_login(team.charlie)
        assert b"observed" not in client.get("/rules").content
        assert client.get("/rules/spike/observed").status_code == 404
        assert client.post("/rules/spike/observed/mode", {"mode": "off", "why": "x"}).status_code == 404


def posting(world: World) -> None:
    RunProgress.objects.filter(run=world.run).update(last_post_at=timezone.now())


class TestBreaker:
    @pytest.fixture
    def fleet(self, project, settings):
        """Eight runs that post; the spike rule acts on all of them."""
        settings.BREAKER_RUNS = 3
        worlds = [World(project, f"run-{n}") for n in range(8)]
        for world in worlds:
            world.policy(modes={"spike": "act", "nonfinite": "act"})
            world.checkpoint(500)
            world.steps(998, 1002)
            posting(world)
        return worlds

    def test_it_drops_to_observe_for_runs_not_yet_held_and_says_so(self, fleet):
        for world in fleet[:2]:
            world.spike()
        run_due()
        assert not BreakerTrip.objects.exists()
        policies = [approval.subject(world.incident())[0]["policy"] for world in fleet[:2]]
        fleet[2].spike()
        run_due()
        trip = BreakerTrip.objects.get()
        assert trip.why == "spike v1 held 3 of 8\u00a0active runs within 10 minutes"
        assert [policy_for(world.run.pk).mode("spike") for world in fleet] == ["act"] * 3 + ["observe"] * 5
        page = Page.objects.get(kind="andon")
        assert page.title == "Andon itself may be wrong: spike v1"
        assert breaker.doubts(fleet[0].incident()) == [trip]
        # What is held stays held, and what people are about to sign there is what it was.
        assert {world.directive() for world in fleet[:3]} == {"hold"}
        assert [approval.subject(world.incident())[0]["policy"] for world in fleet[:2]] == policies

    def test_a_run_made_later_observes_too(self, fleet, project):
        for world in fleet[:3]:
            world.spike()
        assert policy_for(World(project, "before").run.pk).mode("nonfinite") == "act"
        BreakerTrip.objects.all().delete()
        for world in fleet[3:6]:
            world.finding("nonfinite", step=1002)
        run_due()
        assert policy_for(World(project, "later").run.pk).mode("nonfinite") == "observe"

    def test_a_quarter_of_the_fleet_is_not_enough(self, fleet, project):
        for n in range(8, 12):
            posting(World(project, f"run-{n}"))
        for world in fleet[:3]:
            world.spike()
        run_due()
        assert not BreakerTrip.objects.exists()  # 3 of 12 is a quarter, not more

    def test_a_rule_that_is_mostly_wrong_on_a_run_goes_back_to_observe(self, project, team, settings):
        settings.BREAKER_RUNS = 99
        world = World(project, "noisy")
        world.policy(modes={"spike": "act"})
        world.checkpoint(100)
        for number, step in ((1, 500), (2, 900)):
            world.steps(step - 4, step, attempt=number)
            world.spike(at=step, since=step - 2, attempt=number)
            incident = world.incident()
            world.stop(attempt=number)
            seal(incident.dossier)
            approval.false_alarm(incident=incident, person=team.jonas, why="the mixture changed")
            permit = approval.exchange(
                run=world.run, incident_id=incident.pk, attempt=number + 1, webhook_id=f"w-{number}"
            )
            world.launch(number + 1, permit["permit"])
            assert world.incident().state == Incident.State.FALSE_ALARM
            run_due()
        assert policy_for(world.run.pk).mode("spike") == "observe"
        assert "held noisy falsely 2\u00a0times in 7 days" in BreakerTrip.objects.get().why
        assert world.incident().timeline.filter(kind="breaker").exists()


def test_an_admin_may_switch_a_rule_too(observed, project):
    root = person(project, "root", Role.ADMIN)
    modes.set_mode(run=observed.run, rule="spike", mode="off", person=root, why="silent for the test")
    assert policy_for(observed.run.pk).mode("spike") == "off"
