"""The watch window: how a run that went on is watched, and how its watch ends.

It ends clean, past the last step that was watched, or with a failure that says something about the one
before. Either end is a row of the ledger.
"""

import logging
from typing import Any

import msgspec
from django.db import transaction
from django.utils import timezone

from andon.intervals import Window, Windows
from andon.overlap import Overlap
from andon.recurrence import Failure, Verdict, verdict
from incidents import firstbad, holding, ledger, positions, resumed, rules, states
from incidents.models import Incident, LedgerRow, Plan
from runs.attempts import attempt_of
from runs.formatting import count
from runs.locks import lock_run
from runs.models import Attempt, Finding, Run, RunProgress
from runs.policies import policy_for

log = logging.getLogger(__name__)
S = Incident.State
RULE, VERSION = "watch", "1"
ACTION = "watch_end"
RESTORE = "restore_differs"


def watch_from(incident: Incident, plan: Plan, watch_steps: int) -> int:
    """Return the step until which a resumed run is watched.

    From the step the run got to when it failed, not from the checkpoint: the steps it runs again are
    not yet past what failed.
    """
    numbers = plan.numbers
    known: list[int | None] = [
        numbers.get("last_bad_step"),
        incident.first_bad.get("step"),
        plan.checkpoint.get("step"),
    ]
    past = max([step for step in known if step is not None] or [numbers.get("halt_step") or 0])
    return past + watch_steps


def watch_newer(incident: Incident, attempt: Attempt) -> None:
    """A restart under continue (hardware, by the supervisor) is watched in place of the one before."""
    Incident.objects.filter(pk=incident.pk, state=S.WATCHING, watch_attempt__lt=attempt.number).update(
        watch_attempt=attempt.number
    )


def sweep() -> int:
    """Compare what runs again, resolve what was watched long enough; returns how many. Safe to run twice."""
    ended = 0
    watched = Incident.objects.filter(
        state__in=[S.WATCHING, S.OPEN], watch_until_step__isnull=False
    ).values_list("pk", "run_id")
    for pk, run_id in watched:
        try:
            _compare(pk, run_id)
            ended += _end(pk, run_id)
        except Exception:
            log.exception("the watch of incident %s could not be ended", pk)
    return ended


def _end(pk: int, run_id: int) -> int:
    with transaction.atomic():
        run = lock_run(run_id)
        incident = Incident.objects.select_for_update(no_key=True, of=("self",)).get(pk=pk)
        if incident.watch_until_step is None or incident.state not in (S.WATCHING, S.OPEN):
            return 0
        if incident.state == S.OPEN and incident.holds:
            return 0
        progress = RunProgress.objects.filter(run_id=run_id).first()
        if progress is None or progress.step is None or progress.attempt is None:
            return 0
        if progress.attempt < (incident.watch_attempt or 0) or progress.step < incident.watch_until_step:
            return 0
        if Finding.objects.filter(run_id=run_id, needs_incident=True, incident="").exists():
            return 0  # something was seen that nobody has looked at: not clean yet
        clean = f"clean to step {progress.step}: the watch window is over"
        if not states.move(incident, S.RESOLVED, why=clean):
            return 0
        _write_end(
            run,
            incident,
            attempt=progress.attempt,
            step=progress.step,
            says=f"clean to step {count(progress.step)}, past its watch window",
            numbers={"outcome": "clean", "watched_to": incident.watch_until_step},
        )
        return 1


def _compare(pk: int, run_id: int) -> None:
    """Once a resumed run is past the steps it ran again, say how its loss compares with the first time."""
    incident = Incident.objects.select_related("run").get(pk=pk)
    done = resumed.of_incident(incident)
    progress = RunProgress.objects.filter(run_id=run_id).first()
    if not done or progress is None or progress.step is None or progress.attempt != done[-1].new:
        return
    mine = done[-1]
    past = mine.until if mine.until is not None else mine.plan.numbers.get("halt_step")
    if mine.after is None or past is None or progress.step < past:
        return
    if incident.timeline.filter(kind="overlap", data__attempt=mine.new).exists():
        return
    found = resumed.losses(incident.run, mine)
    if found is None:
        return
    overlap = found.overlap
    text = f"attempt {mine.new} against attempt {mine.old}: {overlap.says()}"
    with transaction.atomic():
        run = lock_run(run_id)
        if incident.timeline.filter(kind="overlap", data__attempt=mine.new).exists():
            return
        states.record(
            incident, kind="overlap", text=text, by=f"{RULE} v{VERSION}", data={"attempt": mine.new}
        )
        if overlap.outcome == "differs":
            _restore_differs(run, mine, overlap, text)


