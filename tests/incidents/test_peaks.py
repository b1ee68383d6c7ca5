"""Where a spike was highest, beside where it began."""

import pytest
from django.utils import timezone

from incidents import queries
from runs import curve_store, curve_values
from runs.models import Event
from tests.incidents.world import World

pytestmark = pytest.mark.django_db


def spiked(project, losses):
    world = World(project)
    world.steps(990, 999)
    now = timezone.now()
    posted = [
        Event(
            received_at=now,
            occurred_at=now,
            run_id=world.run.pk,
            attempt=1,
            type="step",
            step=step,
            data={"loss": loss},
            webhook_id=f"step-{step}",
        )
        for step, loss in enumerate(losses, start=1000)
    ]
    curve_store.take(world.run.pk, 1, curve_values.of_events(posted)[1])
    world.spike()
    return world


def test_the_highest_value_is_named_with_its_step(project, team):
    world = spiked(project, [5.0, 6.0, 9.5, 7.0])
    first = queries.incident_page(team.mira, world.incident().pk).first_bad
    assert (first.step, first.followed) == (1000, "Highest at step 1,002: loss 9.500.")


def test_nothing_is_said_where_it_began_at_its_highest(project, team):
    world = spiked(project, [9.5, 6.0, 5.0])
    assert queries.incident_page(team.mira, world.incident().pk).first_bad.followed == ""
