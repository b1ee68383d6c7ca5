"""What incidents add to an evidence bag: the incident, its postmortem, the run's ledger, and the permits."""

import json
import logging
from typing import Any

from django.db.models import Q
from django.dispatch import receiver

from andon.bag_writing import BagWriter
from andon.canonical import exact
from evidence.models import Dossier
from evidence.signals import bag_exporting
from incidents import ledger, rows
from incidents.models import Incident, LedgerRow, Permit
from incidents.permits import rfc3339
from incidents.postmortem import build
from incidents.postmortem.render import render
from runs.models import Finding

log = logging.getLogger(__name__)

SCHEMA = "andon.incident/1"


@receiver(bag_exporting, dispatch_uid="incidents.bag")
def add_to_bag(sender: object, dossier: Dossier, bag: BagWriter, **kwargs: Any) -> None:
    """Add the incident this dossier belongs to; a dossier opened by hand has none, and gets the ledger."""
    incident = (
        Incident.objects.select_related("run", "run__project", "dossier")
        .filter(Q(dossier=dossier) | Q(earlier_dossiers__contains=[dossier.pk]))
        .first()
    )
    chain = [ledger.document(row, dossier.run.slug) for row in LedgerRow.objects.filter(run=dossier.run)]
    bag.add_payload("ledger.json", [_bytes({"schema": ledger.SCHEMA, "rows": chain})])
    if incident is None:
        return
    bag.add_payload("incident.json", [_bytes(document(incident))])
    for permit in Permit.objects.filter(incident=incident).order_by("id"):
        bag.add_payload(f"permits/{permit.public_id}.json", [_bytes(permit.document)])
    _add_postmortem(bag, incident)


def _add_postmortem(bag: BagWriter, incident: Incident) -> None:
    """Add the postmortem as it is now, people by opaque id. Evidence is never kept in by what tells of it."""
    try:
        written = build.of(incident)
        unnamed = written.text({})
        files = {"json": written, "md": unnamed, "html": unnamed}
        bodies = {form: render(files[form], form) for form in files}
    except Exception as error:
        log.exception("the postmortem of incident %s could not be written into its bag", incident.pk)
        said = f"The postmortem could not be written: {type(error).__name__}. The evidence is whole."
        bag.add_payload("postmortem/NOT-WRITTEN.txt", [f"{said}\n".encode()])
        return
    for form, body in bodies.items():
        bag.add_payload(f"postmortem/postmortem.{form}", [body])


def document(incident: Incident) -> dict[str, Any]:
    """Return an incident as JSON-ready data; people appear by opaque id only."""
    requests = incident.requests.select_related("requested_by").prefetch_related("approvals__approver")
    findings = Finding.objects.filter(run_id=incident.run_id, incident=str(incident.pk)).order_by("id")
    return {
        "schema": SCHEMA,
        "incident": str(incident.pk),
        "run": incident.run.slug,
        "attempt": incident.attempt,
        "state": incident.state,
        "kind": incident.kind,
        "title": incident.title,
        "symptom": incident.symptom,
        "family": incident.family,
        "family_why": incident.family_why,
        "opened_at": rfc3339(incident.opened_at),
        "resolved_at": rfc3339(incident.resolved_at) if incident.resolved_at else None,
        "first_bad": incident.first_bad,
        "policy": incident.policy_digest,
        "states": [
            {
                "before": change.before,
                "after": change.after,
                "at": rfc3339(change.at),
                "by": str(change.person.opaque_id) if change.person else "andon",
                "why": change.why,
            }
            for change in incident.changes.select_related("person").order_by("at", "id")
        ],
        "plans": [
            {
                "number": plan.number,
                "kind": plan.kind,
                "checkpoint": plan.checkpoint or None,
                "positions": plan.positions or None,
                "skip": plan.skip,
                "exclusions": plan.exclusions,
                "changes": plan.changes,
                "why": plan.why,
                "made_at": rfc3339(plan.made_at),
                "made_by": str(plan.made_by.opaque_id) if plan.made_by else "andon",
            }
            for plan in incident.plans.select_related("made_by").order_by("number")
        ],
        "requests": [
            {
                "kind": request.kind,
                "state": request.state,
                "at": rfc3339(request.requested_at),
                "by": str(request.requested_by.opaque_id) if request.requested_by else "andon",
                "subject": request.subject,
                "digest": request.digest,
                "ended_why": request.ended_why,
                "approvals": [
                    {"by": str(one.approver.opaque_id), "at": rfc3339(one.at), "digest": one.digest}
                    for one in request.approvals.all()
                ],
            }
            for request in requests.order_by("id")
        ],
        "findings": [_finding(finding) for finding in findings],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    line = rows.finding_line(finding)
    return {
        "kind": line.kind,
        "severity": line.severity,
        "rule": line.rule,
        "mode": line.mode,
        "attempt": finding.attempt,
        "step": line.step,
        "lanes": line.lanes,
        "series": line.series,
        "view": line.view,
        "numbers": line.numbers,
        "detail": line.detail,
        "detector": line.detector,
        "occurred_at": rfc3339(line.occurred_at),
        "received_at": rfc3339(line.received_at),
        "backfill": line.backfill,
    }


def _bytes(value: Any) -> bytes:
    text = json.dumps(exact(value), sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
    return text.encode() + b"\n"
