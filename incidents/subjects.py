"""What an approver signs, its digest, and what changed between two of them, in words."""

from typing import Any

from andon.canonical import sha256
from evidence.queries import signed_facts
from incidents import firstbad, plans
from incidents.models import Incident, Plan, ResumeRequest
from runs import directives
from runs.formatting import count, rank_words
from runs.policies import policy_for

SCHEMA = "andon.approval-subject/1"
WITHOUT_EVIDENCE = (ResumeRequest.Kind.FALSE_ALARM, ResumeRequest.Kind.BREAK_GLASS)


def subject(
    incident: Incident,
    *,
    plan: Plan | None = None,
    kind: str = ResumeRequest.Kind.RESUME,
    first_bad: dict[str, Any] | None = None,
) -> tuple[dict[str, Any], str]:
    """Return what an approver signs, and its SHA-256 over RFC 8785 (lower-case hex).

    In it: run, incident, attempt, the first-bad cell with its ties, one fact per required item of
    evidence, the plan, the policy version. Not in it: optional and late evidence, further exclusions,
    names of spares, access to the vault: what cannot change the decision must not void it.

    Args:
        plan: the plan to sign; None: the newest.
        kind: a false alarm signs no evidence, since it is kept and need not be sealed first, and who
            breaks the glass does not wait for it.
        first_bad: the first-bad document, when the caller has just read it.
    """
    plan = plan or plans.newest(incident)
    signed: dict[str, Any] = {
        "schema": SCHEMA,
        "run": incident.run.slug,
        "incident": str(incident.pk),
        "attempt": newest_attempt(incident.run_id),
        "first_bad": firstbad.of_incident(incident) if first_bad is None else first_bad,
        "evidence": [] if kind in WITHOUT_EVIDENCE else evidence(incident),
        "plan": None if plan is None else plans.content(plan),
        "policy": policy_for(incident.run_id).digest(),
    }
    if kind != ResumeRequest.Kind.RESUME:
        signed[str(kind)] = True
    return signed, sha256(signed)


def evidence(incident: Incident) -> list[dict[str, Any]]:
    """Return one fact per required item: its digest, or what stands in for one.

    A large checkpoint goes from held to sealed while people sleep; its digest is the same before and
    after, so the word is left out where there is a digest, and the approval survives the night.
    """
    facts = []
    for fact in signed_facts(incident.dossier):
        if fact["fact"] in ("held", "sealed") and fact["digest"]:
            facts.append({"kind": fact["kind"], "name": fact["name"], "digest": fact["digest"]})
        else:
            facts.append(fact)
    return facts


def newest_attempt(run_id: int) -> int:
    """Return the number of the newest attempt, 1 before any launch."""
    found = directives.newest_attempt(run_id)
    return 1 if found is None else found.number


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return what changed from `before` to `after`, one sentence each; [] when nothing did."""
    said: list[str] = []
    if before["attempt"] != after["attempt"]:
        said.append(f"attempt {after['attempt']} was launched; it was attempt {before['attempt']}")
    if before["first_bad"] != after["first_bad"]:
        old, new = cell_words(before["first_bad"]), cell_words(after["first_bad"])
        said.append(f"the first bad cell changed: {old} → {new}")
    said += _evidence_differences(before["evidence"], after["evidence"])
    said += _plan_differences(before["plan"], after["plan"])
    if before["policy"] != after["policy"]:
        said.append(f"the policy changed: {before['policy'][:8]} → {after['policy'][:8]}")
    rest = {"attempt", "first_bad", "evidence", "plan", "policy"}
    for name in sorted((before.keys() | after.keys()) - rest):
        if before.get(name) != after.get(name):
            said.append(f"{name.replace('_', ' ')} changed: {before.get(name)} → {after.get(name)}")
    return said


def cell_words(document: dict[str, Any]) -> str:
    """Return a first-bad cell as people say it: "ranks 12 and 40, step 9,210, forward (tie)"."""
    if document.get("step") is None:
        return "none known"
    pieces = [rank_words(document["ranks"]), f"step {count(document['step'])}"]
    if document.get("phase"):
        pieces.append(document["phase"])
    return ", ".join(pieces) + (" (tie)" if document.get("tie") else "")


def _evidence_differences(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[str]:
    old = {(fact["kind"], fact["name"]): fact for fact in before}
    new = {(fact["kind"], fact["name"]): fact for fact in after}
    said = [f"evidence “{name}” is no longer required" for kind, name in old if (kind, name) not in new]
    for (kind, name), fact in new.items():
        known = old.get((kind, name))
        if known is None:
            said.append(f"evidence “{name}” was added: {_fact_words(fact)}")
        elif known != fact:
            said.append(f"evidence “{name}” changed: {_fact_words(known)} → {_fact_words(fact)}")
    return said


def _fact_words(fact: dict[str, Any]) -> str:
    if "fact" not in fact:
        return f"digest {fact['digest'][:8]}"
    words = str(fact["fact"]).replace("_", " ")
    return f"{words} ({fact['why']})" if fact.get("why") else words


def _plan_differences(before: dict[str, Any] | None, after: dict[str, Any] | None) -> list[str]:
    if before == after:
        return []
    if before is None or after is None:
        return ["the plan was added" if before is None else "the plan was taken away"]
    said = []
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if old != new:
            said.append(f"the plan's {name} changed: {_plan_words(name, old)} → {_plan_words(name, new)}")
    return said


def _plan_words(name: str, value: Any) -> str:
    if not value:
        return "none"
    if name == "kind":
        return str(value).replace("_", " ")
    if name == "checkpoint":
        return f"step {count(value['step'])}" + (f" ({value['digest'][:8]})" if value.get("digest") else "")
    if name == "skip":
        return f"samples {count(value['from'])} to {count(value['to'])}"
    if name == "positions":
        return f"loader position {count(value.get('loader_position'))}"
    if name == "exclusions":
        return ", ".join(f"{kind} {' '.join(map(str, values))}" for kind, values in sorted(value.items()))
    if name == "changes":
        return ", ".join(f"{change['what']} = {change.get('to')}" for change in value)
    return str(value)