def _restore_differs(run: Run, mine: resumed.Resumed, overlap: Overlap, text: str) -> None:
    """Store the finding; where the rule acts, the sweep gives it to the incident, which then holds."""
    policy, now = policy_for(run.pk), timezone.now()
    mode = policy.mode("restore")
    if mode == "off":
        return
    Finding.objects.create(
        run=run,
        attempt=mine.new,
        kind=RESTORE,
        rule="restore",
        mode=mode,
        severity=Finding.Severity.HALT,
        step=overlap.differs_from,
        series="loss",
        view="reduced",
        detail=text,
        detector="overlap",
        detector_version=VERSION,
        policy_digest=policy.digest(),
        numbers=msgspec.to_builtins(overlap),
        occurred_at=now,
        received_at=now,
        needs_incident=mode == "act",
    )


def recurrence(incident: Incident, findings: list[Finding], lead: Finding) -> Verdict:
    """Say how a failure in the watch window relates to the one before it, which `incident` still tells of."""
    run, plan = incident.run, incident.plans.last()
    known = incident.first_bad.get("step")
    last = (plan.numbers.get("last_bad_step") if plan is not None else None) or known
    excluded = frozenset(map(str, plan.exclusions.get("nodes", ()))) if plan is not None else frozenset()
    before = _failure(run, incident.attempt, known, last, incident.first_bad.get("ranks") or [])
    now = firstbad.of_findings(run, lead.attempt, findings)
    after = _failure(run, lead.attempt, rules.first_flagged_step(lead), lead.step, now["ranks"])
    return verdict(
        msgspec.structs.replace(before, suspects=before.suspects | excluded),
        msgspec.structs.replace(after, excluded=excluded),
    )


def came_back(incident: Incident, lead: Finding, said: Verdict) -> None:
    """Write the end of a watch that a failure ended; the run lock is held, and `incident` is as it was."""
    step = count(lead.step) if lead.step is not None else "not known"
    _write_end(
        incident.run,
        incident,
        attempt=lead.attempt,
        step=lead.step,
        says=f"{lead.kind.replace('_', ' ')} at step {step}, in its watch window: {said.says}",
        numbers={"outcome": "recurred", "watched_to": incident.watch_until_step, **said.numbers},
    )
    states.record(incident, kind="recurrence", text=said.says, by=f"{RULE} v{VERSION}")


def ends(incident: Incident) -> list[LedgerRow]:
    """Return how the watches of an incident ended, oldest first."""
    return list(LedgerRow.objects.filter(incident=incident, action=ACTION).order_by("seq"))


def _failure(run: Run, attempt: int, first: int | None, last: int | None, ranks: list[int]) -> Failure:
    launched = attempt_of(run, attempt)
    return Failure(
        step=first,
        samples=_samples(run, attempt, first, last),
        suspects=frozenset(firstbad.nodes_of(launched, ranks)),
        ran_on=frozenset(str(node["node"]) for node in (launched.nodes if launched else [])),
    )


def _samples(run: Run, attempt: int, first: int | None, last: int | None) -> Windows:
    if first is None or last is None or first < 1 or last < first:
        return ()
    began, ended = positions.at_each(run, attempt, [first - 1, last])
    start, stop = (known.values["loader_position"] for known in (began, ended))
    return (Window(start, stop),) if start is not None and stop is not None and stop > start else ()


def _write_end(
    run: Run, incident: Incident, *, attempt: int, step: int | None, says: str, numbers: dict[str, Any]
) -> LedgerRow:
    """Write one end of a watch, with how the loss compared over the steps that were run again."""
    done = resumed.of_incident(incident)
    # A newer attempt that a supervisor started by itself ran other steps again than the plan said.
    mine = next((one for one in reversed(done) if one.new == attempt), None)
    found = resumed.losses(run, mine) if mine is not None else None
    if found is not None:
        numbers = numbers | {"overlap": msgspec.to_builtins(found.overlap)}
        says += f"; against attempt {mine.old if mine else attempt}: {found.overlap.says()}"
    plan = mine.plan if mine is not None else None
    reasons: dict[str, str] = {}
    ranks, no_ranks = holding.everyone(run, attempt)
    if ranks is None:
        reasons["ranks"] = no_ranks
    before = plan.positions if plan is not None and plan.positions else None
    if before is None:
        reasons["before"] = "the watch began without a plan that names a position"
    else:
        reasons |= {
            f"before.{name}": "the plan does not name it"
            for name in ledger.POSITIONS
            if before.get(name) is None
        }
    if step is None:
        reasons |= dict.fromkeys(("step", "after"), "the finding names no step")
    after = positions.at(run, attempt, step) if step is not None else None
    if plan is None or not plan.checkpoint:
        reasons["checkpoint"] = "none: no checkpoint was loaded for what was watched"
    return ledger.append(
        run=run,
        action=ACTION,
        why=says,
        decided_by=f"{RULE} v{VERSION}",
        attempt=attempt,
        step=step,
        ranks=ranks,
        before=before,
        after=after.values if after else None,
        checkpoint=plan.checkpoint if plan is not None and plan.checkpoint else None,
        detector={
            "name": RULE,
            "version": VERSION,
            "policy": policy_for(run.pk).digest(),
            "numbers": numbers,
        },
        none_because=reasons | (after.reasons("after") if after else {}),
        incident=incident,
    )
