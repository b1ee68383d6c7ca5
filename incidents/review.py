"""Looks at an open incident again: first-bad cell, title, plan, and whether a request still stands.

A storm of joining findings asks for one review, not for thousands: the review is a unit of work, due
in a moment, and asking again while it is due costs one read.
"""

import time
from datetime import timedelta

from django.db import connection, transaction
from django.utils import timezone

from incidents import describing, firstbad, permits, plans, rules
from incidents.models import Incident
from incidents.standing_approvals import granting as standing
from runs.locks import lock_run
from runs.models import Finding, Work
from runs.policies import policy_for
from runs.work import Lease, Payload, enqueue, handler

KIND = "incidents.review"
SETTLE = timedelta(seconds=1)  # most of a storm's posts arrive within it


def ask(incident: Incident) -> None:
    """Ask for a review of `incident` soon, inside the caller's transaction."""
    key = str(incident.pk)
    if Work.objects.filter(kind=KIND, key=key, state=Work.State.DUE).exists():
        return
    enqueue(kind=KIND, key=key, payload={"incident": incident.pk}, not_before=timezone.now() + SETTLE)


@handler(KIND)
def do(payload: Payload, lease: Lease) -> None:
    """Review one incident; safe to run twice."""
    again(int(str(payload["incident"])))


def again(incident_id: int) -> None:
    """Bring one incident up to date with what is known now."""
    with transaction.atomic():
        run_id = Incident.objects.values_list("run_id", flat=True).get(pk=incident_id)
        lock_run(run_id)
        incident = (
            Incident.objects.select_for_update(no_key=True, of=("self",))
            .select_related("run", "run__project", "dossier")
            .get(pk=incident_id)
        )
        if incident.state not in Incident.UNRESOLVED:
            return
        _take_backfill(incident)
        if incident.state not in (Incident.State.OPEN, Incident.State.APPROVED):
            return
        first_bad = firstbad.of_incident(incident)
        if first_bad != incident.first_bad:
            describing.move_first_bad(incident, first_bad)
        describing.redescribe(incident)
        permits.revalidate(incident)
        plan = plans.newest(incident)
        # A person's plan stays theirs, and a live request was made for exactly this one.
        if (plan is None or plan.made_by_id is None) and permits.live_request(incident) is None:
            plans.draft(incident, policy=policy_for(run_id))
        standing.grant_if_covered(incident)


def _take_backfill(incident: Incident) -> None:
    """Nonfinite values that arrived late belong to the incident of their attempt; they hold nothing."""
    Finding.objects.filter(
        run_id=incident.run_id,
        attempt=incident.attempt,
        incident="",
        backfill=True,
        kind__in=rules.NONFINITE_KINDS,
    ).update(incident=str(incident.pk), needs_incident=False)


# What an open incident may wait for, as one short text: the review says the same until it changes.
_WAITED_FOR = """
SELECT i.id, concat_ws(' ',
    (SELECT concat_ws(' ', count(*), count(*) FILTER (WHERE state = 'verified'),
                      count(*) FILTER (WHERE state IN ('bad', 'deleted')), max(verified_at))
     FROM runs_checkpoint WHERE run_id = i.run_id),
    (SELECT string_agg(concat_ws(' ', id, state, digest, waived_at, source ->> 'checkpoint'), ',' ORDER BY id)
     FROM evidence_item WHERE dossier_id = i.dossier_id AND required),
    (SELECT max(number) FROM incidents_plan WHERE incident_id = i.id),
    (SELECT max(number) FROM runs_attempt WHERE run_id = i.run_id),
    (SELECT max(id) FROM runs_policyversion), i.state, i.kind, i.first_bad)
FROM incidents_incident i WHERE i.id = ANY(%s)
"""
ANYWAY_S = 60.0  # a review that would say the same is made once per so long all the same
_reviewed: dict[int, tuple[str, float]] = {}  # in this process: what was waited for, and when it was reviewed


def sweep() -> int:
    """Review the open incidents that wait for something: a plan that holds good, or an approval.

    What they wait for (a checkpoint that gets verified, evidence that gets sealed) tells nobody above it.
    Nor does a checkpoint that was committed in time and reported late, out of a spool: the evidence then
    has a newer last good one than the plan.
    """
    waiting = [
        incident
        for incident in Incident.objects.filter(state__in=[Incident.State.OPEN, Incident.State.APPROVED])
        if _waits(incident)
    ]
    found = _waited_for([incident.pk for incident in waiting])
    done = 0
    for incident in waiting:
        before, at = _reviewed.get(incident.pk, ("", 0.0))
        if found[incident.pk] == before and time.monotonic() - at < ANYWAY_S:
            continue
        again(incident.pk)
        # As it was before the review: what the review itself changed is looked at once more.
        _reviewed[incident.pk] = found[incident.pk], time.monotonic()
        done += 1
    for ended in _reviewed.keys() - found.keys():
        _reviewed.pop(ended, None)
    return done


def _waits(incident: Incident) -> bool:
    plan = plans.newest(incident)
    waits = bool(plans.lacks(plan)) or permits.live_request(incident) is not None
    return waits or plans.outdated(incident, plan) or standing.waits(incident)


def _waited_for(incident_ids: list[int]) -> dict[int, str]:
    with connection.cursor() as cursor:
        cursor.execute(_WAITED_FOR, [incident_ids])
        return dict(cursor.fetchall())
