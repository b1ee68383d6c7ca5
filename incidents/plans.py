"""The plan: how to go on, computed from the leading family, the checkpoints and the loader's positions.

A rollback-and-skip drops the data from the loader position *of the checkpoint* to that of the last bad
step, plus a margin, in absolute samples: what made the run fail is a batch together with the weights of
that time, and after the rollback neither comes back.
"""

from dataclasses import dataclass, field
from typing import Any

from django.utils import timezone

from andon.policy import Policy
from evidence.queries import last_good, last_good_item
from incidents import attached, board, diagnosis, firstbad, holding, positions, rules, states
from incidents.models import Incident, Plan
from runs.attempts import attempt_of
from runs.formatting import count
from runs.inserting import insert
from runs.models import Checkpoint, Finding, Person, Run
from runs.reading import kept

K = Plan.Kind
ROLLBACKS = frozenset({K.ROLLBACK_AND_REPLAY, K.ROLLBACK_AND_SKIP, K.ROLLBACK_ONE_FURTHER})


@dataclass(slots=True)
class Draft:
    """A plan that is not stored yet. `lacks` says what it still needs to be carried out."""

    kind: str
    why: str
    checkpoint: dict[str, Any] = field(default_factory=dict)
    positions: dict[str, int | None] = field(default_factory=dict)
    skip: dict[str, int] | None = None
    exclusions: dict[str, list[Any]] = field(default_factory=dict)
    changes: list[dict[str, Any]] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    lacks: list[str] = field(default_factory=list)


def newest(incident: Incident) -> Plan | None:
    """Return the plan in force."""
    return incident.plans.order_by("-number").first()


def lacks(plan: Plan | None) -> list[str]:
    """Return what a plan still needs, [] when it can be carried out."""
    if plan is None:
        return ["no plan yet"]
    missing: list[str] = list(plan.numbers.get("lacks", []))
    if plan.kind in ROLLBACKS and not plan.checkpoint and not missing:
        missing.append("no checkpoint is chosen")
    if plan.kind == K.ROLLBACK_AND_SKIP and plan.skip is None and not missing:
        missing.append("no skip window is set")
    return missing


def outdated(incident: Incident, plan: Plan | None) -> bool:
    """Whether Andon's own plan goes back to another checkpoint than the evidence now calls last good."""
    if plan is None or plan.made_by_id is not None or plan.kind not in ROLLBACKS:
        return False
    chosen = checkpoint_for(incident, plan.kind)
    return chosen is not None and plan.checkpoint != document(chosen)


def draft(incident: Incident, *, policy: Policy) -> Plan:
    """Store the default plan unless it says what the plan in force says; the run lock is held."""
    made = default(incident, policy=policy)
    return store(incident, made, person=None)


def draft_first(
    incident: Incident, *, policy: Policy, findings: list[Finding], answer: diagnosis.Answer
) -> Plan:
    """Store the default plan of an incident that just opened with `findings`, diagnosed as `answer`."""
    made = _follow(incident, answer, findings, policy)
    return _store(incident, made, number=1, person=None)


def store(incident: Incident, made: Draft, *, person: Person | None) -> Plan:
    """Store a draft as the next version, unless nothing differs from the plan in force."""
    known = newest(incident)
    numbers = made.numbers | {"lacks": made.lacks}
    if (
        known is not None
        and person is None
        and content(known) == _content_of(made)
        and (known.numbers == numbers and known.why == made.why)
    ):
        return known
    return _store(incident, made, number=1 if known is None else known.number + 1, person=person)


def _store(incident: Incident, made: Draft, *, number: int, person: Person | None) -> Plan:
    plan = Plan(
        incident=incident,
        number=number,
        kind=made.kind,
        checkpoint=made.checkpoint,
        positions=made.positions,
        skip=made.skip,
        exclusions=made.exclusions,
        changes=made.changes,
        why=made.why,
        numbers=made.numbers | {"lacks": made.lacks},
        made_by=person,
        made_at=timezone.now(),
    )
    insert(plan)
    states.record(
        incident,
        kind="plan",
        text=f"plan {plan.number}: {plan.get_kind_display()}" + (f"; {made.why}" if made.why else ""),
        person=person,
        by="" if person else "plan rule",
        data={"plan": plan.pk},
    )
    return plan


