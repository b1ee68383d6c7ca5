"""The pages before a session: sign in, the second step, SSO, an invitation."""

from allauth.account.internal.flows.login import perform_password_login
from allauth.account.models import Login
from allauth.core.internal import ratelimit
from allauth.mfa.base.views import AuthenticateView
from allauth.mfa.webauthn.forms import LoginWebAuthnForm
from allauth.mfa.webauthn.internal.flows import perform_passwordless_login
from allauth.socialaccount import app_settings
from allauth.socialaccount.providers.openid_connect import views as openid
from django.conf import settings
from django.contrib.auth import authenticate, logout
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_http_methods, require_POST
from requests import RequestException

from runs import proof, throttle
from runs.accounts import audit, invitations, passkeys
from runs.accounts.refused import Refused
from runs.models import AccountEvent, Person

WRONG_PAIR = "That name and password do not fit."
WRONG_PASSKEY = "That passkey was not taken. Try again, or use your password."
NO_SSO = "{name} did not let you in. Try again, or use your passkey or password."


def _target(request: HttpRequest) -> str:
    """Return where `next` leads when that is an address of this server, else the runs."""
    target = request.POST.get("next") or request.GET.get("next") or ""
    safe = url_has_allowed_host_and_scheme(
        target, allowed_hosts={request.get_host()}, require_https=request.is_secure()
    )
    return target if safe else "/runs"


def _page(request: HttpRequest, *, status: int = 200, **more: object) -> HttpResponse:
    context = {"next": _target(request), "sso": sso_name(), **more}
    return render(request, "accounts/sign_in.html", context, status=status)


def sso_name() -> str:
    """Return what the OIDC provider is called, "" when there is none."""
    apps = app_settings.PROVIDERS["openid_connect"]["APPS"]
    return str(apps[0]["name"]) if apps else ""


@never_cache
@require_http_methods(["GET", "POST"])
def sign_in(request: HttpRequest) -> HttpResponse:
    """Sign in by name and password; whoever added a passkey or codes takes the second step."""
    if request.method != "POST":
        return redirect(_target(request)) if request.user.is_authenticated else _page(request)
    name, password = request.POST.get("username", "")[:150], request.POST.get("password", "")
    if wait := throttle.wait_s(request, name):
        answer = _page(request, status=429, name=name, wait_s=wait)
        answer["Retry-After"] = str(wait)
        return answer
    person = None
    if len(password) <= proof.LONGEST_PASSWORD:
        person = authenticate(request, username=name, password=password)
    if not isinstance(person, Person):
        _refused(request, name)
        return _page(request, status=400, name=name, says=WRONG_PAIR)
    throttle.forget(request, name)
    answer = perform_password_login(
        request, {"username": name}, Login(user=person, redirect_url=_target(request))
    )
    assert isinstance(answer, HttpResponse)
    return answer


def _refused(request: HttpRequest, name: str) -> None:
    """Count a wrong pair and write it down, naming nobody who is not somebody here."""
    throttle.failed(request, name)
    known = Person.objects.filter(username=name).first()
    audit.note(AccountEvent.Kind.SIGN_IN_FAILED, request=request, about=known, method="password")
    if throttle.wait_s(request, name):
        audit.note(AccountEvent.Kind.BRAKED, request=request, about=known)


@never_cache
@require_POST
def challenge(request: HttpRequest) -> HttpResponse:
    """Answer what a passkey signs to say who it is."""
    if not ratelimit.consume(request, app="allauth.mfa", action="webauthn_login"):
        return JsonResponse({"says": "Too many tries. Try again in a minute."}, status=429)
    return JsonResponse(passkeys.for_sign_in(request))


@never_cache
@require_POST
def by_passkey(request: HttpRequest) -> HttpResponse:
    """Sign in by a passkey, which is both steps in one."""
    form = LoginWebAuthnForm(data={"credential": request.POST.get("passkey", "")})
    if not passkeys.fits(form):
        audit.note(AccountEvent.Kind.SIGN_IN_FAILED, request=request, method="passkey")
        return _page(request, status=400, says=WRONG_PASSKEY)
    authenticator = form.cleaned_data["credential"]
    login = Login(user=authenticator.user, redirect_url=_target(request))
    answer = perform_passwordless_login(request, authenticator, login)
    assert isinstance(answer, HttpResponse)
    return answer


class SecondStep(AuthenticateView):  # type: ignore[misc]  # allauth has no types
    """After the password: a passkey, a code of the app, or a recovery code."""

    template_name = "accounts/second_step.html"

    def post(self, request: HttpRequest, *args: object, **kwargs: object) -> HttpResponse:
        """Take either."""
        right = self.form.is_valid() if "code" in request.POST else passkeys.fits(self.form)
        answer: HttpResponse = self.form_valid(self.form) if right else self.form_invalid(self.form)
        return answer

    def form_invalid(self, form: object) -> HttpResponse:
        """Show the page again, as an error."""
        answer: HttpResponse = super().form_invalid(form)
        answer.status_code = 400
        return answer


second_step = never_cache(SecondStep.as_view())


@require_POST
def sign_out(request: HttpRequest) -> HttpResponse:
    """Sign out."""
    logout(request)
    return redirect("account_login")


@never_cache
@require_POST
def sso(request: HttpRequest, provider_id: str) -> HttpResponse:
    """Go to the OIDC provider: by a page, because the policy lets no form lead away from this server."""
    if provider_id != settings.SSO_PROVIDER or not sso_name():
        raise Http404
    if request.POST.get("process") == "connect" and not request.user.is_authenticated:
        return redirect("account_login")
    try:
        answer = openid.login(request, settings.SSO_PROVIDER)
    except RequestException:
        says = f"{sso_name()} does not answer. Use your passkey or password."
        return _page(request, status=502, says=says)
    if answer.status_code != 302:
        return _page(request, status=502, says=NO_SSO.format(name=sso_name()))
    return render(request, "accounts/sso_go.html", {"to": answer["Location"], "sso": sso_name()})


@never_cache
@require_GET
def sso_callback(request: HttpRequest, provider_id: str) -> HttpResponse:
    """Come back from the OIDC provider; allauth checks state, code and token."""
    if provider_id != settings.SSO_PROVIDER or not sso_name():
        raise Http404
    answer: HttpResponse = openid.callback(request, settings.SSO_PROVIDER)
    return answer


@require_GET
def sso_cancelled(request: HttpRequest) -> HttpResponse:
    """Say that the provider was left without signing in."""
    return _page(request, says=NO_SSO.format(name=sso_name() or "SSO"))


@never_cache
@require_http_methods(["GET", "POST"])
def invitation(request: HttpRequest, token: str) -> HttpResponse:
    """Let an invited person set their password, and sign them in."""
    found = invitations.live(token)
    if found is None:
        return render(request, "accounts/invitation.html", {"over": True}, status=404)
    if request.method != "POST":
        return render(request, "accounts/invitation.html", {"invitation": found})
    try:
        person = invitations.accept(
            token=token, password=request.POST.get("password", "")[: proof.LONGEST_PASSWORD], request=request
        )
    except Refused as refused:
        context = {"invitation": found, "says": refused.says, "over": refused.code == "over"}
        return render(request, "accounts/invitation.html", context, status=refused.status)
    logout(request)  # somebody else may have been signed in here
    answer = perform_password_login(
        request, {"username": person.username}, Login(user=person, redirect_url="/account?welcome=1")
    )
    assert isinstance(answer, HttpResponse)
    return answer
