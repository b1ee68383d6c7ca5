"""From which attempt each one came, by whose word, and in which training regime."""

import pytest
from django.test import Client

from incidents import actions, lineage
from tests.incidents.test_approval import ask, grant, take
from tests.pages.words import text_of

pytestmark = pytest.mark.django_db


def go_on(world, team, **changes):
    if changes:
        actions.change_plan(incident=world.incident(), person=team.tomas, why="asked for", **changes)
    ask(world, team.mira)
    grant(world, team.jonas)
    world.launch(2, take(world)["permit"])
    return lineage.of(world.run)


def test_a_rollback_and_skip_keeps_the_regime(world, team):
    first, second = go_on(world, team)
    assert (first.attempt, first.came_from, first.incident, first.regime) == (1, "the beginning", None, 1)
    assert (second.came_from, second.incident) == ("attempt 1, step 900", world.incident().pk)
    assert second.skipped["from"] == 28_800
    assert (second.regime, second.new_regime) == (1, False)


def test_a_declared_change_begins_another_and_the_page_says_not_comparable(world, team):
    changes = [
        {"what": "lr", "was": "3e-4", "to": "9e-5", "changes_regime": True},
        {"what": "node", "was": "n7", "to": "n9", "changes_regime": False},
    ]
    _, second = go_on(world, team, changes=changes)
    assert (second.regime, second.new_regime) == (2, True)
    client = Client()
    client.force_login(team.vera)
    said = text_of(client.get(f"/runs/{world.run.slug}/lineage"))
    assert "2, new: not comparable with before" in said
    assert "lr = 9e-5" in said
    assert "node = n9 (same regime)" in said
    assert f"incident {world.incident().pk}" in said


def test_a_restart_that_nobody_let_go_on_begins_no_regime(world, team):
    go_on(world, team)
    world.launch(3)
    third = lineage.of(world.run)[-1]
    assert (third.attempt, third.incident, third.by, third.regime) == (3, None, "", 1)
