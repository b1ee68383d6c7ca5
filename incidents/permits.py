"""The permit: issued by the last approval, handed out once, spent by what it let happen.

Everything here is called with the run lock held, except `exchange`, which takes it.
"""

import uuid
from datetime import datetime, timedelta
from typing import Any, Literal

from django.db import transaction
from django.utils import timezone

from andon import permit as documents
from andon.policy import Policy
from evidence.gates import Gate, resume_gate
from incidents import holding, ledger, plans, states, subjects
from incidents.models import Incident, Permit, ResumeRequest
from incidents.refused import Refused
from runs.directives import set_directive
from runs.keys import server_key
from runs.locks import lock_run
from runs.models import Run
from runs.policies import policy_for

S = Incident.State
LIVE = (Permit.State.ISSUED, Permit.State.EXCHANGED)


def rfc3339(moment: datetime) -> str:
    """Return a time as permits carry it."""
    return moment.isoformat().replace("+00:00", "Z")


def issue(incident: Incident, request: ResumeRequest, policy: Policy) -> Permit:
    """Sign the permit of an approved request and turn the directive to it."""
    plan, run, now = request.plan, incident.run, timezone.now()
    expires = now + timedelta(seconds=policy.resume.permit_expires_s)
    public_id = uuid.uuid4()
    attempt = subjects.newest_attempt(run.pk) + 1
    permit = Permit.objects.create(
        public_id=public_id,
        run=run,
        incident=incident,
        request=request,
        attempt=attempt,
        document=documents.issue(
            _content(public_id, incident, request, attempt=attempt, now=now, expires=expires),
            server_key(),
        ),
        issued_at=now,
        expires_at=expires,
    )
    kind: Literal["rollback", "resume"] = "rollback" if plan.kind in plans.ROLLBACKS else "resume"
    directive = set_directive(
        run=run,
        kind=kind,
        incident=str(incident.pk),
        plan=plans.content(plan),
        permit=str(public_id),
        why=f"approved: {plan.get_kind_display()}",
    )
    states.record(
        incident,
        kind="permit",
        text=f"permit issued for attempt {attempt}, directive {directive.seq}: {kind}",
        data={"permit": str(public_id)},
    )
    return permit


def _content(
    public_id: uuid.UUID,
    incident: Incident,
    request: ResumeRequest,
    *,
    attempt: int,
    now: datetime,
    expires: datetime,
) -> documents.Permit:
    plan = request.plan
    kept = plan.checkpoint
    regime = [change["what"] for change in plan.changes if change.get("changes_regime")]
    return documents.Permit(
        permit=str(public_id),
        run=incident.run.slug,
        attempt=attempt,
        incident=str(incident.pk),
        approval=str(request.pk),
        approval_digest=request.digest,
        plan=plan.kind,  # type: ignore[arg-type]
        checkpoint=documents.Checkpoint(kept["step"], kept["uri"], kept.get("digest") or None)
        if kept
        else None,
        positions=documents.Positions(**plan.positions),
        skip=documents.SkipWindow(plan.skip["from"], plan.skip["to"]) if plan.skip else None,
        exclusions=documents.Exclusions(**{name: tuple(values) for name, values in plan.exclusions.items()}),
        changes=tuple(
            documents.Change(
                what=change["what"],
                to=change.get("to"),
                was=change.get("was"),
                changes_regime=bool(change.get("changes_regime")),
            )
            for change in plan.changes
        ),
        regime=f"changed: {', '.join(regime)}" if regime else None,
        issued_at=rfc3339(now),
        expires_at=rfc3339(expires),
    )


def void(incident: Incident, request: ResumeRequest, changes: list[str]) -> None:
    """Make a live request and its permit worthless, and put the hold back if it had been lifted."""
    now = timezone.now()
    request.state, request.ended_at, request.ended_why = ResumeRequest.State.VOIDED, now, changes
    request.save(update_fields=["state", "ended_at", "ended_why"])
    _end(incident, Permit.State.VOIDED, now, "; ".join(changes))


def expire(incident: Incident, request: ResumeRequest, why: str) -> None:
    """End a request, and its permit, whose time has passed."""
    now = timezone.now()
    request.state, request.ended_at, request.ended_why = ResumeRequest.State.EXPIRED, now, [why]
    request.save(update_fields=["state", "ended_at", "ended_why"])
    _end(incident, Permit.State.EXPIRED, now, why)


def _end(incident: Incident, state: str, now: datetime, why: str) -> None:
    ended = Permit.objects.filter(incident=incident, state__in=LIVE).update(
        state=state, ended_at=now, ended_why=why
    )
    states.record(incident, kind="approval", text=f"approval ended: {why}")
    if incident.state in (S.APPROVED, S.RESUMING):
        states.move(incident, S.OPEN, why=why)
    if ended:
        holding.hold_again(incident, policy_for(incident.run_id), f"the approval fell: {why}")


