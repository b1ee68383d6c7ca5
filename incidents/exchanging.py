"""Handing a permit out: to one supervisor, and to that one again while a restart is no person's matter.

A supervisor that names itself may come back for the next attempt: at most the policy's launches, while
no attempt of the permit lives, nothing past the skip window was committed, and the machines were at fault.
"""

from datetime import datetime
from typing import Any

from django.db import transaction
from django.utils import timezone

from incidents import contained, infrastructure, ledger, permits, states, subjects
from incidents.models import Incident, Permit
from incidents.permits import LIVE, live_request, rfc3339
from incidents.refused import Refused
from incidents.standing_approvals import granting as standing
from runs.locks import lock_run
from runs.models import Attempt, Checkpoint, Run
from runs.policies import policy_for

S = Incident.State


def exchange(
    *, run: Run, incident_id: int, attempt: int, webhook_id: str, supervisor: str = ""
) -> dict[str, Any]:
    """Hand the permit out, once: the same `webhook_id` gets the same document again.

    Args:
        attempt: the number of the attempt that is to be launched.
        supervisor: how whoever asks names itself; only a named one may come back for another launch.

    Raises:
        Refused: unknown-incident (404), not-approved, not-contained, changed-since-approval,
            already-exchanged (409), expired (410).
    """
    with transaction.atomic():
        outcome = _exchange(run, incident_id, attempt, webhook_id, supervisor[:100])
    # Raised outside: a refusal may have voided or expired something, and that must stay.
    if isinstance(outcome, Refused):
        raise outcome
    return outcome


def _exchange(
    run: Run, incident_id: int, attempt: int, webhook_id: str, supervisor: str
) -> dict[str, Any] | Refused:
    run = lock_run(run.pk)
    incident = (
        Incident.objects.select_for_update(no_key=True, of=("self",))
        .select_related("run", "run__project", "dossier")
        .filter(pk=incident_id, run=run)
        .first()
    )
    if incident is None:
        return Refused("unknown-incident", f"Run {run.slug} has no incident {incident_id}.", status=404)
    issued = Permit.objects.filter(incident=incident).select_related("request", "request__plan", "run")
    for known in issued.order_by("-id"):
        before = next((one for one in known.exchanges if one["webhook_id"] == webhook_id), None)
        if before is not None:
            return _exchanged_before(known, before["document"])
    permit = issued.order_by("-id").first()
    asked_again = permit is not None and permit.state not in LIVE and live_request(incident) is not None
    if permit is None or permit.state == Permit.State.VOIDED or asked_again:
        last, permit = permit, None
        if attempt == subjects.newest_attempt(run.pk) + 1 and _not_contained(incident) is None:
            permit = standing.for_restart(incident)
        if permit is None:
            return _not_approved(incident, last)
    if permit.state == Permit.State.EXCHANGED and attempt > permit.attempt:
        return _again(incident, permit, attempt, webhook_id, supervisor)
    if permit.state in (Permit.State.EXCHANGED, Permit.State.SPENT):
        return Refused("already-exchanged", _taken_words(permit))
    return _first(incident, permit, attempt, webhook_id, supervisor)


def _first(
    incident: Incident, permit: Permit, attempt: int, webhook_id: str, supervisor: str
) -> dict[str, Any] | Refused:
    """Hand an issued permit out, if what was approved is still what is."""
    if incident.state not in Incident.UNRESOLVED:
        return _not_approved(incident, permit)
    if over := _expired(incident, permit):
        return over
    changes = permits.revalidate(incident)
    if changes:
        return Refused(
            "changed-since-approval",
            f"Not resumed: {'; '.join(changes)}. The approval is void; request again.",
            changes=changes,
        )
    shut = permits.gate_words(incident, permit.request)
    if shut:
        permits.void(incident, permit.request, [shut])
        return Refused("changed-since-approval", f"Not resumed: {shut}.", changes=[shut])
    if attempt != permit.attempt:
        return Refused(
            "not-approved", f"The permit is for attempt {permit.attempt}, not for attempt {attempt}."
        )
    if not_yet := _not_contained(incident):
        return not_yet
    return _hand_out(incident, permit, webhook_id, supervisor, timezone.now())


def _again(
    incident: Incident, permit: Permit, attempt: int, webhook_id: str, supervisor: str
) -> dict[str, Any] | Refused:
    """Let the supervisor that has it launch once more."""
    if over := _expired(incident, permit):
        return over
    why = _why_not_again(permit, attempt, supervisor)
    if why:
        return Refused("already-exchanged", f"{_taken_words(permit)} Not again: {why}.")
    if not_yet := _not_contained(incident):
        return not_yet
    permit.attempt = attempt
    permit.document = permits.sign(permit)
    return _hand_out(incident, permit, webhook_id, supervisor, timezone.now())


