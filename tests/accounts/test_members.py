"""Roles, given and taken by admins of a project, and what no admin may do."""

import threading

import pytest
from django.db import connection, transaction
from django.test import Client
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runs.accounts import members
from runs.accounts.refused import Refused
from runs.models import AccountEvent, Membership, Person, Project, Role
from tests.accounts.conftest import signed_in, text_of

pytestmark = pytest.mark.django_db
PEOPLE = "/projects/default/people"


def roles_of(person):
    member = Membership.objects.filter(person=person).first()
    return member.roles if member else None


class TestThePage:
    def test_an_admin_gives_and_takes_roles_and_each_change_is_a_row(self, alice, bob, project):
        client = signed_in("alice")
        roles = {"do": "roles", "person": bob.pk, "role": ["vault_officer", "responder"]}
        assert client.post(PEOPLE, roles).status_code == 302
        assert roles_of(bob) == ["responder", "vault_officer"]
        row = AccountEvent.objects.get(kind=AccountEvent.Kind.ROLES)
        assert (row.by, row.about, row.project) == (alice.opaque_id, bob.opaque_id, project)
        assert row.data == {"before": ["approver", "responder"], "after": ["responder", "vault_officer"]}
        assert "gave vault officer; took approver" in text_of(client.get("/projects/default/log"))
        assert client.post(PEOPLE, {"do": "remove", "person": bob.pk}).status_code == 302
        assert roles_of(bob) is None
        assert signed_in("bob").get(PEOPLE).status_code == 404

    def test_members_read_it_and_strangers_do_not_know_it_exists(self, alice, bob, charlie):
        page = text_of(signed_in("bob").get(PEOPLE))
        assert "alice" in page
        assert "Save the roles" not in page
        assert signed_in("charlie").get(PEOPLE).status_code == 404
        refused = signed_in("bob").post(PEOPLE, {"do": "roles", "person": bob.pk, "role": ["admin"]})
        assert refused.status_code == 403
        assert "alice may" in text_of(refused)
        assert roles_of(bob) == [Role.RESPONDER, Role.APPROVER]

    def test_a_person_of_another_project_is_not_reached(self, alice, charlie):
        other = Project.objects.create(slug="other", name="Other")
        Membership.objects.create(project=other, person=charlie, roles=[Role.ADMIN])
        client = signed_in("alice")
        for do in ("roles", "remove"):
            answer = client.post(PEOPLE, {"do": do, "person": charlie.pk, "role": ["viewer"]})
            assert answer.status_code == 409
        assert client.get("/projects/other/people").status_code == 404
        assert (
            client.post("/projects/other/people", {"do": "remove", "person": charlie.pk}).status_code == 404
        )
        assert roles_of(charlie) == [Role.ADMIN]


class TestRules:
    def test_nobody_gives_themself_a_role(self, alice, project):
        with pytest.raises(Refused, match="vault officer"):
            members.set_roles(
                project=project, by=alice, person=alice, roles=["admin", "approver", "vault_officer"]
            )
        members.set_roles(project=project, by=alice, person=alice, roles=["admin"])
        with pytest.raises(Refused, match="approver"):
            members.set_roles(project=project, by=alice, person=alice, roles=["admin", "approver"])

    def test_the_last_admin_who_can_sign_in_stays(self, alice, bob, project):
        invited = Person.objects.create_user("invited")
        Membership.objects.create(project=project, person=invited, roles=[Role.ADMIN])
        gone = Person.objects.create_user("gone", password="gone-password", is_active=False)
        Membership.objects.create(project=project, person=gone, roles=[Role.ADMIN])
        with pytest.raises(Refused, match="last admin"):
            members.set_roles(project=project, by=alice, person=alice, roles=["approver"])
        with pytest.raises(Refused, match="last admin"):
            members.remove(project=project, by=alice, person=alice)
        members.set_roles(project=project, by=alice, person=bob, roles=["admin"])
        members.remove(project=project, by=alice, person=alice)
        assert roles_of(alice) is None

    @pytest.mark.parametrize(("roles", "code"), [([], "no-role"), (["root"], "unknown-role")])
    def test_a_member_has_a_role_that_exists(self, alice, bob, project, roles, code):
        with pytest.raises(Refused) as refused:
            members.set_roles(project=project, by=alice, person=bob, roles=roles)
        assert refused.value.code == code

    def test_who_is_no_admin_any_more_changes_nothing(self, alice, bob, project):
        Membership.objects.filter(person=alice).update(roles=[Role.APPROVER])
        for do in (
            lambda: members.set_roles(project=project, by=alice, person=bob, roles=["viewer"]),
            lambda: members.add(project=project, by=alice, username="bob", roles=["viewer"]),
            lambda: members.remove(project=project, by=alice, person=bob),
        ):
            with pytest.raises(Refused, match="Only an admin"):
                do()


class _Undo(Exception):
    """Ends the transaction of one example."""


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 2), st.sets(st.sampled_from(Role.values), max_size=3)),
        min_size=1,
        max_size=8,
    )
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_sequence_of_changes_leaves_a_project_without_an_admin_or_lets_anybody_raise_themself(
    alice, bob, charlie, project, changes
):
    people = [alice, bob, charlie]
    try:
        with transaction.atomic():
            for by, about, roles in changes:
                actor, person = people[by], people[about]
                before = set(roles_of(person) or [])
                was_admin = Role.ADMIN in (roles_of(actor) or [])
                try:
                    if not roles:
                        members.remove(project=project, by=actor, person=person)
                    elif before:
                        members.set_roles(project=project, by=actor, person=person, roles=roles)
                    else:
                        members.add(project=project, by=actor, username=person.username, roles=roles)
                except Refused:
                    assert set(roles_of(person) or []) == before
                    continue
                assert was_admin
                assert set(roles_of(person) or []) == set(roles)
                assert by != about or set(roles) <= before
                assert Membership.objects.filter(project=project, roles__contains=[Role.ADMIN]).exists()
            raise _Undo
    except _Undo:
        pass


@pytest.mark.django_db(transaction=True)
def test_two_admins_who_remove_each_other_at_once_leave_one(alice, bob, project):
    Membership.objects.filter(person=bob).update(roles=[Role.ADMIN])
    start = threading.Barrier(2)

    def remove(by, other):
        start.wait()
        try:
            members.remove(project=project, by=by, person=other)
        except Refused:
            pass
        finally:
            connection.close()

    threads = [threading.Thread(target=remove, args=pair) for pair in ((alice, bob), (bob, alice))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Membership.objects.filter(project=project, roles__contains=[Role.ADMIN]).count() == 1


def test_a_person_may_not_sign_in_is_said_and_their_name_is_inert(alice, project):
    Membership.objects.create(
        project=project,
        person=Person.objects.create_user("<script>alert(1)</script>", is_active=False),
        roles=[Role.VIEWER],
    )
    page = signed_in("alice").get(PEOPLE)
    assert "may not sign in" in text_of(page)
    assert "<script>alert" not in page.content.decode()
    assert Client().get(PEOPLE).status_code == 302
