"""The read API of what was done to a run: its ledger, what it actually saw, and its goodput."""

from datetime import timedelta
from typing import Any, Literal

from django.http import HttpRequest, HttpResponseBase
from django.utils import timezone
from ninja import Router

from incidents import goodput, ledger, seen
from incidents.ledger_views import exported
from incidents.models import LedgerRow
from runs.access import PersonalToken, visible_runs
from runs.models import Person, Run
from runs.problems import Problem

router = Router(tags=["ledger"])
PAGE = 100
_MOST_DAYS = 3_660


@router.get("/runs/{run}/ledger", auth=PersonalToken())
def run_ledger(request: HttpRequest, run: str, cursor: str = "") -> dict[str, Any]:
    """List the ledger of a run, newest first, each row as it is chained."""
    found = _run(request, run)
    rows = LedgerRow.objects.filter(run=found)
    if cursor:
        if not cursor.isdecimal() or len(cursor) > 9:
            raise Problem(422, "bad-field", "cursor: take it from `next` of the page before.", field="cursor")
        rows = rows.filter(seq__lt=int(cursor))
    listed = list(rows.order_by("-seq")[: PAGE + 1])
    shown = listed[:PAGE]
    newest = LedgerRow.objects.filter(run=found).order_by("-seq").first()
    wrong = ledger.checked(found, newest, shown).wrong
    return {
        "items": [ledger.document(row, found.slug) for row in shown],
        "next": str(shown[-1].seq) if len(listed) > PAGE else None,
        "chain": {"verified": not wrong, "wrong": wrong},
    }


@router.get("/runs/{run}/ledger/export", auth=PersonalToken())
def export_ledger(
    request: HttpRequest, run: str, form: Literal["csv", "json", "parquet"] = "json"
) -> HttpResponseBase:
    """Return the whole ledger as a file: CSV, JSON or Parquet of the same rows, each with its digest."""
    found = _run(request, run)
    wrong = ledger.verify(found)
    if wrong:
        raise Problem(409, "chain-broken", "The chain is broken, do not export: " + "; ".join(wrong[:5]))
    return exported(found, form)


@router.get("/runs/{run}/seen", auth=PersonalToken())
def run_seen(
    request: HttpRequest, run: str, attempt: int | None = None, step: int | None = None
) -> dict[str, Any]:
    """Return which samples the weights were trained on, and which were skipped, repeated or rolled back.

    Of the newest attempt after its last step, or of any `attempt` after any `step` of it. A window is
    [first sample, one past the last] in loader positions.
    """
    found = _run(request, run)
    try:
        answer = seen.of_run(found, attempt=attempt, step=step)
    except seen.NotKnown as error:
        raise Problem(404, "unknown-step", str(error), field="step") from error
    if answer is None:
        raise Problem(404, "unknown-step", f"No attempt of {found.slug} was reported yet.", field="attempt")
    return answer.document()


@router.get("/runs/{run}/goodput", auth=PersonalToken())
def run_goodput(request: HttpRequest, run: str, days: int = 7) -> dict[str, Any]:
    """Return GPU-hours by cause over the last days (1 to 3,660), the share kept, and what Andon took."""
    found = _run(request, run)
    if not 1 <= days <= _MOST_DAYS:
        raise Problem(422, "bad-field", f"days: must be 1 to {_MOST_DAYS}.", field="days")
    now = timezone.now()
    counted, start = goodput.of_runs([found], now), now - timedelta(days=days)
    line = goodput.line(found.slug, "", counted, start, now)
    return {
        "run": found.slug,
        "days": days,
        "gpu_hours": dict(line.hours),
        "charged_to_andon": [
            {"rule": one.rule, "gpu_hours": one.hours, "incidents": one.incidents}
            for one in goodput.charges(counted, start, now)
        ],
        "kept_gpu_hours": line.kept,
        "allocated_gpu_hours": line.allocated,
        "goodput": line.kept / line.allocated if line.allocated else None,
    }


def _run(request: HttpRequest, slug: str) -> Run:
    person = request.user
    assert isinstance(person, Person)
    found = visible_runs(person).filter(slug=slug).first()
    if found is None:
        raise Problem(404, "unknown-run", f"There is no run {slug!r} that you may see.", field="run")
    return found
