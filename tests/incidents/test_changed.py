"""What changed since the last good checkpoint: each thing is changed, unchanged or not known."""

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone
from hypothesis import given
from hypothesis import strategies as st

from incidents import changed, neighbours, told
from incidents.models import Incident
from runs.models import Attempt, Event, Project
from tests.incidents.world import World, held, person, seal

pytestmark = pytest.mark.django_db

LAUNCH: dict[str, Any] = {
    "git": {"revision": "a41f9c2", "diff_stat": "3 files changed, 41 insertions(+)"},
    "config": {"lr": 2.4e-4, "model": {"layers": 12}},
    "environment": {"image": "train:9", "driver": "570.86", "nccl": "2.27.3", "python": "3.11"},
}


def of(world):
    return changed.since_last_good(world.incident())


def line(found, name):
    return next(one for one in found.lines if one.name == name)


def event(world, kind, step=None, *, rank=None, attempt=1, at=None, node="", **data):
    return Event.objects.create(
        received_at=at or timezone.now() - timedelta(seconds=1),
        occurred_at=at or timezone.now() - timedelta(seconds=1),
        run_id=world.run.pk,
        attempt=attempt,
        type=kind,
        step=step,
        rank=rank,
        node=node,
        data=data,
        webhook_id=f"{kind}-{step}-{rank}-{attempt}",
    )


def relaunched(project, first, second):
    """Return a run whose attempt 2 fails at step 960, after the last good checkpoint of attempt 1."""
    world = World(project)
    Attempt.objects.filter(run=world.run, number=1).update(data=first)
    world.checkpoint(850)
    world.launch(2)
    Attempt.objects.filter(run=world.run, number=2).update(data=second, first_step=851)
    world.steps(959, 962, attempt=2)
    world.finding("loss_spike", attempt=2, step=962, numbers={"since": 960, "z": 13.0})
    seal(world.incident().dossier)
    return world


class TestOneLaunch:
    def test_nothing_can_have_changed_within_it(self, world):
        Attempt.objects.filter(run=world.run).update(data=LAUNCH)
        found = of(world)
        assert found.since == "step 900 of attempt 1, the last good checkpoint"
        for name in ("code revision", "config", "image", "packages", "driver", "NCCL", "world size", "nodes"):
            assert line(found, name).state == "unchanged", name
        assert line(found, "code revision").says == "a41f9c2, one launch"
        assert found.headline == "nothing that was reported changed"
        assert line(found, "restarts").says == "none"

    def test_what_was_never_reported_is_not_known(self, world):
        found = of(world)
        unknown = {one.name for one in found.unknown}
        assert {
            "code revision",
            "config",
            "image",
            "driver",
            "NCCL",
            "data shard",
            "fleet calendar",
        } <= unknown
        assert line(found, "image").says == "the launch did not tell it"

    def test_a_declared_boundary_and_a_stop_request_stand_with_their_step(self, world):
        event(world, "schedule.boundary", 940, name="warm-up ends")
        event(world, "schedule.boundary", 800, name="too early to count")
        event(world, "stop.requested", 990, reason="maintenance", node="node-01")
        Incident.objects.update(opened_at=timezone.now())
        found = of(world)
        phase = line(found, "lr phase")
        assert (phase.state, phase.step, phase.says) == ("changed", 940, "warm-up ends, step 940")
        assert phase.more == []
        assert line(found, "fleet calendar").says == "stop requested, node-01, maintenance"

    def test_the_shard_of_the_bad_ranks_against_the_last_good_step(self, project):
        world = World(project)
        for step in (800, 900):
            world.checkpoint(step)
        world.steps(998, 1002)
        for rank in (2, 3):
            event(world, "batch.seen", 900, rank=rank, shard="cc-0411")
            event(world, "batch.seen", 1000, rank=rank, shard=f"cc-041{rank}")
        world.finding("nonfinite", step=1000, lanes=[3], view="local")
        shard = line(of(world), "data shard")
        assert (shard.state, shard.says, shard.step) == ("changed", "cc-0411 → cc-0413", 1000)


