"""A plan in words, with what carrying it out costs."""

from typing import Any

from incidents import costs, plans
from incidents.answers import Situation
from incidents.models import Plan
from incidents.page import PlanCost, PlanView
from runs import formatting as words


def plan_view(situation: Situation, plan: Plan) -> PlanView:
    """Return a plan in words, with its cost."""
    kept = plan.checkpoint
    lost = plan.numbers.get("steps_lost")
    cost = costs.of_plan(situation.incident, plan, situation.policy)
    watch = situation.policy.rollback.watch_steps
    return PlanView(
        id=plan.pk,
        number=plan.number,
        kind=plan.kind,
        label=plan.get_kind_display(),
        why=plan.why,
        checkpoint=kept,
        checkpoint_says=f"step {words.count(kept['step'])}, verified"
        if kept
        else "none: ranks go on from memory",
        positions=plan.positions,
        skip=plan.skip,
        skip_says=_skip_words(plan),
        exclusions=plan.exclusions,
        exclusions_say=_exclusion_words(plan),
        changes=plan.changes,
        changes_say=_change_words(plan),
        after_says=f"watch {words.count(watch)} steps, all detectors armed",
        made_by=plan.made_by.username if plan.made_by else "Andon",
        made_at=plan.made_at,
        missing=plans.lacks(plan),
        cost=PlanCost(lost, cost.seconds, cost.gpu_hours, cost.money, cost.currency, cost_words(lost, cost)),
        numbers=plan.numbers,
    )


def _skip_words(plan: Plan) -> str:
    if not plan.skip:
        return "nothing is skipped"
    start, stop = plan.skip["from"], plan.skip["to"]
    batches = plan.numbers.get("skipped_batches")
    more = f", {words.plural(int(batches), 'batch', 'batches')}" if batches else ""
    window = f"samples {words.count(start)}{words.RANGE}{words.count(stop - 1)}"
    return f"{window} ({words.count(stop - start)}{more})"


def _exclusion_words(plan: Plan) -> str:
    said = [
        f"{name} {', '.join(map(str, values))}" for name, values in sorted(plan.exclusions.items()) if values
    ]
    return "; ".join(said) or "none excluded"


def _change_words(plan: Plan) -> str:
    if not plan.changes:
        return "none: same training regime, results stay comparable"
    return "; ".join(map(_change_word, plan.changes))


def _change_word(change: dict[str, Any]) -> str:
    was, what, to = change.get("was"), change["what"], change.get("to")
    said = f"{what} = {to}" if was is None else f"{what}: {was} → {to}"
    return said + (" (changes the regime: not comparable)" if change["changes_regime"] else "")


def cost_words(lost: int | None, cost: costs.Cost) -> str:
    """Return what a plan costs: steps run again, time, GPU-hours, money."""
    if lost is None:
        return "not known yet: the step it stopped at is not known"
    if lost == 0:
        return "none: no step is run again"
    head = f"{words.plural(lost, 'step')} run again"
    if cost.seconds is None:
        return f"{head}; step time was not reported"
    head += f": {words.duration(cost.seconds)}"
    if cost.gpu_hours is None or cost.money is None:
        return head
    return f"{head}, {words.gpu_hours(cost.gpu_hours)}, {words.money(cost.money)}"
