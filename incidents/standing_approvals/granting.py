"""What runs under a standing approval: spikes are rolled back, restarts go further back, all within its cap.

It goes through the same gate as a person's approval: required evidence safe, the run contained, the plan
complete. Never for a bad update, nonfinite weights, a cause that is not known, or a failure that came back.
"""

from datetime import datetime, timedelta

from django.db.models import Q
from django.utils import timezone

from incidents import attached, caps, contained, granting, holding, permits, plans, rules, states, subjects
from incidents.models import Incident, Permit, Plan, ResumeRequest
from incidents.rules import Effect
from incidents.standing_approvals.models import StandingApproval
from runs.formatting import count
from runs.models import Checkpoint
from runs.policies import policy_for

R = ResumeRequest.State
# A held spike whose evidence is not sealed by then is a person's matter after all.
PATIENCE = timedelta(minutes=15)


def kinds() -> list[str]:
    """Return the incident kinds a standing approval may name: spikes, and what infrastructure does."""
    spikes = ["loss_spike", "grad_norm_spike", "grad_norm_sustained", "grad_norm_creep", "grad_norm_collapse"]
    return [*spikes, *sorted(rules.NEVER_HOLDS - {"recovered_spike"})]


def in_force(incident: Incident, now: datetime | None = None) -> list[StandingApproval]:
    """Return the standing approvals that name this incident's kind, are signed, live, and not revoked."""
    now = now or timezone.now()
    found = StandingApproval.objects.filter(
        Q(run=incident.run) | Q(run=None, project=incident.run.project),
        signed_at__isnull=False,
        revoked_at=None,
        expires_at__gt=now,
    )
    return [one for one in found.order_by("id") if incident.kind in one.kinds]


def used_today(one: StandingApproval, now: datetime | None = None) -> int:
    """Return how many permits were issued under it on this UTC day, over all its runs."""
    midnight = (now or timezone.now()).replace(hour=0, minute=0, second=0, microsecond=0)
    return Permit.objects.filter(request__standing=one, issued_at__gte=midnight).count()


def grant_if_covered(incident: Incident) -> Permit | None:
    """Let a held spike be rolled back when a standing approval covers it; the run lock is held.

    Its evidence may take a minute to be sealed: it is asked again with every review.
    """
    if incident.state != Incident.State.OPEN or not incident.holds:
        return None
    one, why_not = covering(incident)
    if one is None or why_not:
        return None
    if permits.evidence_words(incident):
        return None
    stopped = contained.of(incident)
    if not (stopped.whole or stopped.still):
        return None
    return _grant(incident, one)


def for_restart(incident: Incident) -> Permit | None:
    """Let a supervisor's restart go further back than the newest verified checkpoint, or skip.

    The incident holds nothing, so nothing but the plan is decided here; the run lock is held.
    """
    if incident.state != Incident.State.OPEN or incident.holds or permits.live_request(incident) is not None:
        return None
    one, why_not = covering(incident)
    plan = plans.newest(incident)
    if one is None or why_not or plan is None or not _goes_further(incident, plan):
        return None
    # A permit of an earlier incident may not be spent yet: this restart goes back behind it.
    holding.end_live_permit(incident.run, f"restarted under standing approval {one.pk}")
    return _grant(incident, one)


def waits(incident: Incident, now: datetime | None = None) -> bool:
    """Whether a held run will go on by itself soon, so that nobody need be woken for it yet."""
    now = now or timezone.now()
    if not incident.holds or incident.state not in (Incident.State.OPEN, Incident.State.APPROVED):
        return False
    if now - incident.opened_at >= PATIENCE:
        return False
    live = permits.live_request(incident)
    if live is not None:
        return live.standing_id is not None
    one, why_not = covering(incident)
    return one is not None and not why_not


def covering(incident: Incident) -> tuple[StandingApproval | None, str]:
    """Return the standing approval that names this incident, and why it does not cover it all the same."""
    found = in_force(incident)
    if not found:
        return None, ""
    why = _never(incident)
    if why:
        return found[0], why
    reasons = [(one, _beyond(incident, one)) for one in found]
    return next(((one, why) for one, why in reasons if not why), reasons[0])


