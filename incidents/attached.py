"""The findings of an incident, read once per `Incident` object: a storm's are thousands."""

from incidents.models import Incident
from runs.models import Finding
from runs.rows import raw_cursor

_ATTACH = "UPDATE runs_finding SET incident = %s, needs_incident = false WHERE id = ANY(%s)"


def findings(incident: Incident) -> list[Finding]:
    """Return the findings that belong to `incident`."""
    known: list[Finding] | None = incident.__dict__.get("_findings_read")
    if known is None:
        known = list(Finding.objects.filter(run_id=incident.run_id, incident=str(incident.pk)))
        incident.__dict__["_findings_read"] = known
    return list(known)


def attach(incident: Incident, joining: list[Finding]) -> None:
    """Make `joining` the incident's; those that joined it while they were stored are so already."""
    home = str(incident.pk)
    new = [finding for finding in joining if finding.incident != home or finding.needs_incident]
    if new:
        with raw_cursor() as cursor:
            cursor.execute(_ATTACH, (home, [finding.pk for finding in new]))
    for finding in new:
        finding.incident, finding.needs_incident = home, False
    incident.__dict__.pop("_findings_read", None)
