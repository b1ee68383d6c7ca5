"""Caps: how often a run may act by itself in a day. Past that it is held, and a person decides.

An action that a trainer reports was done before anybody could refuse it: what is refused is the next one,
by holding the run. A hold is never refused, since what it stops may be ruining the weights; but past its
cap nothing signed in advance lets the run go on.
"""

from dataclasses import dataclass

from django.utils import timezone

from andon.policy import Policy
from incidents import ledger, states
from incidents.models import Incident, LedgerRow
from runs.formatting import plural
from runs.models import Finding, Run
from runs.policies import policy_for

RULE, VERSION, KIND = "caps", "1", "cap_reached"
ACTIONS = ("hold", "rollback", "skip")


@dataclass(frozen=True, slots=True)
class Budget:
    """What one action may still do today."""

    action: str
    used: int
    of: int

    @property
    def left(self) -> int:
        """How often it may still be done before a person is needed."""
        return max(0, self.of - self.used)


def of(policy: Policy, action: str) -> int | None:
    """Return how often a day an action may be done automatically; None: nothing caps it."""
    caps = policy.caps
    known = {
        "hold": caps.holds_per_day,
        "rollback": caps.rollbacks_per_day,
        "skip": caps.skips_per_day,
    }
    return known.get(action)


def today(run: Run) -> list[Budget]:
    """Return the budgets of a run on this UTC day."""
    policy = policy_for(run.pk)
    return [
        Budget(action, ledger.used_today(run, action), cap)
        for action in ACTIONS
        if (cap := of(policy, action)) is not None
    ]


def note(incident: Incident, row: LedgerRow, policy: Policy) -> None:
    """Say on an incident that its hold was one more than the day's automatic holds."""
    said = finding(incident.run, row, policy, incident=str(incident.pk))
    states.record(incident, kind="cap", text=said.detail, by=f"{RULE} v{VERSION}")


def finding(run: Run, row: LedgerRow, policy: Policy, *, incident: str = "") -> Finding:
    """Store what a row past its cap means; without `incident` it still has to be given its place."""
    budget = row.budget or {}
    now = timezone.now()
    return Finding.objects.create(
        run=run,
        attempt=row.attempt or 1,
        kind=KIND,
        rule=RULE,
        mode="act",
        severity=Finding.Severity.HALT,
        step=row.step,
        detail=f"{plural(budget['used'], f'automatic {row.action}')} today, the cap is {budget['of']}:"
        " a person decides",
        detector=RULE,
        detector_version=VERSION,
        policy_digest=policy.digest(),
        numbers={"action": row.action, **budget, "row": row.seq},
        occurred_at=now,
        received_at=now,
        needs_incident=not incident,
        incident=incident,
    )
