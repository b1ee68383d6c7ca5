"""Goodput of runs: where their GPU time went, from launches, steps and directives.

Counted from a run's first launch to its end, its last sign of life, or now while it is held: a held run's
GPUs are allocated and do nothing, as on the incident's page.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from statistics import median, quantiles

from django.db.models import Q

from andon.goodput import CAUSES, Attempt, Cause, Hold, Span, amounts, kept, spans
from andon.seen import kept_until
from incidents import attempt_history
from incidents.attempt_history import Outline
from incidents.models import Incident, LedgerRow, ResumeRequest
from runs.models import Directive, Run, RunProgress
from runs.rows import raw_cursor

_STEP_AT = """
SELECT w.run, w.attempt, (SELECT occurred_at FROM runs_event
    WHERE run_id = w.run AND attempt = w.attempt AND type = 'step' AND step >= w.step
    ORDER BY step LIMIT 1)
FROM unnest(%s::bigint[], %s::int[], %s::bigint[]) AS w(run, attempt, step)
"""
_NODES = """
SELECT run_id, number, jsonb_array_length(nodes) FROM runs_attempt WHERE run_id = ANY(%s)
"""


@dataclass(frozen=True, slots=True)
class Restart:
    """One attempt that another followed: when its last step was done, and the first new step after it."""

    run: int
    at: datetime
    new_step_at: datetime | None


@dataclass(frozen=True, slots=True)
class OfRun:
    """What is counted of one run."""

    run: Run
    spans: list[Span]
    restarts: list[Restart]
    nodes: dict[int, int]  # of each attempt, where its launch named them
    unknown: list[int]  # attempts that told no world size: nothing of them is counted
    blamed: dict[str, str]  # incident of a false alarm → the rule that held, for what is charged to Andon


def of_runs(runs: Sequence[Run], now: datetime) -> list[OfRun]:
    """Return where the time of each run went, with a handful of queries for all of them."""
    ids = [run.pk for run in runs]
    outlines = attempt_history.outlines(runs)
    blamed = _blamed(ids)
    holds = _holds(ids, now, {incident for of_run in blamed.values() for incident in of_run})
    posted = dict(RunProgress.objects.filter(run__in=ids).values_list("run_id", "last_post_at"))
    kept_steps = {pk: kept_until([one.attempt for one in rows]) for pk, rows in outlines.items()}
    wanted = [
        (pk, one.attempt.number, last)
        for pk, rows in outlines.items()
        for one in rows
        if (last := kept_steps[pk][one.attempt.number]) > one.attempt.began
        and one.reached is not None
        and last < one.reached.last
    ]
    past = [
        (pk, after.attempt.number, one.reached.last + 1)
        for pk, rows in outlines.items()
        for one, after in pairwise(rows)
        if one.reached is not None
    ]
    times, new_steps = _step_times(wanted), _step_times(past)
    nodes: dict[int, dict[int, int]] = {pk: {} for pk in ids}
    with raw_cursor() as cursor:
        cursor.execute(_NODES, (ids,))
        for pk, number, count in cursor.fetchall():
            if count:
                nodes[pk][number] = count
    made = []
    for run in runs:
        rows = outlines[run.pk]
        attempts = [
            _attempt(run.pk, one, after, kept_steps[run.pk], times, blamed[run.pk])
            for one, after in zip(rows, [*rows[1:], None], strict=True)
        ]
        until = _until(run, rows, holds[run.pk], posted.get(run.pk), now)
        restarts = [
            Restart(run.pk, one.reached.last_at, new_steps.get((run.pk, after.attempt.number)))
            for one, after in pairwise(rows)
            if one.reached is not None
        ]
        unknown = [one.number for one in attempts if not one.gpus]
        found = spans(attempts, holds[run.pk], until)
        made.append(OfRun(run, found, restarts, nodes[run.pk], unknown, blamed[run.pk]))
    return made


def _attempt(
    pk: int,
    one: Outline,
    after: Outline | None,
    kept_steps: dict[int, int],
    times: dict[tuple[int, int], datetime],
    blamed: dict[str, str],
) -> Attempt:
    number, began = one.attempt.number, one.attempt.began
    at, last = one.reached, kept_steps[number]
    went_on = str(one.permit.incident_id) if one.permit is not None else ""
    kept_to = None
    if at is not None and last > began:
        kept_to = at.last_at if last >= at.last else times.get((pk, number))
    return Attempt(
        number=number,
        gpus=one.launch.world_size,
        launched=one.launch.launched_at.timestamp(),
        ended=one.launch.exited_at.timestamp() if one.launch.exited_at else None,
        first=at.first_at.timestamp() if at else None,
        last=at.last_at.timestamp() if at else None,
        kept_to=kept_to.timestamp() if kept_to else None,
        # Steps that were reported, not those since the checkpoint: a log that began late must not count.
        kept_steps=max(0, min(last, at.last) - at.first + 1) if at and kept_to else 0,
        step_s=at.step_s if at else None,
        numeric=after is not None and after.permit is not None,
        false_alarm=went_on if went_on in blamed else "",
    )


def _blamed(ids: Sequence[int]) -> dict[int, dict[str, str]]:
    """Return, by run, the incidents in which a rule held it and nothing was wrong, and which rule that was.

    From the moment an approver says so, before the run went on. What a person held by hand is no rule's.
    """
    going_on = (ResumeRequest.State.APPROVED, ResumeRequest.State.USED)
    said = ResumeRequest.objects.filter(
        incident__run__in=ids, kind=ResumeRequest.Kind.FALSE_ALARM, state__in=going_on
    )
    false = Q(incident__state=Incident.State.FALSE_ALARM) | Q(incident__in=said.values("incident"))
    rows = LedgerRow.objects.filter(false, run__in=ids, action="hold", detector__isnull=False)
    found: dict[int, dict[str, str]] = {pk: {} for pk in ids}
    for pk, incident, rule in rows.order_by("seq").values_list("run_id", "incident_id", "detector__rule"):
        found[pk].setdefault(str(incident), rule)
    return found


def _holds(ids: Sequence[int], now: datetime, false: set[str]) -> dict[int, list[Hold]]:
    found: dict[int, list[Hold]] = {pk: [] for pk in ids}
    since: dict[int, tuple[datetime, str]] = {}
    rows = Directive.objects.filter(run__in=ids).order_by("run_id", "seq")
    for pk, kind, at, incident in rows.values_list("run_id", "kind", "since", "incident"):
        if kind != Directive.Kind.CONTINUE:
            since.setdefault(pk, (at, incident))
        elif pk in since:
            found[pk].append(_hold(*since.pop(pk), at, false))
    for pk, (at, incident) in since.items():
        found[pk].append(_hold(at, incident, now, false))
    return found


def _hold(start: datetime, incident: str, end: datetime, false: set[str]) -> Hold:
    return Hold(start.timestamp(), end.timestamp(), incident, incident in false)


def _step_times(wanted: Sequence[tuple[int, int, int]]) -> dict[tuple[int, int], datetime]:
    """Return when each attempt first reported a step of at least this number."""
    if not wanted:
        return {}
    with raw_cursor() as cursor:
        cursor.execute(_STEP_AT, tuple(map(list, zip(*wanted, strict=True))))
        return {(run, attempt): at for run, attempt, at in cursor.fetchall() if at is not None}


def _until(
    run: Run, rows: Sequence[Outline], holds: Sequence[Hold], posted: datetime | None, now: datetime
) -> float:
    if run.finished_at is not None:
        return run.finished_at.timestamp()
    if holds and holds[-1].end >= now.timestamp():
        return now.timestamp()
    newest = rows[-1] if rows else None
    if newest is not None and newest.launch.exited_at is not None:
        return newest.launch.exited_at.timestamp()
    seen = [one for one in (posted, newest.reached.last_at if newest and newest.reached else None) if one]
    return min(now, max(seen)).timestamp() if seen else now.timestamp()


@dataclass(frozen=True, slots=True)
class Line:
    """GPU-hours of one row of a table, by cause, with what of them was kept."""

    name: str
    link: str
    hours: dict[Cause, float]
    kept: float
    allocated: float


@dataclass(frozen=True, slots=True)
class CauseLine:
    """One cause over everything that is counted."""

    cause: Cause
    says: str
    count: int
    hours: float
    incident: str  # the one with the most of it, "" = none


@dataclass(frozen=True, slots=True)
class Rates:
    """How often runs failed, and how long it took to see it and to be past it. None: nothing to count."""

    failures: int
    per_1000_node_hours: float | None
    detect_min: tuple[float, float] | None  # median, p90
    new_step_min: tuple[float, float] | None


def line(name: str, link: str, counted: Sequence[OfRun], start: datetime, end: datetime) -> Line:
    """Return what these runs had between two moments."""
    total: dict[Cause, float] = {}
    for one in counted:
        for cause, seconds in amounts(one.spans, start.timestamp(), end.timestamp()).items():
            total[cause] = total.get(cause, 0.0) + seconds / 3600
    productive, allocated = kept(total)
    return Line(name, link, total, productive, allocated)


def causes(counted: Sequence[OfRun], start: datetime, end: datetime) -> list[CauseLine]:
    """Return every cause there was, the largest first, the productive time apart from them left out."""
    whole = line("", "", counted, start, end).hours
    parts = [
        part
        for one in counted
        for span in one.spans
        if (part := span.within(start.timestamp(), end.timestamp())) is not None
    ]
    made = []
    for cause, hours in whole.items():
        if cause == "PRODUCTIVE":
            continue
        mine = [part for part in parts if part.cause == cause]
        by_incident: dict[str, float] = {}
        for part in mine:
            if part.incident:
                by_incident[part.incident] = by_incident.get(part.incident, 0.0) + part.amount
        worst = max(by_incident, key=lambda name: by_incident[name], default="")
        # One incident is one time, in however many pieces it lies.
        count = len(by_incident) + sum(1 for part in mine if not part.incident)
        made.append(CauseLine(cause, CAUSES[cause], count, hours, worst))
    return sorted(made, key=lambda one: -one.hours)


@dataclass(frozen=True, slots=True)
class Charge:
    """What the false alarms of one rule took: it is charged to Andon."""

    rule: str
    incidents: list[str]
    hours: float


def charges(counted: Sequence[OfRun], start: datetime, end: datetime) -> list[Charge]:
    """Return what is charged to Andon between two moments, by rule, the dearest first."""
    hours: dict[str, dict[str, float]] = {}
    for one in counted:
        for span in one.spans:
            part = span.within(start.timestamp(), end.timestamp())
            if part is not None and part.cause == "FALSE_ALARM":
                by_incident = hours.setdefault(one.blamed[part.incident], {})
                by_incident[part.incident] = by_incident.get(part.incident, 0.0) + part.amount / 3600
    made = [Charge(rule, sorted(each, key=int), sum(each.values())) for rule, each in hours.items()]
    return sorted(made, key=lambda one: (-one.hours, one.rule))


def rates(counted: Sequence[OfRun], start: datetime, end: datetime) -> Rates:
    """Return failures, and minutes to detect and to the first new step, of what began between two moments."""
    restarts = [one for run in counted for one in run.restarts if start <= one.at < end]
    node_hours = sum(
        (part.end - part.start) / 3600 * run.nodes[part.attempt]
        for run in counted
        for span in run.spans
        if span.attempt in run.nodes and (part := span.within(start.timestamp(), end.timestamp())) is not None
    )
    new_steps = [
        (one.new_step_at - one.at).total_seconds() / 60
        for one in restarts
        if one.new_step_at is not None and one.new_step_at >= one.at
    ]
    return Rates(
        failures=len(restarts),
        per_1000_node_hours=1000 * len(restarts) / node_hours if node_hours else None,
        detect_min=_spread(_minutes_to_detect([run.run.pk for run in counted], start, end)),
        new_step_min=_spread(new_steps),
    )


_DETECT = """
SELECT extract(epoch FROM i.opened_at - min(f.occurred_at)) / 60
FROM incidents_incident i JOIN runs_finding f ON f.run_id = i.run_id AND f.incident = i.id::text
WHERE i.run_id = ANY(%s) AND i.opened_at >= %s AND i.opened_at < %s AND f.attempt = i.attempt
GROUP BY i.id
"""


def _minutes_to_detect(ids: Sequence[int], start: datetime, end: datetime) -> list[float]:
    with raw_cursor() as cursor:
        cursor.execute(_DETECT, (list(ids), start, end))
        return [max(0.0, float(minutes)) for (minutes,) in cursor.fetchall()]


def _spread(values: Sequence[float]) -> tuple[float, float] | None:
    if not values:
        return None
    p90 = quantiles(values, n=10, method="inclusive")[-1] if len(values) > 1 else values[0]
    return float(median(values)), float(p90)


def monday(moment: datetime) -> datetime:
    """Return the Monday, 00:00 UTC, of a moment's week."""
    day = moment.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return day - timedelta(days=day.weekday())
