"""The rules for people: what may act on which run, was it right, and who switched it when."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.contrib.auth.decorators import login_required
from django.db.models import Max
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_POST

from andon.policy import DEFAULT_MODES, Policy, decode
from incidents import goodput, ledger, roles
from incidents.refused import Refused
from incidents.rulebook import modes, record
from incidents.rulebook.models import BreakerTrip
from runs.access import project_member, visible_runs
from runs.models import Finding, Person, PolicyVersion, Run
from runs.policies import policy_for, policy_version
from runs.views import person_of, visible_run_or_404

RUNS = 50
HISTORY = 50
RULES = tuple(DEFAULT_MODES)


@dataclass(frozen=True, slots=True)
class Cell:
    """One rule on one run."""

    rule: str
    mode: str
    fired: datetime | None  # when it last said something


@dataclass(frozen=True, slots=True)
class Row:
    """One run: its policy's version, today's budget, and every rule."""

    run: Run
    version: int | None  # None: the defaults
    of_project: bool
    holds: int
    holds_cap: int
    cells: list[Cell]


@dataclass(frozen=True, slots=True)
class Change:
    """One version of a policy that changed a rule's mode or numbers."""

    number: int
    of: str  # a run's or its project's policy
    at: datetime
    by: str
    why: str
    changes: list[str]


def matrix(person: Person, rules: tuple[str, ...] = RULES) -> list[Row]:
    """Return every visible run with the mode of every rule, newest runs first."""
    runs = list(visible_runs(person).order_by("-created_at", "-id")[:RUNS])
    fired: dict[tuple[int, str], datetime] = {
        (run, rule): at
        for run, rule, at in Finding.objects.filter(run__in=runs)
        .values_list("run_id", "rule")
        .annotate(at=Max("received_at"))
    }
    rows = []
    for run in runs:
        policy, version = policy_for(run.pk), policy_version(run.pk)
        rows.append(
            Row(
                run=run,
                version=version.number if version else None,
                of_project=version is not None and version.run_id is None,
                holds=ledger.used_today(run, "hold"),
                holds_cap=policy.caps.holds_per_day,
                cells=[Cell(rule, policy.mode(rule), fired.get((run.pk, rule))) for rule in rules],
            )
        )
    return rows


def history(run: Run, rule: str) -> list[Change]:
    """Return the versions that changed a rule on a run, newest first."""
    found: list[Change] = []
    for of, known in (
        (f"run {run.slug}", PolicyVersion.objects.filter(run=run)),
        (f"project {run.project.slug}", PolicyVersion.objects.filter(project=run.project, run=None)),
    ):
        before = Policy()
        for version in known.select_related("created_by").order_by("number"):
            after = _read(version.document)
            changes = _differences(before, after, rule)
            if changes:
                by = version.created_by.username if version.created_by else "Andon or a command"
                found.append(Change(version.number, of, version.created_at, by, version.why, changes))
            before = after
    return sorted(found, key=lambda one: (one.at, one.number), reverse=True)[:HISTORY]


def _read(document: dict[str, object]) -> Policy:
    try:
        return decode(document)
    except ValueError:
        return Policy()


def _differences(before: Policy, after: Policy, rule: str) -> list[str]:
    said = [f"{before.mode(rule)} → {after.mode(rule)}"] if before.mode(rule) != after.mode(rule) else []
    old, new = numbers(before, rule), numbers(after, rule)
    return said + [
        f"{name}: {old.get(name)} → {value}" for name, value in new.items() if old.get(name) != value
    ]


def numbers(policy: Policy, rule: str) -> dict[str, Any]:
    """Return the numbers a rule decides by."""
    section = policy.document().get(rule)
    return dict(section) if isinstance(section, dict) else {}


@require_GET
@login_required
def show(request: HttpRequest) -> HttpResponse:
    """Show rule × run."""
    return render(
        request,
        "incidents/rules.html",
        {"rows": matrix(person_of(request)), "rules": RULES, "trips": _trips(person_of(request))},
    )


