"""What the board's part of the incident page shows, for whom."""

from incidents import board, roles
from incidents.incident_page import IncidentPage
from runs.access import project_member
from runs.models import Person


def context(page: IncidentPage, person: Person) -> dict[str, object]:
    """Return the board and whether this person works it."""
    return {
        "page": page,
        "board": board.of(page.incident, person=person, first_bad=page.first_bad_document),
        "may_diagnose": project_member(person, page.run.project, *roles.RESPONDERS),
    }
