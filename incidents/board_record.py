"""What is stored about an incident, read for its diagnosis board: rows in, `andon.diagnose.Record` out.

Everything is bounded by the window around the first bad step or by a count, so that the board of a run
of 16,384 ranks costs no more than that of one of 8.
"""

from typing import Any

from django.db.models import F, Func, JSONField, QuerySet, Value

from andon.diagnose.record import Before, Kept, Launch, Posted, Record, Seen
from incidents import diagnosis
from incidents.models import Incident
from runs.models import Attempt, Checkpoint, Event, Finding

FINDINGS = 500
STEPS_BEFORE = 60  # a baseline of the curves, and the ten steps in which a creep shows
STEPS_AFTER = 12  # a spike's peak comes after its first bad step
BATCH_STEPS = 16
EVENTS = 400
WHOLE_DUMPS = 64  # above it only the end of each rank's flight recorder is read: who entered what last
DUMPS = 20_000
CHECKPOINTS = 20
EARLIER = 200
_REPORTS = (
    "hardware.xid",
    "hardware.ecc",
    "hardware.thermal",
    "hardware.link",
    "process.error",
    "preflight.report",
    "checksum.report",
    "twin.report",
    "restore.report",
    "schedule.boundary",
)


def read(incident: Incident, first_bad: dict[str, Any]) -> Record:
    """Return everything that may speak about the cause of `incident`.

    Args:
        first_bad: the first-bad document as it is now.
    """
    found = Finding.objects.filter(run_id=incident.run_id, incident=str(incident.pk))
    rows = list(found.order_by("step", "id")[:FINDINGS])
    step = first_bad.get("step")
    return Record(
        incident=f"I-{incident.pk}",
        run=incident.run.slug,
        attempt=incident.attempt,
        first=first_bad if step is not None else {},
        findings=[_seen(row) for row in rows],
        launches=_launches(incident),
        events=_events(incident, step, first_bad.get("ranks") or []),
        checkpoints=_checkpoints(incident, step),
        earlier=_earlier(incident),
        recurrence=diagnosis.known_recurrence(incident),
        applied=diagnosis.applied(rows, first_bad),
        held_by_hand=not rows,
    )


def _seen(row: Finding) -> Seen:
    return Seen(
        id=f"F-{row.pk}",
        kind=row.kind,
        severity=row.severity,
        rule=row.rule,
        step=row.step,
        lanes=list(row.lanes),
        series=row.series,
        view=row.view,
        score=row.score,
        numbers=dict(row.numbers),
        detail=row.detail,
    )


def _launches(incident: Incident) -> list[Launch]:
    newest = Attempt.objects.filter(run_id=incident.run_id, number__lte=incident.attempt).defer("groups")
    return [
        Launch(
            id=f"N-{row.number}",
            number=row.number,
            first_step=row.first_step,
            world_size=row.world_size,
            precision=row.precision,
            config_sha256=row.config_sha256,
            environment_sha256=row.environment_sha256,
            nodes=row.nodes if row.number == incident.attempt else [],
            data=row.data,
        )
        for row in newest.order_by("-number")[:2]
    ]


def _events(incident: Incident, step: int | None, ranks: list[int]) -> list[Posted]:
    mine = Event.objects.filter(run_id=incident.run_id, attempt=incident.attempt)
    found = list(mine.filter(type__in=_REPORTS).order_by("-id")[:EVENTS])
    found += _dumps(mine)
    if step is not None:
        window = mine.filter(step__range=(max(0, step - STEPS_BEFORE), step + STEPS_AFTER))
        found += window.filter(type="step", rank=None).order_by("step", "id")[:EVENTS]
        batches = mine.filter(type="batch.seen", step__range=(max(0, step - BATCH_STEPS), step))
        if ranks:
            batches = batches.filter(rank__in=ranks[:8])
        found += batches.order_by("-step", "id")[:EVENTS]
    return [_posted(event) for event in found]


def _dumps(mine: QuerySet[Event]) -> list[Event]:
    dumps = mine.filter(type="flight_recorder.dump")
    if len(dumps.values_list("id")[: WHOLE_DUMPS + 1]) <= WHOLE_DUMPS:
        return list(dumps.order_by("id"))
    ends = dumps.defer("data").annotate(
        end=Func(
            F("data"),
            Value("$.entries[last - 2 to last]"),
            function="jsonb_path_query_array",
            template="%(function)s(%(expressions)s::jsonpath)",
            output_field=JSONField(),
        )
    )
    found: list[Event] = list(ends.order_by("id")[:DUMPS])
    for event in found:
        event.data = {"entries": getattr(event, "end", [])}
    return found


def _posted(event: Event) -> Posted:
    return Posted(
        id=f"{'P' if event.type == 'preflight.report' else 'V'}-{event.pk}",
        type=event.type,
        step=event.step,
        rank=event.rank,
        node=event.node,
        at=event.occurred_at.timestamp(),
        data=event.data,
        flags=event.flags,
    )


def _checkpoints(incident: Incident, step: int | None) -> list[Kept]:
    # A later attempt runs the same steps again: its checkpoints say nothing about this failure.
    found = Checkpoint.objects.filter(run_id=incident.run_id, attempt__lte=incident.attempt)
    found = found.exclude(state=Checkpoint.State.DELETED)
    if step is not None:
        found = found.filter(step__lt=step)
    rows = found.order_by("-step", "-id").values_list("id", "step", "state", "uri", "attempt")[:CHECKPOINTS]
    return [Kept(id=f"C-{pk}", step=at, state=state, uri=uri, attempt=n) for pk, at, state, uri, n in rows]


def _earlier(incident: Incident) -> list[Before]:
    """Return earlier incidents of the project with the nodes they began on, as they wrote them down."""
    before = Incident.objects.filter(run__project_id=incident.run.project_id, pk__lt=incident.pk)
    rows = before.exclude(traits=None).order_by("-pk").values_list("pk", "kind", "first_bad", "traits")
    found = []
    for pk, kind, first_bad, traits in rows[:EARLIER]:
        nodes = [str(node) for node in (traits or {}).get("nodes") or []]
        found.append(Before(id=f"I-{pk}", kind=kind, step=first_bad.get("step"), nodes=nodes))
    return found
