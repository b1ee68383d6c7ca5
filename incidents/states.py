"""How an incident moves: compare-and-set, with a history row for every turning point."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Any

from django.utils import timezone

from evidence import custody
from evidence.models import Dossier
from evidence.retention import dates
from incidents.models import Incident, StateChange, TimelineEntry
from incidents.paging import asking
from runs.inserting import insert
from runs.models import Person
from runs.rows import raw_cursor

S = Incident.State
# From → to. What is not here cannot happen, whoever asks.
MOVES: dict[str, frozenset[str]] = {
    S.OPEN: frozenset({S.APPROVED, S.RESOLVED, S.FALSE_ALARM}),
    S.APPROVED: frozenset({S.RESUMING, S.OPEN}),
    S.RESUMING: frozenset({S.WATCHING, S.FALSE_ALARM, S.OPEN}),
    S.WATCHING: frozenset({S.RESOLVED, S.OPEN}),
}


def move(
    incident: Incident, after: str, *, person: Person | None = None, why: str = "", **fields: Any
) -> bool:
    """Move `incident` from the state it was read in to `after`; False when somebody else moved it first.

    Args:
        person: who decided; None: the system did it.
        fields: other fields of the incident that change with it.

    Raises:
        ValueError: there is no such turning point.
    """
    before = incident.state
    if after not in MOVES.get(before, frozenset()):
        raise ValueError(f"an incident does not go from {before} to {after}")
    now = timezone.now()
    if after in (S.RESOLVED, S.FALSE_ALARM):
        fields.setdefault("resolved_at", now)
    if not Incident.objects.filter(pk=incident.pk, state=before).update(state=after, **fields):
        return False
    incident.state = after
    for name, value in fields.items():
        setattr(incident, name, value)
    StateChange.objects.create(incident=incident, before=before, after=after, at=now, person=person, why=why)
    record(incident, kind="state", text=f"{before} → {after}" + (f": {why}" if why else ""), person=person)
    if after in (S.RESOLVED, S.FALSE_ALARM):
        _close_out(incident, person, why)
    return True


def _close_out(incident: Incident, person: Person | None, why: str) -> None:
    """Keep the evidence for the policy's days from now on: until here its locks had short dates."""
    who = str(person.opaque_id) if person else custody.ANDON
    said = f"incident {incident.pk} {incident.state.replace('_', ' ')}" + (f": {why}" if why else "")
    for dossier in Dossier.objects.filter(pk__in=[incident.dossier_id, *incident.earlier_dossiers]):
        dates.close_out(dossier, why=said, who=who)


def record(
    incident: Incident,
    *,
    kind: str,
    text: str,
    person: Person | None = None,
    by: str = "",
    source: str = "",
    occurred_at: datetime | None = None,
    received_at: datetime | None = None,
    data: dict[str, Any] | None = None,
) -> TimelineEntry:
    """Write one timeline entry. Without `source` it is people's when a person did it, else Andon's."""
    received = received_at or timezone.now()
    entry = TimelineEntry(
        incident=incident,
        occurred_at=occurred_at or received,
        received_at=received,
        source=source or (TimelineEntry.Source.PEOPLE if person else TimelineEntry.Source.ANDON),
        person=person,
        by=by[:100],
        kind=kind,
        text=text,
        data=data or {},
    )
    together = _together.get()
    if together is None:
        insert(entry)
        _ask_to_tell([entry])
    else:
        together.append(entry)
    return entry


@contextmanager
def recorded_together() -> Iterator[None]:
    """Write the timeline entries of this block with one statement, at its end: a post waits for each."""
    entries: list[TimelineEntry] = []
    outer = _together.set(entries)
    try:
        yield
    finally:
        _together.reset(outer)
    insert(*entries)
    _ask_to_tell(entries)


def _ask_to_tell(entries: list[TimelineEntry]) -> None:
    """Have people told, once for each incident, when one of these entries is what they must know."""
    for pk in {entry.incident_id for entry in entries if entry.kind in asking.TELLING}:
        asking.ask(pk)


_together: ContextVar[list[TimelineEntry] | None] = ContextVar("together", default=None)


def unresolved(run_id: int) -> Incident | None:
    """Return the one incident of a run that is not resolved."""
    # Mostly there is none, and three wide tables need not be named to find that out.
    with raw_cursor() as cursor:
        cursor.execute(_UNRESOLVED, (run_id, list(map(str, Incident.UNRESOLVED))))
        found = cursor.fetchone()
    return None if found is None else Incident.objects.select_related("run", "dossier").get(pk=found[0])


_UNRESOLVED = "SELECT id FROM incidents_incident WHERE run_id = %s AND state = ANY(%s)"