def revalidate(incident: Incident) -> list[str]:
    """Void the live request if what it was asked for is not what is now; returns what changed.

    A permit that was taken cannot be called back: it is valid offline. Then nothing is voided, and the
    launch it allows is judged by what was signed.
    """
    request = live_request(incident)
    if request is None or incident.state not in (S.OPEN, S.APPROVED):
        return []
    signed, digest = subjects.subject(incident, kind=request.kind)
    if digest == request.digest:
        return []
    changes = subjects.differences(request.subject, signed) or ["what is signed changed"]
    void(incident, request, changes)
    return changes


def live_request(incident: Incident) -> ResumeRequest | None:
    """Return the request that is open or approved."""
    return (
        incident.requests.filter(state__in=[ResumeRequest.State.OPEN, ResumeRequest.State.APPROVED])
        .select_related("plan", "requested_by")
        .first()
    )


def exchange(*, run: Run, incident_id: int, attempt: int, webhook_id: str) -> dict[str, Any]:
    """Hand the permit out, once: the same `webhook_id` gets the same document again.

    Args:
        attempt: the number of the attempt that is to be launched.

    Raises:
        Refused: unknown-incident (404), not-approved, changed-since-approval, already-exchanged (409),
            expired (410).
    """
    with transaction.atomic():
        outcome = _exchange(run, incident_id, attempt, webhook_id)
    # Raised outside: a refusal may have voided or expired something, and that must stay.
    if isinstance(outcome, Refused):
        raise outcome
    return outcome


def _exchange(run: Run, incident_id: int, attempt: int, webhook_id: str) -> dict[str, Any] | Refused:
    run = lock_run(run.pk)
    incident = (
        Incident.objects.select_for_update(no_key=True, of=("self",))
        .select_related("run", "dossier")
        .filter(pk=incident_id, run=run)
        .first()
    )
    if incident is None:
        return Refused("unknown-incident", f"Run {run.slug} has no incident {incident_id}.", status=404)
    again = Permit.objects.filter(incident=incident, exchanged_by=webhook_id).order_by("-id").first()
    if again is not None:
        return _exchanged_before(again)
    permit = (
        Permit.objects.filter(incident=incident)
        .select_related("request", "request__plan")
        .order_by("-id")
        .first()
    )
    asked_again = permit is not None and permit.state not in LIVE and live_request(incident) is not None
    if permit is None or permit.state == Permit.State.VOIDED or asked_again:
        return _not_approved(incident, permit)
    if permit.state in (Permit.State.EXCHANGED, Permit.State.SPENT):
        return Refused("already-exchanged", _taken_words(permit))
    now = timezone.now()
    if permit.state == Permit.State.EXPIRED or permit.expires_at <= now:
        if permit.state == Permit.State.ISSUED:
            expire(
                incident,
                permit.request,
                f"the permit was not taken before {permit.expires_at:%d %b %H:%M} UTC",
            )
        return Refused(
            "expired",
            f"The permit expired at {rfc3339(permit.expires_at)}; ask for a new approval.",
            status=410,
        )
    changes = revalidate(incident)
    if changes:
        return Refused(
            "changed-since-approval",
            f"Not resumed: {'; '.join(changes)}. The approval is void; request again.",
            changes=changes,
        )
    shut = gate_words(incident, permit.request)
    if shut:
        void(incident, permit.request, [shut])
        return Refused("changed-since-approval", f"Not resumed: {shut}.", changes=[shut])
    if attempt != permit.attempt:
        return Refused(
            "not-approved",
            f"The permit is for attempt {permit.attempt}, not for attempt {attempt}.",
        )
    return _hand_out(incident, permit, webhook_id, now)


def _hand_out(incident: Incident, permit: Permit, webhook_id: str, now: datetime) -> dict[str, Any]:
    permit.state, permit.exchanged_at, permit.exchanged_by = Permit.State.EXCHANGED, now, webhook_id
    permit.save(update_fields=["state", "exchanged_at", "exchanged_by"])
    states.move(incident, S.RESUMING, why=f"the permit was taken for attempt {permit.attempt}")
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
    document: dict[str, Any] = permit.document
    return document


def _exchanged_before(permit: Permit) -> dict[str, Any] | Refused:
    if permit.state in LIVE or permit.state == Permit.State.SPENT:
        document: dict[str, Any] = permit.document
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
    if permit is not None:
        changes = list(permit.request.ended_why)
        return Refused(
            "changed-since-approval",
            f"The approval is void: {'; '.join(map(str, changes)) or permit.ended_why}. Request again.",
            changes=[str(change) for change in changes],
        )
    return Refused("not-approved", f"Nobody has asked to resume incident {incident.pk} yet.")


def gate_words(incident: Incident, request: ResumeRequest) -> str:
    """Return what keeps the gate shut for this request, "" when it is open."""
    if request.kind == ResumeRequest.Kind.FALSE_ALARM:
        return ""
    return evidence_words(incident)


def evidence_words(incident: Incident) -> str:
    """Return which required evidence is not safe yet, "" when all is."""
    return lacking_words(resume_gate(incident.dossier))


def lacking_words(gate: Gate) -> str:
    """Return what keeps a gate shut, "" when it is open."""
    if gate.open:
        return ""
    lacking = [f"{line.name}: {line.says}" for line in gate.lacking]
    more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
    return f"evidence is not safe yet ({'; '.join(lacking[:3])}{more})"
