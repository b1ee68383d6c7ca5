"""What waiting costs, and what a plan costs: GPU-hours, and money at the policy's price."""

from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from statistics import median

from andon.policy import Policy
from incidents.models import Incident, Plan
from runs.models import Attempt, Event, Run
from runs.reading import kept

_STEPS_ASKED = 200


@dataclass(frozen=True, slots=True)
class Cost:
    """A length of time on all GPUs of a run. None: not known, because it was not reported."""

    seconds: float | None
    gpus: int | None
    gpu_hours: float | None
    money: float | None
    currency: str


def of_seconds(seconds: float | None, gpus: int | None, policy: Policy) -> Cost:
    """Return what `seconds` on `gpus` GPUs cost at the policy's price per GPU-hour."""
    hours = None if seconds is None or gpus is None else seconds / 3600 * gpus
    money = None if hours is None else hours * policy.cost.gpu_hour_price
    return Cost(seconds, gpus, hours, money, policy.cost.currency)


def waiting(incident: Incident, since: datetime, now: datetime, policy: Policy) -> Cost:
    """Return what the run's GPUs have cost since it was held: they are allocated and do nothing."""
    return of_seconds((now - since).total_seconds(), gpus(incident.run, incident.attempt), policy)


def of_plan(incident: Incident, plan: Plan, policy: Policy) -> Cost:
    """Return what running the lost steps again costs; a plan that loses none costs nothing."""
    lost = plan.numbers.get("steps_lost")
    seconds: float | None = None
    if lost is not None:
        step_s = step_time_s(incident.run, incident.attempt)
        seconds = 0.0 if lost == 0 else None if step_s is None else lost * step_s
    return of_seconds(seconds, gpus(incident.run, incident.attempt), policy)


def of_steps(incident: Incident, lost: int | None, policy: Policy, step_s: float | None) -> Cost:
    """Return what running `lost` steps again costs, with the step time already read."""
    known = None if lost is None else 0.0 if lost == 0 else None if step_s is None else lost * step_s
    return of_seconds(known, gpus(incident.run, incident.attempt), policy)


def gpus(run: Run, attempt: int) -> int | None:
    """Return how many GPUs an attempt has: one per rank, as its launch reported."""
    rows = Attempt.objects.filter(run=run, number=attempt).values_list("world_size", flat=True)
    return kept(("gpus", run.pk, attempt), rows.first)


def step_time_s(run: Run, attempt: int) -> float | None:
    """Return the median step time of the newest steps: as reported, else from when they occurred."""
    return kept(("step time", run.pk, attempt), lambda: _step_time_s(run, attempt))


def _step_time_s(run: Run, attempt: int) -> float | None:
    rows = list(
        Event.objects.filter(run_id=run.pk, attempt=attempt, type="step", step__isnull=False)
        .order_by("-step")
        .values_list("step", "occurred_at", "data")[:_STEPS_ASKED]
    )
    said = [
        float(value)
        for _, _, data in rows
        if isinstance(value := data.get("step_time_s"), int | float)
        and not isinstance(value, bool)
        and value > 0
    ]
    if said:
        return float(median(said))
    first: dict[int, datetime] = {}
    for step, occurred_at, _ in rows:
        if step is None:
            continue
        first[step] = min(occurred_at, first.get(step, occurred_at))
    steps = sorted(first)
    gaps = [
        (first[later] - first[earlier]).total_seconds() / (later - earlier)
        for earlier, later in pairwise(steps)
    ]
    gaps = [gap for gap in gaps if gap > 0]
    return float(median(gaps)) if gaps else None
