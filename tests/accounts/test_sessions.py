"""Where a person is signed in, and signing out everywhere else."""

from datetime import timedelta

import pytest
from allauth.usersessions.models import UserSession
from django.contrib.sessions.models import Session
from django.test import Client
from django.utils import timezone

from runs.accounts import sessions
from runs.erasing import erase
from runs.models import AccountEvent
from tests.accounts.conftest import signed_in, text_of

pytestmark = pytest.mark.django_db
PAGE = "/account/sessions"


def away(name, address="192.0.2.7", agent="Firefox of the office"):
    """A browser elsewhere in which a person signed in."""
    client = Client(REMOTE_ADDR=address, headers={"user-agent": agent})
    client.post("/sign-in", {"username": name, "password": f"{name}-password"})
    return client


def is_in(client):
    return client.get("/runs").status_code == 200


def test_all_others_are_signed_out_and_this_one_stays(alice, bob):
    other, here, bobs = away("alice"), signed_in("alice"), signed_in("bob")
    page = here.get(PAGE)
    words = text_of(page)
    assert "192.0.2.7" in words
    assert "Firefox of the office" in words
    assert "this one" in words
    assert page.content.decode().count('name="session"') == 1, "one button: this one has none"
    assert here.post(PAGE, {"do": "others"})["Location"] == PAGE
    assert [is_in(one) for one in (other, here, bobs)] == [False, True, True]
    assert "Nowhere else" in text_of(here.get(PAGE))
    row = AccountEvent.objects.get(kind=AccountEvent.Kind.SIGN_OUT)
    assert (row.by, row.data) == (alice.opaque_id, {"sessions": 1})


def test_one_is_signed_out_and_nobody_elses(alice, bob):
    first, second, here, bobs = (
        away("alice"),
        away("alice", "192.0.2.9"),
        signed_in("alice"),
        signed_in("bob"),
    )
    one = UserSession.objects.get(ip="192.0.2.9")
    theirs = UserSession.objects.get(user=bob)
    for given in (one.pk, theirs.pk, "x", ""):
        assert here.post(PAGE, {"session": given}).status_code == 302
    assert [is_in(each) for each in (first, second, here, bobs)] == [True, False, True, True]


def test_a_new_password_ends_the_others_and_the_new_key_of_this_one_is_known(alice):
    other, here = away("alice"), signed_in("alice")
    here.post("/account/password", {"new_password": "a-quite-new-one"})
    assert [is_in(each) for each in (other, here)] == [False, True]
    away_again = Client(REMOTE_ADDR="192.0.2.7")
    away_again.post("/sign-in", {"username": "alice", "password": "a-quite-new-one"})
    away_again.post(PAGE, {"do": "others"})
    assert [is_in(each) for each in (away_again, here)] == [True, False]


def test_what_is_over_is_forgotten_and_what_lives_is_kept(alice, bob):
    lives, over = signed_in("alice"), signed_in("bob")
    Session.objects.filter(session_key=over.session.session_key).update(
        expire_date=timezone.now() - timedelta(seconds=1)
    )
    assert sessions.forget() == 1
    assert list(UserSession.objects.values_list("user__username", flat=True)) == ["alice"]
    assert is_in(lives)
    assert not Session.objects.filter(expire_date__lt=timezone.now()).exists()


def test_nothing_of_an_erased_persons_sessions_is_kept(alice, bob):
    theirs = away("bob")
    erase(bob)
    assert not UserSession.objects.exists()
    assert not is_in(theirs)
