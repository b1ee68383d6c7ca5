"""Events that say more than curves do: launches, exits, acknowledgements, checkpoints, actions."""

import logging
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from andon.wire import Event, parse_ranks
from runs.attempts import Attempts
from runs.models import Checkpoint, DirectiveAck, Run
from runs.signals import (
    action_reported,
    artifact_offered,
    checkpoint_changed,
    directive_acked,
    stop_requested,
)
from runs.telling import mark_not_watched, tell

log = logging.getLogger(__name__)

REPORTS = frozenset(
    {
        "run.finished",
        "attempt.launched",
        "attempt.exited",
        "directive.ack",
        "checkpoint.committed",
        "checkpoint.deleted",
        "action",
        "stop.requested",
        "artifact.available",
    }
)
_ACK_STATES = frozenset({"received", "held", "exited", "refused"})
_BIGINT = 2**63 - 1


def attempt_of(event: Event, attempts: Attempts, occurred_at: datetime) -> int:
    """Return the attempt an event belongs to, opening it when it is the first of it."""
    if event.type == "attempt.launched":
        return attempts.launch(event, occurred_at)
    return attempts.number_for(event.attempt)


def take(
    *,
    run_id: int,
    event: Event,
    attempt: int,
    attempts: Attempts,
    occurred_at: datetime,
    received_at: datetime,
) -> None:
    """Write what a report says. Runs in the ingest transaction, after the event itself was stored."""
    match event.type:
        case "attempt.exited":
            attempts.exit(attempt, event, occurred_at)
        case "run.finished":
            Run.objects.filter(pk=run_id, finished_at__isnull=True).update(finished_at=occurred_at)
        case "directive.ack":
            _ack(run_id, event, attempt, occurred_at, received_at)
        case "checkpoint.committed":
            _committed(run_id, event, attempt, occurred_at)
        case "checkpoint.deleted":
            _deleted(run_id, event, attempt)
        case "action":
            tell(action_reported, run_id=run_id, event=event)
        case "artifact.available":
            _offered(run_id, event, attempt, attempts)
        case "stop.requested":
            tell(stop_requested, run_id=run_id, event=event, attempt=attempt)


def not_watched(run_id: int, error: Exception) -> None:
    """Mark a run as not watched because detection raised."""
    mark_not_watched(run_id, f"detection failed: {type(error).__name__}: {error}")


def _whole(data: Mapping[str, Any], name: str) -> int | None:
    value = data.get(name)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _BIGINT else None


def _ack(run_id: int, event: Event, attempt: int, occurred_at: datetime, received_at: datetime) -> None:
    seq, state = _whole(event.data, "seq"), event.data.get("state")
    if seq is None or state not in _ACK_STATES:
        log.warning("run %s: directive.ack without a seq or a known state is kept as an event only", run_id)
        return
    ranks: tuple[int, ...] = event.ranks or (() if event.rank is None else (event.rank,))
    if not ranks and event.data.get("ranks") is not None:
        try:
            ranks = parse_ranks(event.data["ranks"])
        except ValueError:
            log.warning("run %s: directive.ack names unreadable ranks", run_id)
    step = _whole(event.data, "step")
    ack = DirectiveAck.objects.create(
        run_id=run_id,
        attempt=attempt,
        seq=seq,
        state=state,
        step=event.step if step is None else step,
        ranks=list(ranks),
        occurred_at=occurred_at,
        received_at=received_at,
    )
    tell(directive_acked, run_id=run_id, ack=ack)


def _offered(run_id: int, event: Event, attempt: int, attempts: Attempts) -> None:
    kind, uri = _text(event.data, "kind"), _text(event.data, "uri")
    # A post may offer the logs of sixteen thousand ranks: it is told of once for each kind.
    if uri and (attempt, kind) not in attempts.offered:
        attempts.offered.add((attempt, kind))
        tell(artifact_offered, run_id=run_id, attempt=attempt, kind=kind, uri=uri)


def _text(data: Mapping[str, Any], *names: str) -> str:
    for name in names:
        value = data.get(name)
        if isinstance(value, str) and value:
            return value
    return ""


def _committed(run_id: int, event: Event, attempt: int, occurred_at: datetime) -> None:
    data = event.data
    step = event.step if event.step is not None else _whole(data, "step")
    uri = _text(data, "uri", "path")
    if step is None or not uri:
        log.warning("run %s: checkpoint.committed without step or uri is kept as an event only", run_id)
        return
    files = data.get("files")
    files = [entry for entry in files if isinstance(entry, dict)] if isinstance(files, list) else []
    total = _whole(data, "bytes_total")
    if total is None:
        total = min(sum(_whole(entry, "bytes") or 0 for entry in files), _BIGINT)
    positions = data.get("positions")
    where: Mapping[str, Any] = {**positions, **data} if isinstance(positions, dict) else data
    checkpoint, made = Checkpoint.objects.get_or_create(
        run_id=run_id,
        attempt=attempt,
        step=step,
        uri=uri,
        defaults={
            "digest": _text(data, "digest", "sha256")[:64],
            "files": files,
            "bytes_total": total,
            "loader_position": _whole(where, "loader_position"),
            "consumed_samples": _whole(where, "consumed_samples"),
            "optimizer_step": _whole(where, "optimizer_step"),
            "schedule_position": _whole(where, "schedule_position"),
            "committed_at": occurred_at,
        },
    )
    if made:
        tell(checkpoint_changed, run_id=run_id, checkpoint=checkpoint)


def _deleted(run_id: int, event: Event, attempt: int) -> None:
    uri = _text(event.data, "uri", "path")
    step = event.step if event.step is not None else _whole(event.data, "step")
    found = Checkpoint.objects.filter(run_id=run_id).exclude(state=Checkpoint.State.DELETED)
    if uri:
        found = found.filter(uri=uri)
    elif step is not None:
        found = found.filter(attempt=attempt, step=step)
    else:
        return
    for checkpoint in found:
        checkpoint.state = Checkpoint.State.DELETED
        checkpoint.save(update_fields=["state"])
        tell(checkpoint_changed, run_id=run_id, checkpoint=checkpoint)
