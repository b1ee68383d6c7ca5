"""The lineage of a run: from which attempt each one came, by which permit, and in which training regime.

A changed filter, clip, kernel, schedule, batch or world size is another regime: what was measured before
it cannot be compared with what was measured after.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from incidents.models import Permit
from runs.models import Attempt, Run
from runs.views import visible_run_or_404


@dataclass(frozen=True, slots=True)
class Link:
    """One attempt in the lineage of its run."""

    attempt: int
    launched_at: datetime
    regime: int
    new_regime: bool
    came_from: str  # "attempt 1, step 900", "the beginning", "memory of attempt 2"
    incident: int | None
    by: str  # how it was let go on: "resume", "break-glass", … "" = a restart that needs none
    skipped: dict[str, int] | None
    changes: list[dict[str, Any]]


def of(run: Run) -> list[Link]:
    """Return every attempt, oldest first."""
    permits: dict[int, Permit] = {}
    for permit in Permit.objects.filter(run=run, launches__gte=1).select_related("request", "request__plan"):
        for exchange in permit.exchanges:
            permits[int(exchange["attempt"])] = permit
    links: list[Link] = []
    regime = 1
    seen: set[int] = set()
    attempts = Attempt.objects.filter(run=run).order_by("number").only("number", "launched_at", "began_from")
    for attempt in attempts:
        granted = permits.get(attempt.number)
        plan = granted.request.plan if granted else None
        changes = list(plan.changes) if plan else []
        # A second launch of one permit changes nothing again.
        new = granted is not None and granted.pk not in seen and any(one["changes_regime"] for one in changes)
        if granted is not None:
            seen.add(granted.pk)
        regime += new
        links.append(
            Link(
                attempt=attempt.number,
                launched_at=attempt.launched_at,
                regime=regime,
                new_regime=new,
                came_from=_came_from(attempt, plan.checkpoint if plan else None, bool(granted)),
                incident=granted.incident_id if granted else None,
                by=granted.request.get_kind_display() if granted else "",
                skipped=plan.skip if plan else None,
                changes=changes,
            )
        )
    return links


def _came_from(attempt: Attempt, checkpoint: dict[str, Any] | None, granted: bool) -> str:
    if granted and not checkpoint:
        return f"memory of attempt {attempt.number - 1}"
    known = checkpoint or dict(attempt.began_from)
    step = known.get("step")
    if step is None:
        return "the beginning" if attempt.number == 1 else "not said by its launch"
    of = f"attempt {known['attempt']}, " if known.get("attempt") else ""
    return f"{of}step {step:,}"


@require_GET
@login_required
def page(request: HttpRequest, slug: str) -> HttpResponse:
    """Show each attempt with where it came from and in which regime it trained."""
    run = visible_run_or_404(request, slug)
    return render(request, "incidents/lineage.html", {"run": run, "links": of(run)})
