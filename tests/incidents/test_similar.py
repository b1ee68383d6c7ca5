"""What recurs, and which earlier incidents are alike: five traits, compared by columns."""

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from incidents import queries, traits
from incidents.models import Incident, StateChange
from incidents.traits import tensor_kind
from runs.models import Event, Project
from tests.incidents.world import World

pytestmark = pytest.mark.django_db


def failed(project, slug, *, step=20, ranks=(3,), shard="", ended="resolved", why=""):
    """Return a run with one incident that is over, unless `ended` is ""."""
    world = World(project, slug)
    world.steps(step - 1, step)
    for rank in ranks:
        if shard:
            Event.objects.create(
                received_at=timezone.now(),
                occurred_at=timezone.now(),
                run_id=world.run.pk,
                attempt=1,
                type="batch.seen",
                step=step,
                rank=rank,
                data={"shard": shard},
                webhook_id=f"{slug}-{rank}",
            )
    world.finding("nonfinite", step=step, lanes=list(ranks), view="local")
    if ended:
        incident = world.incident()
        Incident.objects.filter(pk=incident.pk).update(state=ended, resolved_at=timezone.now())
        StateChange.objects.create(
            incident=incident, before="watching", after=ended, at=timezone.now(), why=why
        )
    traits.sweep()
    return world


def similar(world, person):
    return queries.incident_page(person, world.incident().pk).similar


class TestRecurrence:
    def test_the_third_time_with_a_shard(self, project, team):
        first = failed(project, "a", shard="0412", ranks=(0,))
        second = failed(project, "b", shard="0412", ranks=(2,))
        failed(project, "c", shard="0999", ranks=(2,))
        found = similar(failed(project, "d", shard="0412", ended=""), team.mira)
        assert found.recurs == "third time with shard 0412"
        assert found.recurs_in == [second.incident().pk, first.incident().pk]

    def test_the_same_step_of_the_same_run_outranks_a_shard(self, project, team):
        world = failed(project, "a", shard="0412")
        world.finding("nonfinite", step=20, lanes=[3], view="local", numbers={"loss": "inf"})
        assert similar(world, team.mira).recurs == "second time at step 20 of this run"

    def test_the_same_node(self, project, team):
        failed(project, "a", ranks=(2,))
        assert similar(failed(project, "b", step=30, ended=""), team.mira).recurs == "second time on node-01"

    def test_a_false_alarm_is_no_recurrence(self, project, team):
        failed(project, "a", shard="0412", ended="false_alarm", why="sensor")
        found = similar(failed(project, "b", shard="0412", ended=""), team.mira)
        assert found.recurs == ""
        assert found.alike[0].ended == "false alarm: sensor"

    def test_what_a_person_may_not_see_recurs_for_nobody(self, project, team):
        elsewhere = Project.objects.create(slug="elsewhere", name="Elsewhere")
        failed(elsewhere, "a", shard="0412")
        assert similar(failed(project, "b", shard="0412", ended=""), team.mira).recurs == ""


class TestAlike:
    def test_shared_traits_are_named_and_how_it_ended(self, project, team):
        failed(project, "far", ranks=(0, 1), step=7)
        failed(project, "near", shard="0412", why="length filter, new regime")
        alike = similar(failed(project, "now", shard="0412", ended=""), team.mira).alike
        assert alike[0].run == "near"
        assert alike[0].of == 5
        assert [one.split()[0] for one in alike[0].shared] == ["symptom", "scope", "node", "data"]
        assert alike[0].shared[-1] == "data shard 0412"
        assert "length filter, new regime" in alike[0].ended

    def test_a_moved_first_bad_cell_is_looked_up_anew(self, project, team):
        world = failed(project, "a", ended="")
        assert world.incident().traits == {"nodes": ["node-01"], "shards": []}
        world.finding("nonfinite", step=12, lanes=[0], view="local")
        assert world.incident().traits is None
        traits.sweep()
        assert world.incident().traits == {"nodes": ["node-00"], "shards": []}

    def test_many_earlier_ones_cost_no_further_query(self, project, team):
        def cost(world):
            with CaptureQueriesContext(connection) as seen:
                assert similar(world, team.mira).recurs
            return len(seen)

        failed(project, "a")
        before = cost(failed(project, "second", ended=""))
        for n in range(4):
            failed(project, f"more-{n}")
        assert cost(failed(project, "last", ended="")) == before


@pytest.mark.parametrize(
    ("layer", "kind"),
    [
        ("layers.6.attn.qkv", "attn.qkv"),
        ("module.decoder.layers.31.mlp.fc1", "mlp.fc1"),
        ("lm_head", "lm_head"),
        ("6", ""),
        (6, ""),
        (None, ""),
        ("", ""),
    ],
)
def test_the_kind_of_a_tensor_is_its_name_without_its_layer(layer, kind):
    assert tensor_kind(layer) == kind
