"""Everything the pages and the read API show of incidents, filtered by membership.

A person who does not belong to the project of a run gets `Incident.DoesNotExist` (404), as for an
incident that does not exist. `incident_page` assembles the whole incident page in a fixed number of
queries; templates only lay out what it returns.
"""

from datetime import datetime

from django.db.models import QuerySet

from incidents.models import Incident
from incidents.page import AlarmLine, IncidentLine, IncidentPage, LedgerLine
from runs.models import Person, Run


def visible_incidents(person: Person) -> QuerySet[Incident]:
    """Return the incidents a person may see."""
    raise NotImplementedError


def incident_for(person: Person, incident_id: int) -> Incident:
    """Return an incident with its run.

    Raises:
        Incident.DoesNotExist: there is none, or the person may not see it.
    """
    raise NotImplementedError


def incident_list(
    person: Person,
    *,
    run: str = "",
    state: str = "",
    before: tuple[datetime, int] | None = None,
    limit: int = 50,
) -> list[IncidentLine]:
    """Return incidents newest first; `state` "open" means every unresolved state.

    Args:
        before: (opened_at, id) of the last line of the page before, for the next page.
    """
    raise NotImplementedError


def incident_page(person: Person, incident_id: int, *, now: datetime | None = None) -> IncidentPage:
    """Return everything the incident page shows.

    Raises:
        Incident.DoesNotExist: there is none, or the person may not see it.
    """
    raise NotImplementedError


def alarm_lines(person: Person, *, now: datetime | None = None) -> list[AlarmLine]:
    """Return one line per run of the person's projects that is held or has an unacknowledged incident."""
    raise NotImplementedError


def open_count(person: Person) -> int:
    """Return how many unresolved incidents the person may see: the number in the bar."""
    raise NotImplementedError


def ledger_lines(
    run: Run, *, before_seq: int | None = None, incident: Incident | None = None, limit: int = 100
) -> list[LedgerLine]:
    """Return ledger rows newest first. The caller has checked that the person may see `run`."""
    raise NotImplementedError
