"""A launch with a permit although nothing is held: the same resume again, or a restart further back."""

from django.utils import timezone

from incidents import granting, ledger, resumptions, states
from incidents.models import LedgerRow, Permit, ResumeRequest
from runs.models import Attempt
from runs.policies import policy_for


def accept(permit: Permit, attempt: Attempt) -> list[LedgerRow]:
    """Count one launch of a permit under continue and write it down; the run lock is held.

    Returns the rows that were one more than their day allows.
    """
    first = permit.launches == 0
    launches = permit.launches + 1
    Permit.objects.filter(pk=permit.pk).update(launches=launches)
    ResumeRequest.objects.filter(pk=permit.request_id, state=ResumeRequest.State.APPROVED).update(
        state=ResumeRequest.State.USED, ended_at=timezone.now()
    )
    of = policy_for(permit.run_id).resume.launches_per_permit
    text = f"attempt {attempt.number} was launched with its permit, launch {launches} of at most {of}"
    states.record(permit.incident, kind="permit", text=text)
    if first:
        return resumptions.write(permit, attempt)
    _write_restart(permit, attempt, text)
    return []


def _write_restart(permit: Permit, attempt: Attempt, text: str) -> None:
    plan, before = permit.request.plan, permit.exchanges[-2]["attempt"]
    reasons = {
        "step": "the step the attempt before it stopped at stands with its exit",
        "ranks": "all ranks of the new attempt",
        "before": f"attempt {before} was ended by the machines; where it stood is lost with it",
    }
    after = {name: plan.positions.get(name) for name in ledger.POSITIONS}
    known = None if all(value is None for value in after.values()) else after
    if known is None:
        reasons["after"] = "the plan names no position: the ranks go on from memory"
    else:
        reasons |= {
            f"after.{name}": "the checkpoint does not keep it" for name in after if after[name] is None
        }
    if not plan.checkpoint:
        reasons["checkpoint"] = "none: the ranks go on from memory"
    ledger.append(
        run=permit.run,
        action="restart",
        why=text,
        decided_by=granting.who(permit.request),
        attempt=attempt.number,
        after=known,
        checkpoint=plan.checkpoint or None,
        none_because=reasons,
        incident=permit.incident,
    )
