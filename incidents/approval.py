"""The one door by which a held run goes on: request, approval, permit.

Button, API and command call these functions. Each takes the run lock first, so that what is approved
is what is there; each raises `Refused(code, says)` with words for the person who tried. A refusal that
voids or expires something commits that before it is raised: call them outside of a transaction.
What one person may do alone (false alarm, break-glass, the sole approver on duty) is in `incidents.alone`.
"""

from datetime import timedelta

from django.utils import timezone

from incidents import granting, permits, plans, roles, states, subjects
from incidents.alone import break_glass, false_alarm, solo
from incidents.door import within
from incidents.exchanging import exchange
from incidents.models import Approval, Incident, ResumeRequest
from incidents.refused import Refused
from incidents.subjects import subject
from runs.formatting import count
from runs.models import Person
from runs.policies import policy_for

__all__ = [
    "approve",
    "break_glass",
    "exchange",
    "false_alarm",
    "reject",
    "request_resume",
    "solo",
    "subject",
    "withdraw",
]

S = Incident.State
R = ResumeRequest.State


def request_resume(*, incident: Incident, person: Person, digest: str, note: str = "") -> ResumeRequest:
    """Ask to resume by exactly what the page showed.

    Args:
        digest: of the subject that the page showed.

    Raises:
        Refused: not-allowed, over, not-held, requested-already, plan-incomplete, gate-shut, changed.
    """
    return within(incident, lambda fresh: _request(fresh, person, digest, note))


def approve(*, incident: Incident, person: Person, digest: str) -> Approval:
    """Approve the live request; the last approval needed issues the permit.

    The caller has made sure that it is this person, now: a recent password or passkey.

    Args:
        digest: of the subject that the page showed.

    Raises:
        Refused: not-allowed, no-request, approved-already, requester, edited, waived, expired,
            changed-since-approval, changed (the page is old), gate-shut.
    """
    return within(incident, lambda fresh: _approve(fresh, person, digest))


def reject(*, incident: Incident, person: Person, why: str) -> ResumeRequest:
    """Reject the live request with a reason. An approver may, the requester may withdraw instead.

    Raises:
        Refused: not-allowed, no-request, reason-needed, taken.
    """
    return within(incident, lambda fresh: _reject(fresh, person, why))


def withdraw(*, incident: Incident, person: Person, why: str = "") -> ResumeRequest:
    """Take back one's own request while nobody has approved it fully.

    Raises:
        Refused: no-request, not-allowed.
    """
    return within(incident, lambda fresh: _withdraw(fresh, person, why))


def _request(incident: Incident, person: Person, digest: str, note: str) -> ResumeRequest | Refused:
    roles.need_responder(person, incident.run.project, "request a resume")
    if incident.state not in Incident.UNRESOLVED:
        return Refused("over", f"Incident {incident.pk} is {incident.state}: there is nothing to resume.")
    if not incident.holds:
        return Refused("not-held", "This incident does not hold its run: nothing to resume.")
    if incident.state != S.OPEN:
        return Refused("requested-already", f"A resume is {incident.state} already.")
    live = permits.live_request(incident)
    if live is not None:
        live = None if _expire_if_due(incident, live) else live
    if live is not None:
        return Refused(
            "requested-already", f"{_name(live.requested_by)} asked already: approve or reject that."
        )
    plan = plans.newest(incident)
    missing = plans.lacks(plan)
    if plan is None or missing:
        return Refused("plan-incomplete", f"The plan is not complete: {'; '.join(missing)}.")
    shut = permits.evidence_words(incident)
    if shut:
        return Refused("gate-shut", f"Resume cannot be requested: {shut}.")
    signed, now_digest = subjects.subject(incident, plan=plan)
    if digest != now_digest:
        return Refused("changed", "What you saw has changed since: look again, then request.")
    policy = policy_for(incident.run_id)
    now = timezone.now()
    request = ResumeRequest.objects.create(
        incident=incident,
        plan=plan,
        requested_by=person,
        requested_at=now,
        digest=now_digest,
        subject=signed,
        note=note.strip(),
        approvers_needed=policy.resume.approvers,
        expires_at=now + timedelta(seconds=policy.resume.approval_expires_s),
    )
    states.record(
        incident,
        kind="request",
        text=f"resume requested by plan {plan.number}" + (f": {request.note}" if request.note else ""),
        person=person,
        data={"request": request.pk, "digest": now_digest},
    )
    return request


