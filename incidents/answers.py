"""The four answers, the waiting line and the gate of the incident page, from rows already read."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.utils.dateparse import parse_datetime

from andon.diagnose.families import Family
from andon.policy import Policy
from evidence.gates import Gate
from evidence.queries import Counts
from incidents import certainty, costs, diagnosis, launched, plans, rules, standing
from incidents.models import Incident, Plan, ResumeRequest
from incidents.page import (
    EvidenceAnswer,
    FirstBadAnswer,
    GateLine,
    Glyph,
    PlanCost,
    PlanView,
    RunAnswer,
)
from runs import formatting as words
from runs.directives import Obedience
from runs.models import Attempt, Directive, RunProgress


@dataclass(frozen=True, slots=True)
class Situation:
    """What the answers are computed from; read once per page."""

    incident: Incident
    attempt: Attempt | None
    directive: Directive | None
    held_since: datetime | None
    obedience: Obedience
    counts: Counts
    gate: Gate
    progress: RunProgress | None
    policy: Policy
    now: datetime

    @property
    def held(self) -> bool:
        """Whether the run is held now: under anything but continue."""
        return self.held_since is not None


def followed(situation: Situation, document: dict[str, Any]) -> str:
    """Return what went bad next; without a bad value, who stands behind."""
    incident = situation.incident
    if document["step"] is None:
        return standing.behind(incident.run_id, incident.attempt)
    return certainty.followed(incident, situation.attempt, document).says


def first_bad(situation: Situation, document: dict[str, Any], followed: str) -> FirstBadAnswer:
    """Return what broke first."""
    incident, attempt = situation.incident, situation.attempt
    symptom = diagnosis.words(incident.symptom)
    ranks: list[int] = list(document["ranks"])
    where = launched.places(incident.run_id, incident.attempt, ranks)
    spike = rules.is_spike(incident.kind)
    return FirstBadAnswer(
        headline=headline(incident, document, where[0].node if len(where) == 1 else ""),
        followed=followed,
        says=_first_bad_says(document),
        sure=certainty.of_first_bad(incident, attempt, document),
        state="" if document["step"] is None else "spike" if spike else "nonfinite",
        symptom=_symptom_words(incident, symptom.name),
        look_first_at=_look_first(incident, symptom.look_first),
        family=incident.family,
        family_why=incident.family_why,
        step=document["step"],
        attempt=incident.attempt,
        ranks=ranks,
        nodes=[place.node for place in where],
        phase=document["phase"],
        layer="" if document["layer"] is None else str(document["layer"]),
        tie=document["tie"],
        certainty=document["certainty"],
    )


def _symptom_words(incident: Incident, name: str) -> str:
    """Return the symptom; of a hold by hand, with the reason that was given."""
    why = incident.dossier.why if incident.kind == rules.HELD_BY_HAND else ""
    return f"{name}: {words.inert(why, 240)}" if why else name


# Families that lead because something was recorded: that is where to look, not the symptom's usual cause.
_RECORDED = frozenset(map(str, (Family.HARDWARE, Family.DISTRIBUTED, Family.COMMUNICATION, Family.DRIFT)))


def _look_first(incident: Incident, usual: str) -> str:
    if incident.kind == rules.HELD_BY_HAND:
        return ""
    if incident.family in _RECORDED and incident.family_why:
        return f"{incident.family}: {incident.family_why}"
    return usual


def headline(incident: Incident, document: dict[str, Any], node: str) -> str:
    """Return the fact: "rank 61 on node-07, step 18,003, backward".

    Args:
        node: the one node all of the ranks are on, "" when there is none.
    """
    if incident.kind == rules.HELD_BY_HAND and document["step"] is None:
        return "none: held by hand"
    if document["step"] is None:
        return "first bad unknown: no rank-local values in the window"
    step = f"step {words.count(document['step'])}"
    if "at or before" in document["certainty"]:
        step = f"at or before {step}"
    phase = f", {document['phase']}" if document["phase"] else ""
    ranks = document["ranks"]
    if not ranks:
        return f"{step}{phase}; the rank is not known"
    where = words.rank_words(ranks)
    if node:
        where += f" on {words.inert(node)}"
    return f"{where}, {step}{phase}" + (" (tie)" if document["tie"] else "")


def _first_bad_says(document: dict[str, Any]) -> str:
    said = []
    if document["micro_batch"] is not None:
        said.append(f"Micro-batch {document['micro_batch']}.")
    if document["skipped"]:
        said.append("The update was skipped.")
    return " ".join(said)


def evidence(situation: Situation) -> EvidenceAnswer:
    """Return whether the evidence is safe."""
    counts = situation.counts
    head = f"{counts['held']} of {counts['required']} held, {counts['sealed']} sealed"
    if counts["missing"]:
        head += f", {counts['missing']} missing"
    lacking = situation.gate.lacking
    if lacking:
        shown = "; ".join(f"{line.name}: {line.says}" for line in lacking[:3])
        more = f"; and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        says = f"Waiting for {shown}{more}."
    else:
        waived = sum(line.waived for line in situation.gate.lines)
        says = (
            "Nothing is missing."
            if not waived
            else f"{words.plural(waived, 'item')} waived, the rest is safe."
        )
    return EvidenceAnswer(
        headline=head,
        says=says,
        required=counts["required"],
        held=counts["held"],
        sealed=counts["sealed"],
        missing=counts["missing"],
    )


def running(situation: Situation) -> RunAnswer:
    """Return what the run is doing and who obeys."""
    directive, obeys = situation.directive, situation.obedience
    step = obeys["step"]
    if step is None and situation.progress is not None:
        step = situation.progress.step
    kind = directive.kind if directive else "continue"
    at = f" after step {words.count(step)}" if step is not None else ""
    if kind == "hold":
        lead = f"Held{at}"
    elif kind == "continue":
        lead = f"Running, step {words.count(step)}" if step is not None else "Running"
    else:
        lead = f"Held{at}, {kind} approved"
    return RunAnswer(
        headline=lead,
        obedience=_obedience_words(situation),
        says=_leaving_words(situation),
        kind=kind,
        seq=directive.seq if directive else 0,
        since=directive.since if directive else None,
        obeyed=obeys["obeyed"],
        of=obeys["of"],
        silent=obeys["silent"],
        held=situation.held,
    )


def _obedience_words(situation: Situation) -> str:
    obeys = situation.obedience
    if not situation.held:
        return ""
    if not obeys["of"]:
        return "No launch told how many ranks there are."
    head = f"{words.count(obeys['obeyed'])} of {words.count(obeys['of'])} ranks obey"
    if obeys["obeyed"] >= obeys["of"]:
        return head
    silent = words.rank_words(obeys["silent"])
    return f"{head}; {silent} did not answer" + (
        f" since {words.clock(situation.directive.since, situation.now)} UTC" if situation.directive else ""
    )


def leaves_at(situation: Situation) -> datetime | None:
    """Return when held ranks leave, None when the directive says no time."""
    directive = situation.directive
    text = directive.document.get("deadline") if directive and directive.kind == "hold" else None
    return parse_datetime(text) if text else None


def _leaving_words(situation: Situation) -> str:
    leaves = leaves_at(situation)
    if not situation.held:
        over = situation.incident.state not in Incident.UNRESOLVED
        return "" if over else "It goes on: this incident holds nothing."
    if leaves is None:
        return ""
    if leaves <= situation.now:
        return f"Ranks leave with exit code 93 since {words.clock(leaves, situation.now)} UTC."
    return f"Ranks wait in place and leave {words.ago(leaves, situation.now)}."


def contained(situation: Situation) -> GateLine:
    """Return whether every rank stopped, or the launcher says that they are gone."""
    obeys, attempt = situation.obedience, situation.attempt
    if attempt is not None and attempt.exited_at is not None:
        at = words.clock(attempt.exited_at, situation.now)
        return GateLine("contained", "Contained", "done", f"attempt {attempt.number} is gone since {at} UTC")
    if obeys["of"] and obeys["obeyed"] >= obeys["of"]:
        return GateLine("contained", "Contained", "done", f"all {words.count(obeys['of'])} ranks stopped")
    if not situation.held:
        return GateLine("contained", "Contained", "not_yet", "the run is not held")
    return GateLine("contained", "Contained", "running", _obedience_words(situation))


def gate(situation: Situation, plan: Plan | None, request: ResumeRequest | None) -> list[GateLine]:
    """Return the lines of the gate, each with what is missing."""
    counts, lacks = situation.counts, plans.lacks(plan)
    open_now = situation.gate.open
    safe = f"{sum(line.satisfied for line in situation.gate.lines)} of {len(situation.gate.lines)}"
    glyph: Glyph = "done" if open_now else "missing" if counts["missing"] else "running"
    lines = [
        contained(situation),
        GateLine("evidence", "Required evidence sealed or waived by name", glyph, safe),
        GateLine("plan", "Plan complete", "missing" if lacks else "done", "; ".join(lacks) or "complete"),
    ]
    if request is None:
        lines.append(GateLine("requested", "Resume requested", "not_yet", "by a responder"))
        lines.append(
            GateLine("approved", "Approved", "not_yet", approvers_words(situation.policy.resume.approvers))
        )
        return lines
    by = request.requested_by.username if request.requested_by else "false alarm"
    lines.append(GateLine("requested", "Resume requested", "done", by))
    have = request.approvals.count()
    done = request.state == ResumeRequest.State.APPROVED
    lines.append(
        GateLine(
            "approved", "Approved", "done" if done else "running", f"{have} of {request.approvers_needed}"
        )
    )
    return lines


def approvers_words(needed: int) -> str:
    """Return "one approver, not the requester"."""
    return "one approver, not the requester" if needed == 1 else f"{needed} approvers, not the requester"


def plan_view(situation: Situation, plan: Plan) -> PlanView:
    """Return a plan in words, with its cost."""
    kept = plan.checkpoint
    lost = plan.numbers.get("steps_lost")
    cost = costs.of_plan(situation.incident, plan, situation.policy)
    watch = situation.policy.rollback.watch_steps
    return PlanView(
        id=plan.pk,
        number=plan.number,
        kind=plan.kind,
        label=plan.get_kind_display(),
        why=plan.why,
        checkpoint=kept,
        checkpoint_says=f"step {words.count(kept['step'])}, verified"
        if kept
        else "none: ranks go on from memory",
        positions=plan.positions,
        skip=plan.skip,
        skip_says=_skip_words(plan),
        exclusions=plan.exclusions,
        exclusions_say=_exclusion_words(plan),
        changes=plan.changes,
        changes_say=_change_words(plan),
        after_says=f"watch {words.count(watch)} steps, all detectors armed",
        made_by=plan.made_by.username if plan.made_by else "Andon",
        made_at=plan.made_at,
        missing=plans.lacks(plan),
        cost=PlanCost(lost, cost.seconds, cost.gpu_hours, cost.money, cost.currency, _cost_words(lost, cost)),
        numbers=plan.numbers,
    )


def _checkpoint_words(plan: Plan) -> str:
    if plan.checkpoint:
        return f"step {words.count(plan.checkpoint['step'])}, verified"
    return "not chosen yet" if plan.kind in plans.ROLLBACKS else "none: ranks go on from memory"


def _skip_words(plan: Plan) -> str:
    if not plan.skip:
        return "nothing is skipped"
    start, stop = plan.skip["from"], plan.skip["to"]
    batches = plan.numbers.get("skipped_batches")
    more = f", {words.plural(int(batches), 'batch', 'batches')}" if batches else ""
    window = f"samples {words.count(start)}{words.RANGE}{words.count(stop - 1)}"
    return f"{window} ({words.count(stop - start)}{more})"


def _exclusion_words(plan: Plan) -> str:
    said = [
        f"{name} {', '.join(map(str, values))}" for name, values in sorted(plan.exclusions.items()) if values
    ]
    return "; ".join(said) or "none excluded"


def _change_words(plan: Plan) -> str:
    if not plan.changes:
        return "none: same training regime, results stay comparable"
    return "; ".join(
        f"{change['what']}: {change.get('was')} → {change.get('to')}"
        + (" (changes the regime: not comparable)" if change["changes_regime"] else "")
        for change in plan.changes
    )


def _cost_words(lost: int | None, cost: costs.Cost) -> str:
    if lost is None:
        return "not known yet: the step it stopped at is not known"
    if lost == 0:
        return "none: no step is run again"
    head = f"{words.plural(lost, 'step')} run again"
    if cost.seconds is None:
        return f"{head}; step time was not reported"
    head += f": {words.duration(cost.seconds)}"
    if cost.gpu_hours is None or cost.money is None:
        return head
    return f"{head}, {words.gpu_hours(cost.gpu_hours)}, {words.money(cost.money)}"
