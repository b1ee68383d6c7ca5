"""Everything the pages and the read API show of incidents, filtered by membership.

A person who does not belong to the project of a run gets `Incident.DoesNotExist` (404), as for an
incident that does not exist.
"""

from collections import defaultdict
from datetime import datetime

from django.db.models import Q, QuerySet
from django.utils import timezone

from evidence.models import Item
from evidence.queries import Counts
from incidents import answers, diagnosis, firstbad
from incidents.incident_page import IncidentPage
from incidents.models import Incident
from incidents.page import IncidentLine
from runs.access import visible_runs
from runs.directives import Obedience, obedience
from runs.models import Directive, Person

NOBODY: Obedience = {"obeyed": 0, "of": 0, "silent": [], "step": None}


def visible_incidents(person: Person) -> QuerySet[Incident]:
    """Return the incidents a person may see."""
    return Incident.objects.filter(run__in=visible_runs(person))


def incident_for(person: Person, incident_id: int) -> Incident:
    """Return an incident with its run.

    Raises:
        Incident.DoesNotExist: there is none, or the person may not see it.
    """
    return (
        visible_incidents(person)
        .select_related(
            *("run", "run__project", "dossier", "acknowledged_by"),
            *("lead", "evidence_owner", "communications"),
        )
        .get(pk=incident_id)
    )


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
    found = visible_incidents(person).select_related("run", "lead")
    if run:
        found = found.filter(run__slug=run)
    if state:
        found = found.filter(state__in=Incident.UNRESOLVED if state == "open" else [state])
    if before is not None:
        at, pk = before
        found = found.filter(Q(opened_at__lt=at) | Q(opened_at=at, pk__lt=pk))
    listed = list(found.order_by("-opened_at", "-id")[:limit])
    counts = _counts([incident.dossier_id for incident in listed])
    nodes = firstbad.only_node(listed)
    directives = _directives({incident.run_id for incident in listed})
    return [_line(incident, counts, nodes.get(incident.pk, ""), directives) for incident in listed]


def incident_page(person: Person, incident_id: int, *, now: datetime | None = None) -> IncidentPage:
    """Return the incident page; each of its pieces is read when it is asked for.

    Raises:
        Incident.DoesNotExist: there is none, or the person may not see it.
    """
    return IncidentPage(incident_for(person, incident_id), person, now or timezone.now())


def open_count(person: Person) -> int:
    """Return how many unresolved incidents the person may see: the number in the bar."""
    return visible_incidents(person).filter(state__in=Incident.UNRESOLVED).count()


def _line(
    incident: Incident,
    counts: dict[int, Counts],
    node: str,
    directives: dict[int, tuple[str, int]],
) -> IncidentLine:
    kind, seq = directives.get(incident.run_id, ("continue", 0))
    # Who obeys is asked of the newest directive only: for what is over it says nothing.
    obeys = obedience(incident.run_id) if incident.state in Incident.UNRESOLVED else NOBODY
    document = {**firstbad.UNKNOWN, **incident.first_bad}
    return IncidentLine(
        id=incident.pk,
        run=incident.run.slug,
        attempt=incident.attempt,
        state=incident.state,
        title=incident.title,
        symptom=diagnosis.words(incident.symptom).name,
        symptom_key=incident.symptom,
        severity=incident.severity,
        held=incident.state in Incident.UNRESOLVED and kind != Directive.Kind.CONTINUE,
        opened_at=incident.opened_at,
        first_bad=answers.headline(incident, document, node),
        lead=_name(incident.lead),
        acknowledged=incident.acknowledged_at is not None,
        evidence=counts[incident.dossier_id],
        directive={"kind": kind, "seq": seq, "obeyed": obeys["obeyed"], "of": obeys["of"]},
        first_bad_document=document,
    )


def _counts(dossiers: list[int]) -> dict[int, Counts]:
    """Return `evidence_counts` of many dossiers in one query; a test compares the two."""
    found: dict[int, Counts] = defaultdict(lambda: Counts(required=0, held=0, sealed=0, missing=0))
    items = Item.objects.filter(dossier_id__in=dossiers, required=True).exclude(
        state=Item.State.NOT_APPLICABLE
    )
    for dossier, state, held_at in items.values_list("dossier_id", "state", "held_at"):
        counts = found[dossier]
        counts["required"] += 1
        counts["sealed"] += state == Item.State.SEALED
        counts["held"] += state == Item.State.SEALED or held_at is not None
        counts["missing"] += state == Item.State.MISSING
    return found


def _directives(runs: set[int]) -> dict[int, tuple[str, int]]:
    newest = Directive.objects.filter(run_id__in=runs).order_by("run_id", "-seq").distinct("run_id")
    return {run: (kind, seq) for run, kind, seq in newest.values_list("run_id", "kind", "seq")}


def _name(person: Person | None) -> str:
    return person.username if person else ""
