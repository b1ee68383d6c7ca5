"""Other runs on the same node, on the same switch, and what else went wrong in the same minute.

A person is told of runs they may see, and of no other.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import connection

from incidents import launched
from incidents.models import Incident
from runs.access import visible_runs
from runs.models import Person

# Jobs that ended longer ago left nothing behind on the node that a new one would meet.
BEFORE = timedelta(hours=24)
MINUTE = timedelta(minutes=1)
_ATTEMPTS = 40
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Neighbour:
    """One other run, and what it shares: "node-07", "switch leaf-3" or "the same minute"."""

    run: str
    shares: str
    attempt: int
    since: datetime
    until: datetime | None  # None: it still runs, or nobody reported that it ended
    incident: int | None  # opened in the same minute


_SHARING = """
WITH near AS MATERIALIZED (
    SELECT run_id, number, launched_at, exited_at, nodes FROM runs_attempt
    WHERE run_id = ANY(%(runs)s) AND launched_at <= %(at)s AND (exited_at IS NULL OR exited_at >= %(since)s)
    ORDER BY launched_at DESC LIMIT %(limit)s
)
SELECT DISTINCT ON (near.run_id, near.number) near.run_id, near.number, near.launched_at, near.exited_at,
       n ->> 'node', coalesce(n ->> 'switch', n ->> 'leaf_switch', '')
FROM near CROSS JOIN LATERAL jsonb_array_elements(near.nodes) n
WHERE n ->> 'node' = ANY(%(nodes)s) OR coalesce(n ->> 'switch', n ->> 'leaf_switch') = ANY(%(switches)s)
ORDER BY near.run_id, near.number, (n ->> 'node' = ANY(%(nodes)s)) DESC
"""


def of_incident(incident: Incident, person: Person) -> list[Neighbour]:
    """Return the runs that share a node, a switch or the minute with an incident's first bad ranks."""
    others = dict(visible_runs(person).exclude(pk=incident.run_id).values_list("pk", "slug"))
    if not others:
        return []
    found = _sharing(incident, others)
    minute = Incident.objects.filter(
        run__in=others,
        opened_at__gte=incident.opened_at - MINUTE,
        opened_at__lte=incident.opened_at + MINUTE,
    )
    for other in minute.order_by("opened_at")[:_SHOWN]:
        slug = others[other.run_id]
        found.append(Neighbour(slug, "the same minute", other.attempt, other.opened_at, None, other.pk))
    return found


def _sharing(incident: Incident, others: dict[int, str]) -> list[Neighbour]:
    places = launched.places(incident.run_id, incident.attempt, incident.first_bad.get("ranks") or [])
    nodes = [place.node for place in places]
    if not nodes:
        return []
    values: dict[str, Any] = {
        "runs": list(others),
        "at": incident.opened_at,
        "since": incident.opened_at - BEFORE,
        "limit": _ATTEMPTS,
        "nodes": nodes,
        "switches": [place.switch for place in places if place.switch],
    }
    with connection.cursor() as cursor:
        cursor.execute(_SHARING, values)
        rows = cursor.fetchall()
    return [
        Neighbour(
            others[run_id], str(node) if node in nodes else f"switch {switch}", number, since, until, None
        )
        for run_id, number, since, until, node, switch in rows[:_SHOWN]
    ]
