"""The permit: issued by the last approval, void as soon as what was approved is not what is.

Everything here is called with the run lock held. `incidents.exchanging` hands permits out.
"""

import uuid
from datetime import datetime, timedelta
from typing import Any, Literal

from django.utils import timezone

from andon import permit as documents
from andon.policy import Policy
from evidence.gates import Gate, resume_gate
from incidents import holding, plans, roles, states, subjects
from incidents.models import Incident, Permit, ResumeRequest
from runs.access import project_member
from runs.directives import set_directive
from runs.keys import server_key
from runs.policies import policy_for

S = Incident.State
LIVE = (Permit.State.ISSUED, Permit.State.EXCHANGED)


def rfc3339(moment: datetime) -> str:
    """Return a time as permits carry it."""
    return moment.isoformat().replace("+00:00", "Z")


def issue(incident: Incident, request: ResumeRequest, policy: Policy) -> Permit:
    """Sign the permit of an approved request and turn the directive to it.

    Where the incident holds nothing the directive stays: the supervisor restarts by itself, and the
    permit lets it go further back than the newest verified checkpoint.
    """
    run, plan, now = incident.run, request.plan, timezone.now()
    expires = now + timedelta(seconds=policy.resume.permit_expires_s)
    public_id = uuid.uuid4()
    attempt = subjects.newest_attempt(run.pk) + 1
    permit = Permit(
        public_id=public_id,
        run=run,
        incident=incident,
        request=request,
        attempt=attempt,
        issued_at=now,
        expires_at=expires,
    )
    permit.document = sign(permit)
    permit.save(force_insert=True)
    text = f"permit issued for attempt {attempt}"
    if incident.holds:
        kind: Literal["rollback", "resume"] = "rollback" if plan.kind in plans.ROLLBACKS else "resume"
        directive = set_directive(
            run=run,
            kind=kind,
            incident=str(incident.pk),
            plan=plans.content(plan),
            permit=str(public_id),
            why=f"approved: {plan.get_kind_display()}",
        )
        text += f", directive {directive.seq}: {kind}"
    states.record(incident, kind="permit", text=text, data={"permit": str(public_id)})
    return permit


def sign(permit: Permit) -> dict[str, Any]:
    """Return the signed document of a permit for the attempt it now names."""
    request, plan = permit.request, permit.request.plan
    kept = plan.checkpoint
    regime = [change["what"] for change in plan.changes if change.get("changes_regime")]
    content = documents.Permit(
        permit=str(permit.public_id),
        run=permit.run.slug,
        attempt=permit.attempt,
        incident=str(permit.incident_id),
        approval=f"standing-{request.standing_id}" if request.standing_id else str(request.pk),
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
        issued_at=rfc3339(permit.issued_at),
        expires_at=rfc3339(permit.expires_at),
    )
    return documents.issue(content, server_key())


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
    if ended and incident.holds:
        holding.hold_again(incident, policy_for(incident.run_id), f"the approval fell: {why}")


def revalidate(incident: Incident) -> list[str]:
    """Void the live request if what it was asked for is not what is now; returns what changed.

    A permit that was taken cannot be called back: it is valid offline. Then nothing is voided, and the
    launch it allows is judged by what was signed.
    """
    request = live_request(incident)
    if request is None or incident.state not in (S.OPEN, S.APPROVED):
        return []
    if not incident.holds and _taken(request):
        return []
    signed, digest = subjects.subject(incident, kind=request.kind)
    changes = _gone(incident, request)
    if digest != request.digest:
        changes = (subjects.differences(request.subject, signed) or ["what is signed changed"]) + changes
    if changes:
        void(incident, request, changes)
    return changes


def _gone(incident: Incident, request: ResumeRequest) -> list[str]:
    """Return whose approval is worth nothing any more: they lost the role by which they gave it.

    An account that was taken over is stopped by taking its role; what it approved must stop with it.
    """
    named = policy_for(incident.run_id).resume.break_glass_roles
    needed = named if request.kind == ResumeRequest.Kind.BREAK_GLASS else roles.APPROVERS
    return [
        f"{one.approver.username} approved and may not any more"
        for one in request.approvals.select_related("approver").order_by("id")
        if not project_member(one.approver, incident.run.project, *needed)
    ]


def _taken(request: ResumeRequest) -> bool:
    return Permit.objects.filter(request=request, state=Permit.State.EXCHANGED).exists()


def live_request(incident: Incident) -> ResumeRequest | None:
    """Return the request that is open or approved."""
    return (
        incident.requests.filter(state__in=[ResumeRequest.State.OPEN, ResumeRequest.State.APPROVED])
        .select_related("plan", "requested_by")
        .first()
    )


def gate_words(incident: Incident, request: ResumeRequest) -> str:
    """Return what keeps the gate shut for this request, "" when it is open.

    A false alarm needs its evidence only held. Who breaks the glass goes on without it, and what was
    not safe then is written down.
    """
    if request.kind in (ResumeRequest.Kind.FALSE_ALARM, ResumeRequest.Kind.BREAK_GLASS):
        return ""
    if not incident.holds:
        return ""  # a restart that nothing holds waits for nothing; what is frozen stays frozen
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
