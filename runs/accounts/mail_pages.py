"""Pages of mail: a lost password, before a session; a person's own address, in one."""

from allauth.account.internal.flows.login import perform_password_login
from allauth.account.models import Login
from allauth.core.internal import ratelimit
from django.conf import settings
from django.contrib.auth import logout
from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods

from runs import proof
from runs.accounts import mail
from runs.accounts.mine import proven
from runs.accounts.refused import Refused
from runs.views import person_of


def _prints() -> bool:
    """Whether mail goes nowhere but to the worker's output."""
    return str(settings.EMAIL_BACKEND).endswith("console.EmailBackend")


@never_cache
@require_http_methods(["GET", "POST"])
def lost(request: HttpRequest) -> HttpResponse:
    """Take an address and say the same whatever it is."""
    context: dict[str, object] = {"prints": _prints()}
    if request.method == "POST":
        if not ratelimit.consume(request, app="allauth.account", action="reset_password"):
            return render(request, "accounts/lost.html", context | {"limited": True}, status=429)
        mail.ask_for_link(request=request, email=request.POST.get("email", ""))
        context["asked"] = True
    return render(request, "accounts/lost.html", context)


@never_cache
@require_http_methods(["GET", "POST"])
def lost_link(request: HttpRequest, key: str) -> HttpResponse:
    """Set the new password; whoever added a passkey or codes takes the second step after it."""
    owner = mail.owner_of_link(key)
    if owner is None:
        return render(request, "accounts/lost_link.html", {"over": True}, status=404)
    if request.method != "POST":
        return render(request, "accounts/lost_link.html", {"owner": owner})
    given = request.POST.get("password", "")[: proof.LONGEST_PASSWORD]
    try:
        person = mail.set_new_password(request=request, key=key, password=given)
    except Refused as refused:
        context = {"owner": owner, "says": refused.says, "over": refused.code == "over"}
        return render(request, "accounts/lost_link.html", context, status=refused.status)
    logout(request)  # somebody else may have been signed in here
    answer = perform_password_login(
        request, {"username": person.username}, Login(user=person, redirect_url="/account")
    )
    assert isinstance(answer, HttpResponse)
    return answer


@never_cache
@require_http_methods(["GET", "POST"])
@login_required
@proven
def address(request: HttpRequest) -> HttpResponse:
    """Say where links go; a new address counts once the link that is mailed there was opened."""
    person = person_of(request)
    says, status, sent = "", 200, ""
    if request.method == "POST" and request.POST.get("do") == "remove":
        mail.take_away(request=request, person=person)
        return redirect("account")
    if request.method == "POST":
        try:
            sent = request.POST.get("email", "").strip()[:254]
            mail.ask_to_confirm(request=request, person=person, email=sent)
        except Refused as refused:
            says, status, sent = refused.says, refused.status, ""
    context = {"mail": mail.of(person), "says": says, "sent": sent, "prints": _prints()}
    return render(request, "accounts/mail.html", context, status=status)


@never_cache
@require_http_methods(["GET", "POST"])
@login_required
def confirm(request: HttpRequest, key: str) -> HttpResponse:
    """Confirm one's address by a button: programs that only follow links confirm nothing."""
    person = person_of(request)
    found = mail.waiting(person=person, key=key)
    if found is None:
        raise Http404
    if request.method != "POST":
        return render(request, "accounts/mail_confirm.html", {"mail": found})
    mail.confirm(request=request, person=person, key=key)
    return redirect("account")
