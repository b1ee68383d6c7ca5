"""Actions that a trainer or supervisor took by itself and reported: each becomes a ledger row."""

import logging
import time
from typing import Any

from django.dispatch import receiver

from andon.ledger import ALSO_REQUIRED, REQUIRED
from andon.wire import Event
from incidents import caps, ledger, opening, states, subjects
from incidents.models import TimelineEntry
from runs.formatting import inert
from runs.locks import lock_run
from runs.models import Run
from runs.policies import policy_for
from runs.signals import action_reported

log = logging.getLogger(__name__)

_SIDES = {"before": "loader_before", "after": "loader_after"}
_ONLY_LOADER = "the reporter named the loader position only"


@receiver(action_reported, dispatch_uid="incidents.reports")
def on_action(sender: object, run: Run, event: Event, **kwargs: Any) -> None:
    """Write one reported action to the ledger, and to the timeline of the open incident."""
    data = event.data
    action = str(data["action"])[:32]
    step = event.step if event.step is not None else _whole(data.get("step"))
    ranks = list(event.ranks or ()) or ([event.rank] if event.rank is not None else data.get("ranks"))
    reasons = _reasons(data)
    sides = {side: _side(data, side, reasons) for side in _SIDES}
    checkpoint = data.get("checkpoint")
    if checkpoint is not None and not isinstance(checkpoint, dict):
        checkpoint = {"uri": str(checkpoint)} if isinstance(checkpoint, str) else {"step": checkpoint}
    cap = _cap(run, event, action)
    if cap is not None:
        # Past its cap the run is held, and whoever holds a run has its lock before that of its ledger.
        run = lock_run(run.pk)
    incident = states.unresolved(run.pk)
    why = str(data.get("reason") or f"{action}, as reported")
    fields: dict[str, Any] = {
        "step": step,
        "ranks": [int(rank) for rank in ranks] if ranks else None,
        "before": sides["before"],
        "after": sides["after"],
        "checkpoint": checkpoint or None,
        "detector": _detector(data.get("detector")),
        "samples_skipped": _skipped(action, data, sides),
        "steps_lost": _whole(data.get("steps_lost")),
        "gpu_hours_lost": None,
    }
    reasons |= _unsaid(action, fields, reasons)
    row = ledger.append(
        run=run,
        action=action,
        why=why,
        decided_by=_decider(data, event.node),
        attempt=event.attempt or subjects.newest_attempt(run.pk),
        **fields,
        none_because=reasons,
        cap=cap,
        incident=incident,
    )
    if incident is not None:
        states.record(
            incident,
            kind="action",
            text=f"{inert(action)}: {inert(why, 300)}",
            source=TimelineEntry.Source.TRAINER,
            by=inert(event.node or "trainer"),
            data={"ledger": row.seq},
        )
    if ledger.past_cap(row):
        opening.take(run, [caps.finding(run, row, policy_for(run.pk))], locked=True)


def _cap(run: Run, event: Event, action: str) -> int | None:
    """Return the day's cap of a reported action; None where it is not counted.

    A loss scaler drops an overflow as a part of its search, and has a rule of its own; and what is told
    late, or of an earlier attempt, changes nothing any more.
    """
    policy = policy_for(run.pk)
    cap = caps.of(policy, action)
    numbers = event.data.get("numbers")
    if cap is None or (isinstance(numbers, dict) and numbers.get("loss_scale") is not None):
        return None
    late_s = 0.0 if event.occurred_ns is None else time.time() - event.occurred_ns / 1e9
    old = event.attempt is not None and event.attempt < subjects.newest_attempt(run.pk)
    return None if old or late_s > policy.nonfinite.backfill_after_s else cap


def _reasons(data: dict[str, Any]) -> dict[str, str]:
    """Return why fields are missing, in the ledger's names; `loader` speaks for both sides."""
    given = data.get("reason_none")
    said = {str(name): str(why) for name, why in given.items()} if isinstance(given, dict) else {}
    for side, name in _SIDES.items():
        why = said.pop(name, "") or said.get("loader", "")
        if why:
            said[side] = why
    said.pop("loader", None)
    return said


def _side(data: dict[str, Any], side: str, reasons: dict[str, str]) -> dict[str, int | None] | None:
    value = data.get(_SIDES[side])
    if isinstance(value, dict):
        found = {name: _whole(value.get(name)) for name in ledger.POSITIONS}
    else:
        found = dict.fromkeys(ledger.POSITIONS, None) | {"loader_position": _whole(value)}
    if all(position is None for position in found.values()):
        return None
    for name, position in found.items():
        if position is None:
            reasons.setdefault(f"{side}.{name}", _ONLY_LOADER)
    return found


def _unsaid(action: str, have: dict[str, Any], reasons: dict[str, str]) -> dict[str, str]:
    """Return reasons for what this action's row needs and the reporter left out."""
    needed = REQUIRED + ALSO_REQUIRED.get(action, ())
    return {
        name: "the reporter did not say" for name in needed if have.get(name) is None and name not in reasons
    }


def _skipped(action: str, data: dict[str, Any], sides: dict[str, dict[str, int | None] | None]) -> int | None:
    """Return how many samples were skipped: as said, else as far as the loader moved over the skip."""
    said = _whole(data.get("samples_skipped"))
    before, after = ((sides[side] or {}).get("loader_position") for side in ("before", "after"))
    if said is not None or action != "skip" or before is None or after is None or after < before:
        return said
    return after - before


def _detector(value: Any) -> dict[str, Any] | None:
    if value is None or value == "":
        return None
    return value if isinstance(value, dict) else {"name": str(value)}


def _decider(data: dict[str, Any], node: str | None) -> str:
    named = data.get("detector")
    name = named.get("name") if isinstance(named, dict) else named
    return str(name or data.get("by") or node or "trainer")[:64]


def _whole(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not float(value).is_integer():
        return None
    return int(value)