def _never(incident: Incident) -> str:
    """Return why no standing approval is valid for this incident, whatever it says."""
    if incident.recurrence:
        return "it came back in its watch window"
    findings = attached.findings(incident)
    worst = {finding.kind for finding in findings if rules.effect(finding) == Effect.HOLD}
    other = sorted(kind for kind in worst if kind not in kinds())
    if other:
        return f"{other[0].replace('_', ' ')} is a person's matter"
    if incident.holds and incident.family in ("", "cause unknown"):
        return "the cause is unknown"
    if incident.requests.filter(state=R.REJECTED).exists():
        return "a person rejected a resume of this incident"
    return ""


def _beyond(incident: Incident, one: StandingApproval) -> str:
    """Return which of its limits the plan passes, "" when it keeps to all."""
    plan = plans.newest(incident)
    missing = plans.lacks(plan)
    if plan is None or missing:
        return f"the plan is not complete: {'; '.join(missing)}"
    if plan.made_by_id is not None:
        return "a person changed the plan"
    if plan.kind not in plans.ROLLBACKS:
        return f"a plan to {plan.get_kind_display()} is a person's matter"
    if any(change.get("changes_regime") for change in plan.changes):
        return "the plan changes the training regime"
    lost = plan.numbers.get("steps_lost")
    if lost is None or lost > one.furthest_steps:
        how = "not known how many" if lost is None else count(lost)
        return f"steps run again: {how}, allowed {count(one.furthest_steps)}"
    wide = plan.skip["to"] - plan.skip["from"] if plan.skip else 0
    if wide > one.widest_skip:
        return f"samples skipped: {count(wide)}, allowed {count(one.widest_skip)}"
    used = used_today(one)
    if used >= one.per_day:
        return f"used {count(used)} of {count(one.per_day)} today"
    needed = ("rollback", "skip") if plan.skip else ("rollback",)
    for budget in caps.today(incident.run):
        if budget.action in needed and not budget.left:
            return f"{budget.action}s of the run today: {count(budget.used)} of {count(budget.of)} used"
    return ""


def _goes_further(incident: Incident, plan: Plan) -> bool:
    """Whether a restart by this plan is more than one from the newest verified checkpoint."""
    newest = (
        Checkpoint.objects.filter(run_id=incident.run_id, state=Checkpoint.State.VERIFIED)
        .order_by("-step")
        .values_list("step", flat=True)
        .first()
    )
    return bool(plan.skip) or (newest is not None and int(plan.checkpoint["step"]) < newest)


def _grant(incident: Incident, one: StandingApproval) -> Permit | None:
    plan = plans.newest(incident)
    assert plan is not None
    # Its row is the lock of its count: two runs of one project must not both take the last one of a day,
    # and a revocation waits for this permit, which it then voids, or is seen here.
    fresh = StandingApproval.objects.select_for_update(no_key=True).get(pk=one.pk)
    used = used_today(one)
    if fresh.revoked_at is not None or used >= fresh.per_day:
        return None
    signed, digest = subjects.subject(incident, plan=plan, kind=ResumeRequest.Kind.STANDING)
    now = timezone.now()
    request = ResumeRequest.objects.create(
        incident=incident,
        kind=ResumeRequest.Kind.STANDING,
        plan=plan,
        requested_at=now,
        digest=digest,
        subject=signed,
        note=f"standing approval {one.pk}, {count(used + 1)} of {count(one.per_day)} today",
        approvers_needed=0,
        expires_at=now + timedelta(seconds=policy_for(incident.run_id).resume.approval_expires_s),
        standing=one,
    )
    signer = one.signed_by.username if one.signed_by else "an approver"
    states.record(
        incident,
        kind="standing",
        text=f"standing approval {one.pk}, signed by {signer}: {plan.get_kind_display()}, "
        f"{count(used + 1)} of {count(one.per_day)} today",
        by=f"standing approval {one.pk}",
        data={"standing": one.pk, "request": request.pk},
    )
    return granting.grant(
        incident, request, person=None, more=f"{count(used + 1)} of {count(one.per_day)} today"
    )
