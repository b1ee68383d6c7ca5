"""A person's own account: password, passkeys, codes, SSO, tokens; and where they prove it is them."""

import base64
from collections.abc import Callable
from functools import wraps
from typing import Any
from urllib.parse import urlencode

from allauth.account.internal.flows.reauthentication import resume_request
from allauth.mfa.adapter import get_adapter
from allauth.mfa.models import Authenticator
from allauth.mfa.recovery_codes.internal import flows as recovery
from allauth.mfa.totp.forms import ActivateTOTPForm
from allauth.mfa.totp.internal import flows as totp
from allauth.mfa.webauthn.forms import AddWebAuthnForm
from allauth.mfa.webauthn.internal import flows as webauthn
from allauth.socialaccount.internal.flows.connect import disconnect
from allauth.socialaccount.models import SocialAccount
from django.conf import settings
from django.contrib.auth import update_session_auth_hash
from django.contrib.auth.decorators import login_required
from django.db import transaction
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from runs import proof
from runs.accounts import audit, entering, invitations, mail, passkeys, sessions, tokens
from runs.accounts.refused import Refused
from runs.models import AccountEvent, Membership, Scope
from runs.views import person_of

View = Callable[..., HttpResponse]
T = Authenticator.Type


def proven(view: View) -> View:
    """Let only a session with a recent proof see and do this; others prove it first and come back."""

    @wraps(view)
    def guarded(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        if proof.recent(request, person_of(request)) is None:
            return redirect(f"/account/prove?{urlencode({'next': request.path})}")
        return view(request, *args, **kwargs)

    return guarded


@never_cache
@require_GET
@login_required
def account(request: HttpRequest) -> HttpResponse:
    """Show how this person signs in, what they may do where, and what happened to their account."""
    person = person_of(request)
    events = list(audit.of_person(person)[:12])
    factors = list(Authenticator.objects.filter(user=person).order_by("created_at", "pk"))
    recovery_codes = next((one for one in factors if one.type == T.RECOVERY_CODES), None)
    return render(
        request,
        "accounts/account.html",
        {
            "ways": proof.ways(person),
            "passkeys": [one for one in factors if one.type == T.WEBAUTHN],
            "totp": next((one for one in factors if one.type == T.TOTP), None),
            "recovery_left": len(recovery_codes.wrap().get_unused_codes()) if recovery_codes else None,
            "sso": entering.sso_name(),
            "linked": list(SocialAccount.objects.filter(user=person).order_by("pk")),
            "memberships": Membership.objects.filter(person=person)
            .select_related("project")
            .order_by("project__slug"),
            "mail": mail.of(person),
            "tokens": tokens.live(tokens.mine(person)).count(),
            "events": events,
            "people": audit.names(events),
            "welcome": "welcome" in request.GET,
        },
    )


# Prove who you are


@never_cache
@require_http_methods(["GET", "POST"])
@login_required
def prove(request: HttpRequest) -> HttpResponse:
    """Ask for a proof, then go on to what needed it."""
    person = person_of(request)
    target = request.POST.get("next") or request.GET.get("next") or "/account"
    if not url_has_allowed_host_and_scheme(target, allowed_hosts={request.get_host()}):
        target = "/account"
    says, status = "", 200
    if request.method == "POST":
        try:
            proof.prove_again(request, person)
        except proof.NotAgain as refused:
            says, status = refused.says, refused.status
        else:
            return resume_request(request) or redirect(target)
    context = {"next": target, "says": says, "ways": proof.ways(person)}
    return render(request, "accounts/prove.html", context, status=status)


@never_cache
@require_POST
@login_required
def challenge(request: HttpRequest) -> HttpResponse:
    """Answer what a passkey signs to prove that it is this person, for one address."""
    return JsonResponse(passkeys.challenge(request, person_of(request), request.POST.get("for", "")[:300]))


# How to sign in


@never_cache
@require_http_methods(["GET", "POST"])
@login_required
@proven
def password(request: HttpRequest) -> HttpResponse:
    """Set a new password; every other session of this person ends."""
    person = person_of(request)
    if request.method != "POST":
        return render(request, "accounts/password.html")
    try:
        with transaction.atomic():
            invitations.set_password(person, request.POST.get("new_password", "")[: proof.LONGEST_PASSWORD])
            audit.note(AccountEvent.Kind.PASSWORD, request=request, by=person)
    except Refused as refused:
        return render(request, "accounts/password.html", {"says": refused.says}, status=refused.status)
    update_session_auth_hash(request, person)
    sessions.remember(request)  # its key is new
    sessions.end(person, but=request.session.session_key or "")
    return redirect("account")


@never_cache
@require_http_methods(["GET", "POST"])
@login_required
@proven
def add_passkey(request: HttpRequest) -> HttpResponse:
    """Add a passkey that signs in by itself and proves who it is."""
    person = person_of(request)
    says = ""
    if request.method == "POST":
        name = request.POST.get("name", "").strip()[:60] or "passkey"
        form = AddWebAuthnForm(
            user=person,
            data={"name": name, "credential": request.POST.get("passkey", ""), "passwordless": True},
        )
        if passkeys.fits(form):
            _, made_codes = webauthn.add_authenticator(request, name, form.cleaned_data["credential"])
            return redirect("recovery_codes" if made_codes else "account")
        says = "No passkey was added: the browser's answer does not fit. Try again."
    return render(request, "accounts/add_passkey.html", {"says": says}, status=400 if says else 200)


@never_cache
@require_POST
@login_required
def passkey_options(request: HttpRequest) -> HttpResponse:
    """Answer what the browser needs to make a passkey."""
    person = person_of(request)
    if proof.recent(request, person) is None:
        return JsonResponse(
            {"says": "Open this page again: the proof that it is you is too old."}, status=403
        )
    return JsonResponse(passkeys.for_adding(request, person))


@never_cache
@require_http_methods(["GET", "POST"])
@login_required
@proven
def passkey(request: HttpRequest, passkey_id: int) -> HttpResponse:
    """Name a passkey anew, or remove it."""
    person = person_of(request)
    one = Authenticator.objects.filter(user=person, type=T.WEBAUTHN, pk=passkey_id).first()
    if one is None:
        raise Http404
    last = not person.has_usable_password() and (
        Authenticator.objects.filter(user=person, type=T.WEBAUTHN).count() == 1
        and not SocialAccount.objects.filter(user=person).exists()
    )
    if request.method == "POST" and request.POST.get("do") == "remove" and not last:
        webauthn.remove_authenticator(request, one)
        return redirect("account")
    if request.method == "POST" and request.POST.get("do") == "name":
        webauthn.rename_authenticator(request, one, request.POST.get("name", "").strip()[:60] or "passkey")
        return redirect("account")
    status = 409 if request.method == "POST" else 200
    return render(request, "accounts/passkey.html", {"passkey": one, "last": last}, status=status)


@never_cache
@require_http_methods(["GET", "POST"])
@login_required
@proven
def codes(request: HttpRequest) -> HttpResponse:
    """Switch codes of an app on or off."""
    person = person_of(request)
    has = Authenticator.objects.filter(user=person, type=T.TOTP).first()
    if has is not None:
        if request.method == "POST" and request.POST.get("do") == "off":
            totp.deactivate_totp(request, has)
            return redirect("account")
        return render(request, "accounts/codes.html", {"on": has})
    says = ""
    if request.method == "POST":
        form = ActivateTOTPForm(user=person, data={"code": request.POST.get("app_code", "")[:16]})
        if form.is_valid():
            _, made_codes = totp.activate_totp(request, form)
            return redirect("recovery_codes" if made_codes else "account")
        says = (
            "Not switched on: that code does not fit. Wait for the next one, or check the clock of the phone."
        )
    else:
        form = ActivateTOTPForm(user=person)
    adapter = get_adapter()
    svg = adapter.build_totp_svg(adapter.build_totp_url(person, form.secret))
    context = {
        "says": says,
        "secret": form.secret,
        "picture": f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}",
    }
    return render(request, "accounts/codes.html", context, status=400 if says else 200)


