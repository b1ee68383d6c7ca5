"""Further parts of the incident page, each with a template of its own: what it shows, for whom."""

from collections.abc import Callable

from incidents import board_part, changed, duties, first_hour, neighbours, watch_part
from incidents.incident_page import IncidentPage
from runs.models import Person

Context = dict[str, object]


def _changed(page: IncidentPage, person: Person) -> Context:
    return {"page": page, "changed": changed.since_last_good(page.incident)}


def _neighbours(page: IncidentPage, person: Person) -> Context:
    return {"page": page, "neighbours": neighbours.of_incident(page.incident, person)}


def _first_hour(page: IncidentPage, person: Person) -> Context:
    """Return the steps, who has which duty, and who may be given one."""
    held = {
        "lead": page.lead,
        "evidence_owner": page.evidence_owner,
        "communications": page.communications,
    }
    return {
        "page": page,
        "hour": first_hour.of(page),
        "duties": [(duty, label, held[duty]) for duty, label in duties.DUTIES.items()],
        "holders": [one.username for one in duties.holders(page.incident)],
        "me": person.username,
    }


def _similar(page: IncidentPage, person: Person) -> Context:
    return {"page": page, "similar": page.similar}


def _watch(page: IncidentPage, person: Person) -> Context:
    return {
        "page": page,
        "watch": watch_part.of_page(page),
        "width": watch_part.WIDTH,
        "height": watch_part.HEIGHT,
    }


def _notes(page: IncidentPage, person: Person) -> Context:
    return {"page": page, "me_id": person.pk}


# Rendered with the page.
WITH_PAGE: dict[str, Callable[[IncidentPage, Person], Context]] = {
    "changed": _changed,
    "first_hour": _first_hour,
    "recurrence": _similar,
    "similar": _similar,
    "watch": _watch,
    "notes": _notes,
}
# Asked for once the page is there: what is slow, or is looked at by few.
AFTER_PAGE: dict[str, Callable[[IncidentPage, Person], Context]] = {
    "neighbours": _neighbours,
    "board": board_part.context,
}