def _approve(incident: Incident, person: Person, digest: str) -> Approval | Refused:
    roles.need_approver(person, incident.run.project, "approve")
    request = permits.live_request(incident)
    if request is None:
        return _no_request(incident)
    if request.kind == ResumeRequest.Kind.SOLO and request.state == R.OPEN:
        return Refused(
            "solo-waits",
            f"{_name(request.requested_by)} resumes as sole approver at {request.grants_at:%H:%M:%S} UTC: "
            "reject it to stop it, or reject and approve a request instead.",
        )
    if request.state == R.APPROVED:
        return Refused("approved-already", "It is approved already; the permit waits for its supervisor.")
    why_not = roles.why_not_approver(incident, person, request.requested_by)
    if why_not:
        return Refused("not-you", why_not, status=403)
    if request.approvals.filter(approver=person).exists():
        return Refused("approved-already", f"You approved; {_still_needed(request)}")
    if _expire_if_due(incident, request):
        return Refused("expired", "The request expired before it was approved: request again.", status=410)
    changes = permits.revalidate(incident)
    if changes:
        return Refused(
            "changed-since-approval",
            f"Not approved: {'; '.join(changes)}. Review again.",
            changes=changes,
        )
    if digest != request.digest:
        return Refused(
            "changed", "Not approved: the page you saw is of another plan or evidence. Review again."
        )
    shut = permits.evidence_words(incident)
    if shut:
        return Refused("gate-shut", f"Not approved: {shut}.")
    approval = Approval.objects.create(
        request=request,
        approver=person,
        requester=request.requested_by,
        digest=request.digest,
        at=timezone.now(),
    )
    states.record(
        incident,
        kind="approval",
        text=f"approved plan {request.plan.number} ({_progress(request)})",
        person=person,
        data={"digest": request.digest},
    )
    if request.approvals.count() >= request.approvers_needed:
        granting.grant(incident, request, person=person)
    return approval


def _reject(incident: Incident, person: Person, why: str) -> ResumeRequest | Refused:
    roles.need_approver(person, incident.run.project, "reject")
    request = permits.live_request(incident)
    if request is None:
        return _no_request(incident)
    why = why.strip()
    if not why:
        return Refused("reason-needed", "Say why: the person who asked has to know what to change.")
    if incident.state == S.RESUMING:
        return Refused("taken", "The permit was taken already: hold the run by hand once it runs.")
    permits.void(incident, request, [f"rejected by {person.username}: {why}"])
    ResumeRequest.objects.filter(pk=request.pk).update(state=R.REJECTED, ended_why=[why])
    states.record(incident, kind="reject", text=f"rejected: {why}", person=person)
    request.refresh_from_db()
    return request


def _withdraw(incident: Incident, person: Person, why: str) -> ResumeRequest | Refused:
    request = permits.live_request(incident)
    if request is None or request.state != R.OPEN:
        return _no_request(incident)
    if request.requested_by_id != person.pk:
        return Refused(
            "not-allowed", f"Only {_name(request.requested_by)}, who asked, may withdraw it.", status=403
        )
    permits.void(
        incident, request, [f"withdrawn by {person.username}" + (f": {why.strip()}" if why.strip() else "")]
    )
    return request


def _expire_if_due(incident: Incident, request: ResumeRequest) -> bool:
    if request.state != R.OPEN or request.expires_at > timezone.now():
        return False
    permits.expire(incident, request, f"nobody approved before {request.expires_at:%d %b %H:%M} UTC")
    return True


def _no_request(incident: Incident) -> Refused:
    last = incident.requests.order_by("-id").first()
    if last is not None and last.state in (R.VOIDED, R.EXPIRED, R.REJECTED):
        said = "; ".join(map(str, last.ended_why))
        return Refused("no-request", f"The last request was {last.state}: {said}. Request again.")
    return Refused("no-request", "Nobody has asked to resume.")


def _progress(request: ResumeRequest) -> str:
    return f"{count(request.approvals.count())} of {count(request.approvers_needed)}"


def _still_needed(request: ResumeRequest) -> str:
    return f"{_progress(request)} approvals are there, somebody else must give the next."


def _name(person: Person | None) -> str:
    return person.username if person else "Andon"
