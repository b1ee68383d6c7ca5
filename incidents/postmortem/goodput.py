"""Goodput of the run in the week of its incident: the share of GPU time whose progress was kept.

First order: steps that were kept times the attempt's own median step time, over the time its GPUs were
allocated, from the week's Monday until the incident was over. What came later is left out, so that a
number that was once read does not move while the run goes on.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from incidents import costs
from incidents.postmortem.facts import Facts
from runs import formatting
from runs.models import Attempt, Event

_WEEK = timedelta(days=7)


@dataclass(frozen=True, slots=True)
class Span:
    """What one attempt contributes, in seconds on one GPU: allocated, and kept."""

    allocated_s: float
    kept_s: float


def of_week(facts: Facts) -> tuple[str, list[Attempt]]:
    """Return the share in words, and the launches it was counted from."""
    incident, over = facts.incident, facts.resolved_at
    if over is None:
        return "not known yet: the incident is not over", []
    opened = incident.opened_at.astimezone(UTC)
    monday = (opened - timedelta(days=opened.weekday())).replace(hour=0, minute=0, second=0, microsecond=0)
    until = min(monday + _WEEK, over)
    attempts = list(
        Attempt.objects.filter(run_id=incident.run_id, launched_at__lt=until)
        .defer("groups")
        .order_by("number")
    )
    counted: list[Attempt] = []
    allocated = kept = 0.0
    for attempt, following in zip(attempts, [*attempts[1:], None], strict=True):
        span = _span(facts, attempt, following, monday, until)
        if span is None:
            return f"not measured: attempt {attempt.number} reported no world size or no step time", [attempt]
        if span.allocated_s > 0:
            counted.append(attempt)
            allocated += span.allocated_s * (attempt.world_size or 0)
            kept += span.kept_s * (attempt.world_size or 0)
    if not counted:
        return "not measured: no attempt ran in it", []
    share = formatting.percent(min(kept, allocated), allocated)
    hours = f"{kept / 3600:,.1f} of {allocated / 3600:,.1f}"
    return f"{share}: {hours} GPU‑hours kept until the incident was over", counted


def _span(
    facts: Facts, attempt: Attempt, following: Attempt | None, monday: datetime, until: datetime
) -> Span | None:
    ends = [until, *(one for one in (attempt.exited_at, following and following.launched_at) if one)]
    start, end = max(attempt.launched_at, monday), min(ends)
    if end <= start:
        return Span(0.0, 0.0)
    if not attempt.world_size:
        return None
    allocated = (end - start).total_seconds()
    first, last = _reached(attempt, start), _reached(attempt, end)
    if first is None or last is None:
        return Span(allocated, 0.0)  # it held its GPUs and made no step
    step_s = costs.step_time_s(facts.incident.run, attempt.number)
    if step_s is None:
        return None
    if following is not None and following.began_from:
        # Steps after the checkpoint that the next attempt began from were thrown away.
        again = following.began_from.get("step")
        last = min(last, again) if isinstance(again, int) else last
    return Span(allocated, max(0, last - first) * step_s)


def _reached(attempt: Attempt, moment: datetime) -> int | None:
    """Return the step an attempt had reached at a moment; None when it reported no step.

    Searched over the steps, which are indexed; times only grow with them.
    """
    steps = Event.objects.filter(
        run_id=attempt.run_id, attempt=attempt.number, type="step", step__isnull=False
    )
    low = steps.order_by("step").values_list("step", flat=True).first()
    high = steps.order_by("-step").values_list("step", flat=True).first()
    if low is None or high is None:
        return None
    low -= 1  # before its first step
    while low < high:
        middle = (low + high + 1) // 2
        at = (
            steps.filter(step__gte=middle)
            .order_by("step", "id")
            .values_list("occurred_at", flat=True)
            .first()
        )
        if at is not None and at <= moment:
            low = middle
        else:
            high = middle - 1
    return low
