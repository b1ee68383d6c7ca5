"""An open incident gets worse: what only warned holds the run, what was over comes back."""

from andon.policy import Policy
from incidents import describing, firstbad, holding, plans, rules, states, watching
from incidents.models import Incident
from incidents.paging import raising
from incidents.rulebook import breaker
from incidents.rules import Effect
from runs.models import Finding, Person
from runs.policies import policy_for


def hold_open(incident: Incident, *, person: Person, why: str) -> Incident:
    """Hold the run of an incident that held nothing, because a person says so; the run lock is held."""
    incident = (
        Incident.objects.select_for_update(no_key=True, of=("self",))
        .select_related("run", "dossier")
        .get(pk=incident.pk)
    )
    _holds_now(incident)
    states.record(incident, kind="held", text=f"held by hand: {why}", person=person)
    policy = policy_for(incident.run_id)
    holding.end_live_permit(incident.run, f"held by hand by {person.username}")
    holding.hold(incident, finding=None, policy=policy, person=person, why=why)
    plans.draft(incident, policy=policy)
    return incident


def worsen(incident: Incident, findings: list[Finding]) -> None:
    """A warning became a failure that holds the run."""
    policy = policy_for(incident.run_id)
    lead = rules.leading(findings)
    _freeze_again_if_elsewhere(incident, lead, findings, policy)
    _holds_now(incident)
    describing.redescribe(incident)
    holding.end_live_permit(incident.run, f"incident {incident.pk} holds the run again")
    holding.hold(incident, finding=lead, policy=policy)
    breaker.ask(incident)
    plans.draft(incident, policy=policy)


def _holds_now(incident: Incident) -> None:
    Incident.objects.filter(pk=incident.pk).update(
        holds=True, severity=Finding.Severity.HALT, watch_until_step=None, watch_attempt=None
    )
    incident.holds, incident.severity = True, Finding.Severity.HALT
    incident.watch_until_step = incident.watch_attempt = None


def reopen(incident: Incident, findings: list[Finding]) -> None:
    """It came back in its watch window: new evidence, a new hold, and what the recurrence says."""
    policy = policy_for(incident.run_id)
    lead = rules.leading(findings)
    said = watching.recurrence(incident, findings, lead)
    watching.came_back(incident, lead, said)
    words = f"{lead.kind.replace('_', ' ')} at step {lead.step}, in the watch window"
    states.move(incident, Incident.State.OPEN, why=words, watch_until_step=None, watch_attempt=None)
    holding.end_live_permit(incident.run, "it recurred in the watch window")
    _freeze_again_if_elsewhere(incident, lead, findings, policy)
    holds = rules.effect(lead) == Effect.HOLD
    incident.holds = holds
    raising.again(incident)
    incident.recurrence = "" if said.kind == "none" else said.kind
    incident.save(update_fields=["holds", "recurrence"])
    describing.redescribe(incident)
    if holds:
        holding.hold(incident, finding=lead, policy=policy)
    else:
        incident.watch_attempt, incident.watch_until_step = lead.attempt, watch_until([lead], policy)
        incident.save(update_fields=["watch_attempt", "watch_until_step"])
    plans.draft(incident, policy=policy)


def _freeze_again_if_elsewhere(
    incident: Incident, lead: Finding, findings: list[Finding], policy: Policy
) -> None:
    """Freeze the evidence of another attempt than the dossier's; what was frozen before stays."""
    if lead.attempt == incident.attempt:
        return
    first_bad = firstbad.of_findings(incident.run, lead.attempt, findings)
    dossier = describing.freeze_for(
        run=incident.run,
        number=incident.pk,
        kind=lead.kind,
        attempt=lead.attempt,
        first_bad=first_bad,
        policy=policy,
    )
    incident.earlier_dossiers = [*incident.earlier_dossiers, incident.dossier_id]
    incident.dossier, incident.attempt, incident.first_bad = dossier, lead.attempt, first_bad
    incident.kind = lead.kind
    incident.save(update_fields=["earlier_dossiers", "dossier", "attempt", "first_bad", "kind"])
    states.record(
        incident, kind="evidence", text=f"evidence of attempt {lead.attempt} frozen beside the earlier one"
    )


def watch_until(findings: list[Finding], policy: Policy) -> int | None:
    """Return to which step a run that goes on is watched: so many clean steps after the last that acted."""
    steps = [one.step for one in findings if one.step is not None and rules.effect(one) > Effect.NOTE]
    return max(steps) + policy.rollback.recovered_watch_steps if steps else None
