"""What the incident page is told: by whom it may be read, its answers, its buttons, its cost."""

import re
from datetime import timedelta

import pytest
from django.utils import timezone

from evidence.queries import evidence_counts
from incidents import actions, alarms, approval, holding, queries
from incidents.models import Incident
from runs.models import DirectiveAck, RunProgress
from tests.incidents.world import World, held

pytestmark = pytest.mark.django_db


def page(world, person):
    return queries.incident_page(person, world.incident().pk)


def ask(world, person):
    incident = world.incident()
    return approval.request_resume(incident=incident, person=person, digest=approval.subject(incident)[1])


class TestWhoSees:
    def test_a_stranger_gets_404_everywhere(self, world, team):
        with pytest.raises(Incident.DoesNotExist):
            page(world, team.charlie)
        assert queries.incident_list(team.charlie) == []
        assert alarms.alarm_lines(team.charlie) == []
        assert queries.open_count(team.charlie) == 0

    def test_a_viewer_sees_and_is_told_who_may_press(self, world, team):
        shown = page(world, team.vera)
        approve = next(button for button in shown.next.buttons if button.code == "approve")
        assert approve.never
        assert approve.why == "Approver: jonas, mira or priya."


class TestAnswers:
    def test_first_bad_in_words(self, world, team):
        first = page(world, team.mira).first_bad
        assert first.headline == "step 1,000, forward; the rank is not known"
        assert first.sure == "reduced values only: the rank is not known"
        assert first.symptom == "loss spike without recovery"

    def test_first_bad_with_rank_and_node(self, project, team):
        world = World(project)
        world.steps(1, 3)
        world.finding("nonfinite", step=3, lanes=[3], view="local")
        first = page(world, team.mira).first_bad
        assert first.headline == "rank 3 on node-01, step 3, forward"
        assert first.sure == "local values, who else reported this step is not known, no tie"

    def test_evidence_counts(self, world, team):
        evidence = page(world, team.mira).evidence
        counts = evidence_counts(world.incident().dossier)
        assert (evidence.required, evidence.sealed) == (counts["required"], counts["sealed"])
        assert (
            evidence.headline == f"{counts['held']} of {counts['required']} held, {counts['sealed']} sealed"
        )
        assert queries.incident_list(team.mira)[0].evidence == counts

    def test_who_obeys(self, project, team):
        world = held(project, stopped=False)
        DirectiveAck.objects.create(
            run=world.run,
            attempt=1,
            seq=2,
            state="held",
            step=1003,
            ranks=[0, 1, 2],
            occurred_at=timezone.now(),
            received_at=timezone.now(),
        )
        running = page(world, team.mira).running
        assert running.headline == "Held after step 1,003"
        assert running.obedience.startswith("3 of 4 ranks obey; rank 3 did not answer since ")
        assert running.silent == [3]

    def test_waiting_costs_gpu_hours_and_money_at_policy_price(self, world, team):
        world.policy(cost={"gpu_hour_price": 3.0})
        RunProgress.objects.update(nodes={"node-00": timezone.now().isoformat()})
        since = holding.held_since(world.run.pk)
        shown = queries.incident_page(team.mira, world.incident().pk, now=since + timedelta(minutes=30))
        assert shown.waiting.gpus == 4
        assert shown.waiting.gpu_hours == pytest.approx(2.0)
        assert shown.waiting.money == pytest.approx(6.0)
        assert shown.waiting.money_per_minute == pytest.approx(0.2)
        assert (shown.waiting.nodes, shown.waiting.oldest_node) == (1, "node-00")
        assert shown.waiting.money_per_hour == pytest.approx(12.0)

    def test_the_plan_and_its_cost(self, world, team):
        plan = page(world, team.mira).plan
        assert plan.checkpoint_says == "step 900, verified"
        assert plan.skip_says == "samples 28,800–35,199 (6,400, 200\u00a0batches)"
        assert plan.cost.gpu_hours == pytest.approx(102 * 2 / 3600 * 4)
        assert plan.cost.says.startswith("102\u00a0steps run again: 3\u00a0min, 0.2")

    def test_the_digest_shown_is_the_one_that_is_signed(self, world, team):
        shown = page(world, team.mira)
        approval.request_resume(incident=world.incident(), person=team.mira, digest=shown.digest)


class TestNext:
    """One main thing, by what the gate lacks."""

    def test_it_leads_from_acknowledge_to_watching(self, world, team):
        assert page(world, team.mira).next.main.code == "acknowledge"
        actions.acknowledge(incident=world.incident(), person=team.mira)
        assert page(world, team.mira).next.main.code == "request"
        ask(world, team.mira)
        assert page(world, team.jonas).next.main.allowed
        mine = page(world, team.mira).next
        assert (mine.main.code, mine.main.allowed) == ("approve", False)
        assert mine.says == "You asked. jonas or priya may approve."
        approval.approve(incident=world.incident(), person=team.jonas, digest=page(world, team.jonas).digest)
        assert page(world, team.mira).next.says.startswith("Permit not taken yet")
        document = approval.exchange(
            run=world.run, incident_id=world.incident().pk, attempt=2, webhook_id="w"
        )
        world.launch(2, document["permit"])
        world.steps(1402, 1402, attempt=2)
        assert "100\u00a0steps of the watch window left" in page(world, team.mira).next.says

    def test_it_says_what_opens_the_gate(self, world, team):
        world.incident().dossier.items.filter(kind="norms").update(
            state="collecting", bytes_done=10, bytes_total=20
        )
        actions.acknowledge(incident=world.incident(), person=team.mira)
        shown = page(world, team.mira)
        assert shown.next.main.code == "check-plan"
        assert "10 of 20 bytes" in shown.next.says
        line = next(line for line in shown.gate if line.code == "evidence")
        assert line.glyph == "running"


