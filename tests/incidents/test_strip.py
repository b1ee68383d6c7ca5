"""The strip: how sure the first bad cell is, what followed it, what waiting costs, what nobody presses."""

from datetime import UTC, datetime, timedelta

import pytest
from django.utils import timezone

from incidents import approval, queries
from incidents.actions import hold_by_hand
from incidents.holding import held_since
from incidents.models import Incident
from runs.models import Attempt, Event, FirstBad, Frame, NodeEvent, RunProgress, Work
from tests.incidents.world import World, seal

pytestmark = pytest.mark.django_db


def page(world, person, **more):
    return queries.incident_page(person, world.incident().pk, **more)


def pieces(world, person, **more):
    return " · ".join(piece.text for piece in page(world, person, **more).waiting.pieces)


def bad(world, rank, step, **more):
    fields = {"view": "local", "phase": 2, "series": "nonfinite", "bits": 4}
    FirstBad.objects.create(
        run=world.run,
        attempt=1,
        stream="rank",
        lane=str(rank),
        step=step,
        received_at=timezone.now(),
        **fields | more,
    )


def frame(world, first, last, *, lanes=(0, 3), number=0):
    Frame.objects.create(
        received_at=timezone.now(),
        run_id=world.run.pk,
        attempt=1,
        stream="rank",
        content_type="application/json",
        body=b"",
        step_first=first,
        step_last=last,
        lane_first=lanes[0],
        lane_last=lanes[1],
        rows=(last - first + 1) * (lanes[1] - lanes[0] + 1),
        webhook_id=f"frame-{first}-{lanes}-{number}",
    )


@pytest.fixture
def nan(project):
    """Rank 3 is bad at step 20, rank 1 one step later."""
    world = World(project)
    world.steps(18, 20)
    bad(world, 3, 20)
    bad(world, 1, 21)
    world.finding("nonfinite", step=20, lanes=[3], view="local")
    return world


class TestItsMachines:
    def test_the_number_of_a_fault_stands_beside_the_rank_and_what_only_followed_does_not(self, nan, team):
        now = timezone.now()
        for node, xid in (("node-01", 48), ("node-01", 48), ("node-01", 31), ("node-00", 79)):
            NodeEvent.objects.create(
                run=nan.run,
                attempt=1,
                node=node,
                kind="xid",
                step=19,
                occurred_at=now,
                received_at=now,
                data={"xid": xid},
            )
        recorded = page(nan, team.mira).first_bad.recorded
        assert recorded == "Xid 48 on node-01 at step 19: double-bit ECC error."

    def test_nothing_recorded_is_no_sentence(self, nan, team):
        assert page(nan, team.mira).first_bad.recorded == ""


class TestHowSure:
    def test_all_ranks_reported(self, nan, team):
        frame(nan, 11, 20)
        first = page(nan, team.mira).first_bad
        assert first.headline == "rank 3 on node-01, step 20, backward"
        assert first.sure == "local values, all 4 ranks reported, no tie"
        assert first.followed == "rank 1 one step later"

    def test_some_ranks_reported_another_step_only(self, nan, team):
        frame(nan, 11, 20, lanes=(2, 3))
        frame(nan, 11, 19, lanes=(0, 1))
        assert page(nan, team.mira).first_bad.sure == "local values, 2 of 4 ranks reported this step, no tie"

    def test_what_was_incomplete_is_asked_for_again(self, nan, team):
        frame(nan, 11, 20, lanes=(1, 3))
        assert "3 of 4 ranks" in page(nan, team.mira).first_bad.sure
        Event.objects.create(
            received_at=timezone.now(),
            occurred_at=timezone.now(),
            run_id=nan.run.pk,
            attempt=1,
            type="step",
            step=20,
            rank=0,
            webhook_id="late",
        )
        assert "all 4 ranks" in page(nan, team.mira).first_bad.sure

    def test_a_tie_says_why(self, nan, team):
        frame(nan, 11, 20)
        bad(nan, 2, 20)
        first = page(nan, team.mira).first_bad
        assert first.headline.startswith("ranks 2 and 3 on node-01, step 20")
        assert ", a tie: 2 equal cells" in first.sure

    def test_everyone_followed(self, nan, team):
        bad(nan, 0, 20, view="reduced", phase=3)
        bad(nan, 2, 21)
        first = page(nan, team.mira).first_bad
        assert first.followed == "rank 0 in the same step, all other ranks one step later"

    def test_a_tie_says_that_who_was_first_cannot_be_told(self, nan, team):
        frame(nan, 11, 20)
        bad(nan, 2, 20)
        Incident.objects.update(symptom="one_rank_nonfinite")
        first = page(nan, team.mira).first_bad
        assert first.symptom == "NaN or Inf first on ranks 2 and 3; which of them was first cannot be told"
        assert first.look_first_at == "their shard, their device"

    def test_the_rank_of_a_run_that_has_one_is_known(self, project, team):
        one = World(project, world_size=1)
        one.steps(995, 1002)
        one.spike()
        first = page(one, team.mira).first_bad
        assert (first.headline, first.sure) == (
            "rank 0 on node-01, step 1,000, forward",
            "the only rank of this run",
        )

    def test_a_hold_by_hand_says_who_and_why(self, project, team):
        world = World(project)
        incident = hold_by_hand(run=world.run, person=team.tomas, why="no rank advances")
        Incident.objects.filter(pk=incident.pk).update(lead=team.mira)
        assert page(world, team.mira).first_bad.symptom == "held by tomas: no rank advances"


