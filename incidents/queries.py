"""Everything the pages and the read API show of incidents, filtered by membership.

A person who does not belong to the project of a run gets `Incident.DoesNotExist` (404), as for an
incident that does not exist. `incident_page` assembles the whole incident page in a fixed number of
queries; templates only lay out what it returns.
"""

from collections import defaultdict
from datetime import datetime
from typing import Any

from django.db.models import Q, QuerySet
from django.utils import timezone

from evidence.gates import resume_gate
from evidence.models import Item
from evidence.queries import Counts, evidence_counts
from incidents import answers, buttons, diagnosis, firstbad, permits, roles, rows, subjects
from incidents.answers import Situation
from incidents.models import Incident, LedgerRow, Note
from incidents.page import AlarmLine, IncidentLine, IncidentPage, LedgerLine
from runs import formatting as words
from runs.access import visible_runs
from runs.directives import Obedience, current, obedience
from runs.models import Attempt, Directive, Finding, Person, Run, RunProgress
from runs.policies import policy_for

FINDINGS = 500
DIRECTIVES_BACK = 50  # directives of one hold: a change of approval each; nobody makes fifty
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
        .select_related("run", "run__project", "dossier", "acknowledged_by", "lead")
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
    attempts = _attempts(listed)
    directives = _directives({incident.run_id for incident in listed})
    return [_line(incident, counts, attempts, directives) for incident in listed]


def incident_page(person: Person, incident_id: int, *, now: datetime | None = None) -> IncidentPage:
    """Return everything the incident page shows.

    Raises:
        Incident.DoesNotExist: there is none, or the person may not see it.
    """
    incident = incident_for(person, incident_id)
    now = now or timezone.now()
    situation = _situation(incident, now)
    findings = list(
        Finding.objects.filter(run_id=incident.run_id, incident=str(incident.pk)).order_by("step", "id")[
            :FINDINGS
        ]
    )
    made = list(incident.plans.select_related("made_by").order_by("number"))
    plan = made[-1] if made else None
    requests = list(
        incident.requests.select_related("requested_by", "plan", "permit")
        .prefetch_related("approvals__approver")
        .order_by("-id")
    )
    live = next((request for request in requests if request.state in ("open", "approved")), None)
    permit = next((found for request in requests if (found := getattr(request, "permit", None))), None)
    lacks = permits.lacking_words(situation.gate)
    signed, digest = subjects.subject(incident)
    return IncidentPage(
        incident=incident,
        run=incident.run,
        now=now,
        state=incident.state,
        title=incident.title,
        held=situation.held,
        opened_at=incident.opened_at,
        acknowledged_at=incident.acknowledged_at,
        acknowledged_by=_name(incident.acknowledged_by),
        lead=_name(incident.lead),
        first_bad=answers.first_bad(situation, signed["first_bad"]),
        evidence=answers.evidence(situation),
        running=answers.running(situation),
        next=buttons.next_answer(
            incident,
            person,
            plan=plan,
            request=live,
            permit=permit,
            evidence_lacks=lacks,
            progress=situation.progress,
            now=now,
        ),
        waiting=answers.waiting(situation) if incident.state in Incident.UNRESOLVED else None,
        gate=answers.gate(situation, plan, live),
        plan=answers.plan_view(situation, plan) if plan else None,
        plans=[answers.plan_view(situation, one) for one in made],
        request=rows.request_view(live) if live else None,
        requests=[rows.request_view(request) for request in requests],
        may_approve=[
            one.username for one in roles.free_approvers(incident, live.requested_by if live else None)
        ],
        subject=signed,
        digest=digest,
        watch_says=buttons.watch_words(incident, situation.progress),
        timeline=rows.timeline(incident, findings),
        ledger=ledger_lines(incident.run, incident=incident),
        findings=[rows.finding_line(finding) for finding in findings],
        states=rows.state_steps(incident),
        notes=_notes(incident),
    )


