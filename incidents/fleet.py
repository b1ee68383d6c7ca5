"""What a fleet's own tools say of a run stands on its open incident's timeline, and holds nothing."""

from django.dispatch import receiver

from incidents import states
from runs import formatting as words
from runs.models import FleetReport, Run
from runs.signals import fleet_reported

_MOST = 20  # of one post; a fleet that reports every GPU would push everything else off the page


@receiver(fleet_reported, dispatch_uid="incidents.fleet")
def on_reports(sender: object, run: Run, reports: list[FleetReport], **kwargs: object) -> None:
    """Write one timeline entry per report, and one for those that are only counted."""
    incident = states.unresolved(run.pk)
    if incident is None:
        return
    for report in reports[:_MOST]:
        place = f", {words.inert(report.node, 48)}" if report.node else ""
        over = " (over)" if report.state == "resolved" else ""
        states.record(
            incident,
            kind="fleet",
            text=f"{words.inert(report.title, 160)}{place}{over}",
            by=report.source,
            occurred_at=(report.ended_at if over else report.started_at) or report.last_at,
            received_at=report.last_at,
            data={"report": report.pk, "severity": report.severity},
        )
    if len(reports) > _MOST:
        more = words.plural(len(reports) - _MOST, "more report")
        states.record(incident, kind="fleet", text=f"{more} of the fleet", by=reports[0].source)
