"""The goodput page: what share of GPU time was kept, and what the rest was lost to."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import dropwhile

from django.contrib.auth.decorators import login_required
from django.db.models import Q
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_GET

from andon.goodput import CAUSES, Cause
from incidents import goodput
from incidents.goodput import Line, OfRun
from runs import formatting as words
from runs.access import visible_runs
from runs.models import Person, Run
from runs.policies import policy_for
from runs.views import person_of, visible_run_or_404

MOST_RUNS = 200  # counted on one page, newest first
BAR_PX = 600
GROUPS = ("cause", "run", "week")
PERIODS = {"week": "this week", "30": "30 days", "90": "90 days"}
_SPARE_S = 60.0  # a spare replaces a node in about a minute
_LONGEST_DAILY = timedelta(days=31)


@dataclass(frozen=True, slots=True)
class Bar:
    """One day or week: its pieces in pixels of `BAR_PX`, which stands for the fullest of them."""

    name: str
    says: str
    pieces: list[tuple[Cause, float, float]]


@dataclass(frozen=True, slots=True)
class Saving:
    """What something would have saved, to first order."""

    what: str
    hours: float


@require_GET
@login_required
def goodput_page(request: HttpRequest) -> HttpResponse:
    """Show goodput over all runs a person may see."""
    return _page(request, None)


@require_GET
@login_required
def run_goodput(request: HttpRequest, slug: str) -> HttpResponse:
    """Show goodput of one run."""
    return _page(request, visible_run_or_404(request, slug))


def _page(request: HttpRequest, run: Run | None) -> HttpResponse:
    now = timezone.now()
    period = request.GET.get("period", "")
    period = period if period in PERIODS else "week"
    by = request.GET.get("by", "")
    by = by if by in GROUPS else "cause"
    start = goodput.monday(now) if period == "week" else now - timedelta(days=int(period))
    runs, more = ([run], 0) if run is not None else runs_between(person_of(request), start)
    counted = goodput.of_runs(runs, now)
    whole = goodput.line("", "", counted, start, now)
    price = policy_for(runs[0].pk).cost if runs else None
    return render(
        request,
        "incidents/goodput.html",
        {
            "run": run,
            "whole": whole,
            "period": period,
            "periods": PERIODS,
            "by": by,
            "groups": [one for one in GROUPS if run is None or one != "run"],
            "bars": _bars(counted, start, now),
            "width": BAR_PX,
            "all_causes": [(cause, says) for cause, says in CAUSES.items() if cause in whole.hours],
            "causes": goodput.causes(counted, start, now),
            "lines": _lines(by, counted, start, now),
            "charges": goodput.charges(counted, start, now),
            "rates": goodput.rates(counted, start, now),
            "savings": _savings(counted, start, now),
            "price": price.gpu_hour_price if price else None,
            "more": more,
            "unknown": [(one.run, one.unknown) for one in counted if one.unknown],
        },
    )


def runs_between(person: Person, start: datetime) -> tuple[list[Run], int]:
    """Return the runs a person may see that were launched and not over before `start`, and how many more."""
    found = (
        visible_runs(person)
        .filter(Q(finished_at__isnull=True) | Q(finished_at__gte=start), attempts__isnull=False)
        .filter(Q(progress__last_post_at__gte=start) | Q(progress__last_post_at__isnull=True))
        .distinct()
        .order_by("-created_at", "-pk")
    )
    rows = list(found[: MOST_RUNS + 1])
    more = found.count() - MOST_RUNS if len(rows) > MOST_RUNS else 0
    return rows[:MOST_RUNS], more


def _lines(by: str, counted: Sequence[OfRun], start: datetime, end: datetime) -> list[Line]:
    if by == "run":
        made = [
            goodput.line(one.run.slug, f"/runs/{one.run.slug}/goodput", [one], start, end) for one in counted
        ]
        return sorted((one for one in made if one.allocated), key=lambda one: one.kept - one.allocated)
    if by == "week":
        weeks = []
        at = goodput.monday(start)
        while at < end:
            following = at + timedelta(days=7)
            name = f"week of {at:%d %b}"
            weeks.append(goodput.line(name, "", counted, max(at, start), min(following, end)))
            at = following
        return [one for one in weeks if one.allocated]
    return []


def _bars(counted: Sequence[OfRun], start: datetime, end: datetime) -> list[Bar]:
    days = 1 if end - start <= _LONGEST_DAILY else 7
    at = start.replace(hour=0, minute=0, second=0, microsecond=0)
    lines = []
    while at < end:
        following = at + timedelta(days=days)
        lines.append(goodput.line(f"{at:%a %d %b}", "", counted, max(at, start), min(following, end)))
        at = following
    fullest = max((one.allocated for one in lines), default=0.0)
    # What lies before the first launch is not of this period.
    lines = list(dropwhile(lambda one: not one.allocated, lines))
    return [_bar(one, fullest) for one in lines] if fullest else []


def _bar(one: Line, fullest: float) -> Bar:
    pieces, x = [], 0.0
    for cause in CAUSES:
        hours = one.hours.get(cause, 0.0)
        if hours > 0:
            width = hours / fullest * BAR_PX
            pieces.append((cause, round(x, 1), round(width, 1)))
            x += width
    if not one.allocated:
        return Bar(one.name, "nothing ran", [])
    share = words.percent(one.kept, one.allocated)
    return Bar(one.name, f"{share} of {words.gpu_hours(one.allocated)} kept", pieces)


def _savings(counted: Sequence[OfRun], start: datetime, end: datetime) -> list[Saving]:
    hours = goodput.line("", "", counted, start, end).hours
    thrown = hours.get("NUMERIC_ROLLBACK", 0.0) + hours.get("WASTED_PROGRESS_FROM_DISRUPTION", 0.0)
    waited = sum(
        max(0.0, part.end - part.start - _SPARE_S) * part.gpus / 3600
        for one in counted
        for span in one.spans
        if span.cause == "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION"
        and (part := span.within(start.timestamp(), end.timestamp())) is not None
    )
    every = [
        Saving("checkpoints twice as often (half of the steps thrown away)", thrown / 2),
        Saving("a spare in a minute after every failure", waited),
        Saving("an approval at once", hours.get("HELD_FOR_APPROVAL", 0.0)),
        Saving("no false alarm", hours.get("FALSE_ALARM", 0.0)),
    ]
    return sorted((one for one in every if one.hours > 0), key=lambda one: -one.hours)
