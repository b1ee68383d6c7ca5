"""The four answers, the waiting line and the gate of the incident page, from rows already read."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.utils.dateparse import parse_datetime

from andon.diagnose.families import Family
from andon.policy import Policy
from evidence.gates import Gate
from evidence.queries import Counts
from incidents import certainty, diagnosis, launched, machine_faults, plans, ranks_behind, rules
from incidents import contained as containment
from incidents.models import Incident, Plan, ResumeRequest, StateChange
from incidents.page import (
    EvidenceAnswer,
    FirstBadAnswer,
    GateLine,
    Glyph,
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
        return ranks_behind.behind(incident.run_id, incident.attempt)
    return certainty.followed(incident, situation.attempt, document).says


def first_bad(situation: Situation, document: dict[str, Any], followed: str) -> FirstBadAnswer:
    """Return what broke first."""
    incident, attempt = situation.incident, situation.attempt
    symptom = diagnosis.words(incident.symptom)
    ranks: list[int] = list(document["ranks"])
    where = launched.places(incident.run_id, incident.attempt, ranks)
    spike = rules.is_spike(incident.kind)
    # Without a bad value, who stands behind is what broke first.
    behind = followed if document["step"] is None else ""
    return FirstBadAnswer(
        headline=behind or headline(incident, document, where[0].node if len(where) == 1 else ""),
        followed="No value is bad." if behind else followed,
        recorded=machine_faults.of_places(incident.run_id, incident.attempt, where),
        says=_first_bad_says(document, where),
        sure=certainty.of_first_bad(incident, attempt, document),
        state="" if document["step"] is None else "spike" if spike else "nonfinite",
        symptom=_symptom_words(incident, document, symptom.name),
        look_first_at=_look_first(incident, document, symptom.look_first),
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


def _symptom_words(incident: Incident, document: dict[str, Any], name: str) -> str:
    """Return the symptom; of a hold by hand, with who gave which reason; of a tie, what it leaves open."""
    if document["tie"] and incident.symptom == "one_rank_nonfinite":
        who = words.rank_words(document["ranks"])
        return f"NaN or Inf first on {who}; which of them was first cannot be told"
    if incident.kind != rules.HELD_BY_HAND:
        return name
    opened = StateChange.objects.filter(incident=incident, before="").order_by("id")
    person = opened.values_list("person__username", flat=True).first()
    who, why = f"held by {person}" if person else name, incident.dossier.why
    return f"{who}: {words.inert(why, 240)}" if why else who


# Families that lead because something was recorded: that is where to look, not the symptom's usual cause.
_RECORDED = frozenset(map(str, (Family.HARDWARE, Family.DISTRIBUTED, Family.COMMUNICATION, Family.DRIFT)))


def _look_first(incident: Incident, document: dict[str, Any], usual: str) -> str:
    if document["tie"]:
        usual = usual.replace("that rank's", "their")
    if incident.kind == rules.HELD_BY_HAND:
        return ""
    if incident.family in _RECORDED and incident.family_why:
        # The reason may name the family itself: "hardware records on node-02".
        named = incident.family_why.startswith(incident.family)
        return incident.family_why if named else f"{incident.family}: {incident.family_why}"
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


def _first_bad_says(document: dict[str, Any], where: list[launched.Place]) -> str:
    said = []
    if len(document["ranks"]) == 1 and len(where) == 1:
        said.append(f"GPU {where[0].gpus[0]} of its node.")
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
    return EvidenceAnswer(
        headline=head,
        says=_evidence_words(situation.gate),
        required=counts["required"],
        held=counts["held"],
        sealed=counts["sealed"],
        missing=counts["missing"],
    )


def _evidence_words(gate: Gate) -> str:
    """Return what is not there, then what is still waited for: the one will not come, the other may."""
    lacking = gate.lacking
    if not lacking:
        waived = sum(line.waived for line in gate.lines)
        return (
            f"{words.plural(waived, 'item')} waived, the rest is safe." if waived else "All required is safe."
        )
    said = []
    for lead, missing in (("Not there:", True), ("Waiting for", False)):
        lines = [line for line in lacking if (line.state == "missing") is missing]
        shown = "; ".join(f"{line.name}: {line.says.removeprefix('missing: ')}" for line in lines[:3])
        more = f"; and {len(lines) - 3} more" if len(lines) > 3 else ""
        said += [f"{lead} {shown}{more}."] if lines else []
    return " ".join(said)


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
    if situation.attempt is not None and situation.attempt.exited_at is not None:
        at = words.clock(situation.attempt.exited_at, situation.now)
        return f"attempt {situation.attempt.number} is gone since {at} UTC"
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
        return "" if over or situation.incident.holds else _goes_on(situation.incident)
    if leaves is not None and leaves <= situation.now:
        return f"Ranks leave with exit code 93 since {words.clock(leaves, situation.now)} UTC."
    return ""


def _goes_on(incident: Incident) -> str:
    """Return what becomes of a run that this incident does not hold, if nobody presses anything."""
    until = incident.watch_until_step
    ends = f"; without another finding it resolves itself after step {words.count(until)}" if until else ""
    return f"No hold was ordered: the run goes on{ends}. A finding that halts holds it."


def contained(situation: Situation) -> GateLine:
    """Return whether every rank stopped, or the launcher says that they are gone."""
    if not situation.held:
        return GateLine("contained", "Contained", "not_yet", "the run is not held")
    found = containment.of(situation.incident, situation.now)
    if found.whole:
        return GateLine("contained", "Contained", "done", found.says)
    if found.still:
        says = f"{found.says}; the supervisor confirms it when it takes the permit"
        return GateLine("contained", "Contained", "running", says)
    return GateLine("contained", "Contained", "running", f"{found.says}; no permit is handed out until then")


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
