"""What an approved request sets in motion: the one place where a permit comes into being.

Every way to go on ends here: the last of the approvals needed, a false alarm, break-glass, the sole
approver whose delay is over, a standing approval. The run lock is held.
"""

from incidents import ledger, permits, states
from incidents.models import Incident, Permit, ResumeRequest
from runs.models import Person
from runs.policies import policy_for

_HOW = {
    ResumeRequest.Kind.RESUME: "approved",
    ResumeRequest.Kind.FALSE_ALARM: "approved as a false alarm",
    ResumeRequest.Kind.BREAK_GLASS: "approved by breaking the glass",
    ResumeRequest.Kind.SOLO: "approved by the sole approver on duty",
    ResumeRequest.Kind.STANDING: "allowed by standing approval",
}


def grant(incident: Incident, request: ResumeRequest, *, person: Person | None, more: str = "") -> Permit:
    """Approve `request` and issue its permit.

    Args:
        person: who decided; None: a standing approval, which the request names.
        more: what the ledger must say beside it.
    """
    how = _HOW[ResumeRequest.Kind(request.kind)]
    if request.standing_id:
        how += f" {request.standing_id}"
    request.state = ResumeRequest.State.APPROVED
    request.save(update_fields=["state"])
    if incident.holds:
        why = f"plan {request.plan.number} {how}"
        states.move(incident, Incident.State.APPROVED, person=person, why=why)
    permit = permits.issue(incident, request, policy_for(incident.run_id))
    plan = request.plan
    none = "none: an approval moves nothing; the launch it permits does"
    ledger.append(
        run=incident.run,
        action="approve",
        why=f"{plan.get_kind_display()} {how} for attempt {permit.attempt}, signing {request.digest}"
        + (f"; {more}" if more else ""),
        decided_by=who(request, person),
        attempt=permit.attempt,
        checkpoint=plan.checkpoint or None,
        none_because=dict.fromkeys(("step", "ranks", "before", "after"), none)
        | ({} if plan.checkpoint else {"checkpoint": "none: the ranks go on from memory"}),
        incident=incident,
    )
    return permit


def who(request: ResumeRequest, person: Person | None = None) -> str:
    """Return who let it go on, as the ledger names them."""
    if request.standing_id:
        return f"standing approval {request.standing_id}"
    if person is None:
        last = request.approvals.select_related("approver").order_by("id").last()
        person = last.approver if last else None
    return str(person.opaque_id) if person else "andon"
