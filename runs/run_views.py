"""Pages of runs: is anything wrong, and what has this one been doing."""

import msgspec
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET, require_safe

from runs import formatting, live, noticed, overview, run_view
from runs.access import visible_runs
from runs.attempts import launches
from runs.figures import plot_width
from runs.models import Attempt, Checkpoint, PolicyVersion, Run, RunSecret, UnreadBody
from runs.policies import policy_for
from runs.run_figure import run_figure as figure_of
from runs.views import person_of, visible_run_or_404

CHIPS = (
    *("held", overview.OPEN_INCIDENT, "no progress", "not watched"),
    *(overview.WATCHING, "running", "finished"),
)
PAGE_RUNS = 50
SHOWN_CHECKPOINTS = 100


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
    state, text = request.GET.get("state", ""), request.GET.get("q", "").strip()[:100]
    asked = request.GET.get("page", "")
    standings = overview.standings(visible_runs(person_of(request)))
    shown = [one for one in standings if (not state or one.fits(state)) and text.lower() in one.slug.lower()]
    pages = max(1, -(-len(shown) // PAGE_RUNS))
    page = min(max(1, int(asked)), pages) if asked.isdecimal() and len(asked) < 6 else 1
    return {
        "lines": overview.lines(shown[(page - 1) * PAGE_RUNS : page * PAGE_RUNS]),
        "total": len(standings),
        "found": len(shown),
        "page": page,
        "pages": pages,
        "chips": [(chip, sum(one.fits(chip) for one in standings)) for chip in CHIPS],
        "state": state,
        "q": text,
        "query": request.GET.urlencode(),
        "limit": formatting.duration(overview.NO_PROGRESS_AFTER.total_seconds()),
    }


@require_GET
@login_required
def run(request: HttpRequest, slug: str) -> HttpResponse:
    """Show what a run has been doing."""
    found = visible_run_or_404(request, slug)
    view = run_view.view_of(found, request.GET.dict())
    number = view.attempts[-1]
    context = _head_context(found)
    head = live.render(request, "runs/_head.html", context)
    findings, more = noticed.findings(found)
    checkpoints = Checkpoint.objects.filter(run=found).order_by("-attempt", "-step").defer("files")
    return render(
        request,
        "runs/detail.html",
        {
            **context,
            "head": head,
            "view": view,
            "attempt": number,
            "attempts": launches(found.pk),
            "ranges": [*run_view.RANGES, run_view.ALL],
            "checkpoints": checkpoints[:SHOWN_CHECKPOINTS],
            "findings": findings,
            "findings_more": more,
            "skipped": noticed.skipped(found, number),
            "unread": UnreadBody.objects.filter(run=found).order_by("-received_at").defer("body")[:20],
            "policy": policy_for(found.pk),
            "policy_version": PolicyVersion.objects.filter(run=found).order_by("-number").first(),
            "secret": RunSecret.objects.filter(run=found).order_by("-last_used_at").first(),
        },
    )


@require_GET
@login_required
def run_head(request: HttpRequest, slug: str) -> HttpResponse:
    """Answer the poll of the head of a run."""
    return live.answer(request, "runs/_head.html", _head_context(visible_run_or_404(request, slug)))


def _head_context(found: Run) -> dict[str, object]:
    line = overview.lines(overview.standings(Run.objects.filter(pk=found.pk)), curves=False)[0]
    last = line.progress.last if line.progress is not None else {}
    kept = Checkpoint.objects.filter(run=found).exclude(state="deleted").defer("files")
    facts = [
        (name, form(overview.latest(last, key)))
        for name, key, form in (
            ("lr", "lr", lambda value: value[0]),
            ("tokens a step", "tokens", lambda value: formatting.amount(value[1])),
            ("loss scale", "loss_scale", lambda value: value[0]),
        )
        if key in last
    ]
    newest = Attempt.objects.filter(run=found).order_by("-number").values_list("data__revision", flat=True)
    revision = newest.first()
    if isinstance(revision, str) and revision:
        facts.append(("revision", formatting.inert(revision, 12)))
    return {"run": found, "line": line, "facts": facts, "newest": kept.order_by("-attempt", "-step").first()}


@require_safe
@login_required
def run_figure(request: HttpRequest, slug: str) -> HttpResponse:
    """Answer the Plotly figure of a run for `attempt=`, `range=` or `steps=a-b`; a HEAD only its version."""
    found = visible_run_or_404(request, slug)
    view = run_view.view_of(found, request.GET.dict())
    headers = {"ETag": f'"{view.version}"', "Cache-Control": "private, no-cache"}
    if request.headers.get("If-None-Match") == headers["ETag"]:
        return HttpResponse(status=304, headers=headers)
    if request.method == "HEAD":
        return HttpResponse(headers=headers)
    width = plot_width(request.GET.get("width", ""))
    figure = figure_of(view, policy=policy_for(found.pk), width=width)
    # Tens of thousands of numbers: the standard library would take longer than reading them did.
    return HttpResponse(msgspec.json.encode(figure), content_type="application/json", headers=headers)
