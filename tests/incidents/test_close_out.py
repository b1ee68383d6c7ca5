"""The end of an incident closes its dossiers and keeps them for the policy's days."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
from django.utils import timezone

from evidence.models import Dossier, Item
from evidence.retention.release import why_not_release
from incidents.actions import resolve
from incidents.models import Incident
from runs.models import Project, Work
from tests.incidents.world import World, held

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_resolved_incident_extends_the_first_short_dates(project: Project, team: SimpleNamespace) -> None:
    world = held(project)
    incident = world.incident()
    # An earlier attempt's dossier of the same incident ends with it.
    earlier = Dossier.objects.create(run=world.run, opened_at=timezone.now(), label="earlier")
    Incident.objects.filter(pk=incident.pk).update(holds=False, earlier_dossiers=[earlier.pk])
    incident.refresh_from_db()
    before = {item.pk: item.retain_until for item in Item.objects.filter(dossier=incident.dossier)}
    assert why_not_release(incident.dossier) is not None
    resolve(incident=incident, person=team.mira, why="the spike recovered")
    now = timezone.now()
    for item in Item.objects.filter(dossier=incident.dossier):
        was = before[item.pk]
        assert was is not None
        assert item.retain_until is not None
        assert was < item.retain_until
        assert timedelta(days=29) < item.retain_until - now < timedelta(days=30)
        assert Work.objects.filter(kind="evidence.extend", key=str(item.pk)).exists()
    incident.dossier.refresh_from_db()
    earlier.refresh_from_db()
    assert incident.dossier.closed_at is not None
    assert earlier.closed_at is not None
    row = incident.dossier.custody.get(what="closed")
    assert row.who == str(team.mira.opaque_id)
    assert row.data["why"] == f"incident {incident.pk} resolved: the spike recovered"
    assert len(row.data["kept_until"]) == len(before)


def test_an_incident_that_goes_on_leaves_its_dossier_open(project: Project) -> None:
    world: World = held(project)
    assert world.incident().dossier.closed_at is None
    assert not world.incident().dossier.custody.filter(what="closed").exists()
