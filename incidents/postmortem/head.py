"""Head, impact and phases: what happened when, and what it cost."""

from datetime import datetime

from andon.postmortem.document import Item, Row, Table
from incidents import costs
from incidents.models import Incident, LedgerRow
from incidents.postmortem import goodput
from incidents.postmortem.book import Book, Source
from incidents.postmortem.facts import Facts
from incidents.postmortem.words import minutes, plain, stamp
from runs import formatting
from runs.models import Checkpoint

RESUMES = ("resume", "rollback")


def head(book: Book, facts: Facts) -> Table:
    """Return run, attempt, worst finding and the four moments."""
    incident, leading = facts.incident, facts.leading
    resumed = facts.acted("resume")
    rows = [
        book.row(("Run", f"{incident.run.slug}, attempt {incident.attempt}"), incident),
        book.row(("State", incident.state.replace("_", " ")), incident),
        book.row(("Worst finding", _worst(facts)), leading or incident),
        book.row(("Opened", stamp(incident.opened_at)), incident),
        book.row(("Contained", _contained(facts)), facts.contained or incident),
        book.row(("Resumed", stamp(resumed.at) if resumed else "not resumed"), resumed or incident),
        book.row(("Resolved", stamp(incident.resolved_at) if incident.resolved_at else "not yet"), incident),
    ]
    return Table(("", ""), tuple(rows))


def _worst(facts: Facts) -> str:
    row = facts.leading
    if row is None:
        return "none: the run was held by a person"
    words = f"{row.kind.replace('_', ' ')}, {row.severity}"
    return words if row.step is None else f"{words}, step {formatting.count(row.step)}"


def _contained(facts: Facts) -> str:
    if facts.contained is not None:
        return f"{stamp(facts.contained.received_at)}, all ranks {facts.contained.state}"
    if facts.attempt is not None and facts.attempt.exited_at is not None:
        return f"{stamp(facts.attempt.exited_at)}, the attempt was gone"
    return "not known: not every rank said that it stopped"


def impact(book: Book, facts: Facts) -> list[Item]:
    """Return what it cost, as a table."""
    incident, gpus = facts.incident, facts.attempt.world_size if facts.attempt else None
    before, held, again = _before(book, facts, gpus), _held(book, facts, gpus), _again(book, facts)
    rows = [row for row, _ in (before, held, again)]
    rows.append(_money(book, facts, [hours for _, hours in (before, held, again)]))
    said, launches = goodput.of_week(facts)
    sources: list[Source] = [*launches] if launches else [incident]
    rows.append(book.row(("Goodput of that week", said), *sources))
    rows += _samples(book, facts)
    return [Table(("", ""), tuple(rows))]


Counted = tuple[Row, float | None]


def _before(book: Book, facts: Facts, gpus: int | None) -> Counted:
    """Work after the last committed checkpoint was lost when the run failed."""
    name = "GPU‑hours lost before the failure"
    step, incident = facts.first_bad["step"], facts.incident
    if step is None:
        return book.row((name, "none: nothing failed"), incident), 0.0
    kept = Checkpoint.objects.filter(run_id=incident.run_id, step__lt=step, attempt__lte=incident.attempt)
    kept = kept.exclude(state__in=("deleted", "bad"))
    newest = kept.defer("files").order_by("-step", "-id").first()
    seconds = costs.step_time_s(incident.run, incident.attempt)
    if newest is None or seconds is None or gpus is None:
        lacks = "no checkpoint" if newest is None else "no step time" if seconds is None else "no world size"
        return book.row((name, f"not measured: {lacks} was reported"), facts.attempt or incident), None
    hours = (step - newest.step) * seconds * gpus / 3600
    said = f"{_hours(hours)}: {step - newest.step:,} steps since the checkpoint of step {newest.step:,}"
    return book.row((name, said), newest, facts.origin or incident), hours


def _held(book: Book, facts: Facts, gpus: int | None) -> Counted:
    name = "GPU‑hours held"
    hold, resumed = facts.acted("hold"), facts.acted("resume")
    if hold is None:
        return book.row((name, "none: the run was not held"), facts.incident), 0.0
    began, end = hold.at, _hold_ended(facts, resumed)
    if end is None:
        return book.row((name, "not known yet: the run is held"), hold), None
    sources: list[Source] = [hold, resumed or facts.incident]
    if gpus is None:
        return book.row((name, f"not measured: held {minutes(began, end)}, no world size"), *sources), None
    hours = (end - began).total_seconds() / 3600 * gpus
    said = f"{_hours(hours)}: {minutes(began, end)} on {gpus:,} GPUs"
    if facts.incident.state == Incident.State.FALSE_ALARM and hold.detector:
        said += ", a false alarm: charged to Andon"
    return book.row((name, said), *sources), hours


def _hold_ended(facts: Facts, resumed: LedgerRow | None) -> datetime | None:
    return resumed.at if resumed else facts.resolved_at


