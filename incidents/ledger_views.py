"""Pages of the ledger: one run's or all, its exports, and what the run actually saw."""

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse, HttpResponseBase, StreamingHttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from andon.ledger_files import write
from incidents import caps, ledger, ledger_page, seen
from incidents.models import LedgerRow
from runs.models import Run
from runs.views import person_of, visible_run_or_404

CONTENT_TYPES = {
    "csv": "text/csv; charset=utf-8",
    "json": "application/json",
    "parquet": "application/vnd.apache.parquet",
}
NAMES = {"csv": "CSV", "json": "JSON", "parquet": "Parquet"}


@require_GET
@login_required
def run_ledger(request: HttpRequest, slug: str) -> HttpResponse:
    """Show what was done to a run, automatically or by decision, and whether the chain holds."""
    return _page(request, visible_run_or_404(request, slug))


def _page(
    request: HttpRequest, run: Run, *, wrong: list[str] | None = None, status: int = 200
) -> HttpResponse:
    wanted = ledger_page.Filter.of(request.GET)
    newest = LedgerRow.objects.filter(run=run).order_by("-seq").first()
    page = ledger_page.of_run(run, wanted, request.GET.get("before", ""))
    found = ledger.checked(run, newest, page.rows)
    return render(
        request,
        "incidents/ledger.html",
        {
            "run": run,
            "page": page,
            "filter": wanted,
            "actions": ledger_page.actions(run, person_of(request)),
            "budgets": caps.today(run),
            "wrong": found.wrong if wrong is None else wrong,
            "checked_at": found.at,
            "newest": newest,
            "formats": NAMES,
        },
        status=status,
    )


@require_GET
@login_required
def export(request: HttpRequest, slug: str, form: str) -> HttpResponseBase:
    """Hand out the whole ledger of a run as a file; refused while its chain is broken."""
    run = visible_run_or_404(request, slug)
    wrong = ledger.verify(run)
    if wrong:
        return _page(request, run, wrong=wrong, status=409)
    return exported(run, form)


def exported(run: Run, form: str) -> StreamingHttpResponse:
    """Return the ledger as it is now, written as it is read."""
    newest = LedgerRow.objects.filter(run=run).order_by("-seq").values_list("seq", flat=True).first() or 0
    body = write(ledger.documents(run, until=newest), form)
    answer = StreamingHttpResponse(body, content_type=CONTENT_TYPES[form])
    answer["Content-Disposition"] = f'attachment; filename="ledger-{run.slug}.{form}"'
    return answer


@require_GET
@login_required
def run_seen(request: HttpRequest, slug: str) -> HttpResponse:
    """Show which samples the weights of a run were trained on: a part of its ledger's page, or by itself."""
    run = visible_run_or_404(request, slug)
    asked = {name: _number(request.GET.get(name, "")) for name in ("attempt", "step")}
    says, view = "", None
    try:
        found = seen.of_run(run, attempt=asked["attempt"], step=asked["step"])
        view = seen.view(found) if found is not None else None
    except seen.NotKnown as error:
        says = str(error)
    part = request.headers.get("HX-Request") == "true"
    template = "incidents/_seen.html" if part else "incidents/seen.html"
    return render(request, template, {"run": run, "view": view, "says": says, "width": seen.BAR_PX})


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) < 19 else None


@require_GET
@login_required
def all_ledgers(request: HttpRequest) -> HttpResponse:
    """Show the newest ledger rows of every run a person may see."""
    person, wanted = person_of(request), ledger_page.Filter.of(request.GET)
    return render(
        request,
        "incidents/ledgers.html",
        {
            "page": ledger_page.of_person(person, wanted, request.GET.get("before", "")),
            "filter": wanted,
            "actions": ledger_page.actions(None, person),
        },
    )