def _why_not_again(permit: Permit, attempt: int, supervisor: str) -> str:
    limit = policy_for(permit.run_id).resume.launches_per_permit
    newest = Attempt.objects.filter(run_id=permit.run_id).order_by("-number").first()
    if not supervisor or supervisor != permit.supervisor:
        return "another supervisor has it"
    if len(permit.exchanges) >= limit:
        return f"it lets at most {limit} launches happen, and a person must look"
    if permit.launches < len(permit.exchanges):
        return f"its launch of attempt {permit.attempt} was not reported"
    if newest is None or newest.number != permit.attempt or attempt != newest.number + 1:
        return f"the next attempt is {subjects.newest_attempt(permit.run_id) + 1}"
    if newest.exited_at is None:
        return f"attempt {newest.number} has not exited"
    if not infrastructure.ended(newest):
        return f"attempt {newest.number} was not ended by the machines, so a person must look"
    first = permit.exchanges[0]["attempt"]
    committed = Checkpoint.objects.filter(run_id=permit.run_id, attempt__gte=first)
    if any(is_past(one, permit) for one in committed):
        return "a checkpoint past its window was committed: restart from the newest verified one"
    return ""


def is_past(checkpoint: Checkpoint, permit: Permit) -> bool:
    """Return whether a checkpoint lies past what the permit's plan skips or runs again."""
    plan = permit.request.plan
    began = plan.checkpoint.get("step")
    if began is not None and checkpoint.step <= began:
        return False
    if plan.skip and checkpoint.loader_position is not None:
        return checkpoint.loader_position >= int(plan.skip["to"])
    last = plan.numbers.get("last_bad_step")
    return last is None or checkpoint.step > int(last)


def _expired(incident: Incident, permit: Permit) -> Refused | None:
    if permit.state != Permit.State.EXPIRED and permit.expires_at > timezone.now():
        return None
    if permit.state == Permit.State.ISSUED:
        until = f"{permit.expires_at:%d %b %H:%M} UTC"
        permits.expire(incident, permit.request, f"the permit was not taken before {until}")
    return Refused(
        "expired",
        f"The permit expired at {rfc3339(permit.expires_at)}; ask for a new approval.",
        status=410,
    )


def _not_contained(incident: Incident) -> Refused | None:
    """Two attempts must never write at once. Asking is the supervisor's word that the last one is gone."""
    found = contained.of(incident)
    if found.whole or found.still:
        return None
    return Refused(
        "not-contained",
        f"Not yet: {found.says}. Ask again once they stopped, or report attempt.exited.",
    )


def _hand_out(
    incident: Incident, permit: Permit, webhook_id: str, supervisor: str, now: datetime
) -> dict[str, Any]:
    permit.state, permit.exchanged_at, permit.exchanged_by = Permit.State.EXCHANGED, now, webhook_id
    permit.supervisor = permit.supervisor or supervisor
    document: dict[str, Any] = permit.document
    taken = {"webhook_id": webhook_id, "attempt": permit.attempt, "at": rfc3339(now), "document": document}
    permit.exchanges = [*permit.exchanges, taken]
    permit.save()
    by = f" by {supervisor}" if supervisor else ""
    if incident.state == S.APPROVED:
        why = f"the permit was taken for attempt {permit.attempt}{by}"
        states.move(incident, S.RESUMING, why=why)
    else:
        states.record(incident, kind="permit", text=f"permit taken for attempt {permit.attempt}{by}")
    plan = permit.request.plan
    none = "none: handing a permit out moves nothing; the launch does"
    ledger.append(
        run=incident.run,
        action="permit",
        why=f"permit {permit.public_id} handed out for attempt {permit.attempt}: {plan.get_kind_display()}",
        decided_by="andon",
        attempt=permit.attempt,
        checkpoint=plan.checkpoint or None,
        none_because=dict.fromkeys(("step", "ranks", "before", "after"), none)
        | ({} if plan.checkpoint else {"checkpoint": "none: the ranks go on from memory"}),
        incident=incident,
        at=now,
    )
    return document


def _exchanged_before(permit: Permit, document: dict[str, Any]) -> dict[str, Any] | Refused:
    if permit.state in LIVE or permit.state == Permit.State.SPENT:
        return document
    if permit.state == Permit.State.EXPIRED:
        return Refused("expired", f"The permit expired at {rfc3339(permit.expires_at)}.", status=410)
    return Refused("not-approved", f"The permit was voided: {permit.ended_why}.")


def _taken_words(permit: Permit) -> str:
    when = rfc3339(permit.exchanged_at) if permit.exchanged_at else "an unknown time"
    return f"The permit was taken at {when} by the post {permit.exchanged_by}; it lets one resume happen."


def _not_approved(incident: Incident, permit: Permit | None) -> Refused:
    if incident.state not in Incident.UNRESOLVED:
        return Refused("not-approved", f"Incident {incident.pk} is {incident.state}; nothing is held by it.")
    request = live_request(incident)
    if request is not None:
        have = request.approvals.count()
        return Refused("not-approved", f"Requested, {have} of {request.approvers_needed} approved.")
    if not incident.holds:
        return Refused(
            "not-approved",
            "Nothing is held: restart from the newest verified checkpoint without a permit. To go further "
            "back or to skip, a standing approval must allow it.",
        )
    if permit is not None:
        changes = list(permit.request.ended_why)
        return Refused(
            "changed-since-approval",
            f"The approval is void: {'; '.join(map(str, changes)) or permit.ended_why}. Request again.",
            changes=[str(change) for change in changes],
        )
    return Refused("not-approved", f"Nobody has asked to resume incident {incident.pk} yet.")
