"""How an incident is described: its first-bad cell, title, symptom, family, and what is frozen for it."""

from typing import Any

from andon.policy import Policy
from evidence import plan as freeze_plan
from evidence.models import Dossier
from incidents import attached, diagnosis, firstbad, rules, states
from incidents.models import Incident
from runs.attempts import attempt_of
from runs.models import Attempt, Finding, Person, Run


def freeze_for(
    *,
    run: Run,
    number: int,
    kind: str,
    attempt: int,
    first_bad: dict[str, Any],
    policy: Policy,
    person: Person | None = None,
    why: str = "",
) -> Dossier:
    """Write the freeze plan of an incident, in the caller's transaction."""
    return freeze_plan.freeze(
        run=run,
        label=f"incident {number}",
        url=f"/incidents/{number}",
        why=why or kind.replace("_", " "),
        opened_by=str(person.opaque_id) if person else "",
        attempt=attempt,
        first_bad_step=first_bad["step"],
        margin_steps=rules.margin_steps(kind, policy),
        policy=policy,
    )


def move_first_bad(incident: Incident, first_bad: dict[str, Any]) -> bool:
    """Move the first-bad cell by compare-and-set and reconsider the dossier; the run lock is held."""
    known = incident.first_bad
    moved = {"first_bad": first_bad, "traits": None}  # its node and shard are looked up anew
    if not Incident.objects.filter(pk=incident.pk, first_bad=known).update(**moved):
        return False
    incident.first_bad, incident.traits = first_bad, None
    if firstbad.earlier(first_bad, known):
        freeze_plan.reconsider(incident.dossier, first_bad_step=first_bad["step"])
        states.record(
            incident,
            kind="first_bad",
            text=f"first bad moved from step {known.get('step')} to step {first_bad['step']}",
            data={"before": known, "after": first_bad},
        )
    return True


def redescribe(incident: Incident) -> None:
    """Name the incident by what leads it now: title, kind, symptom and family."""
    known = attached.findings(incident)
    mine = [finding for finding in known if finding.attempt == incident.attempt]
    bad = [finding for finding in mine if finding.kind != rules.LAUNCH_WITHOUT_PERMIT]
    if not bad:
        return
    lead = rules.leading(bad)
    launched = attempt_of(incident.run, incident.attempt)
    answer = diagnosis.of(
        incident.run,
        incident.attempt,
        bad,
        incident.first_bad,
        recurrence=diagnosis.known_recurrence(incident),
    )
    incident.title = title(incident.run, incident.attempt, lead, incident.first_bad, launched)
    incident.kind, incident.symptom = lead.kind, answer.symptom
    incident.family, incident.family_why = answer.family, answer.why
    incident.save(update_fields=["title", "kind", "symptom", "family", "family_why"])


def title(
    run: Run, attempt: int, lead: Finding | None, first_bad: dict[str, Any], launched: Attempt | None
) -> str:
    return rules.title(
        lead,
        ranks=len(first_bad["ranks"]),
        world_size=launched.world_size if launched else None,
        spread=firstbad.spread(run, attempt),
        held_by_hand=lead is None,
    )
