"""Every address, tried as everybody: what `declared.py` says is what the server does.

Roles only add, so one person who holds every role that does *not* let them do a thing stands for all who
may not: refused, each of them would be.
"""

import json
import re

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


class World:
    """A held run with all that people did, and whoever tries: each signed in once."""

    def __init__(self, values, project):
        self.project = project
        # Nobody holds the secrets that stand in addresses; tests of their own use the right ones.
        self.values = {**values, "token": "nonsense"}
        self.people, self.browsers = {}, {"visitor": Client()}
        self.others = {}  # who may not, by the roles that may

    def come(self, person, project=None, roles=()):
        """Let a person in: into their browser, and into a project with `roles`."""
        if project is not None:
            Membership.objects.create(project=project, person=person, roles=sorted(roles))
        self.people[person.username] = person
        self.browsers[person.username] = Client(raise_request_exception=False)
        self.browsers[person.username].force_login(person)
        return person.username

    def with_roles(self, roles):
        """Return the name of a member with exactly these roles."""
        name = "-".join(sorted(roles)) or "member"
        if name not in self.people:
            person = Person.objects.create_user(name, password=f"{name}-password")
            self.come(person, self.project, roles)
        return name


@pytest.fixture
def world(full, project, alice, charlie):
    """The world, and charlie, who rules a project next door."""
    made = World(full, project)
    made.come(charlie, Project.objects.create(slug="next-door", name="Next door"), Role.values)
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
    made.values["page_id"] = page.pk
    for role in Role.values:
        made.with_roles({role})
    made.others = {may: made.with_roles(set(Role.values) - may) for may in ROLE_SETS}
    return made


# Every set of roles that something is declared for.
ROLE_SETS = {
    frozenset(map(str, who))
    for who in [*API.values(), *(one for access in PAGES.values() for one in (access.see, access.do))]
    if isinstance(who, frozenset)
}


def tried_by(world, allowed):
    """Return who tries an address: whoever may not, and one who may."""
    if not isinstance(allowed, frozenset):
        return ["visitor", "charlie", "viewer"]
    may = frozenset(map(str, allowed))
    return ["visitor", "charlie", world.others[may], *sorted(may)[:1]]


def filled(route, access, values):
    values = values | ({"name": access.name} if access.name else {})
    return "/" + re.sub(r"<(?:\w+:)?(\w+)>", lambda found: str(values[found[1]]), route)


def press(world, who, address, access: Access):
    """Press what a page's form does and take it back; returns the answer."""
    fields = {name: text.format(**world.values) for name, text in access.fields}
    body = {"why": "because", "password": f"{who}-password", "digest": "0" * 64, **fields}
    try:
        with transaction.atomic():
            answer = world.browsers[who].post(address, body)
            raise _Undo
    except _Undo:
        return answer


def is_answered(who, allowed, status):
    """Return whether somebody who may got as far as the thing itself, and who may not was refused."""
    return status not in {401, 403, 404, 405, 500} if who in allowed else status == 403


def wrong_about(who, address, answer, allowed):
    """Return what is wrong with an answer, nothing when it is as declared."""
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
        fits = is_answered(who, allowed, status)
    return [] if fits else [f"{answer.request['REQUEST_METHOD']} {address} as {who}: {status}"]


def test_every_address_is_for_whom_it_is_declared(world):
    wrong = [*wrongly_seen(world), *wrongly_pressed(world), *wrongly_called(world)]
    assert not wrong, "\n".join(wrong)


def wrongly_seen(world):
    """Open every page as whoever may not see it and one who may."""
    for route, access in PAGES.items():
        address = filled(route, access, world.values)
        for who in tried_by(world, access.see):
            if who == "viewer" and route.endswith(".pdf"):
                continue  # seconds of work: tests/incidents/test_postmortem.py makes it as a viewer
            answer = world.browsers[who].get(address)
            yield from wrong_about(who, address, answer, access.see)
            shown = answer.status_code == 200 and access.see is not KEY and who in {"visitor", "charlie"}
            if shown and RUN in answer.content.decode(errors="replace"):
                yield f"{address} tells {who} of {RUN}"


def wrongly_pressed(world):
    """Press every button as whoever may not and one who may; whatever it does is taken back."""
    for route, access in PAGES.items():
        if access.see is None and access.do is None:
            continue
        if route in {"sign-out", "sign-in", "account/password"}:
            continue  # they end the session that the walk needs; tests/accounts presses them
        address = filled(route, access, world.values)
        for who in tried_by(world, access.do):
            yield from wrong_about(who, address, press(world, who, address, access), access.do)


def wrongly_called(world):
    """Call all of the API with a token of whoever may not, and of each role that may."""
    tokens = {name: create_token(person=person) for name, person in world.people.items()}
    values = {name: str(value) for name, value in world.values.items()}
    values |= {"run": RUN, "source": "generic", "upload": "1", "task": "1", "n": "1"}
    for (method, path), allowed in API.items():
        address = "/api/v1" + re.sub(r"{(\w+)}", lambda found: values[found[1]], path)
        callers = tried_by(world, allowed)
        if isinstance(allowed, frozenset):
            callers = [*callers[:3], *sorted(allowed)]
        for who in callers:
            body = {"digest": "0" * 64, "password": f"{who}-password"}
            answer = call(method, address, tokens.get(who), body)
            if not fits_call(who, allowed, answer):
                yield f"{method} {address} as {who}: {answer.status_code}"


def call(method, address, token, body):
    """Call the API and take back what that did."""
    client = Client(headers={"authorization": f"Bearer {token}"} if token else {})
    try:
        with transaction.atomic():
            answer = client.generic(method, address, data=json.dumps(body), content_type="application/json")
            raise _Undo
    except _Undo:
        return answer


def fits_call(who, allowed, answer):
    status = answer.status_code
    if allowed is KEY:
        return status in {401, 403, 404}
    if who == "visitor":
        return status == 401
    if allowed is SIGNED_IN:
        return status == 200 and (who != "charlie" or RUN not in answer.content.decode())
    if who == "charlie":
        return status == 404
    return status == 200 if allowed is MEMBERS else is_answered(who, allowed, status)
