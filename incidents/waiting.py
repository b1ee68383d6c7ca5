"""The waiting line: what a held run costs, how long it may wait, what happens if nobody presses anything."""

from datetime import UTC, datetime, timedelta
from typing import Any

from django.utils.dateparse import parse_datetime

from andon.wire_times import parse_time
from incidents import costs, health, launched
from incidents.answers import Situation, leaves_at
from incidents.models import Permit, ResumeRequest
from incidents.page import Piece, Waiting
from runs import formatting as words
from runs.models import Event

FRESH = timedelta(seconds=60)  # agents post every 5 s; a minute of silence is silence
# Names under which launchers tell when their allocation ends; Slurm sets the last for every job.
_ENDS = ("allocation_ends_at", "allocation_end", "SLURM_JOB_END_TIME")


def line(
    situation: Situation, *, request: ResumeRequest | None = None, permit: Permit | None = None
) -> Waiting | None:
    """Return what waiting costs, None while the run is not held."""
    since, now, policy = situation.held_since, situation.now, situation.policy
    if since is None:
        return None
    held_s = (now - since).total_seconds()
    cost = costs.of_seconds(held_s, situation.attempt.world_size if situation.attempt else None, policy)
    a_minute = costs.of_seconds(60.0, cost.gpus, policy).money
    leaves = leaves_at(situation)
    run_id, attempt = situation.incident.run_id, situation.incident.attempt
    expected = launched.node_count(run_id, attempt)
    told = launched.facts(run_id, {attempt}).get(attempt, {})
    ends = allocation_ends_at(situation, told)
    ages = _ages(situation)
    oldest = max(ages, key=lambda node: ages[node], default="")
    return Waiting(
        since=since,
        held_s=held_s,
        gpus=cost.gpus,
        gpu_hours=cost.gpu_hours,
        money=cost.money,
        money_per_minute=a_minute,
        currency=cost.currency,
        leaves_at=leaves,
        ends_at=ends,
        nodes=len(ages),
        nodes_fresh=sum(age <= FRESH.total_seconds() for age in ages.values()),
        oldest_node=oldest,
        oldest_node_s=ages.get(oldest),
        pieces=[
            _allocation(ends, now),
            _data(situation, ages, oldest, expected),
            _health(situation),
        ],
        nothing_pressed=if_nothing(situation, leaves, request, permit),
    )


def _ages(situation: Situation) -> dict[str, float]:
    """Return how long ago each node was heard, in seconds."""
    nodes = dict(situation.progress.nodes) if situation.progress else {}
    seen = {node: parse_datetime(str(at)) for node, at in nodes.items()}
    return {node: (situation.now - at).total_seconds() for node, at in seen.items() if at is not None}


def _allocation(ends: datetime | None, now: datetime) -> Piece:
    if ends is None:
        return Piece("the launch told no end of its allocation")
    at = f"{words.clock(ends, now)} UTC"
    if ends <= now:
        return Piece(f"allocation ended {at}", warn=True)
    return Piece(f"allocation ends {at},", moment=ends, warn=ends - now < timedelta(minutes=30))


def allocation_ends_at(situation: Situation, told: dict[str, Any]) -> datetime | None:
    """Return when the allocation of the attempt ends, as a stop request or its launch told.

    Args:
        told: what the launch told.
    """
    asked = (
        Event.objects.filter(
            run_id=situation.incident.run_id,
            attempt=situation.incident.attempt,
            type="stop.requested",
            data__has_key="allocation_ends_at",
        )
        # In the order of the index: sorted by id, all events of the run would be walked to find none.
        .order_by("-step")
        .values_list("id", "data")[:20]
    )
    newest: dict[str, Any] = max(asked, default=(0, {}), key=lambda row: row[0])[1]
    for source in (newest, told, told.get("environment"), told.get("env")):
        for name in _ENDS:
            found = _moment(source.get(name)) if isinstance(source, dict) else None
            if found is not None:
                return found
    return None


def _moment(value: Any) -> datetime | None:
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        ns, _ = parse_time(value)
        return datetime.fromtimestamp(ns / 1e9, tz=UTC)
    except (ValueError, OverflowError, OSError):
        return None


def _data(situation: Situation, ages: dict[str, float], oldest: str, expected: int | None) -> Piece:
    if situation.attempt is not None and situation.attempt.exited_at is not None:
        return Piece("the attempt is over, its nodes post no more")
    if not ages:
        nodes = f" (the launch named {words.count(expected)})" if expected else ""
        return Piece(f"no node has given a sign of life under its name{nodes}")
    of = max(expected or 0, len(ages))
    fresh = sum(age <= FRESH.total_seconds() for age in ages.values())
    text = f"sign of life from {words.count(fresh)} of {words.plural(of, 'node')} in the last minute"
    obeys = situation.obedience
    # Ranks that wait have no more to post: a node that is quiet then hides nothing of the failure.
    waits = bool(obeys["of"]) and obeys["obeyed"] >= obeys["of"]
    if ages[oldest] <= FRESH.total_seconds():
        return Piece(text, warn=fresh < of and not waits)
    heard = situation.now - timedelta(seconds=ages[oldest])
    return Piece(f"{text}, quietest {words.inert(oldest, 48)}", moment=heard, warn=not waits)


def _health(situation: Situation) -> Piece:
    state = health.of_andon(situation.progress, situation.now)
    return Piece(state.says, warn=not state.well)


def if_nothing(
    situation: Situation,
    leaves: datetime | None,
    request: ResumeRequest | None,
    permit: Permit | None,
) -> str:
    """Return what happens if nobody presses anything, in one or two sentences."""
    now, state = situation.now, situation.incident.state
    if state == situation.incident.State.RESUMING:
        return "The supervisor launches the next attempt by itself; nothing has to be pressed."
    if state == situation.incident.State.APPROVED and permit is not None:
        until = words.clock(permit.expires_at, now)
        return f"The supervisor takes the permit by itself; it expires {until} UTC, then the run stays held."
    said = []
    gone = situation.attempt is not None and situation.attempt.exited_at is not None
    if leaves is not None and leaves > now and not gone:
        said.append(
            f"ranks wait, and exit {words.ago(leaves, now)} ({words.clock(leaves, now)} UTC, code 93)"
        )
    said.append("the run stays held")
    if request is not None:
        said.append(f"the request expires {words.clock(request.expires_at, now)} UTC")
    said.append("nothing resumes and no evidence is let go")
    text = f"{', '.join(said[:-1])}, {said[-1]}."
    return text[:1].upper() + text[1:]