def _again(book: Book, facts: Facts) -> Counted:
    name = "GPU‑hours run again"
    row = facts.acted("rollback")
    if row is None:
        said = "none: no step was run again" if facts.acted("resume") else "none yet: the run did not go back"
        return book.row((name, said), facts.acted("resume") or facts.incident), 0.0
    if row.gpu_hours_lost is None:
        return book.row((name, "not measured: step time or world size was not reported"), row), None
    return book.row(
        (name, f"{_hours(row.gpu_hours_lost)}: {row.steps_lost:,} steps"), row
    ), row.gpu_hours_lost


def _money(book: Book, facts: Facts, hours: list[float | None]) -> Row:
    known = [one for one in hours if one is not None]
    total = sum(known) * facts.policy.cost.gpu_hour_price
    said = f"{formatting.money(total)} at {formatting.money(facts.policy.cost.gpu_hour_price)} a GPU‑hour"
    if len(known) < len(hours):
        said += ", without what was not measured"
    return book.row(("Money", said), facts.incident)


def _samples(book: Book, facts: Facts) -> list[Row]:
    rollback, skips = facts.acted("rollback"), [row for row in facts.ledger if row.action == "skip"]
    sources: list[Source] = [*skips] if skips else [facts.incident]
    rows = []
    if rollback is not None:
        back = _between(rollback)
        said = f"{rollback.steps_lost:,} steps" if rollback.steps_lost is not None else "steps not known"
        said += f", {back:,} samples" if back is not None else ", samples not known"
        rows.append(book.row(("Repeated", said), rollback))
    skipped = sum(row.samples_skipped or 0 for row in skips)
    said = f"{skipped:,} samples" if skips else "none"
    rows.append(book.row(("Skipped", said), *sources))
    return rows


def _between(row: LedgerRow) -> int | None:
    before, after = ((side or {}).get("loader_position") for side in (row.before, row.after))
    return before - after if before is not None and after is not None and before >= after else None


def _hours(hours: float) -> str:
    return formatting.gpu_hours(hours)


def phases(book: Book, facts: Facts) -> Table:
    """Return detect, contain, preserve, diagnose and resume, with minutes each."""
    incident, origin = facts.incident, facts.origin
    opened, resumed = incident.opened_at, facts.acted("resume")
    contained = facts.contained
    sealed = [item for item in facts.items if item.required and item.sealed_at is not None]
    last = max(sealed, key=lambda item: (item.sealed_at, item.pk), default=None)
    whole = all(
        item.sealed_at or item.state == "not_applicable" or item.waived_at
        for item in facts.items
        if item.required
    )
    request = facts.requests[-1] if facts.requests else None
    cause = facts.cause
    rows = [
        _phase(book, "Detect", origin.occurred_at if origin else None, opened, origin or incident, incident),
        _phase(book, "Contain", opened, contained.received_at if contained else None, incident, contained),
        _phase(book, "Preserve", opened, last.sealed_at if last and whole else None, incident, last),
        _phase(book, "Diagnose", opened, cause.at if cause else None, incident, cause),
        _phase(
            book,
            "Resume",
            request.requested_at if request else None,
            resumed.at if resumed else None,
            request or incident,
            resumed,
        ),
    ]
    return Table(("Phase", "From", "Until", "Minutes"), tuple(rows))


def _phase(
    book: Book, name: str, start: datetime | None, end: datetime | None, first: Source, then: Source | None
) -> Row:
    until = stamp(end) if end else "not yet"
    sources = [first] if then is None else [first, then]
    return book.row((name, stamp(start), until, minutes(start, end)), *sources)


def timeline(book: Book, facts: Facts) -> Table:
    """Return what happened, oldest first: the timeline's entries and what detectors said."""
    lines: list[tuple[datetime, str, Row]] = []
    for entry in facts.timeline:
        by = f"{{{entry.person.opaque_id}}}" if entry.person else plain(entry.by or "Andon", 80)
        lag = formatting.lag(entry.occurred_at, entry.received_at)
        row = book.row((stamp(entry.occurred_at), lag, plain(entry.text), by), entry)
        lines.append((entry.occurred_at, f"T-{entry.pk:020d}", row))
    groups: dict[tuple[str, str, int | None], list[int]] = {}
    for index, finding in enumerate(facts.findings):
        groups.setdefault((finding.kind, finding.severity, finding.step), []).append(index)
    for (kind, severity, step), indexes in groups.items():
        alike = [facts.findings[index] for index in indexes]
        first = min(alike, key=lambda one: (one.occurred_at, one.pk))
        words = f"{kind.replace('_', ' ')} ({severity})"
        words += f" at step {formatting.count(step)}" if step is not None else ""
        words += f": {plain(first.detail)}" if first.detail else ""
        words += f", {len(alike)} times" if len(alike) > 1 else ""
        by = f"{plain(first.detector, 60)} v{plain(first.detector_version, 20)}"
        lag = formatting.lag(first.occurred_at, first.received_at)
        row = book.row((stamp(first.occurred_at), lag, words, by), first)
        lines.append((first.occurred_at, f"F-{first.pk:020d}", row))
    ordered = [row for *_, row in sorted(lines, key=lambda line: line[:2])]
    if facts.timeline_count > len(facts.timeline):
        left = facts.timeline_count - len(facts.timeline)
        ordered.append(book.row(("later", "", f"{left:,} further entries", "Andon"), facts.incident))
    return Table(("Occurred", "Received", "What", "By"), tuple(ordered))
