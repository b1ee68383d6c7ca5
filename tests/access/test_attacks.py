"""Ways around the door, tried over HTTP on a held run whose gate is open: none ends in a permit."""

import re

import pytest
from django.test import Client

from incidents import actions, approval
from incidents.models import Approval, Permit
from incidents.refused import Refused
from runs.actions import create_token
from runs.models import Membership, Person, Project, Role, Scope
from tests.accounts.conftest import signed_in, text_of
from tests.incidents.conftest import team, world  # noqa: F401

pytestmark = pytest.mark.django_db


@pytest.fixture
def asked(world, team):  # noqa: F811
    """Tomas asked to resume."""
    ask(world, team.tomas)
    return world


def ask(world, person):  # noqa: F811
    incident = world.incident()
    return approval.request_resume(incident=incident, person=person, digest=approval.subject(incident)[1])


def page(world):  # noqa: F811
    return f"/incidents/{world.incident().pk}/approve"


def shown(client, world):  # noqa: F811
    """Return the form of the approve page as this person sees it, ready to be sent."""
    html = client.get(page(world)).content.decode()
    return {"digest": re.search(r'name="digest" value="([0-9a-f]{64})"', html)[1]}


def api(person, *scopes):
    token = create_token(person=person, name="t", scopes=list(scopes) or list(Scope.values))
    return Client(headers={"authorization": f"Bearer {token}"})


def call(client, world, what, **body):  # noqa: F811
    address = f"/api/v1/incidents/{world.incident().pk}/{what}"
    return client.post(address, body, content_type="application/json")


@pytest.fixture(autouse=True)
def _nobody_got_through():
    yield
    assert not Permit.objects.exists()


def test_who_asked_by_the_api_does_not_approve_in_the_browser(world, team):  # noqa: F811
    digest = approval.subject(world.incident())[1]
    assert call(api(team.mira, Scope.RESPOND), world, "request", digest=digest).status_code == 200
    answer = signed_in("mira").post(page(world), {"digest": digest, "password": "mira-password"})
    assert answer.status_code == 403
    assert "You asked. jonas or priya may approve." in text_of(answer)


def test_nor_with_another_session_of_theirs_or_by_another_way_alone(world, team):  # noqa: F811
    digest = ask(world, team.mira).digest
    body = {"digest": digest, "password": "mira-password", "why": "now", "run_name": world.run.slug}
    for client in (signed_in("mira"), signed_in("mira")):
        assert "You asked" in text_of(client.get(page(world)))
        assert client.post(page(world), body).status_code == 403
        for what in ("false-alarm", "break-glass"):
            answer = client.post(f"/incidents/{world.incident().pk}/{what}", body)
            assert answer.status_code == 403, what
        alone = client.post(f"/incidents/{world.incident().pk}/solo", body)
        assert "does not let one approver resume alone" in text_of(alone)


def test_a_stolen_token_approves_nothing(asked, team):  # noqa: F811
    digest = asked.incident().requests.get().digest
    small = api(team.jonas, Scope.READ, Scope.RESPOND)
    assert call(small, asked, "approve", digest=digest, password="jonas-password").status_code == 403
    full = api(team.jonas)
    for given in ({}, {"password": "guess"}, {"code": "123456"}, {"password": "priya-password"}):
        assert call(full, asked, "approve", digest=digest, **given).status_code == 403
    assert full.get(page(asked)).status_code == 302, "a token is no session"
    assert not Approval.objects.exists()


def test_a_session_that_is_only_open_approves_nothing_however_fresh(asked, team):  # noqa: F811
    client = signed_in("jonas")
    answer = client.post(page(asked), shown(client, asked))
    assert answer.status_code == 403
    assert "give your password" in text_of(answer)


def test_of_two_tabs_the_older_approves_nothing(asked, team):  # noqa: F811
    client = signed_in("jonas")
    old = {**shown(client, asked), "password": "jonas-password"}
    actions.change_plan(incident=asked.incident(), person=team.mira, checkpoint_step=800)
    ask(asked, team.tomas)
    answer = client.post(page(asked), old)
    assert answer.status_code == 409
    assert "Review again" in text_of(answer)
    assert asked.incident().requests.filter(state="open").count() == 1, "and ends nothing either"


def test_a_post_that_is_sent_again_counts_once(asked, team):  # noqa: F811
    asked.policy(resume={"approvers": 2})
    with pytest.raises(Refused):  # the policy is part of what tomas asked for
        approval.approve(incident=asked.incident(), person=team.priya, digest="0" * 64)
    ask(asked, team.tomas)
    client = signed_in("jonas")
    body = {**shown(client, asked), "password": "jonas-password"}
    assert client.post(page(asked), body).status_code == 302
    for _ in range(2):
        again = client.post(page(asked), body)
        assert again.status_code == 409
        assert "You approved; 1 of 2" in text_of(again).replace("\u00a0", " ")
    assert Approval.objects.count() == 1
    approval.reject(incident=asked.incident(), person=team.priya, why="look first")
    late = client.post(page(asked), body)
    assert late.status_code == 409
    assert "The last request was rejected" in text_of(late)


@pytest.mark.parametrize("who", ["vera", "tomas", "next"])
def test_neither_a_viewer_nor_a_responder_nor_who_rules_next_door(asked, team, who):  # noqa: F811
    if who == "next":
        other = Project.objects.create(slug="next-door")
        person = Person.objects.create_user("next", password="next-password")
        Membership.objects.create(project=other, person=person, roles=list(Role.values))
    else:
        person = getattr(team, who)
    digest, refused = asked.incident().requests.get().digest, 404 if who == "next" else 403
    body = {"digest": digest, "password": f"{who}-password", "why": "now", "run_name": asked.run.slug}
    client, number = signed_in(who), asked.incident().pk
    for what in ("approve", "reject", "false-alarm", "break-glass", "solo"):
        assert client.post(f"/incidents/{number}/{what}", body).status_code == refused, what
        assert call(api(person), asked, what, **body).status_code == refused, what
    if who == "next":
        theirs, nobodys = (
            re.sub(r"\d+", "n", text_of(client.get(f"/incidents/{one}/approve"))) for one in (number, 10_000)
        )
        assert theirs == nobodys, "it must not tell whether it exists"
    assert asked.incident().requests.get().state == "open"