def content(plan: Plan) -> dict[str, Any]:
    """Return what of a plan is signed: what is done, not why."""
    return {
        "kind": plan.kind,
        "checkpoint": plan.checkpoint or None,
        "positions": plan.positions or None,
        "skip": plan.skip,
        "exclusions": {name: values for name, values in plan.exclusions.items() if values},
        "changes": plan.changes,
    }


def _content_of(made: Draft) -> dict[str, Any]:
    return {
        "kind": made.kind,
        "checkpoint": made.checkpoint or None,
        "positions": made.positions or None,
        "skip": made.skip,
        "exclusions": {name: values for name, values in made.exclusions.items() if values},
        "changes": made.changes,
    }


def default(incident: Incident, *, policy: Policy) -> Draft:
    """Return the plan that follows from the family that leads the diagnosis board, with its why."""
    findings = attached.findings(incident)
    by_hand = incident.kind == rules.HELD_BY_HAND
    mine = [finding for finding in findings if finding.attempt == incident.attempt]
    answer = diagnosis.of(
        incident.run,
        incident.attempt,
        [] if by_hand else mine,
        incident.first_bad,
        recurrence=diagnosis.known_recurrence(incident),
        leading=None if by_hand else board.leader(incident),
    )
    return _follow(incident, answer, mine, policy)


def _follow(incident: Incident, answer: diagnosis.Answer, findings: list[Finding], policy: Policy) -> Draft:
    made = Draft(kind=answer.plan.kind, why=answer.plan.why)
    if not incident.holds and incident.kind in rules.NEVER_HOLDS:
        made.kind, made.why = K.ROLLBACK_AND_REPLAY, "not the job's own doing: the same data again"
    suspects = _suspects(incident) if answer.family == "hardware" else {}
    complete(incident, made, policy=policy, checkpoint=None, exclusions=suspects, findings=findings)
    return made


def complete(
    incident: Incident,
    made: Draft,
    *,
    policy: Policy,
    checkpoint: Checkpoint | None,
    exclusions: dict[str, list[Any]],
    findings: list[Finding] | None = None,
) -> None:
    """Fill in what follows from the kind: checkpoint, positions, skip window, what is lost."""
    run, attempt = incident.run, incident.attempt
    if findings is None:
        findings = [one for one in attached.findings(incident) if one.attempt == attempt]
    first, last = bad_steps(incident, findings)
    halt = halt_step(run, attempt, last)
    made.exclusions = exclusions
    made.numbers = {"first_bad_step": first, "last_bad_step": last, "halt_step": halt, "attempt": attempt}
    if made.kind in ROLLBACKS:
        chosen = checkpoint or checkpoint_for(incident, made.kind)
        if chosen is None:
            limit = "" if first is None else f" before step {count(first)}"
            made.lacks.append(_no_checkpoint(incident, limit))
        else:
            made.checkpoint = document(chosen)
            made.positions = positions.of_checkpoint(chosen).values
            if halt is not None:
                made.numbers["steps_lost"] = max(0, halt - chosen.step)
            if made.kind == K.ROLLBACK_AND_SKIP:
                _skip_from_checkpoint(incident, made, chosen, last=last, policy=policy)
        return
    made.numbers["steps_lost"] = 0
    if halt is not None:
        made.positions = positions.at(run, attempt, halt).values
    if made.kind == K.SKIP_AND_CONTINUE and first is not None and last is not None:
        begin = positions.at(run, attempt, first - 1) if first > 0 else None
        end = positions.at(run, attempt, last)
        start = begin.values["loader_position"] if begin else 0
        stop = end.values["loader_position"]
        if start is not None and stop is not None and stop > start:
            made.skip = {"from": start, "to": stop}
            made.numbers["samples_skipped"] = stop - start