def alarm_lines(person: Person, *, now: datetime | None = None) -> list[AlarmLine]:
    """Return one line per run of the person's projects that is held or has an unacknowledged incident."""
    now = now or timezone.now()
    found = list(
        visible_incidents(person)
        .filter(state__in=Incident.UNRESOLVED)
        .select_related("run", "lead")
        .order_by("opened_at", "id")
    )
    directives = _directives({incident.run_id for incident in found})
    attempts = _attempts(found)
    lines = []
    for incident in found:
        held = directives.get(incident.run_id, ("continue", 0))[0] != "continue"
        if not held and incident.acknowledged_at is not None:
            continue
        since = held_since(incident.run_id) if held else None
        what = f"held {words.duration((now - since).total_seconds())}" if since else "not held"
        cell = answers.headline(
            incident, incident.first_bad, attempts.get((incident.run_id, incident.attempt))
        )
        who = f"{incident.lead.username} has it." if incident.lead else "Nobody has it yet."
        lines.append(
            AlarmLine(
                incident=incident.pk,
                run=incident.run.slug,
                held=held,
                says=f"{incident.run.slug} {what}, incident {incident.pk}, {cell}. {who}",
                acknowledged=incident.acknowledged_at is not None,
            )
        )
    return lines


def open_count(person: Person) -> int:
    """Return how many unresolved incidents the person may see: the number in the bar."""
    return visible_incidents(person).filter(state__in=Incident.UNRESOLVED).count()


def ledger_lines(
    run: Run, *, before_seq: int | None = None, incident: Incident | None = None, limit: int = 100
) -> list[LedgerLine]:
    """Return ledger rows newest first. The caller has checked that the person may see `run`."""
    found = LedgerRow.objects.filter(run=run)
    if before_seq is not None:
        found = found.filter(seq__lt=before_seq)
    if incident is not None:
        found = found.filter(incident=incident)
    return rows.ledger_lines(found.order_by("-seq")[:limit], run.slug)


def held_since(run_id: int) -> datetime | None:
    """Return since when the run is held without a break, None when it is not."""
    since: datetime | None = None
    newest = Directive.objects.filter(run_id=run_id).order_by("-seq")
    for kind, at in newest.values_list("kind", "since")[:DIRECTIVES_BACK]:
        if kind == Directive.Kind.CONTINUE:
            break
        since = at
    return since


def _situation(incident: Incident, now: datetime) -> Situation:
    return Situation(
        incident=incident,
        attempt=Attempt.objects.filter(run_id=incident.run_id, number=incident.attempt).first(),
        directive=current(incident.run_id),
        held_since=held_since(incident.run_id),
        obedience=obedience(incident.run_id),
        counts=evidence_counts(incident.dossier),
        gate=resume_gate(incident.dossier),
        progress=RunProgress.objects.filter(run_id=incident.run_id).first(),
        policy=policy_for(incident.run_id),
        now=now,
    )


def _line(
    incident: Incident,
    counts: dict[int, Counts],
    attempts: dict[tuple[int, int], Attempt],
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
        first_bad=answers.headline(incident, document, attempts.get((incident.run_id, incident.attempt))),
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


def _attempts(listed: list[Incident]) -> dict[tuple[int, int], Attempt]:
    wanted = {(incident.run_id, incident.attempt) for incident in listed}
    found = Attempt.objects.filter(
        run_id__in={run for run, _ in wanted}, number__in={number for _, number in wanted}
    )
    return {(attempt.run_id, attempt.number): attempt for attempt in found}


def _directives(runs: set[int]) -> dict[int, tuple[str, int]]:
    newest = Directive.objects.filter(run_id__in=runs).order_by("run_id", "-seq").distinct("run_id")
    return {run: (kind, seq) for run, kind, seq in newest.values_list("run_id", "kind", "seq")}


def _notes(incident: Incident) -> list[dict[str, Any]]:
    """Return notes newest first, the newest text of each; `edits` counts the texts before it."""
    replaced: dict[int, Note] = {}
    edits: dict[int, int] = {}
    shown: list[Note] = []
    for note in incident.notes.select_related("person").order_by("id"):
        if note.replaces_id is not None:
            replaced[note.replaces_id] = note
            edits[note.pk] = edits.get(note.replaces_id, 0) + 1
        shown.append(note)
    return [
        {
            "id": note.pk,
            "by": note.person.username,
            "at": note.at,
            "text": note.text,
            "edits": edits.get(note.pk, 0),
        }
        for note in reversed(shown)
        if note.pk not in replaced
    ]


def _name(person: Person | None) -> str:
    return person.username if person else ""
