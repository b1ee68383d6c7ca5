"""Looks at an open incident again: first-bad cell, title, plan, and whether a request still stands.

A storm of joining findings asks for one review, not for thousands: the review is a unit of work, due
in a moment, and asking again while it is due costs one read.
"""

from datetime import timedelta

from django.db import transaction
from django.utils import timezone

from incidents import describing, firstbad, permits, plans, rules
from incidents.models import Incident
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
            .select_related("run", "dossier")
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


def _take_backfill(incident: Incident) -> None:
    """Nonfinite values that arrived late belong to the incident of their attempt; they hold nothing."""
    Finding.objects.filter(
        run_id=incident.run_id,
        attempt=incident.attempt,
        incident="",
        backfill=True,
        kind__in=rules.NONFINITE_KINDS,
    ).update(incident=str(incident.pk), needs_incident=False)


def sweep() -> int:
    """Review the open incidents that wait for something: a plan that holds good, or an approval.

    What they wait for (a checkpoint that gets verified, evidence that gets sealed) tells nobody above it.
    Nor does a checkpoint that was committed in time and reported late, out of a spool: the evidence then
    has a newer last good one than the plan.
    """
    done = 0
    for incident in Incident.objects.filter(state__in=[Incident.State.OPEN, Incident.State.APPROVED]):
        plan = plans.newest(incident)
        waits = plans.lacks(plan) or permits.live_request(incident) is not None
        if waits or plans.outdated(incident, plan):
            again(incident.pk)
            done += 1
    return done