class TestTwoLaunches:
    def test_each_difference_is_named_with_where(self, project):
        second = {
            "git": {"revision": "b52e", "diff_stat": "1 file changed"},
            "config": {"lr": 1e-4, "model": {"layers": 12}, "clip": 1.0},
            "environment": {**LAUNCH["environment"], "nccl": "2.28.1", "torch": "2.10"},
        }
        found = of(relaunched(project, LAUNCH, second))
        code = line(found, "code revision")
        assert (code.state, code.says, code.step) == ("changed", "a41f9c2 → b52e", 851)
        assert code.more == ["diff: 1 file changed"]
        assert line(found, "config").more == ["clip: none → 1.0", "lr: 0.00024 → 0.0001"]
        assert line(found, "NCCL").says == "2.27.3 → 2.28.1"
        assert line(found, "packages").more == ["torch: none → 2.10"]
        assert line(found, "image").state == "unchanged"
        assert line(found, "restarts").says == "attempt 2"

    def test_nodes_that_left_and_joined_and_another_world_size(self, project):
        world = relaunched(project, LAUNCH, LAUNCH)
        nodes = [{"node": "node-00", "ranks": [0, 1]}, {"node": "spare-02", "ranks": [2]}]
        Attempt.objects.filter(number=2).update(nodes=nodes, world_size=3)
        found = of(world)
        assert line(found, "nodes").says == "node-01 left, spare-02 joined"
        assert line(found, "world size").says == "4 → 3 ranks"

    def test_an_earlier_launch_that_told_nothing_is_no_answer(self, project):
        found = of(relaunched(project, {}, LAUNCH))
        assert line(found, "image").state == "not known"
        assert "attempt 1 did not tell it" in line(found, "image").says

    def test_a_resume_in_place_keeps_what_the_launch_before_it_told(self, project):
        found = of(relaunched(project, LAUNCH, {"in_place": True}))
        assert line(found, "image").says == "train:9"
        assert line(found, "image").state == "unchanged"

    def test_secrets_and_hostile_names_are_not_shown(self, project):
        first = {"environment": {"packages": {"x\u202e": "1"}}, "config": {"api_key": "sk-" + "a" * 40}}
        second = {"environment": {"packages": {"x\u202e": "2"}}, "config": {"api_key": "sk-" + "b" * 40}}
        found = of(relaunched(project, first, second))
        assert line(found, "packages").more == ["x\ufffd: 1 → 2"]
        assert "aaaa" not in str(found)
        assert "bbbb" not in str(found)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text("ab=.\u202e\n", max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text("ab.", max_size=12), inner, max_size=4)
    ),
    max_leaves=12,
)
KEYS = st.sampled_from(["git", "config", "environment", "image", "packages", "code", "nccl", "versions", "x"])


@given(st.dictionaries(KEYS, JSON, max_size=6), st.dictionaries(KEYS, JSON, max_size=6))
def test_whatever_a_launch_tells_can_be_compared(before, after):
    for fact in (told.REVISION, told.DIFF_STAT, told.DATA_MIX, *told.FACTS):
        old, new = told.value_of(fact, before), told.value_of(fact, after)
        assert isinstance(told.text(new), str)
        if old == new:
            assert told.differences(old, new) == []


class TestNeighbours:
    def test_same_node_same_switch_same_minute(self, project, team):
        world = World(project)
        world.steps(1, 3)
        world.finding("nonfinite", step=3, lanes=[3], view="local")
        nodes = [{"node": "node-01", "ranks": [2, 3], "switch": "leaf-3"}]
        Attempt.objects.filter(run=world.run).update(nodes=nodes)
        other = World(project, "shares-node")
        switch = World(project, "shares-switch")
        Attempt.objects.filter(run=switch.run).update(
            nodes=[{"node": "node-99", "ranks": [0], "switch": "leaf-3"}]
        )
        gone = World(project, "long-gone")
        Attempt.objects.filter(run=gone.run).update(
            launched_at=timezone.now() - timedelta(days=9), exited_at=timezone.now() - timedelta(days=8)
        )
        Attempt.objects.filter(run__in=[other.run, switch.run]).update(
            launched_at=timezone.now() - timedelta(hours=1)
        )
        third = held(project, "same-minute")
        Attempt.objects.filter(run=third.run).update(nodes=[])
        found = {(one.run, one.shares) for one in neighbours.of_incident(world.incident(), team.mira)}
        assert found == {
            ("shares-node", "node-01"),
            ("shares-switch", "switch leaf-3"),
            ("same-minute", "the same minute"),
        }

    def test_runs_of_another_project_are_not_told(self, project, team):
        world = World(project)
        world.steps(1, 3)
        world.finding("nonfinite", step=3, lanes=[3], view="local")
        elsewhere = Project.objects.create(slug="elsewhere", name="Elsewhere")
        held(elsewhere, "secret-run")
        Attempt.objects.filter(run__slug="secret-run").update(launched_at=timezone.now() - timedelta(hours=1))
        assert neighbours.of_incident(world.incident(), team.mira) == []
        outsider = person(elsewhere, "olga", "viewer")
        assert [one.run for one in neighbours.of_incident(world.incident(), outsider)] == [
            "secret-run",
            "secret-run",
        ]
