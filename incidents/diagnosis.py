"""The first diagnosis of an incident: rows in, `andon.diagnose` asked, words out."""

import json
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from andon.detect.cells import FirstBad, Phase
from andon.detect.finding import Finding as Said
from andon.diagnose.devices import is_fault
from andon.diagnose.families import Diagnosis, Facts, Family, PlanChoice, default_plan, diagnose
from andon.diagnose.symptoms import SYMPTOMS, Symptom
from incidents import firstbad, rules
from incidents.models import Incident
from runs.attempts import attempt_of
from runs.models import Finding, Run
from runs.rows import raw_cursor

Recurrence = Literal["none", "same_data", "same_step", "other_step", "other_nodes", "same_node"]
_HARDWARE_EVENTS = ("hardware.xid", "hardware.ecc", "hardware.link")
_HARDWARE = "SELECT DISTINCT node, type, data FROM andon_events_of(%s, %s, %s) WHERE node <> '' LIMIT %s"
_HARDWARE_ROWS = 1_000  # different records: a device repeats its own, and a storm of them is one fault


@dataclass(frozen=True, slots=True)
class Answer:
    """What leads, and the plan that follows from it."""

    symptom: str  # key of SYMPTOMS
    family: str
    why: str
    plan: PlanChoice


def words(symptom: str) -> Symptom:
    """Return the playbook's row of a symptom; an unknown key is the row of unknown symptoms."""
    return SYMPTOMS.get(symptom) or SYMPTOMS["unknown"]


def of(
    run: Run,
    attempt: int,
    findings: list[Finding],
    first_bad: dict[str, Any],
    *,
    recurrence: Recurrence = "none",
    checkpoint_suspect: bool = False,
    leading: tuple[str, str] | None = None,
) -> Answer:
    """Return the leading family of one incident; without findings it was held by a person.

    Args:
        leading: the family that the board names, and why, where it knows more than the findings.
    """
    launched = attempt_of(run, attempt)
    bad = [finding for finding in findings if finding.kind != rules.LAUNCH_WITHOUT_PERMIT]
    facts = Facts(
        update_applied=applied(bad, first_bad),
        restarted_at=launched.first_step if launched and launched.number > 1 else None,
        recurrence=recurrence,
        hardware_nodes=hardware_nodes(run, attempt),
        bad_nodes=frozenset(firstbad.nodes_of(launched, first_bad["ranks"])),
        checkpoint_suspect=checkpoint_suspect or any(f.kind == "restore_differs" for f in bad),
        held_by_hand=not findings,
    )
    answer: Diagnosis = diagnose([said(finding) for finding in bad], cell(first_bad), facts)
    if leading is not None and findings and leading[0] != answer.family:
        answer = msgspec.structs.replace(answer, family=Family(leading[0]), why=leading[1])
    return Answer(answer.symptom, str(answer.family), answer.why, default_plan(answer, facts))


def said(row: Finding) -> Said:
    """Return what the detector said, from the row that keeps it."""
    return Said(
        kind=row.kind,
        severity=row.severity,  # type: ignore[arg-type]
        rule=row.rule,
        step=row.step,
        detector=row.detector,
        detector_version=int(row.detector_version) if str(row.detector_version).isdigit() else 0,
        series=row.series,
        detail=row.detail,
        lanes=tuple(row.lanes),
        score=row.score,
        numbers=row.numbers,
        view="local" if row.view == "local" else "reduced",
    )


def cell(document: dict[str, Any]) -> FirstBad | None:
    """Return the first-bad cell of a document, None where none is known."""
    if document.get("step") is None or not document.get("phase"):
        return None
    return FirstBad(
        step=document["step"],
        micro_batch=document.get("micro_batch"),
        phase=Phase[document["phase"].upper()],
        ranks=tuple(document["ranks"]),
        tie=document["tie"],
        tie_reason=document["tie_reason"],
        certainty=document["certainty"],
        layer=document.get("layer"),
        stage=document.get("stage"),
        skipped=document.get("skipped", False),
    )


def applied(findings: list[Finding], first_bad: dict[str, Any]) -> bool | None:
    """Return whether the first bad update reached the weights, None when nobody said."""
    kinds = {finding.kind for finding in findings if finding.severity != Finding.Severity.INFO}
    if kinds & {"nonfinite", "nonfinite_state"}:
        return True
    if kinds & ({"nonfinite_skipped"} | rules.SCALER_KINDS) and first_bad.get("skipped", True):
        return False
    return None


def hardware_nodes(run: Run, attempt: int) -> frozenset[str]:
    """Return the nodes of an attempt on which a hardware fault was recorded."""
    with raw_cursor() as cursor:
        cursor.execute(_HARDWARE, (run.pk, attempt, list(_HARDWARE_EVENTS), _HARDWARE_ROWS))
        rows = cursor.fetchall()
    return frozenset(node for node, kind, data in rows if is_fault(kind, json.loads(data)))


def known_recurrence(incident: Incident) -> Recurrence:
    """Return how this incident came back, as the reopening wrote it down; "none" for a first failure."""
    known: tuple[Recurrence, ...] = ("same_data", "same_step", "other_step", "other_nodes", "same_node")
    return next((kind for kind in known if kind == incident.recurrence), "none")
