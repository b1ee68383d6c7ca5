"""The line under the bar of every page: a run that is held, an incident that nobody acknowledged."""

from collections.abc import Collection
from datetime import datetime

from django.utils import timezone

from incidents import answers, firstbad
from incidents.holding import held_since_of
from incidents.models import Incident, ResumeRequest
from incidents.page import AlarmLine
from incidents.queries import visible_incidents
from runs import formatting as words
from runs.models import Attempt, Person

S = Incident.State


def alarm_lines(person: Person, *, now: datetime | None = None) -> list[AlarmLine]:
    """Return one line per run of the person's projects that is held or has an unacknowledged incident.

    What holds most GPUs comes first: with ten incidents the oldest is not the one that costs.
    """
    now = now or timezone.now()
    found = list(
        visible_incidents(person)
        .filter(state__in=Incident.UNRESOLVED)
        .select_related("run", "lead", "acknowledged_by")
        .order_by("opened_at", "id")
    )
    held = held_since_of({incident.run_id for incident in found})
    glass = broken_glass([one.pk for one in found])
    shown = [one for one in found if one.run_id in held or one.acknowledged_at is None or one.pk in glass]
    nodes = firstbad.only_node(shown)
    idle = _gpus([one for one in shown if one.run_id in held])
    lines = [
        _line(
            one,
            held.get(one.run_id),
            nodes.get(one.pk, ""),
            now,
            idle_gpus=idle.get(one.pk, 0),
            glass=glass.get(one.pk, ""),
        )
        for one in shown
    ]
    return sorted(lines, key=lambda line: -line.idle_gpus)


def _gpus(incidents: list[Incident]) -> dict[int, int]:
    """Return how many GPUs each held run has, by incident id, where its launch said so."""
    rows = Attempt.objects.filter(run__in={one.run_id for one in incidents}, world_size__isnull=False)
    sizes = {(run, number): size for run, number, size in rows.values_list("run", "number", "world_size")}
    return {one.pk: size for one in incidents if (size := sizes.get((one.run_id, one.attempt)))}


def others_words(lines: list[AlarmLine]) -> str:
    """Return what one line says of the incidents beside the one somebody looks at."""
    held = sum(line.held for line in lines)
    said = [f"{len(lines)} other {'incident' if len(lines) == 1 else 'incidents'}, {held} held"]
    nobody = sum(not line.acknowledged for line in lines)
    if nobody:
        said.append(f"{nobody} not acknowledged")
    if lines[0].idle_gpus:
        said.append(f"most GPUs idle: {words.inert(lines[0].run, 40)}, {words.count(lines[0].idle_gpus)}")
    return "; ".join(said)


def broken_glass(incidents: Collection[int]) -> dict[int, str]:
    """Return who broke the glass of which incident, and why; it stands until the incident is resolved."""
    if not incidents:
        return {}
    rows = ResumeRequest.objects.filter(
        incident__in=incidents,
        kind=ResumeRequest.Kind.BREAK_GLASS,
        state__in=[ResumeRequest.State.APPROVED, ResumeRequest.State.USED],
    )
    found = rows.order_by("id").values_list("incident_id", "requested_by__username", "note")
    return {pk: f"{by} broke the glass: {words.inert(note, 200)}" for pk, by, note in found}


def _line(
    incident: Incident, since: datetime | None, node: str, now: datetime, *, idle_gpus: int, glass: str
) -> AlarmLine:
    cell = answers.headline(incident, {**firstbad.UNKNOWN, **incident.first_bad}, node)
    return AlarmLine(
        incident=incident.pk,
        run=incident.run.slug,
        held=since is not None,
        says=f"{incident.run.slug} {_doing(incident, since, now)}, incident {incident.pk}, {cell}. "
        f"{_who(incident)}",
        acknowledged=incident.acknowledged_at is not None,
        idle_gpus=idle_gpus,
        glass=glass,
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
