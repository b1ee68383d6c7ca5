"""Where a person is signed in, and signing out what is not this browser."""

from allauth.usersessions.models import UserSession
from django.contrib.auth.decorators import login_required
from django.contrib.sessions.backends.db import SessionStore
from django.contrib.sessions.models import Session
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods

from runs.accounts import audit
from runs.accounts.tokens import number
from runs.models import AccountEvent, Person
from runs.views import person_of


def remember(request: HttpRequest) -> None:
    """Keep where this session is used from, under the key it has now."""
    UserSession.objects.create_from_request(request)


def of(request: HttpRequest, person: Person) -> list[UserSession]:
    """Return a person's live sessions, this one first, then the newest."""
    remember(request)
    found = UserSession.objects.purge_and_list(person)
    return sorted(found, key=lambda one: (not one.is_current(), -one.created_at.timestamp()))


def end(person: Person, *, but: str = "") -> int:
    """End every session of a person but the one with this key; returns how many."""
    others = list(UserSession.objects.filter(user=person).exclude(session_key=but).order_by("pk"))
    for one in others:
        one.end()
    return len(others)


def forget() -> int:
    """Delete sessions whose time is over, and what was kept about them; returns how many of these."""
    SessionStore.clear_expired()
    left = Session.objects.values("session_key")
    gone, _ = UserSession.objects.exclude(session_key__in=left).delete()
    return int(gone)


@never_cache
@require_http_methods(["GET", "POST"])
@login_required
def page(request: HttpRequest) -> HttpResponse:
    """List them; sign out one, or all but this one."""
    person = person_of(request)
    if request.method != "POST":
        return render(request, "accounts/sessions.html", {"sessions": of(request, person)})
    ended = 0
    if request.POST.get("do") == "others":
        ended = end(person, but=request.session.session_key or "")
    else:
        mine = UserSession.objects.filter(user=person, pk=number(request.POST.get("session", "")))
        for one in mine:
            one.end()
            ended += 1
    if ended:
        audit.note(AccountEvent.Kind.SIGN_OUT, request=request, by=person, sessions=ended)
    return redirect("sessions")