def _trips(person: Person, rule: str = "") -> list[BreakerTrip]:
    found = BreakerTrip.objects.select_related("run").filter(**({"rule": rule} if rule else {}))
    mine = set(visible_runs(person).values_list("pk", flat=True))
    return [one for one in found[:HISTORY] if one.run_id is None or one.run_id in mine][:10] if mine else []


def _known(rule: str, person: Person) -> str:
    if rule not in RULES and not Finding.objects.filter(rule=rule, run__in=visible_runs(person)).exists():
        raise Http404
    return rule


@require_GET
@login_required
def one(request: HttpRequest, rule: str) -> HttpResponse:
    """Show one rule: its record and false-hold rate on every run."""
    person = person_of(request)
    rows = matrix(person, (_known(rule, person),))
    records = [(row, record.of(row.run, rule)) for row in rows]
    right, false = sum(each.right for _, each in records), sum(each.false for _, each in records)
    return render(
        request,
        "incidents/rule.html",
        {
            "rule": rule,
            "records": records,
            "right": right,
            "false": false,
            "judged": right + false,
            "trips": _trips(person, rule),
        },
    )


def _on_run(request: HttpRequest, rule: str, slug: str, *, says: str = "", status: int = 200) -> HttpResponse:
    run, person = visible_run_or_404(request, slug), person_of(request)
    policy, told = policy_for(run.pk), record.of(run, rule)
    return render(
        request,
        "incidents/rule_on_run.html",
        {
            "rule": _known(rule, person),
            "run": run,
            "mode": policy.mode(rule),
            "record": told,
            "charged": _charged(run, rule) if told.false else None,
            "numbers": numbers(policy, rule),
            "history": history(run, rule),
            "days": record.DAYS,
            "modes": ("off", "observe", "act"),
            "may_set": project_member(person, run.project, *modes.MAY_SET),
            "may_judge": project_member(person, run.project, *roles.RESPONDERS),
            "says": says,
        },
        status=status,
    )


def _charged(run: Run, rule: str) -> float | None:
    """Return the GPU-hours of a rule's false alarms on a run, None when none are known."""
    now = timezone.now()
    counted = goodput.of_runs([run], now)
    found = goodput.charges(counted, now - timedelta(days=record.DAYS), now)
    return next((one.hours for one in found if one.rule == rule), None)


@never_cache
@require_GET
@login_required
def on_run(request: HttpRequest, rule: str, slug: str) -> HttpResponse:
    """Show a rule's record on one run, and let it be switched by who has read it."""
    return _on_run(request, rule, slug)


def _act(request: HttpRequest, rule: str, slug: str, do: Callable[[Run, Person], object]) -> HttpResponse:
    run = visible_run_or_404(request, slug)
    try:
        do(run, person_of(request))
    except Refused as refused:
        return _on_run(request, rule, slug, says=refused.says, status=refused.status)
    return redirect("rule_on_run", rule, slug)


@require_POST
@login_required
def set_mode(request: HttpRequest, rule: str, slug: str) -> HttpResponse:
    """Switch a rule on one run."""
    _known(rule, person_of(request))
    return _act(
        request,
        rule,
        slug,
        lambda run, person: modes.set_mode(
            run=run,
            rule=rule,
            mode=request.POST.get("mode", ""),
            person=person,
            why=request.POST.get("why", ""),
            seen=request.POST.get("seen", ""),
        ),
    )


@require_POST
@login_required
def judge(request: HttpRequest, rule: str, slug: str) -> HttpResponse:
    """Say whether a rule that only observed was right."""
    _known(rule, person_of(request))
    finding = request.POST.get("finding", "")
    return _act(
        request,
        rule,
        slug,
        lambda run, person: modes.judge(
            run=run,
            rule=rule,
            finding_id=int(finding) if finding.isdecimal() and len(finding) < 18 else 0,
            right=request.POST.get("verdict") == "right",
            person=person,
            why=request.POST.get("why", ""),
        ),
    )
