"""Every kind of plan for one incident, and what it would cost: none is stored."""

from dataclasses import dataclass

from incidents import costs
from incidents.incident_page import IncidentPage
from incidents.models import Plan
from incidents.plan_words import cost_words
from incidents.plans import ROLLBACKS, checkpoint_for
from runs.formatting import count

K = Plan.Kind
# In the order of what they cost.
ORDER = (
    K.RESUME_IN_PLACE,
    K.SKIP_AND_CONTINUE,
    K.ROLLBACK_AND_REPLAY,
    K.ROLLBACK_AND_SKIP,
    K.ROLLBACK_ONE_FURTHER,
)


@dataclass(frozen=True, slots=True)
class Choice:
    """One kind of plan: where it would begin, what it skips, what it costs, what it lacks."""

    label: str
    chosen: bool
    begins: str
    skips: str
    cost: str
    lacks: str


def of(page: IncidentPage) -> list[Choice]:
    """Return all kinds: the one in force as it is, the others from the checkpoint the rule would take."""
    incident, plan, policy = page.incident, page.newest_plan, page.situation.policy
    halt = plan.numbers.get("halt_step") if plan is not None else None
    step_s = costs.step_time_s(incident.run, incident.attempt)
    made = []
    for kind in ORDER:
        chosen = plan is not None and plan.kind == kind
        lacks, step, lost = "", None, 0 if kind not in ROLLBACKS else None
        if chosen and plan is not None:
            step, lost = plan.checkpoint.get("step"), plan.numbers.get("steps_lost")
            lacks = "; ".join(page.plan_lacks)
        elif kind in ROLLBACKS:
            kept = checkpoint_for(incident, kind)
            step = kept.step if kept else None
            lacks = "" if kept else "no verified checkpoint is known"
            lost = None if kept is None or halt is None else max(0, halt - kept.step)
        made.append(
            Choice(
                label=K(kind).label,
                chosen=chosen,
                begins="memory" if kind not in ROLLBACKS else "" if step is None else count(step),
                skips=_skips(kind, plan if chosen else None),
                cost=cost_words(lost, costs.of_steps(incident, lost, policy, step_s)),
                lacks=lacks,
            )
        )
    return made


def _skips(kind: str, chosen: Plan | None) -> str:
    if chosen is not None and chosen.skip:
        return f"{count(chosen.skip['to'] - chosen.skip['from'])} samples"
    return "the bad data" if kind in (K.SKIP_AND_CONTINUE, K.ROLLBACK_AND_SKIP) else "nothing"
