"""Small readings that the incident pages need beside `incidents.queries`: plan form, numbers, one cell."""

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from andon.policy import Policy
from incidents import alone_part, choices, plan_form
from incidents.incident_page import IncidentPage
from incidents.models import Plan
from incidents.page import FindingLine, IncidentLine
from runs import formatting
from runs.models import Checkpoint

Z_BAR_PX = 104
CHOICES = 50


def cursor_text(line: IncidentLine) -> str:
    """Return where the next page of incidents begins."""
    return f"{line.opened_at.astimezone(UTC).isoformat()}~{line.id}"


def cursor(text: str) -> tuple[datetime, int] | None:
    """Read `cursor_text`; None for anything else."""
    moment, tilde, number = text.partition("~")
    if not tilde or not number.isdecimal() or len(number) > 18:
        return None
    try:
        at = datetime.fromisoformat(moment.replace(" ", "+"))
    except ValueError:
        return None
    return (at, int(number)) if at.tzinfo is not None else None


def plan_context(page: IncidentPage) -> dict[str, object]:
    """Return what the form that changes the plan offers: kinds and checkpoints."""
    step = page.first_bad.step
    checkpoints = Checkpoint.objects.filter(run=page.run).exclude(state=Checkpoint.State.DELETED)
    if step is not None:
        checkpoints = checkpoints.filter(step__lt=step)
    chosen = page.plan.checkpoint.get("step") if page.plan is not None else None
    return {
        "plan_kinds": Plan.Kind.choices,
        "checkpoints": checkpoints.order_by("-step").values("step", "state").distinct()[:CHOICES],
        "chosen_step": chosen,
        "lacking": [line for line in page.gate if line.glyph == "missing"],
        "choices": choices.of(page),
        "change_names": plan_form.CHANGES,
        "change_rows": _change_rows(page),
        "alone": alone_part.of(page),
    }


def _change_rows(page: IncidentPage) -> list[dict[str, Any]]:
    known = list(page.plan.changes) if page.plan is not None else []
    return (known + [{}] * plan_form.ROWS)[: max(plan_form.ROWS, len(known))]


@dataclass(frozen=True, slots=True)
class Numbers:
    """One finding as a row of numbers, with its z as a bar of `Z_BAR_PX`."""

    finding: FindingLine
    value: str
    median: str
    mad: str
    z: str
    bar: float | None
    warn: float
    halt: float
    lanes: str


def numbers(page: IncidentPage, policy: Policy) -> list[Numbers]:
    """Return the findings of an incident with the numbers detectors used and the bounds they judged by."""
    rows = []
    for finding in page.findings:
        rules = policy.grad_norm if finding.series == "grad_norm" else policy.spike
        given = finding.numbers
        form = finding.series
        score = finding.score if finding.score is not None else given.get("z")
        usable = isinstance(score, int | float) and math.isfinite(score)
        full = rules.halt_z * 1.4
        rows.append(
            Numbers(
                finding=finding,
                value=_value(finding, form),
                median=formatting.metric(form, given["median"]) if "median" in given else "",
                mad=formatting.significant(given["mad"], 2) if "mad" in given else "",
                z=formatting.z_score(score) if usable else "",
                bar=round(max(0.0, min(1.0, float(str(score)) / full)) * Z_BAR_PX, 1) if usable else None,
                warn=round(rules.warn_z / full * Z_BAR_PX, 1),
                halt=round(rules.halt_z / full * Z_BAR_PX, 1),
                lanes=_lanes(finding.lanes),
            )
        )
    return rows


def _value(finding: FindingLine, form: str) -> str:
    value = finding.numbers.get("value", finding.numbers.get(form))
    if value is None and "nonfinite" in finding.kind:
        return "nonfinite"
    return formatting.metric(form, value)


def _lanes(lanes: list[Any]) -> str:
    ranks = [lane for lane in lanes if isinstance(lane, int)]
    if ranks and len(ranks) == len(lanes):
        return formatting.rank_words(ranks)
    return ", ".join(formatting.inert(lane, 48) for lane in lanes[:3]) + (
        f" and {len(lanes) - 3:,} more" if len(lanes) > 3 else ""
    )
