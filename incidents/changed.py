"""What changed since the last good checkpoint: two launches compared, and what was told in between.

Each line says changed, unchanged or not known. "Nothing changed" is an answer; what nobody reported is not
known, and is never taken for unchanged.
"""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.db import connection
from django.db.models import Q

from evidence.queries import last_good
from incidents import data_read, launched, told
from incidents.models import Incident
from runs import formatting as words
from runs.attempts import launches
from runs.models import Attempt, Event
from runs.reading import kept

_NAMES_SHOWN = 4
_EVENTS = 400
_BOUNDARIES = ("schedule.boundary",)
_CALENDAR = ("node.state", "stop.requested", "preflight.report", "hardware.xid", "hardware.ecc")


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that may have changed. `step` is where, None for what changed between launches or nowhere."""

    name: str
    state: data_read.State
    says: str
    step: int | None = None
    at: datetime | None = None
    more: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Changed:
    """Everything that may have changed, and since when."""

    since: str  # "step 17,750 of attempt 3, the last good checkpoint"
    lines: list[Line]

    @property
    def changed(self) -> list[Line]:
        """The lines that changed."""
        return [line for line in self.lines if line.state == "changed"]

    @property
    def unchanged(self) -> list[Line]:
        """The lines that did not."""
        return [line for line in self.lines if line.state == "unchanged"]

    @property
    def unknown(self) -> list[Line]:
        """The lines nobody reported."""
        return [line for line in self.lines if line.state == "not known"]

    @property
    def headline(self) -> str:
        """The answer in one line."""
        if self.changed:
            return f"{words.plural(len(self.changed), 'thing')} changed"
        if self.unknown:
            return "nothing that was reported changed"
        return "nothing changed"


@dataclass(frozen=True, slots=True)
class _Span:
    """From where to where: attempt and step of the last good state, and of the first bad one."""

    incident: Incident
    before: int  # attempt
    good_step: int | None
    good_at: datetime | None
    after: int  # attempt
    bad_step: int | None

    @property
    def relaunched(self) -> bool:
        return self.before != self.after


def since_last_good(incident: Incident) -> Changed:
    """Return what changed between the last good checkpoint of an incident and its first bad step."""
    good = kept(("last good", incident.dossier_id), lambda: last_good(incident.dossier))
    bad_step = incident.first_bad.get("step")
    rows = [row for row in launches(incident.run_id) if row.number <= incident.attempt]
    attempts = {row.number: row for row in rows[:200]}
    if good is not None:
        before, good_step = good.attempt, good.step
        since = f"step {words.count(good.step)} of attempt {good.attempt}, the last good checkpoint"
    else:
        earlier = [number for number in attempts if number < incident.attempt]
        before, good_step = max(earlier, default=incident.attempt), None
        since = (
            f"attempt {before}; no last good checkpoint is known"
            if earlier
            else "the launch; nothing came before"
        )
    span = _Span(incident, before, good_step, good.committed_at if good else None, incident.attempt, bad_step)
    known = launched.facts(incident.run_id, {span.before, span.after})
    lines = _software(span, attempts, known)
    lines += _shape(span, attempts)
    lines += _data(span, known.get(span.after, {}))
    lines += _events(span)
    lines.append(_restarts(span, attempts))
    return Changed(since, lines)


def _software(span: _Span, attempts: dict[int, Attempt], known: dict[int, dict[str, Any]]) -> list[Line]:
    before, after = known.get(span.before, {}), known.get(span.after, {})
    if after.get("in_place") is True:
        # A resume in place launches nothing: the processes, and all they are made of, went on.
        after = before | after
    lines = [_compared(span, attempts, told.REVISION, before, after)]
    stat = told.value_of(told.DIFF_STAT, after)
    if stat is not None:
        lines[0].more.append(f"diff: {words.inert(str(told.text(stat)), 300)}")
    lines += [_compared(span, attempts, fact, before, after) for fact in told.FACTS]
    return lines


def _compared(
    span: _Span, attempts: dict[int, Attempt], fact: told.Fact, before: dict[str, Any], after: dict[str, Any]
) -> Line:
    old, new = told.value_of(fact, before), told.value_of(fact, after)
    if new is None:
        return Line(fact.name, "not known", "the launch did not tell it")
    if not span.relaunched:
        return Line(fact.name, "unchanged", f"{told.text(new)}, one launch")
    if old is None:
        return Line(fact.name, "not known", f"{told.text(new)}; attempt {span.before} did not tell it")
    if old == new:
        return Line(fact.name, "unchanged", told.text(new))
    more = told.differences(old, new)
    says = words.plural(len(more), "difference") if more else f"{told.text(old)} → {told.text(new)}"
    return Line(fact.name, "changed", says, *_where(attempts.get(span.after)), more=more)


def _where(attempt: Attempt | None) -> tuple[int | None, datetime | None]:
    return (attempt.first_step, attempt.launched_at) if attempt is not None else (None, None)


def _shape(span: _Span, attempts: dict[int, Attempt]) -> list[Line]:
    old, new = attempts.get(span.before), attempts.get(span.after)
    sizes = [row.world_size if row else None for row in (old, new)]
    if sizes[1] is None or (span.relaunched and sizes[0] is None):
        world = Line("world size", "not known", "the launch did not tell it")
    elif not span.relaunched or sizes[0] == sizes[1]:
        world = Line("world size", "unchanged", f"{words.count(sizes[1])} ranks")
    else:
        world = Line(
            "world size", "changed", f"{words.count(sizes[0])} → {words.count(sizes[1])} ranks", *_where(new)
        )
    return [world, _nodes(span, new)]


_NODES = """
SELECT n ->> 'node', bool_or(a.number = %(before)s), bool_or(a.number = %(after)s)
FROM runs_attempt a CROSS JOIN LATERAL jsonb_array_elements(a.nodes) n
WHERE a.run_id = %(run)s AND a.number IN (%(before)s, %(after)s)
GROUP BY 1 HAVING NOT (bool_or(a.number = %(before)s) AND bool_or(a.number = %(after)s)) ORDER BY 1 LIMIT 5000
"""


def _nodes(span: _Span, new: Attempt | None) -> Line:
    number = launched.node_count(span.incident.run_id, span.after)
    if number is None:
        return Line("nodes", "not known", "the launch named none")
    if not span.relaunched:
        return Line("nodes", "unchanged", f"{words.plural(number, 'node')}, one launch")
    if launched.node_count(span.incident.run_id, span.before) is None:
        return Line("nodes", "not known", f"attempt {span.before} named none")
    with connection.cursor() as cursor:
        cursor.execute(_NODES, {"run": span.incident.run_id, "before": span.before, "after": span.after})
        rows = cursor.fetchall()
    left = [str(name) for name, was, _ in rows if was]
    joined = [str(name) for name, _, now in rows if now]
    if not rows:
        return Line("nodes", "unchanged", f"the same {words.plural(number, 'node')}")
    said = [f"{_names(names)} {verb}" for names, verb in ((left, "left"), (joined, "joined")) if names]
    return Line("nodes", "changed", ", ".join(said), *_where(new))


def _data(span: _Span, launch: dict[str, Any]) -> list[Line]:
    found = data_read.compared(
        span.incident, span.good_step, span.bad_step, launch, attempt_before=span.before
    )
    return [Line(name, state, says, step) for name, state, says, step in found]


def _names(names: list[str]) -> str:
    shown = ", ".join(words.inert(name, 40) for name in names[:_NAMES_SHOWN])
    more = len(names) - _NAMES_SHOWN
    return f"{shown} and {words.count(more)} more" if more > 0 else shown


def _between(span: _Span, *types: str) -> list[Event]:
    """Return events of these types after the last good state and up to the first bad step, oldest first."""
    within = Q(attempt=span.after)
    if span.relaunched:
        within |= Q(attempt__gte=span.before, attempt__lt=span.after)
    timed = Q(step=None)  # told without a step, as nodes do: then its time decides
    if span.good_at is not None:
        timed &= Q(occurred_at__gte=span.good_at)
    inside = Q(step__isnull=False)
    if span.good_step is not None:
        inside &= Q(step__gt=span.good_step)
    if span.bad_step is not None:
        inside &= Q(step__lte=span.bad_step)
    rows = Event.objects.filter(within, timed | inside, run_id=span.incident.run_id)
    rows = rows.filter(type__in=types, received_at__lte=span.incident.opened_at)
    # In the order of the index: sorted by id, a run's millions of events would be walked for a handful.
    found = rows.order_by("-attempt", "-type", "-step")[:_EVENTS]
    return sorted(found, key=lambda event: (event.occurred_at, event.pk))


def _events(span: _Span) -> list[Line]:
    found = _between(span, *_CALENDAR, *_BOUNDARIES)
    calendar = [event for event in found if event.type in _CALENDAR]
    boundaries = [event for event in found if event.type in _BOUNDARIES]
    lines = [_schedule(span, boundaries)]
    if not calendar:
        lines.append(
            Line("fleet calendar", "not known", "no node state, stop request or preflight was reported")
        )
    lines += [
        Line("fleet calendar", "changed", _calendar_words(event), event.step, event.occurred_at)
        for event in calendar[-_NAMES_SHOWN:]
    ]
    return lines


def _schedule(span: _Span, boundaries: list[Event]) -> Line:
    if boundaries:
        last = boundaries[-1]
        said = [_boundary_words(event) for event in boundaries]
        return Line(
            "lr phase", "changed", said[-1], last.step, last.occurred_at, more=said[:-1][-_NAMES_SHOWN:]
        )
    rates = data_read.learning_rates(span.incident, span.good_step, span.bad_step, span.before)
    if rates is None:
        return Line("lr phase", "not known", "no boundary and no learning rate was reported")
    old, new = rates
    says = (
        words.learning_rate(new) if old == new else f"{words.learning_rate(old)} → {words.learning_rate(new)}"
    )
    return Line("lr phase", "unchanged", f"no boundary declared, lr {says}")


def _boundary_words(event: Event) -> str:
    data = event.data
    name = data.get("name") or data.get("boundary") or data.get("kind") or data.get("reason") or "boundary"
    at = f", step {words.count(event.step)}" if event.step is not None else ""
    return f"{words.inert(name, 80)}{at}"


def _calendar_words(event: Event) -> str:
    data = event.data
    what = data.get("state") or data.get("reason") or data.get("result") or data.get("xid") or ""
    node = words.inert(event.node or data.get("node") or "", 48)
    pieces = [event.type.replace(".", " ").replace("_", " "), node, words.inert(what, 60) if what else ""]
    return ", ".join(piece for piece in pieces if piece)


def _restarts(span: _Span, attempts: dict[int, Attempt]) -> Line:
    since = [attempts[number] for number in sorted(attempts) if span.before < number <= span.after]
    if not since:
        return Line("restarts", "unchanged", "none")
    said = [
        f"attempt {row.number}" + ("" if row.launch_reported else ", launch not reported") for row in since
    ]
    return Line(
        "restarts", "changed", ", ".join(said[-_NAMES_SHOWN:]), *_where(since[-1]), more=said[:-_NAMES_SHOWN]
    )
