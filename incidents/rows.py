"""Rows of the incident page: requests, timeline, ledger, findings, with names for people."""

import uuid
from collections.abc import Iterable

from incidents import holding
from incidents.ledger import POSITIONS, REQUIRED
from incidents.models import Incident, LedgerRow, Permit, ResumeRequest, StateChange, TimelineEntry
from incidents.page import FindingLine, LedgerLine, RequestView, StateStep, TimelineRow
from runs import formatting as words
from runs.models import Finding, Person

TIMELINE_ROWS = 300
_SOURCES = {"people": "people", "trainer": "trainer", "andon": "Andon"}


def request_view(request: ResumeRequest) -> RequestView:
    """Return a request with its approvals and its permit; both are prefetched by the caller."""
    permit: Permit | None = getattr(request, "permit", None)
    return RequestView(
        id=request.pk,
        kind=request.kind,
        state=request.state,
        by=request.requested_by.username if request.requested_by else "Andon",
        at=request.requested_at,
        note=request.note,
        plan_number=request.plan.number,
        digest=request.digest,
        approvals=[(approval.approver.username, approval.at) for approval in request.approvals.all()],
        needed=request.approvers_needed,
        expires_at=request.expires_at,
        ended_at=request.ended_at,
        ended_why=[str(why) for why in request.ended_why],
        permit=str(permit.public_id) if permit else "",
        permit_state=permit.state if permit else "",
        permit_expires_at=permit.expires_at if permit else None,
        exchanged_at=permit.exchanged_at if permit else None,
        exchanged_by=permit.exchanged_by if permit else "",
    )


def timeline(incident: Incident, findings: list[Finding]) -> list[TimelineRow]:
    """Return the timeline, newest first; alike findings are one row with a count."""
    entries = incident.timeline.select_related("person").order_by("-occurred_at", "-id")[:TIMELINE_ROWS]
    rows = [_entry(entry) for entry in entries]
    rows += _folded(findings)
    return sorted(rows, key=lambda row: (row.occurred_at, row.received_at), reverse=True)[:TIMELINE_ROWS]


def _entry(entry: TimelineEntry) -> TimelineRow:
    return TimelineRow(
        occurred_at=entry.occurred_at,
        received_at=entry.received_at,
        lag=words.lag(entry.occurred_at, entry.received_at),
        source=_SOURCES.get(entry.source, entry.source),
        by=entry.person.username if entry.person else entry.by or "Andon",
        kind=entry.kind,
        text=entry.text,
    )


def _folded(findings: list[Finding]) -> list[TimelineRow]:
    groups: dict[tuple[str, str, str, int | None], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.kind, finding.severity, finding.series, finding.step), []).append(finding)
    rows = []
    for (kind, severity, _, step), alike in groups.items():
        first = min(alike, key=lambda finding: (finding.occurred_at, finding.pk))
        ranks = sorted({lane for finding in alike for lane in finding.lanes if isinstance(lane, int)})
        text = f"{kind.replace('_', ' ')} ({severity})"
        if step is not None:
            text += f" at step {words.count(step)}"
        if ranks:
            text += f", {words.rank_words(ranks)}"
        if first.detail:
            text += f": {words.inert(first.detail, 300)}"
        rows.append(
            TimelineRow(
                occurred_at=first.occurred_at,
                received_at=first.received_at,
                lag=words.lag(first.occurred_at, first.received_at),
                source="Andon",
                by=holding.rule_name(first),
                kind="finding",
                text=text,
                count=len(alike),
            )
        )
    return rows


def finding_line(finding: Finding) -> FindingLine:
    """Return a finding with the numbers it used."""
    return FindingLine(
        id=finding.pk,
        kind=finding.kind,
        severity=finding.severity,
        rule=finding.rule,
        mode=finding.mode,
        step=finding.step,
        lanes=list(finding.lanes),
        series=finding.series,
        view=finding.view,
        score=finding.score,
        numbers=dict(finding.numbers),
        detail=finding.detail,
        detector=holding.rule_name(finding),
        occurred_at=finding.occurred_at,
        received_at=finding.received_at,
        backfill=finding.backfill,
    )


def ledger_lines(rows: Iterable[LedgerRow], run: str = "") -> list[LedgerLine]:
    """Return ledger rows in the order given; opaque ids of people become names where there still are any.

    Args:
        run: the one run of all of them; "": each row's own, which the caller has read with it.
    """
    listed = list(rows)
    names = person_names(row.decided_by for row in listed)
    return [
        LedgerLine(
            seq=row.seq,
            at=row.at,
            run=run or row.run.slug,
            incident=row.incident_id,
            attempt=row.attempt,
            action=row.action,
            step=row.step,
            ranks=row.ranks,
            ranks_say=words.rank_words(row.ranks) if row.ranks else "",
            before=row.before,
            after=row.after,
            loader_says=_loader_words(row),
            positions=_positions(row),
            checkpoint=row.checkpoint,
            detector=row.detector,
            decided_by=names.get(row.decided_by, "Andon" if row.decided_by == "andon" else row.decided_by),
            why=row.why,
            samples_skipped=row.samples_skipped,
            steps_lost=row.steps_lost,
            gpu_hours_lost=row.gpu_hours_lost,
            budget=row.budget,
            none_because=row.none_because,
            absent=_absent(row.none_because),
            digest=row.digest,
            previous=row.previous,
        )
        for row in listed
    ]


def _loader_words(row: LedgerRow) -> str:
    before, after = ((side or {}).get("loader_position") for side in (row.before, row.after))
    if before is None and after is None:
        return ""
    if before == after:
        return words.count(before)
    return f"{words.count(before)} → {words.count(after)}"


def _positions(row: LedgerRow) -> list[tuple[str, str, str]]:
    if row.before is None and row.after is None:
        return []
    before, after = row.before or {}, row.after or {}
    return [
        (name.replace("_", " "), words.count(before.get(name)), words.count(after.get(name)))
        for name in POSITIONS
    ]


def _absent(none_because: dict[str, str]) -> list[tuple[str, str]]:
    """Return ("step, ranks", reason) with each reason once: most rows lack several things for one reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in none_because.items():
        by_reason.setdefault(reason.removeprefix("none: "), []).append(name)
    return [(_field_words(fields), reason) for reason, fields in by_reason.items()]


def _field_words(fields: list[str]) -> str:
    sides = ("before", "after")
    said = [name for name in REQUIRED if name in fields and name not in sides]
    said += (
        ["loader"] if set(sides) <= set(fields) else [f"loader {name}" for name in sides if name in fields]
    )
    for name in fields:
        side, _, position = name.partition(".")
        if position:
            said.append(f"{position} {side}".replace("_", " "))
        elif name not in REQUIRED:
            said.append(name.replace("_", " "))
    return ", ".join(said)


def person_names(ids: Iterable[str]) -> dict[str, str]:
    """Return the user names of opaque ids; what is no id of a person is left out."""
    wanted = set()
    for text in ids:
        try:
            wanted.add(uuid.UUID(text))
        except ValueError:
            continue
    people = Person.objects.filter(opaque_id__in=wanted) if wanted else []
    return {str(person.opaque_id): person.username for person in people}


def state_steps(incident: Incident) -> list[StateStep]:
    """Return the turning points, oldest first."""
    changes: Iterable[StateChange] = incident.changes.select_related("person").order_by("at", "id")
    return [
        StateStep(
            before=change.before,
            after=change.after,
            at=change.at,
            by=change.person.username if change.person else "Andon",
            why=change.why,
        )
        for change in changes
    ]
