"""The sign-in that stands before every page, and what every page of a run asks first."""

from django.contrib.auth import authenticate, login, logout
from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from runs import throttle
from runs.access import visible_runs
from runs.models import Person, Run

WRONG_PAIR = "That name and password do not fit."


def person_of(request: HttpRequest) -> Person:
    """Return the signed-in person of a view behind `login_required`."""
    assert isinstance(request.user, Person)
    return request.user


def visible_run_or_404(request: HttpRequest, slug: str) -> Run:
    """Return a run the person may see; any other answers 404, like one that does not exist."""
    try:
        return visible_runs(person_of(request)).select_related("project").get(slug=slug)
    except Run.DoesNotExist:
        raise Http404 from None


def theme_of(request: HttpRequest) -> str:
    """Return light or dark as the page's script asks for it."""
    return "dark" if request.GET.get("theme") == "dark" else "light"


def root(request: HttpRequest) -> HttpResponse:
    """Send people to the runs."""
    return redirect("runs")


@never_cache
@require_http_methods(["GET", "POST"])
def sign_in(request: HttpRequest) -> HttpResponse:
    """Sign in by name and password; `next` is kept when it is an address of this server."""
    target = request.POST.get("next") or request.GET.get("next") or ""
    if not url_has_allowed_host_and_scheme(
        target, allowed_hosts={request.get_host()}, require_https=request.is_secure()
    ):
        target = "/runs"
    if request.method == "GET":
        if request.user.is_authenticated:
            return redirect(target)
        return render(request, "runs/sign_in.html", {"next": target})
    name, password = request.POST.get("username", "")[:150], request.POST.get("password", "")
    context = {"next": target, "name": name}
    if wait := throttle.wait_s(request, name):
        answer = render(request, "runs/sign_in.html", {**context, "wait_s": wait}, status=429)
        answer["Retry-After"] = str(wait)
        return answer
    person = authenticate(request, username=name, password=password)
    if person is None:
        throttle.failed(request, name)
        return render(request, "runs/sign_in.html", {**context, "says": WRONG_PAIR}, status=400)
    throttle.forget(request, name)
    login(request, person)
    return redirect(target)


@require_POST
def sign_out(request: HttpRequest) -> HttpResponse:
    """Sign out."""
    logout(request)
    return redirect("sign_in")


@require_POST
@login_required
def set_theme(request: HttpRequest) -> HttpResponse:
    """Keep a person's choice of light, dark or the system's."""
    person = person_of(request)
    chosen = request.POST.get("theme", "")
    if chosen in {"system", "light", "dark"}:
        Person.objects.filter(pk=person.pk).update(theme=chosen)
    back = request.POST.get("next", "")
    safe = url_has_allowed_host_and_scheme(back, allowed_hosts={request.get_host()})
    return redirect(back if safe else "runs")
