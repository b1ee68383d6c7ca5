"""The strip: how sure the first bad cell is, what followed it, what waiting costs, what nobody presses."""

from datetime import UTC, datetime, timedelta

import pytest
from django.utils import timezone

from incidents import approval, queries
from incidents.holding import held_since
from runs.models import Attempt, Event, FirstBad, Frame, RunProgress, Work
from tests.incidents.world import World

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


class TestWaiting:
    def test_the_line_in_order(self, nan, team):
        now = timezone.now()
        RunProgress.objects.filter(run=nan.run).update(
            nodes={"node-00": now.isoformat(), "node-01": (now - timedelta(minutes=3)).isoformat()}
        )
        text = pieces(nan, team.mira)
        assert [
            text.index(word) for word in ("ranks exit", "allocation", "obeyed", "data from", "Andon")
        ] == sorted(text.index(word) for word in ("ranks exit", "allocation", "obeyed", "data from", "Andon"))
        assert "obeyed by 0 of 4" in text
        assert "data from 1 of 2\u00a0nodes, oldest node-01" in text
        assert text.endswith("Andon healthy")

    def test_a_node_that_never_posted_is_counted(self, nan, team):
        RunProgress.objects.filter(run=nan.run).update(nodes={"node-00": timezone.now().isoformat()})
        assert "data from 1 of 2\u00a0nodes, oldest below 1\u00a0min" in pieces(nan, team.mira)

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
        assert "allocation end not known: the launch told none" in pieces(nan, team.mira)

    def test_andon_says_when_it_is_not_well(self, nan, team):
        Work.objects.create(kind="x", key="1", not_before=timezone.now() - timedelta(minutes=5))
        assert "Andon: no worker took work for 5\u00a0min" in pieces(nan, team.mira)


class TestIfNothingIsPressed:
    def test_the_ranks_leave_and_the_run_stays_held(self, nan, team):
        says = page(nan, team.mira).waiting.nothing_pressed
        assert says.startswith("Ranks exit at ")
        assert says.endswith("with code 93, the run stays held, nothing resumes and no evidence is let go.")

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
