"""Roles from groups of the OIDC provider, given and taken at each sign-in by SSO."""

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.test import Client

from config import sign_in
from runs.accounts import groups, members
from runs.models import AccountEvent, Membership, Person, Project, Role
from tests.accounts.conftest import signed_in, text_of
from tests.accounts.test_sso import link, sso, through  # noqa: F401  (a fixture)

pytestmark = pytest.mark.django_db


def roles_of(person, slug="default"):
    found = Membership.objects.filter(person=person, project__slug=slug).first()
    return found.roles if found else None


def changes(person):
    rows = AccountEvent.objects.filter(kind=AccountEvent.Kind.ROLES, about=person.opaque_id)
    return list(rows.order_by("id"))


@pytest.fixture
def table(settings):
    """Leads approve, everybody of ml views, ops rule."""
    settings.SSO_ROLES = {"default": {"viewer": ["ml"], "approver": ["ml-leads"], "admin": ["ops"]}}


@pytest.fixture
def linked(bob, sso, table):  # noqa: F811
    """Bob, who linked SSO before the provider told any group of his."""
    link(bob, sso)
    return bob


class TestAtSignIn:
    def test_they_are_given_and_taken_and_what_people_gave_beside_them_stays(self, linked, alice, sso):  # noqa: F811
        assert roles_of(linked) == ["responder", "approver"], "linking decides nothing"
        sso.claims = {"groups": ["ml", "elsewhere"]}
        client = Client()
        through(client, sso)
        assert roles_of(linked) == ["responder", "viewer"]
        (row,) = changes(linked)
        assert (row.by, row.project.slug) == (None, "default")
        assert row.data == {
            "before": ["approver", "responder"],
            "after": ["responder", "viewer"],
            "groups": ["ml"],
        }
        through(Client(), sso)
        assert len(changes(linked)) == 1, "nothing changed, nothing is written"
        admins = signed_in("alice")
        assert "gave viewer; took approver; by the groups ml" in text_of(admins.get("/projects/default/log"))
        assert "give and take at each sign-in by SSO: admin, approver, viewer" in text_of(
            admins.get("/projects/default/people")
        )

    def test_who_keeps_no_role_is_no_member_any_more(self, linked, alice, sso):  # noqa: F811
        Membership.objects.filter(person=linked).update(roles=["approver"])
        sso.claims = {"groups": []}
        client = Client()
        through(client, sso)
        assert roles_of(linked) is None
        assert client.get("/projects/default/people").status_code == 404

    def test_a_provider_that_tells_no_groups_changes_nothing(self, linked, sso, caplog):  # noqa: F811
        for claims in ({}, {"groups": 7}, {"_claim_names": {"groups": "src1"}}):
            sso.claims = claims
            through(Client(), sso)
        assert roles_of(linked) == ["responder", "approver"]
        assert "told no 'groups'" in caplog.text

    def test_the_last_admin_who_can_sign_in_stays_one_and_the_log_says_so(self, alice, bob, sso, table):  # noqa: F811
        link(alice, sso)
        sso.claims = {"groups": ["ml-leads"]}
        through(Client(), sso)
        assert roles_of(alice) == ["admin", "approver"]
        assert changes(alice)[-1].data["kept"] == "admin, as the last one"
        Membership.objects.filter(person=bob).update(roles=["admin"])
        through(Client(), sso)
        assert roles_of(alice) == ["approver"]

    def test_whom_the_provider_lets_in_comes_with_their_roles(self, project, sso, table, settings):  # noqa: F811
        settings.SIGN_UP, sso.name = "sso", "new.one"
        sso.claims = {"groups": ["ml-leads", "ops"]}
        client = Client()
        through(client, sso)
        assert roles_of(Person.objects.get()) == ["admin", "approver"]
        assert client.get("/projects/default/log").status_code == 200

    def test_no_project_but_those_named_is_touched(self, linked, sso, settings):  # noqa: F811
        other = Project.objects.create(slug="other")
        Membership.objects.create(project=other, person=linked, roles=["approver"])
        settings.SSO_ROLES = {"gone": {"admin": ["ml"]}, "default": {"approver": []}}
        sso.claims = {"groups": ["ml"]}
        through(Client(), sso)
        assert (roles_of(linked), roles_of(linked, "other")) == (["responder"], ["approver"])

    def test_a_password_gives_and_takes_nothing(self, linked):
        signed_in("bob")
        assert roles_of(linked) == ["responder", "approver"]


@pytest.mark.parametrize(
    ("data", "claim", "found"),
    [
        ({"userinfo": {"groups": ["a", 1, "b"]}}, "groups", {"a", "b"}),
        ({"userinfo": {"groups": "a"}}, "groups", {"a"}),
        ({"userinfo": {"sub": "1"}, "id_token": {"groups": ["a"]}}, "groups", {"a"}),
        ({"userinfo": {"groups": []}, "id_token": {"groups": ["a"]}}, "groups", set()),
        ({"userinfo": {"realm_access": {"roles": ["a"]}}}, "realm_access.roles", {"a"}),
        ({"userinfo": {"https://x.org/groups": ["a"]}}, "https://x.org/groups", {"a"}),
        ({"userinfo": None}, "groups", None),
        ({"userinfo": {"a": "b"}}, "a.b", None),
        ({}, "groups", None),
    ],
)
def test_where_a_provider_tells_groups(data, claim, found):
    assert groups.told(data, claim) == found


class TestTable:
    def read(self, monkeypatch, text):
        monkeypatch.setenv("ANDON_OIDC_ROLES", text)
        return sign_in._roles()

    def test_it_is_toml(self, monkeypatch):
        assert self.read(monkeypatch, '[vision]\nviewer = ["ml"]\n') == {"vision": {"viewer": ["ml"]}}
        assert self.read(monkeypatch, "") == {}
        assert set(sign_in.ROLES) == set(Role.values)

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("vision", "not TOML"),
            ("vision = 1", "expected vision.ROLE"),
            ('vision.root = ["ops"]', "vision.root is no role; the roles are viewer"),
            ('vision.admin = "ops"', r'expected \["GROUP"'),
            ("vision.admin = [1]", r'expected \["GROUP"'),
        ],
    )
    def test_what_is_no_table_stops_the_server(self, monkeypatch, text, says):
        with pytest.raises(ImproperlyConfigured, match=says):
            self.read(monkeypatch, text)


def test_the_last_admin_is_not_erased(alice, bob, project):
    with pytest.raises(CommandError, match="alice is the last admin who can sign in"):
        call_command("erase_person", "alice")
    assert Person.objects.get(username="alice").is_active
    members.set_roles(project=project, by=alice, person=bob, roles=["admin"])
    call_command("erase_person", "alice")
    assert not Person.objects.filter(username="alice").exists()
