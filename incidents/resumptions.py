"""What the ledger keeps of a run that goes on: the rollback, the skip, and the resume itself."""

from typing import Any

from incidents import costs, granting, holding, ledger, plans, positions
from incidents.models import LedgerRow, Permit, Plan
from runs.models import Attempt
from runs.policies import policy_for


def write(permit: Permit, attempt: Attempt) -> list[LedgerRow]:
    """Append the ledger rows of what a launch with its permit did: rollback, skip, and the resume itself.

    Returns those that were one more than their day allows: the cap had room when the permit was issued,
    and something else used it up since.
    """
    incident, plan, run = permit.incident, permit.request.plan, permit.run
    numbers = plan.numbers
    halt, old = numbers.get("halt_step"), numbers.get("attempt") or incident.attempt
    before = positions.at(run, old, halt) if halt is not None else None
    after, no_after = _after(plan)
    ranks, no_ranks = holding.everyone(run, attempt.number)
    who = granting.who(permit.request)
    reasons: dict[str, str] = {} if ranks else {"ranks": no_ranks}
    reasons |= before.reasons("before") if before else {"before": "the step it stopped at is not known"}
    reasons |= no_after
    if halt is None:
        reasons["step"] = "the step it stopped at is not known"
    if not plan.checkpoint:
        reasons["checkpoint"] = "none: the ranks go on from memory"
    cost = costs.of_plan(incident, plan, policy_for(run.pk)).gpu_hours
    common: dict[str, Any] = {
        "run": run,
        "decided_by": who,
        "attempt": attempt.number,
        "step": halt,
        "ranks": ranks,
        "before": before.values if before else None,
        "after": after,
        "checkpoint": plan.checkpoint or None,
        "incident": incident,
    }
    # What a person decided is capped by nothing but that person.
    caps = policy_for(run.pk).caps if permit.request.standing_id else None
    rows = []
    if plan.kind in plans.ROLLBACKS:
        lost = numbers.get("steps_lost")
        more = {} if lost is not None else {"steps_lost": "the step it stopped at is not known"}
        more |= {} if cost is not None else {"gpu_hours_lost": "step time or world size was not reported"}
        row = ledger.append(
            action="rollback",
            why=plan.why or plan.get_kind_display(),
            steps_lost=lost,
            gpu_hours_lost=cost,
            none_because=reasons | more,
            cap=caps.rollbacks_per_day if caps else None,
            **common,
        )
        rows.append(row)
    if plan.skip:
        start, stop = plan.skip["from"], plan.skip["to"]
        row = ledger.append(
            action="skip",
            why=f"samples {start} to {stop} are left out (half open, absolute)",
            samples_skipped=stop - start,
            none_because=reasons,
            cap=caps.skips_per_day if caps else None,
            **common,
        )
        rows.append(row)
    ledger.append(
        action="resume",
        why=f"{plan.get_kind_display()}: attempt {attempt.number} launched with permit {permit.public_id}",
        none_because=reasons,
        **common,
    )
    return [row for row in rows if ledger.past_cap(row)]


def _after(plan: Plan) -> tuple[dict[str, int | None] | None, dict[str, str]]:
    values = {name: plan.positions.get(name) for name in ledger.POSITIONS}
    if all(value is None for value in values.values()):
        return None, {"after": "the plan names no position: the ranks go on from memory"}
    return values, {
        f"after.{name}": "the checkpoint does not keep it" if plan.checkpoint else "it was not reported"
        for name, value in values.items()
        if value is None
    }
