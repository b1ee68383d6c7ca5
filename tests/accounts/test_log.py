"""The log of accounts: rows are only added, admins read their own project's, names can be erased."""

import pytest
from django.db import DatabaseError, connection, transaction
from django.test import Client

from runs.accounts import audit
from runs.erasing import erase
from runs.models import AccountEvent, Membership, Person, Project, Role
from tests.accounts.conftest import signed_in, text_of

pytestmark = pytest.mark.django_db
LOG = "/projects/default/log"


def test_no_row_is_ever_changed_or_deleted(alice):
    signed_in("alice")
    for statement in (
        "UPDATE runs_accountevent SET about = NULL",
        "DELETE FROM runs_accountevent",
    ):
        with pytest.raises(DatabaseError, match="append-only"), transaction.atomic():
            connection.cursor().execute(statement)


def test_only_admins_read_it(alice, bob, charlie):
    assert signed_in("alice").get(LOG).status_code == 200
    assert signed_in("bob").get(LOG).status_code == 403
    assert signed_in("charlie").get(LOG).status_code == 404


def test_an_admin_reads_of_members_and_of_names_nobody_has_but_of_no_other_project(alice, charlie):
    other = Project.objects.create(slug="other", name="Other")
    zoe = Person.objects.create_user("zoe", password="zoe-password")
    Membership.objects.create(project=other, person=zoe, roles=[Role.ADMIN])
    Membership.objects.create(project=other, person=alice, roles=[Role.VIEWER])
    audit.note(AccountEvent.Kind.ROLES, by=zoe, about=alice, project=other, before=[], after=["viewer"])
    for name in ("zoe", "charlie"):
        signed_in(name)
    Client().post("/sign-in", {"username": "nobody", "password": "x"})
    words = text_of(signed_in("alice").get(LOG))
    assert "alice" in words
    assert "nobody here" in words
    for hidden in ("zoe", "charlie", "gave viewer"):
        assert hidden not in words, hidden


def test_it_is_read_by_kind_and_page_by_page(alice, monkeypatch):
    from runs.accounts import projects

    monkeypatch.setattr(projects, "LOG_PAGE", 2)
    client = signed_in("alice")
    for number in range(3):
        audit.note(AccountEvent.Kind.TOKEN_MADE, by=alice, name=f"token {number}")
    first = client.get(f"{LOG}?kind=token made")
    assert "token 2" in text_of(first)
    assert "token 0" not in text_of(first)
    older = first.context["older"]
    assert "token 0" in text_of(client.get(f"{LOG}?kind=token made&before={older}"))


def test_an_erased_person_stands_in_it_by_an_id_that_says_nothing(alice, bob):
    signed_in("bob")
    opaque = str(bob.opaque_id)
    erase(bob)
    html = signed_in("alice").get(LOG).content.decode()
    assert "bob" not in html
    assert AccountEvent.objects.filter(about=opaque).exists()


def test_a_person_reads_their_own_on_their_page(alice, bob):
    signed_in("bob")
    words = text_of(signed_in("alice").get("/account"))
    assert "signed in" in words
    assert "bob" not in words
