"""The worker's look at what was posted: detectors with memory, one worker per run at a time.

What waits is a row in `pending`, never "id above the last seen", because a lower id may commit later.
Rows are deleted in the transaction that stores what their look found. An exception inside detection
costs no data: the run is marked as not watched, which pages, and the look goes on without that part.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.db import transaction
from django.db.models import Max

from andon.detect.finding import Finding as Said
from andon.detect.nonfinite import row_health, seen_in_event, seen_in_frame
from andon.detect.skips import StepSeen
from andon.wire import decode_frame
from runs import bell, compaction, judging, node_events
from runs.ingest_frames import with_masks
from runs.judging import Judged
from runs.locks import try_watch
from runs.memory import Memory
from runs.models import Attempt, Event, Finding, Frame, Pending, Run
from runs.policies import policy_for
from runs.signals import findings_stored
from runs.telling import mark_not_watched, mark_watched
from runs.wire_rows import as_posted

log = logging.getLogger(__name__)

BATCH = 2_000  # pending rows of one transaction: a storm must not make one that lasts minutes
MAX_RUNS = 500
FRAME_STEPS = 10_000  # steps of one healthy frame that are counted one by one
LONG = 64  # rounds of one look; then the next ring goes on, so that no run keeps a worker


def look_at_all() -> int:
    """Look at every run with something pending; returns how many runs had."""
    run_ids = list(Pending.objects.order_by().values_list("run_id", flat=True).distinct()[:MAX_RUNS])
    for run_id in run_ids:
        look(run_id)
    return len(run_ids)


def look(run_id: int) -> int:
    """Look at all that is pending of one run; returns how many rows were looked at.

    Returns at once when another worker looks at this run.
    """
    done = 0
    for _ in range(LONG):
        taken = _round(run_id)
        done += taken
        if taken < BATCH:
            return done
    bell.ring("runs.tasks.look", run_id)
    return done


def _round(run_id: int) -> int:
    with transaction.atomic():
        if not try_watch(run_id):
            return 0
        pending = list(Pending.objects.filter(run_id=run_id).order_by("pk")[:BATCH])
        if not pending:
            return 0
        events, frames = _events(run_id, pending), _frames(run_id, pending)
        compaction.leave(run_id, pending, events, frames)
        node_events.keep(run_id, events)
        failure: Exception | None = None
        try:
            # A savepoint: what a failing detector half wrote must go, the pending rows with it must not.
            with transaction.atomic():
                _watch(run_id, pending, events, frames)
        except Exception as error:
            log.exception("run %s: detection failed; the data is kept", run_id)
            failure = error
            mark_not_watched(run_id, f"detection failed: {type(error).__name__}: {error}")
        Pending.objects.filter(pk__in=[row.pk for row in pending]).delete()
        if failure is None:
            mark_watched(run_id)
    return len(pending)


@dataclass(slots=True)
class _Round:
    """What one round found."""

    judged: list[Judged] = field(default_factory=list)

    def add(self, said: Sequence[Said], attempt: int, backfill: bool, occurred_at: datetime) -> None:
        self.judged += [Judged(one, attempt, backfill, occurred_at) for one in said]


def _watch(run_id: int, pending: Sequence[Pending], events: Sequence[Event], frames: Sequence[Frame]) -> None:
    policy = policy_for(run_id)
    found = _Round()
    memory = Memory(run_id, policy)
    current = Attempt.objects.filter(run_id=run_id).aggregate(newest=Max("number"))["newest"] or 1
    # In order of training, not of arrival: posts of one second arrive in any order.
    things: list[Event | Frame] = [event for event in events if event.type in {"step", "skip"}]
    things += [frame for frame in frames if frame.stream != "node"]
    things.sort(key=_training_order)
    first_steps: dict[int, int] = {}
    for thing in things:
        if thing.backfill or thing.attempt < current:
            continue  # a baseline is not built from what arrives late; nonfinite values were judged at once
        step = thing.step if isinstance(thing, Event) else thing.step_first
        if step is not None:
            first_steps[thing.attempt] = min(step, first_steps.get(thing.attempt, step))
        if isinstance(thing, Event):
            found.add(_of_event(memory, thing), thing.attempt, False, thing.occurred_at)
        else:
            found.add(_of_frame(memory, thing), thing.attempt, False, thing.received_at)
    memory.save()
    _note_first_steps(run_id, first_steps)
    received_at = max(row.received_at for row in pending)
    findings = judging.store(run_id=run_id, policy=policy, judged=found.judged, received_at=received_at)
    judging.act(run_id=run_id, policy=policy, findings=findings)
    _show_joined(run_id, pending)


def _training_order(thing: Event | Frame) -> tuple[int, int, int]:
    if isinstance(thing, Event):
        return thing.attempt, -1 if thing.step is None else thing.step, thing.pk
    return thing.attempt, thing.step_first, thing.pk


def _wanted(run_id: int, pending: Sequence[Pending], what: str) -> dict[str, Any] | None:
    """Return the filter for the rows behind pending ones; received times let it skip other days."""
    rows = [row for row in pending if row.what == what]
    if not rows:
        return None
    times = [row.received_at for row in rows]
    return {
        "run_id": run_id,
        "pk__in": [row.ref for row in rows],
        "received_at__range": (min(times), max(times)),
    }


def _events(run_id: int, pending: Sequence[Pending]) -> list[Event]:
    wanted = _wanted(run_id, pending, "event")
    return [] if wanted is None else list(Event.objects.filter(**wanted))


def _frames(run_id: int, pending: Sequence[Pending]) -> list[Frame]:
    wanted = _wanted(run_id, pending, "frame")
    return [] if wanted is None else list(Frame.objects.filter(**wanted).defer("body", "state_plane"))


def _of_event(memory: Memory, event: Event) -> list[Said]:
    seen = seen_in_event(as_posted(event))
    said: list[Said] = memory.skips(event.attempt).update(seen)
    if event.type != "step" or event.step is None:
        return said
    newest = memory.newest(event.attempt)
    loss = _number(event, "loss") if event.view != "local" else None
    if loss is not None and newest.is_new("loss", event.step):
        found = memory.loss(event.attempt).update(event.step, loss)
        said += [] if found is None else [found]
    # The norm is reduced unless the event says otherwise; then it is no global value.
    norm = _number(event, "grad_norm") if event.data.get("view") != "local" else None
    if norm is not None and newest.is_new("grad_norm", event.step):
        said += memory.norm(event.attempt).update(event.step, norm)
    return said


def _number(event: Event, name: str) -> float | None:
    value = event.data.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return None if event.flags.get(f"data.{name}") else float(value)


def _of_frame(memory: Memory, frame: Frame) -> list[Said]:
    if frame.stream == "rank" and not frame.bad_cells and not frame.skips:
        # Nothing in it but applied steps: the summary says all, the body stays where it is.
        said: list[Said] = []
        last = min(frame.step_last, frame.step_first + FRAME_STEPS)
        counter = memory.skips(frame.attempt)
        for step in range(frame.step_first, last + 1):
            said += counter.update(StepSeen(step=step, skipped=False))
        return said
    body = Frame.objects.filter(run_id=frame.run_id, pk=frame.pk, received_at=frame.received_at)
    stored = body.values_list("body", "content_type").get()
    decoded = with_masks(decode_frame(bytes(stored[0]), stored[1]))
    if frame.stream == "layer":
        return memory.layers(frame.attempt).update(decoded)
    said = []
    counter = memory.skips(frame.attempt)
    for seen in seen_in_frame(decoded, row_health(decoded)):
        said += counter.update(seen)
    return said


def _note_first_steps(run_id: int, first_steps: dict[int, int]) -> None:
    for number, step in first_steps.items():
        attempts = Attempt.objects.filter(run_id=run_id, number=number)
        attempts.filter(first_step__isnull=True).update(first_step=step)
        attempts.filter(first_step__gt=step).update(first_step=step)


def _show_joined(run_id: int, pending: Sequence[Pending]) -> None:
    """Let the incident hear of findings that joined it while posts were coming in, all at once."""
    ids = [row.ref for row in pending if row.what == "finding"]
    if not ids:
        return
    joined = list(Finding.objects.filter(run_id=run_id, pk__in=ids).order_by("step", "pk"))
    if joined:
        findings_stored.send(sender=Finding, run=Run.objects.get(pk=run_id), findings=joined)
