"""What every page asks first, and a person's choice of theme."""

from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.http import require_POST

from runs.access import visible_runs
from runs.models import Person, Run


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
