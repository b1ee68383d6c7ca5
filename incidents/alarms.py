"""The line under the bar of every page: a run that is held, an incident that nobody acknowledged."""

from datetime import datetime

from django.utils import timezone

from incidents import answers, firstbad
from incidents.holding import held_since_of
from incidents.models import Incident
from incidents.page import AlarmLine
from incidents.queries import visible_incidents
from runs import formatting as words
from runs.models import Person

S = Incident.State


def alarm_lines(person: Person, *, now: datetime | None = None) -> list[AlarmLine]:
    """Return one line per run of the person's projects that is held or has an unacknowledged incident."""
    now = now or timezone.now()
    found = list(
        visible_incidents(person)
        .filter(state__in=Incident.UNRESOLVED)
        .select_related("run", "lead", "acknowledged_by")
        .order_by("opened_at", "id")
    )
    held = held_since_of({incident.run_id for incident in found})
    shown = [one for one in found if one.run_id in held or one.acknowledged_at is None]
    nodes = firstbad.only_node(shown)
    return [_line(one, held.get(one.run_id), nodes.get(one.pk, ""), now) for one in shown]


def _line(incident: Incident, since: datetime | None, node: str, now: datetime) -> AlarmLine:
    cell = answers.headline(incident, {**firstbad.UNKNOWN, **incident.first_bad}, node)
    return AlarmLine(
        incident=incident.pk,
        run=incident.run.slug,
        held=since is not None,
        says=f"{incident.run.slug} {_doing(incident, since, now)}, incident {incident.pk}, {cell}. "
        f"{_who(incident)}",
        acknowledged=incident.acknowledged_at is not None,
    )


def _doing(incident: Incident, since: datetime | None, now: datetime) -> str:
    """Return what the run does, in the words of the incident's state."""
    if incident.state == S.WATCHING:
        until = incident.watch_until_step
        return "runs again, watched" + (f" to step {words.count(until)}" if until is not None else "")
    if since is None:
        # An incident that holds nothing: the run never stopped.
        return "runs on"
    held = f"held {words.duration((now - since).total_seconds())}"
    if incident.state == S.APPROVED:
        return f"{held}, resume approved"
    if incident.state == S.RESUMING:
        return f"resuming after {held.removeprefix('held ')} held"
    return held


def _who(incident: Incident) -> str:
    if incident.lead is not None:
        return f"{incident.lead.username} has it."
    if incident.acknowledged_by is not None:
        return f"{incident.acknowledged_by.username} acknowledged it."
    return "Nobody has acknowledged it."