def bad_steps(incident: Incident, findings: list[Finding]) -> tuple[int | None, int | None]:
    """Return the first and the last step whose batch is suspect.

    After a nonfinite update was applied every later step is nonfinite too, whatever its data: only the
    first one accuses its batch. A spike, and skipped steps, accuse every step they were seen at.
    """
    first = incident.first_bad.get("step")
    if first is None:
        return None, None
    applied = any(finding.kind in ("nonfinite", "nonfinite_state") for finding in findings)
    if applied:
        return first, first
    steps = [finding.step for finding in findings if finding.step is not None and finding.severity != "info"]
    return first, max([first, *steps])


def halt_step(run: Run, attempt: int, last_bad: int | None) -> int | None:
    """Return the last step the attempt reached."""
    reached = holding.progress_step(run, attempt)
    known = [step for step in (reached, last_bad) if step is not None]
    return max(known) if known else None


def document(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what plan, permit and ledger keep of a checkpoint."""
    return {
        "step": checkpoint.step,
        "uri": checkpoint.uri,
        "digest": checkpoint.digest,
        "attempt": checkpoint.attempt,
    }


def _no_checkpoint(incident: Incident, limit: str) -> str:
    """Return why there is none: one is being verified, or none is known."""
    item = last_good_item(incident.dossier)
    if item is not None and item.source.get("undecided"):
        return f"last good checkpoint {item.why}"
    return f"no verified checkpoint{limit} is known yet"


def checkpoint_for(incident: Incident, kind: str) -> Checkpoint | None:
    """Return the checkpoint that the rule takes for a kind of rollback, None while none is verified."""
    chosen = kept(("last good", incident.dossier_id), lambda: last_good(incident.dossier))
    if chosen is not None and chosen.state != Checkpoint.State.VERIFIED:
        chosen = None
    if kind != K.ROLLBACK_ONE_FURTHER or chosen is None:
        return chosen
    return (
        Checkpoint.objects.filter(
            run_id=incident.run_id, state=Checkpoint.State.VERIFIED, step__lt=chosen.step
        )
        .order_by("-step", "-attempt")
        .first()
    )


def _skip_from_checkpoint(
    incident: Incident, made: Draft, chosen: Checkpoint, *, last: int | None, policy: Policy
) -> None:
    run = incident.run
    start = chosen.loader_position
    if start is None:
        made.lacks.append(f"the checkpoint of step {count(chosen.step)} keeps no loader position")
        return
    if last is None:
        made.lacks.append("no bad step is known, so there is no window to skip")
        return
    reached = positions.at(run, incident.attempt, last)
    stop = reached.values["loader_position"]
    if stop is None or stop <= start:
        made.lacks.append(f"no loader position was reported for step {count(last)}: set the skip window")
        return
    batch = positions.samples_per_step(run, incident.attempt)
    margin = 0
    if batch:
        batches = -(-(stop - start) // batch)
        # The margin fills the window up to the policy's smallest; a window that is already wider than
        # the largest takes no margin, but is never cut short of the last bad step.
        margin = max(0, policy.rollback.skip_batches_min - batches)
        margin = min(margin, max(0, policy.rollback.skip_batches_max - batches))
        made.numbers |= {
            "batch_samples": batch,
            "skipped_batches": batches + margin,
            "margin_batches": margin,
        }
        if batches > policy.rollback.skip_batches_max:
            made.why += (
                f"; {count(batches)} batches, more than the policy's {policy.rollback.skip_batches_max}"
            )
    else:
        made.why += "; samples per step are not known, so no margin is added"
    made.skip = {"from": start, "to": stop + margin * (batch or 0)}
    made.numbers["samples_skipped"] = made.skip["to"] - start
    if "loader_position" in reached.computed:
        made.why += f"; {reached.computed['loader_position']}"


def _suspects(incident: Incident) -> dict[str, list[Any]]:
    launched = attempt_of(incident.run, incident.attempt)
    nodes = firstbad.nodes_of(launched, incident.first_bad.get("ranks", []))
    return {"nodes": nodes} if nodes else {}
