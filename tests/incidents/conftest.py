"""People of these tests: mira responds, jonas and priya approve, charlie belongs to nothing."""

from types import SimpleNamespace

import pytest

from runs.models import Person, Project, Role
from tests.incidents.world import held, person


@pytest.fixture
def team(project: Project) -> SimpleNamespace:
    """Members by what they may do, and one who may nothing."""
    return SimpleNamespace(
        mira=person(project, "mira", Role.RESPONDER, Role.APPROVER),
        jonas=person(project, "jonas", Role.APPROVER),
        priya=person(project, "priya", Role.APPROVER),
        tomas=person(project, "tomas", Role.RESPONDER),
        vera=person(project, "vera", Role.VIEWER),
        charlie=Person.objects.create_user("charlie"),
    )


@pytest.fixture
def world(project: Project):
    """A held run whose gate is open: sealed evidence, complete plan."""
    return held(project)
