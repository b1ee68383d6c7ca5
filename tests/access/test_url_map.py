"""Every address, tried as everybody: what `declared.py` says is what the server does."""

import json
import re
from types import SimpleNamespace

import pytest
from django.db import transaction
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver
from django.utils import timezone

from config.urls import api
from incidents import diagnosing
from incidents.models import Incident
from incidents.paging.models import Page
from runs.actions import create_token
from runs.models import Membership, Person, Project, Role
from tests.access.declared import ALL, API, API_OPEN, KEY, MEMBERS, PAGES, SIGNED_IN, Access

pytestmark = pytest.mark.django_db
RUN = "gpt-16"


class _Undo(Exception):
    """Ends the transaction of one press, so that everybody presses the same button."""


def routes():
    """Return every route of the URL map, as Django writes it, and as the walk names the API's."""
    found = []

    def walk(patterns, before):
        for pattern in patterns:
            route = before + str(pattern.pattern)
            if isinstance(pattern, URLResolver):
                walk(pattern.url_patterns, route)
            elif isinstance(pattern, URLPattern):
                found.append(route)

    walk(get_resolver().url_patterns, "")
    return found


def calls():
    """Return every call of the API as (method, path)."""
    return {
        (method, path)
        for _, router in api._routers
        for path, view in router.path_operations.items()
        for operation in view.operations
        for method in operation.methods
    }


def test_every_page_is_declared_and_nothing_else():
    pages = {route for route in routes() if not route.startswith("api/v1/")}
    assert pages - set(PAGES) == set(), "say in tests/access/declared.py who may see and do it"
    assert set(PAGES) - pages == set(), "these are gone"


