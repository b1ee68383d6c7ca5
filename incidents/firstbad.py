"""The first-bad cell of an incident: from rank-local cells where there are any, else from its findings."""

from collections.abc import Iterable
from typing import Any

from django.db import connection

from andon.detect.cells import LOCAL_VALUE, REDUCED_ONLY
from incidents import attached, rules
from incidents.models import Incident
from runs import queries as run_queries
from runs.models import Attempt, Finding, Run

UNKNOWN: dict[str, Any] = {
    "step": None,
    "micro_batch": None,
    "phase": "",
    "ranks": [],
    "tie": False,
    "tie_reason": "",
    "certainty": "",
    "layer": None,
    "stage": None,
    "skipped": False,
}


def of_findings(run: Run, attempt: int, findings: list[Finding]) -> dict[str, Any]:
    """Return the first-bad document of one attempt, given the findings of its incident.

    Returns:
        `FirstBad.to_document()` where nonfinite cells are known; for a spike the step it began at,
        with its ranks only where the value was local; `UNKNOWN` when nothing bad was measured.
    """
    mine = [finding for finding in findings if finding.attempt == attempt]
    bad = [finding for finding in mine if finding.kind != rules.LAUNCH_WITHOUT_PERMIT]
    if not bad:
        return dict(UNKNOWN)
    lead = rules.leading(bad)
    if lead.kind in rules.NONFINITE_KINDS:
        cell = run_queries.first_bad(run, attempt)
        if cell is not None and (lead.step is None or cell.step <= lead.step):
            return _of_only_rank(run, attempt, cell.to_document())
    return _of_only_rank(run, attempt, _of_finding(lead, bad))


def _of_only_rank(run: Run, attempt: int, document: dict[str, Any]) -> dict[str, Any]:
    """Name the rank of a run that has one only: nothing was reduced over others."""
    if document["ranks"] or REDUCED_ONLY not in document["certainty"]:
        return document
    if not Attempt.objects.filter(run=run, number=attempt, world_size=1).exists():
        return document
    certainty = document["certainty"].replace(REDUCED_ONLY, LOCAL_VALUE)
    return document | {"ranks": [0], "certainty": certainty}


def of_incident(incident: Incident) -> dict[str, Any]:
    """Return the first-bad document as it is now; what an approver signs."""
    if incident.kind == rules.HELD_BY_HAND:
        return dict(incident.first_bad)
    found = of_findings(incident.run, incident.attempt, attached.findings(incident))
    # Findings are kept for ever and cells of partitions that retention dropped are not: what was
    # known once stays known.
    return found if found["step"] is not None else dict(incident.first_bad)


def earlier(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether `one` lies at an earlier step than `other`; an unknown step is never earlier."""
    if one.get("step") is None:
        return False
    return other.get("step") is None or one["step"] < other["step"]


def spread(run: Run, attempt: int) -> int:
    """Return how many ranks of an attempt ever went bad."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(DISTINCT lane) FROM runs_firstbad"
            " WHERE run_id = %s AND attempt = %s AND stream = 'rank' AND lane <> '-1'",
            [run.pk, attempt],
        )
        return int(cursor.fetchone()[0])


def nodes_of(attempt: Attempt | None, ranks: Iterable[int]) -> list[str]:
    """Return the nodes that any of `ranks` ran on, by name; none when the launch did not say."""
    wanted = set(ranks)
    nodes = attempt.nodes if attempt and wanted else []
    return sorted({str(node["node"]) for node in nodes if not wanted.isdisjoint(node.get("ranks") or [])})


_RANKS_OF_A_NODE = 128  # no node has more; a tie of more ranks is not looked up
_NODES = """
WITH wanted AS MATERIALIZED (
    SELECT id, run_id, attempt, first_bad -> 'ranks' AS ranks FROM incidents_incident
    WHERE id = ANY(%s) AND jsonb_array_length(first_bad -> 'ranks') BETWEEN 1 AND %s
)
SELECT w.id, n ->> 'node'
FROM wanted w
JOIN runs_attempt a ON a.run_id = w.run_id AND a.number = w.attempt
CROSS JOIN LATERAL jsonb_array_elements(a.nodes) n
WHERE n -> 'ranks' @> w.ranks
"""


def only_node(incidents: Iterable[Incident]) -> dict[int, str]:
    """Return the one node on which all first-bad ranks ran, by incident id, where there is one.

    The database looks: a fleet's nodes are a hundred kilobytes that no list has to read.
    """
    wanted = [incident.pk for incident in incidents]
    if not wanted:
        return {}
    with connection.cursor() as cursor:
        cursor.execute(_NODES, [wanted, _RANKS_OF_A_NODE])
        return dict(cursor.fetchall())


def _of_finding(lead: Finding, bad: list[Finding]) -> dict[str, Any]:
    same = [finding for finding in bad if finding.series == lead.series and finding.rule == lead.rule]
    steps = [step for step in map(rules.first_flagged_step, same) if step is not None]
    local = lead.view == "local" and bool(lead.lanes)
    ranks = sorted(lane for lane in lead.lanes if isinstance(lane, int)) if local else []
    names = [lane for lane in lead.lanes if isinstance(lane, str)]
    return UNKNOWN | {
        "step": min(steps) if steps else lead.step,
        "phase": "reduce" if lead.series == "grad_norm" else "forward",
        "ranks": ranks,
        "tie": len(ranks) > 1,
        "tie_reason": f"{len(ranks)} equal cells" if len(ranks) > 1 else "",
        "certainty": "local value" if ranks else REDUCED_ONLY,
        "layer": names[0] if names else None,
        "skipped": lead.kind in ({"nonfinite_skipped"} | rules.SCALER_KINDS),
    }