class TestRows:
    def test_alike_findings_are_one_row_with_a_count(self, world, team):
        for rank in range(3):
            world.finding("loss_spike", step=1003, lanes=[rank], numbers={"since": 1000})
        folded = [row for row in page(world, team.mira).timeline if "step 1,003" in row.text]
        assert [row.count for row in folded] == [3]
        assert "ranks 0–2" in folded[0].text

    def test_the_ledger_names_people(self, project, team):
        world = World(project)
        actions.hold_by_hand(run=world.run, person=team.tomas, why="odd")
        assert [row.decided_by for row in page(world, team.mira).ledger] == ["tomas"]

    def test_the_alarm_line_says_who_has_it(self, world, team):
        line = alarms.alarm_lines(team.vera)[0]
        assert line.says.endswith("Nobody has acknowledged it.")
        actions.acknowledge(incident=world.incident(), person=team.mira)
        assert alarms.alarm_lines(team.vera)[0].says.endswith("mira has it.")

    def test_the_alarm_line_says_what_the_run_does_in_every_state(self, world, team):
        def says():
            return alarms.alarm_lines(team.vera)[0].says

        assert re.search(r" held \d+\xa0s, incident \d+, step 1,000", says())
        ask(world, team.mira)
        approval.approve(incident=world.incident(), person=team.jonas, digest=page(world, team.jonas).digest)
        assert re.search(r" held \d+\xa0s, resume approved, ", says())
        document = approval.exchange(
            run=world.run, incident_id=world.incident().pk, attempt=2, webhook_id="w"
        )
        assert re.search(r" resuming after \d+\xa0s held, ", says())
        world.launch(2, document["permit"])
        world.steps(1402, 1402, attempt=2)
        assert "runs again, watched to step 1,5" in says()
        assert says().endswith("Nobody has acknowledged it.")
        actions.acknowledge(incident=world.incident(), person=team.mira)
        assert alarms.alarm_lines(team.vera) == []  # it runs, and somebody has it

    def test_the_alarm_line_of_a_run_that_was_never_held_says_that_it_runs(self, project, team):
        world = World(project)
        world.steps(1, 3)
        world.finding("loss_spike", step=3, severity="warn", mode="act")
        shown = alarms.alarm_lines(team.vera)
        assert [line.held for line in shown] == [False]
        assert " runs on, incident " in shown[0].says

    def test_the_run_that_idles_most_gpus_comes_first(self, project, team):
        for slug, ranks in (("small", 2), ("large", 8)):
            one = World(project, slug=slug, world_size=ranks)
            one.steps(1, 3)
            one.finding("nonfinite", step=3)
        shown = alarms.alarm_lines(team.vera)
        assert [(line.run, line.idle_gpus) for line in shown] == [("large", 8), ("small", 2)]
        assert alarms.others_words(shown) == (
            "2 other incidents, 2 held; 2 not acknowledged; most GPUs idle: large, 8"
        )
        assert alarms.others_words(shown[1:]).startswith("1 other incident, 1 held")

    def test_the_list_and_the_page_name_the_same_node(self, project, team):
        world = World(project)
        world.steps(1, 3)
        world.finding("nonfinite", step=3, lanes=[3], view="local")
        listed = queries.incident_list(team.mira)[0].first_bad
        assert listed == page(world, team.mira).first_bad.headline
        assert "on node-01" in alarms.alarm_lines(team.mira)[0].says

    def test_a_reason_why_a_row_has_nothing_is_said_once(self, world, team):
        ask(world, team.mira)
        approval.approve(incident=world.incident(), person=team.jonas, digest=page(world, team.jonas).digest)
        row = next(row for row in page(world, team.mira).ledger if row.action == "approve")
        moved = "an approval moves nothing; the launch it permits does"
        assert row.absent == [("step, ranks, loader", moved)]

    def test_a_changed_note_shows_its_newest_text(self, world, team):
        note = actions.add_note(incident=world.incident(), person=team.mira, text="one sample")
        actions.add_note(incident=world.incident(), person=team.mira, text="two samples", replaces=note)
        notes = page(world, team.mira).notes
        assert [(one.text, one.edits) for one in notes] == [("two samples", 1)]


def test_the_page_takes_the_same_few_queries_however_much_it_shows(
    world, team, django_assert_max_num_queries
):
    for step in range(1003, 1053):
        world.finding("loss_spike", step=step, numbers={"since": 1000})
    with django_assert_max_num_queries(60):
        page(world, team.mira)


def test_the_list_takes_the_same_queries_for_many(project, team, django_assert_max_num_queries):
    for n in range(4):
        held(project, f"run-{n}")
    with django_assert_max_num_queries(25):
        assert len(queries.incident_list(team.mira)) == 4