@never_cache
@require_http_methods(["GET", "POST"])
@login_required
@proven
def recovery_codes(request: HttpRequest) -> HttpResponse:
    """Show the recovery codes that are left, or make new ones."""
    person = person_of(request)
    if not recovery.can_generate_recovery_codes(person):
        raise Http404
    if request.method == "POST":
        recovery.generate_recovery_codes(request)
        return redirect("recovery_codes")
    found, _ = recovery.view_recovery_codes(request)
    left = found.get_unused_codes() if found is not None else []
    return render(request, "accounts/recovery_codes.html", {"codes": left})


@never_cache
@require_POST
@login_required
@proven
def unlink_sso(request: HttpRequest) -> HttpResponse:
    """Take away SSO from this account, unless nothing would be left to sign in by."""
    person = person_of(request)
    if person.has_usable_password() or proof.ways(person).passkey:
        for one in SocialAccount.objects.filter(user=person).order_by("pk"):
            disconnect(request, one)
    return redirect("account")


# Tokens


@never_cache
@require_http_methods(["GET", "POST"])
@login_required
def my_tokens(request: HttpRequest) -> HttpResponse:
    """List personal API tokens; make one, shown this once; revoke one."""
    person = person_of(request)
    shown, says, status = "", "", 200
    if request.method == "POST":
        post = request.POST
        try:
            proof.prove_recently(request, person)
            if post.get("do") == "revoke":
                tokens.revoke(person=person, token_id=post.get("token", ""), request=request)
                return redirect("my_tokens")
            shown = tokens.make(
                person=person,
                name=post.get("name", ""),
                scopes=post.getlist("scope"),
                days=post.get("days", ""),
                request=request,
            )
        except (Refused, proof.NotAgain) as refused:
            says, status = refused.says, refused.status
    context = {
        "tokens": tokens.mine(person),
        "scopes": [(scope, tokens.SCOPES[scope]) for scope in Scope],
        "shown": shown,
        "says": says,
        "given": request.POST,
        "chosen": request.POST.getlist("scope") or [Scope.READ],
        "url": settings.PUBLIC_URL,
    }
    return render(request, "accounts/tokens.html", context, status=status)
