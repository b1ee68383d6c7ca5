"""The plan: the worked example of the rules, and what follows from each family."""

import pytest

from evidence.models import Item
from incidents import actions, plans, review
from incidents.models import Plan
from tests.incidents.world import BATCH, World, held

pytestmark = pytest.mark.django_db


class TestWorkedExample:
    """Spike 1000 to 1011, halt agreed at 1002."""

    @pytest.fixture
    def world(self, project):
        return held(project)

    def test_it_takes_the_newest_verified_checkpoint_a_margin_before_the_spike(self, world):
        plan = plans.newest(world.incident())
        assert plan.kind == Plan.Kind.ROLLBACK_AND_SKIP
        assert plan.checkpoint["step"] == 900  # 950 and 1000 exist and lie inside the margin

    def test_the_skip_starts_at_the_loader_position_of_the_checkpoint(self, world):
        plan = plans.newest(world.incident())
        assert plan.skip["from"] == 900 * BATCH

    def test_the_skip_passes_the_last_bad_step_and_is_filled_to_the_policys_smallest(self, world):
        plan = plans.newest(world.incident())
        assert plan.skip["to"] == 900 * BATCH + 200 * BATCH
        assert plan.skip["to"] >= 1002 * BATCH
        assert plan.numbers["skipped_batches"] == 200

    def test_it_says_what_is_lost_and_why(self, world):
        plan = plans.newest(world.incident())
        assert plan.numbers["steps_lost"] == 102
        assert "data" in plan.why
        assert plans.lacks(plan) == []

    def test_positions_are_all_four_of_the_checkpoint(self, world):
        plan = plans.newest(world.incident())
        assert plan.positions == {
            "loader_position": 28800,
            "consumed_samples": 28795,
            "optimizer_step": 900,
            "schedule_position": 907,
        }


class TestWindow:
    def test_a_wide_failure_takes_no_margin_and_is_never_cut_short(self, project):
        world = World(project)
        world.checkpoint(300)
        world.steps(995, 1002)
        world.spike()
        plan = plans.newest(world.incident())
        assert plan.skip == {"from": 300 * BATCH, "to": 1002 * BATCH}
        assert "more than the policy's 500" in plan.why

    def test_without_a_loader_position_the_plan_is_not_complete_and_says_so(self, project):
        world = World(project)
        kept = world.checkpoint(900)
        type(kept).objects.update(loader_position=None)
        world.spike()
        assert plans.lacks(plans.newest(world.incident())) == [
            "the checkpoint of step 900 keeps no loader position"
        ]

    def test_without_a_checkpoint_the_plan_is_not_complete_and_says_so(self, project):
        world = World(project)
        world.steps(998, 1002)
        world.spike()
        assert "no verified checkpoint before step 1,000" in plans.lacks(plans.newest(world.incident()))[0]


class TestLateCheckpoint:
    """A newer last good one is known after the plan was made: its report waited in a spool."""

    def newer(self, world):
        Item.objects.filter(dossier=world.incident().dossier, kind="last_good_checkpoint").update(
            source={"checkpoint": world.checkpoint(925).pk}
        )

    def test_andons_own_plan_follows(self, project):
        world = held(project)
        self.newer(world)
        assert review.sweep() == 1
        plan = plans.newest(world.incident())
        assert (plan.checkpoint["step"], plan.skip["from"]) == (925, 925 * BATCH)
        assert review.sweep() == 0

    def test_an_incident_that_waits_is_reviewed_when_what_it_waits_for_changes(self, project):
        world = World(project)
        world.steps(998, 1002)
        world.spike()
        assert plans.lacks(plans.newest(world.incident()))
        assert [review.sweep() for _ in range(3)] == [1, 0, 0]
        self.newer(world)
        assert review.sweep() == 1
        assert not plans.lacks(plans.newest(world.incident()))

    def test_a_persons_plan_stays(self, project, team):
        world = held(project)
        actions.change_plan(
            incident=world.incident(),
            person=team.mira,
            kind=Plan.Kind.ROLLBACK_AND_SKIP,
            checkpoint_step=800,
            why="further back",
        )
        self.newer(world)
        review.sweep()
        assert plans.newest(world.incident()).checkpoint["step"] == 800
