"""Holding a run: the directive, its ledger row, and the end of whatever permit was live."""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Exists, OuterRef
from django.utils import timezone
from django.utils.dateparse import parse_datetime

from andon.policy import Policy
from incidents import caps, ledger, positions, states
from incidents.models import Incident, Permit, ResumeRequest
from runs.attempts import attempt_of
from runs.directives import set_directive
from runs.formatting import count, rank_words
from runs.models import Directive, Finding, Person, Run
from runs.rows import raw_cursor


def hold(
    incident: Incident,
    *,
    finding: Finding | None,
    policy: Policy,
    person: Person | None = None,
    why: str = "",
) -> Directive:
    """Turn the directive to hold and write it to the ledger; the caller holds the run lock."""
    run, now = incident.run, timezone.now()
    # `exit`: ranks leave as soon as their snapshot is safe, so there is nothing to wait for.
    wait_s = policy.hold.deadline_s if policy.hold.mode == "in_place" else 0.0
    says = why or (finding.detail if finding else "") or incident.title
    directive = set_directive(
        run=run,
        kind="hold",
        incident=str(incident.pk),
        mode=policy.hold.mode,
        deadline=now + timedelta(seconds=wait_s),
        set_by=str(person.opaque_id) if person else "",
        why=says,
    )
    states.record(
        incident,
        kind="directive",
        text=f"hold, directive {directive.seq}: {says}",
        person=person,
        by="" if person else rule_name(finding),
        data={"seq": directive.seq},
    )
    _write_hold(incident, finding, policy, person, says)
    return directive


def hold_again(incident: Incident, policy: Policy, why: str) -> Directive:
    """Put the hold back after an approval fell; no new ledger hold, since the run never went on."""
    directive = set_directive(
        run=incident.run,
        kind="hold",
        incident=str(incident.pk),
        mode=policy.hold.mode,
        # The time ranks were given to wait in place is over or running: it is not given twice.
        deadline=_given_deadline(incident),
        why=why,
    )
    states.record(incident, kind="directive", text=f"hold, directive {directive.seq}: {why}")
    return directive


def end_live_permit(run: Run, why: str) -> None:
    """Void the run's live permit, if any, and the request it came from; the run lock is held.

    A new failure leaves no older permission standing.
    """
    now = timezone.now()
    live = [str(Permit.State.ISSUED), str(Permit.State.EXCHANGED)]
    with raw_cursor() as cursor:
        cursor.execute(_VOID, (str(Permit.State.VOIDED), now, why, run.pk, live))
        ended = [request_id for (request_id,) in cursor.fetchall()]
    if ended:
        ResumeRequest.objects.filter(
            pk__in=ended, state__in=[ResumeRequest.State.OPEN, ResumeRequest.State.APPROVED]
        ).update(state=ResumeRequest.State.VOIDED, ended_at=now, ended_why=[why])


_VOID = """
UPDATE incidents_permit SET state = %s, ended_at = %s, ended_why = %s
WHERE run_id = %s AND state = ANY(%s) RETURNING request_id
"""


def rule_name(finding: Finding | None) -> str:
    """Return who decided when it was a rule: "nonfinite v1"."""
    return f"{finding.detector} v{finding.detector_version}" if finding else "andon"


def detector_document(finding: Finding) -> dict[str, Any]:
    """Return what a ledger row keeps of the detector: name, version, policy and its numbers."""
    return {
        "name": finding.detector,
        "version": str(finding.detector_version),
        "rule": finding.rule,
        "mode": finding.mode,
        "policy": finding.policy_digest,
        "series": finding.series,
        "score": finding.score,
        "numbers": finding.numbers,
    }


def everyone(run: Run, attempt: int) -> tuple[list[int] | None, str]:
    """Return all ranks of an attempt, or None and why they are not known."""
    launched = attempt_of(run, attempt)
    if launched and launched.world_size:
        return list(range(launched.world_size)), ""
    return None, f"attempt {attempt} did not report its world size"


def _write_hold(
    incident: Incident, finding: Finding | None, policy: Policy, person: Person | None, says: str
) -> None:
    run, attempt = incident.run, incident.attempt
    # The step it takes effect at is the one that was judged; a person's hold takes the newest known.
    step = finding.step if finding and finding.step is not None else progress_step(run, attempt)
    ranks, no_ranks = everyone(run, attempt)
    reasons = {"checkpoint": "none: a hold loads nothing"}
    if ranks is None:
        reasons["ranks"] = no_ranks
    before = after = None
    if step is None:
        reasons |= dict.fromkeys(("step", "before", "after"), "no step was received yet")
    else:
        known = positions.at_each(run, attempt, [step, step - 1] if step > 0 else [step])
        after = known[0].values
        reasons |= known[0].reasons("after")
        if step > 0:
            before = known[1].values
            reasons |= known[1].reasons("before")
        else:
            reasons["before"] = "step 0 has none before it"
    if finding is None:
        reasons["detector"] = "none: a person decided"
    who = rank_words(ranks) if ranks else "all ranks"
    row = ledger.append(
        run=run,
        action="hold",
        why=f"{says} ({who} at step {count(step)})" if step is not None else says,
        decided_by=str(person.opaque_id) if person else rule_name(finding),
        attempt=attempt,
        step=step,
        ranks=ranks,
        before=before,
        after=after,
        detector=detector_document(finding) if finding else None,
        none_because=reasons,
        cap=None if person else policy.caps.holds_per_day,
        incident=incident,
    )
    if ledger.past_cap(row):
        caps.note(incident, row, policy)


def progress_step(run: Run, attempt: int) -> int | None:
    """Return the newest step an attempt reported, None when it reported none."""
    # Not the whole row: it names every node of a fleet.
    with raw_cursor() as cursor:
        cursor.execute(
            "SELECT step FROM runs_runprogress WHERE run_id = %s AND attempt = %s", (run.pk, attempt)
        )
        found = cursor.fetchone()
    return None if found is None else found[0]


def _given_deadline(incident: Incident) -> datetime | None:
    row = (
        Directive.objects.filter(run_id=incident.run_id, incident=str(incident.pk), kind="hold")
        .order_by("-seq")
        .first()
    )
    text = row.document.get("deadline") if row else None
    if not text:
        return None
    return parse_datetime(text)


def held_since(run_id: int) -> datetime | None:
    """Return since when the run is held without a break, None when it is not."""
    return held_since_of({run_id}).get(run_id)


def held_since_of(run_ids: Iterable[int]) -> dict[int, datetime]:
    """Return since when each of these runs is held without a break; a run that is not held is left out.

    Held since the first directive after the newest `continue`.
    """
    gone_on = Directive.objects.filter(
        run=OuterRef("run"), kind=Directive.Kind.CONTINUE, seq__gt=OuterRef("seq")
    )
    under_hold = Directive.objects.filter(~Exists(gone_on), run__in=list(run_ids))
    since = under_hold.exclude(kind=Directive.Kind.CONTINUE).order_by("run_id", "seq").distinct("run_id")
    return dict(since.values_list("run_id", "since"))