def test_every_call_is_declared_and_nothing_else():
    assert calls() - set(API) == set(), "say in tests/access/declared.py who may call it"
    assert set(API) - calls() == set(), "these are gone"
    named = {re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", route.removeprefix("api/v1")) for route in routes()}
    paths = {path for _, path in API}
    others = {route for route in named if route.startswith("/")} - paths
    assert others - {route.removeprefix("api/v1") for route in API_OPEN} <= {"/"}, "a route beside the calls"


@pytest.fixture
def world(full, project, alice, bob, charlie):
    """A held run with all that people did, a member per role, and charlie, who rules a project next door."""
    other = Project.objects.create(slug="next-door", name="Next door")
    Membership.objects.create(project=other, person=charlie, roles=list(Role.values))
    people = {"charlie": charlie}
    for role in Role.values:
        person = Person.objects.create_user(role, password=f"{role}-password")
        Membership.objects.create(project=project, person=person, roles=[role])
        people[role] = person
    browsers = {"visitor": Client()}
    for name, person in people.items():
        browsers[name] = Client(raise_request_exception=False)
        browsers[name].force_login(person)
    diagnosing.start(
        incident=Incident.objects.get(), person=alice, family="data", key="own", name="x", condition="y"
    )
    page = Page.objects.create(
        key="vault",
        group="vault",
        kind=Page.Kind.VAULT,
        project=project,
        title="An object is lost",
        says="look at it",
        link="/vault",
        raised_at=timezone.now(),
        escalating_since=timezone.now(),
    )
    full = full | {"page_id": page.pk}
    # Nobody holds the secrets that stand in addresses; tests of their own use the right ones.
    return SimpleNamespace(values={**full, "token": "nonsense"}, people=people, browsers=browsers)


def filled(route, access, values):
    values = values | ({"name": access.name} if access.name else {})
    return "/" + re.sub(r"<(?:\w+:)?(\w+)>", lambda found: str(values[found[1]]), route)


def press(world, who, address, access: Access):
    """Press what a page's form does and take it back; returns the status, and where it leads."""
    fields = {name: text.format(**world.values) for name, text in access.fields}
    body = {"why": "because", "password": f"{who}-password", "digest": "0" * 64, **fields}
    try:
        with transaction.atomic():
            answer = world.browsers[who].post(address, body)
            raise _Undo
    except _Undo:
        return answer


def expected(who, person_may, status):
    """Return whether a status is what somebody who may, or may not, gets."""
    return status not in {401, 403, 404, 405, 500} if person_may else status == 403


def wrong_about(world, who, address, answer, allowed):
    """Return what is wrong with an answer, "" when it is as declared."""
    status = answer.status_code
    to_sign_in = status == 302 and answer["Location"].startswith("/sign-in")
    if allowed is None:
        fits = status == 405 or (who == "visitor" and to_sign_in)
    elif allowed is ALL:
        fits = status in {200, 302, 400}
    elif allowed is KEY:
        fits = status in {404, 405} or to_sign_in or answer.get("Location", "").startswith("/account/prove")
    elif who == "visitor":
        fits = to_sign_in
    elif allowed is SIGNED_IN:
        fits = status in {200, 302, 304, 400, 403, 409}
    elif who == "charlie":
        fits = status == 404
    elif allowed is MEMBERS:
        fits = status in {200, 302, 304, 400, 409, 422}
    else:
        fits = expected(who, Role(who) in allowed, status)
    return "" if fits else f"{answer.request['REQUEST_METHOD']} {address} as {who}: {status}"


def test_each_page_is_seen_by_whom_it_is_for(world):
    wrong = []
    for route, access in PAGES.items():
        address = filled(route, access, world.values)
        by_role = isinstance(access.see, frozenset)
        for who in world.browsers if by_role else ("visitor", "charlie", "viewer"):
            answer = world.browsers[who].get(address)
            wrong.append(wrong_about(world, who, address, answer, access.see))
            if who in {"visitor", "charlie"} and answer.status_code == 200 and access.see is not KEY:
                words = answer.content.decode(errors="replace")
                wrong += [f"{address} tells {who} of {RUN}"] * (RUN in words)
    assert not any(wrong), "\n".join(line for line in wrong if line)


def test_each_button_is_pressed_by_whom_it_is_for(world):
    wrong = []
    for route, access in PAGES.items():
        if access.see is None and access.do is None:
            continue
        address = filled(route, access, world.values)
        if route in {"sign-out", "sign-in", "account/password"}:
            continue  # they end the session that the walk needs; tests/accounts presses them
        may = access.do if isinstance(access.do, frozenset) else frozenset()
        # All who may not, and one who may.
        roles = [*(role for role in Role if role not in may), *sorted(may)[:1]] if may else [Role.VIEWER]
        wrong += [
            wrong_about(world, who, address, press(world, who, address, access), access.do)
            for who in ("visitor", "charlie", *(role.value for role in roles))
        ]
    assert not any(wrong), "\n".join(line for line in wrong if line)


def test_each_call_is_answered_to_whom_it_is_for(world):
    tokens = {name: create_token(person=person) for name, person in world.people.items()}
    values = {
        **{name: str(value) for name, value in world.values.items()},
        "run": RUN,
        "source": "generic",
        "upload": "1",
        "task": "1",
        "n": "1",
        "token": "nonsense",
    }
    wrong = []
    for (method, path), allowed in API.items():
        address = "/api/v1" + re.sub(r"{(\w+)}", lambda found: values[found[1]], path)
        for who in ("visitor", *world.people):
            headers = {"authorization": f"Bearer {tokens[who]}"} if who in tokens else {}
            body = {"digest": "0" * 64, "password": f"{who}-password"}
            client = Client(headers=headers)
            try:
                with transaction.atomic():
                    answer = client.generic(
                        method, address, data=json.dumps(body), content_type="application/json"
                    )
                    raise _Undo
            except _Undo:
                status = answer.status_code
            if allowed is KEY:
                fits = status in {401, 403, 404}
            elif who == "visitor":
                fits = status == 401
            elif allowed is SIGNED_IN:
                fits = status == 200 and (who != "charlie" or RUN not in answer.content.decode())
            elif who == "charlie":
                fits = status == 404
            elif allowed is MEMBERS:
                fits = status == 200
            else:
                fits = expected(who, isinstance(allowed, frozenset) and Role(who) in allowed, status)
            wrong += [f"{method} {address} as {who}: {status}"] * (not fits)
    assert not wrong, "\n".join(wrong)
