"""Pages of runs, and the sign-in that stands before every page."""

from django.contrib.auth import authenticate, login, logout
from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from runs import figures, formatting, grid, live, noticed, overview, throttle
from runs.access import visible_runs
from runs.models import Attempt, Checkpoint, Person, PolicyVersion, Run, RunProgress, RunSecret, UnreadBody
from runs.policies import policy_for

WRONG_PAIR = "That name and password do not fit."
CHIPS = ("held", "no progress", "not watched", "running", "finished")
PAGE_RUNS = 50
RANGES = {"1k": 1_000, "10k": 10_000, "attempt": None}


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


@require_GET
@login_required
def runs(request: HttpRequest) -> HttpResponse:
    """Show all runs a person may see: is anything wrong, in one look."""
    context = _runs_context(request)
    fragment = live.render(request, "runs/_table.html", context)
    return render(request, "runs/list.html", {**context, "table": fragment})


@require_GET
@login_required
def runs_table(request: HttpRequest) -> HttpResponse:
    """Answer the poll of the table of runs."""
    return live.answer(request, "runs/_table.html", _runs_context(request))


def _runs_context(request: HttpRequest) -> dict[str, object]:
    state, text = request.GET.get("state", ""), request.GET.get("q", "").strip()
    everything = visible_runs(person_of(request))
    light = overview.lines(everything, sparks=False)
    counts = {chip: sum(1 for line in light if line.state == chip) for chip in CHIPS}
    shown = [
        line for line in light if (not state or line.state == state) and text.lower() in line.run.slug.lower()
    ]
    page = shown[:PAGE_RUNS]
    # Curves cost a read per run: only for what is on the page.
    drawn = {
        line.run.pk: line
        for line in overview.lines(Run.objects.filter(pk__in=[line.run.pk for line in page]))
    }
    return {
        "lines": [drawn.get(line.run.pk, line) for line in page],
        "total": len(light),
        "more": len(shown) - len(page),
        "chips": [(chip, counts[chip]) for chip in CHIPS],
        "state": state,
        "q": text,
        "query": request.GET.urlencode(),
    }


@require_GET
@login_required
def run(request: HttpRequest, slug: str) -> HttpResponse:
    """Show what a run has been doing."""
    found = visible_run_or_404(request, slug)
    attempts = list(Attempt.objects.filter(run=found).order_by("-number"))
    progress = RunProgress.objects.filter(run=found).first()
    number = _attempt(request, attempts, progress)
    context = _head_context(found)
    head = live.render(request, "runs/_head.html", context)
    policies = PolicyVersion.objects.filter(project=found.project, run__in=[found]).order_by("-number")
    findings, more = noticed.findings(found)
    return render(
        request,
        "runs/detail.html",
        {
            **context,
            "head": head,
            "attempt": number,
            "attempts": attempts,
            "chosen_range": request.GET.get("range", "1k"),
            "ranges": list(RANGES),
            "checkpoints": Checkpoint.objects.filter(run=found).order_by("-attempt", "-step")[:100],
            "findings": findings,
            "findings_more": more,
            "skipped": noticed.skipped(found, number),
            "unread": UnreadBody.objects.filter(run=found).order_by("-received_at").defer("body")[:20],
            "policy": policy_for(found.pk),
            "policy_version": policies.first(),
            "secret": RunSecret.objects.filter(run=found).order_by("-last_used_at").first(),
        },
    )


@require_GET
@login_required
def run_head(request: HttpRequest, slug: str) -> HttpResponse:
    """Answer the poll of the head of a run."""
    return live.answer(request, "runs/_head.html", _head_context(visible_run_or_404(request, slug)))


def _head_context(found: Run) -> dict[str, object]:
    line = overview.lines(Run.objects.filter(pk=found.pk), sparks=False)[0]
    last = line.progress.last if line.progress is not None else {}
    newest = (
        Checkpoint.objects.filter(run=found).exclude(state="deleted").order_by("-attempt", "-step").first()
    )
    facts = [
        (name, form(overview.latest(last, key)))
        for name, key, form in (
            ("lr", "lr", lambda value: value[0]),
            ("tokens", "tokens", lambda value: formatting.amount(value[1])),
            ("loss scale", "loss_scale", lambda value: value[0]),
        )
        if key in last
    ]
    return {"run": found, "line": line, "facts": facts, "newest": newest}


def _attempt(request: HttpRequest, attempts: list[Attempt], progress: RunProgress | None) -> int:
    asked = request.GET.get("attempt", "")
    if asked.isdecimal() and any(attempt.number == int(asked) for attempt in attempts):
        return int(asked)
    if attempts:
        return attempts[0].number
    return (progress.attempt if progress is not None else None) or 1


@require_GET
@login_required
def run_figure(request: HttpRequest, slug: str) -> HttpResponse:
    """Answer the Plotly figure of a run for `range=` or `steps=a-b`."""
    found = visible_run_or_404(request, slug)
    attempts = list(Attempt.objects.filter(run=found).order_by("-number"))
    number = _attempt(request, attempts, RunProgress.objects.filter(run=found).first())
    known = grid.extent(found, number)
    span = RANGES.get(request.GET.get("range", "1k"), 1_000)
    first = known.step_first if span is None else max(known.step_first, known.step_last - span + 1)
    opening = grid.Window(first, max(first, known.step_last), 0, known.ranks - 1)
    window = grid.read_window(request.GET.get("steps", ""), "", opening, known)
    marks = figures.checkpoint_marks(found, number, window.step_first, window.step_last)
    figure = figures.run_figure(
        found,
        number,
        window.step_first,
        window.step_last,
        policy=policy_for(found.pk),
        marks=marks,
        width=figures.plot_width(request.GET.get("width", "")),
    )
    figure["layout"]["meta"]["extent"] = [known.step_first, known.step_last]
    return JsonResponse(figure)