class TestEvidence:
    def test_what_will_not_come_is_not_waited_for(self, nan, team):
        seal(nan.incident().dossier)
        items = nan.incident().dossier.items
        assert page(nan, team.mira).evidence.says == "All required is safe."
        items.filter(kind__in=("last_good_checkpoint", "first_bad_checkpoint")).update(state="not_applicable")
        items.filter(kind="batch_ids").update(state="missing", why="nobody offered it")
        items.filter(kind="rank_logs").update(state="planned", why="")
        assert page(nan, team.mira).evidence.says == (
            "Not there: batch ids: nobody offered it; it can be waived with a reason."
            " Waiting for rank logs: planned: nothing is held yet."
        )


class TestNotHeld:
    def test_a_run_that_goes_on_says_until_when_and_offers_a_hold(self, project, team):
        world = World(project)
        world.steps(995, 1000)
        world.finding("loss_spike", step=1000, severity="warn")
        shown = page(world, team.mira)
        assert shown.running.obedience == ""
        assert "without another finding it resolves itself after step 1,050" in shown.running.says
        assert next(button for button in shown.next.buttons if button.code == "hold").allowed
        assert next(button for button in page(world, team.vera).next.buttons if button.code == "hold").never


class TestWaiting:
    def test_the_line_in_order(self, nan, team):
        now = timezone.now()
        RunProgress.objects.filter(run=nan.run).update(
            nodes={"node-00": now.isoformat(), "node-01": (now - timedelta(minutes=3)).isoformat()}
        )
        text = pieces(nan, team.mira)
        places = [text.index(word) for word in ("allocation", "sign of life from", "Andon")]
        assert places == sorted(places)
        assert "sign of life from 1 of 2\u00a0nodes in the last minute, quietest node-01" in text
        assert text.endswith("Andon healthy")

    def test_a_node_that_never_posted_is_counted(self, nan, team):
        RunProgress.objects.filter(run=nan.run).update(nodes={"node-00": timezone.now().isoformat()})
        assert "sign of life from 1 of 2\u00a0nodes in the last minute" in pieces(nan, team.mira)

    @pytest.mark.parametrize(
        "told",
        [
            {"allocation_ends_at": "2031-05-06T07:08:09Z"},
            {"environment": {"SLURM_JOB_END_TIME": "1935817689"}},
            {"env": {"SLURM_JOB_END_TIME": 1935817689}},
        ],
    )
    def test_the_end_of_the_allocation_as_the_launch_told_it(self, nan, team, told):
        Attempt.objects.filter(run=nan.run).update(data=told)
        waiting = page(nan, team.mira).waiting
        assert waiting.ends_at == datetime(2031, 5, 6, 7, 8, 9, tzinfo=UTC)
        assert "allocation ends 6\u00a0May\u00a02031 07:08 UTC" in pieces(nan, team.mira)

    @pytest.mark.parametrize(
        "told", [{}, {"allocation_ends_at": "soon"}, {"allocation_ends_at": [1]}, {"env": 3}]
    )
    def test_an_end_nobody_told_is_said(self, nan, team, told):
        Attempt.objects.filter(run=nan.run).update(data=told)
        assert "the launch told no end of its allocation" in pieces(nan, team.mira)

    def test_andon_says_when_it_is_not_well(self, nan, team):
        Work.objects.create(kind="x", key="1", not_before=timezone.now() - timedelta(minutes=5))
        assert "Andon: no worker took work for 5\u00a0min" in pieces(nan, team.mira)


class TestIfNothingIsPressed:
    def test_the_ranks_leave_and_the_run_stays_held(self, nan, team):
        says = page(nan, team.mira).waiting.nothing_pressed
        assert says.startswith("Ranks wait, and exit in ")
        assert says.endswith("code 93), the run stays held, nothing resumes and no evidence is let go.")

    def test_after_the_deadline(self, nan, team):
        later = held_since(nan.run.pk) + timedelta(hours=2)
        says = page(nan, team.mira, now=later).waiting.nothing_pressed
        assert says == "The run stays held, nothing resumes and no evidence is let go."

    def test_with_a_request_and_with_a_permit(self, world, team):
        digest = approval.subject(world.incident())[1]
        approval.request_resume(incident=world.incident(), person=team.mira, digest=digest)
        assert ", the request expires " in page(world, team.mira).waiting.nothing_pressed
        approval.approve(incident=world.incident(), person=team.jonas, digest=digest)
        assert page(world, team.mira).waiting.nothing_pressed.startswith("The supervisor takes the permit")
