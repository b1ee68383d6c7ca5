"""What one person may do alone: false alarm, break-glass, the sole approver on duty. Each is loud.

None of them is for automation, and none goes around the permit: what one person decided is signed,
bound to what was there, and void as soon as that changes.
"""

from datetime import timedelta

from django.db import transaction
from django.utils import timezone

from incidents import granting, permits, plans, roles, states, subjects
from incidents.door import within
from incidents.models import Approval, Incident, Plan, ResumeRequest
from incidents.paging import on_call, raising
from incidents.refused import Refused
from runs.access import project_member
from runs.formatting import count, duration
from runs.locks import lock_run
from runs.models import Checkpoint, Person
from runs.policies import policy_for

S = Incident.State
R = ResumeRequest.State
K = ResumeRequest.Kind
SOLO_PLANS = (Plan.Kind.RESUME_IN_PLACE, Plan.Kind.ROLLBACK_AND_REPLAY)


def false_alarm(*, incident: Incident, person: Person, why: str) -> Incident:
    """Declare that nothing was wrong: one approver, a reason, resume in place, evidence kept.

    Raises:
        Refused: not-allowed, reason-needed, over, not-you.
    """
    return within(incident, lambda fresh: _false_alarm(fresh, person, why))


def break_glass(*, incident: Incident, person: Person, why: str, run_name: str, digest: str) -> ResumeRequest:
    """Resume alone and now, without a second person and without waiting for evidence.

    Everybody is paged over every channel; the alarm line, the ledger and the postmortem say so.

    Args:
        run_name: the run's name as the person typed it.
        digest: of the subject that the page showed for this.

    Raises:
        Refused: not-allowed, wrong-name, reason-needed, over, not-held, plan-incomplete, changed.
    """
    return within(incident, lambda fresh: _break_glass(fresh, person, why, run_name, digest))


def solo(*, incident: Incident, person: Person, digest: str, why: str = "") -> ResumeRequest:
    """Ask and approve as the sole approver on duty: it takes effect after a delay any approver can veto.

    Off unless the policy says otherwise, and only for a resume in place or a rollback and replay of a
    verified checkpoint that keeps the training regime.

    Raises:
        Refused: not-allowed, solo-off, not-sole, not-you, over, requested-already, plan-incomplete,
            not-simple, gate-shut, changed.
    """
    return within(incident, lambda fresh: _solo(fresh, person, digest, why))


def sweep_solo() -> int:
    """Grant what sole approvers approved, once nobody vetoed it in time; returns how many. Safe to repeat."""
    due = ResumeRequest.objects.filter(kind=K.SOLO, state=R.OPEN, grants_at__lte=timezone.now())
    done = 0
    for pk, incident_id, run_id in due.values_list("pk", "incident_id", "incident__run_id"):
        with transaction.atomic():
            lock_run(run_id)
            incident = (
                Incident.objects.select_for_update(no_key=True, of=("self",))
                .select_related("run", "run__project", "dossier")
                .get(pk=incident_id)
            )
            request = permits.live_request(incident)
            if request is None or request.pk != pk or request.state != R.OPEN:
                continue
            done += _grant_solo(incident, request)
    return done


# --- false alarm


def _false_alarm(incident: Incident, person: Person, why: str) -> Incident | Refused:
    roles.need_approver(person, incident.run.project, "declare a false alarm")
    why = why.strip()
    if not why:
        return Refused(
            "reason-needed", "Say why nothing was wrong: it is counted against the rule that held."
        )
    if incident.state != S.OPEN:
        return Refused("over", f"Incident {incident.pk} is {incident.state}: too late for a false alarm.")
    # Without a second person the first must have no stake: asking and then declaring would be approving
    # one's own request by another name.
    part = roles.why_not_approver(incident, person, None)
    if not part and roles.requested(incident, person):
        others = roles.names_of(roles.free_approvers(incident, person))
        part = f"You asked to resume. {others or 'Another approver'} may."
    if part:
        return Refused("not-you", part, status=403)
    if not incident.holds:
        states.move(incident, S.FALSE_ALARM, person=person, why=why)
        return incident
    _end_live(incident, f"declared a false alarm by {person.username}")
    request = _request(incident, K.FALSE_ALARM, _in_place(incident, why), None, why)
    _sign(request, person)
    states.record(incident, kind="false_alarm", text=f"false alarm: {why}", person=person)
    granting.grant(incident, request, person=person)
    return incident


def _in_place(incident: Incident, why: str) -> Plan:
    """Return the plan to go on: from memory where ranks still wait, else from the halt snapshot."""
    made = plans.Draft(kind=Plan.Kind.RESUME_IN_PLACE, why=f"false alarm: {why}")
    plans.complete(incident, made, policy=policy_for(incident.run_id), checkpoint=None, exclusions={})
    return plans.store(incident, made, person=None)


# --- break-glass


def why_not_break_glass(incident: Incident, person: Person) -> str:
    """Return why this person may not break the glass, "" when they may."""
    named = policy_for(incident.run_id).resume.break_glass_roles
    if project_member(person, incident.run.project, *named) if named else False:
        return ""
    words = " or ".join(name.replace("_", " ") for name in named) or "nobody: the policy names no role"
    return f"Only a member with this role may break the glass: {words}."


def _break_glass(
    incident: Incident, person: Person, why: str, run_name: str, digest: str
) -> ResumeRequest | Refused:
    if why_not := why_not_break_glass(incident, person):
        return Refused("not-allowed", why_not, status=403)
    if over := _not_held(incident):
        return over
    if run_name.strip() != incident.run.slug:
        return Refused("wrong-name", f"Type the run's name, {incident.run.slug}, to break the glass.")
    why = why.strip()
    if not why:
        return Refused("reason-needed", "Say why it cannot wait for a second person: everybody will read it.")
    plan = plans.newest(incident)
    missing = plans.lacks(plan)
    if plan is None or missing:
        return Refused("plan-incomplete", f"The plan is not complete: {'; '.join(missing)}.")
    _, now_digest = subjects.subject(incident, plan=plan, kind=K.BREAK_GLASS)
    if digest != now_digest:
        return Refused("changed", "What you saw has changed since: look again, then decide.")
    lacking = permits.evidence_words(incident)
    _end_live(incident, f"{person.username} broke the glass")
    request = _request(incident, K.BREAK_GLASS, plan, person, why)
    _sign(request, person)
    without = f"; {lacking}" if lacking else "; all required evidence was safe"
    states.record(
        incident,
        kind="break_glass",
        text=f"glass broken: {why}{without}",
        person=person,
        data={"request": request.pk, "lacking": lacking},
    )
    granting.grant(incident, request, person=person, more=f"one person alone: {why}{without}")
    raising.break_glass(incident, person, why)
    return request


# --- the sole approver on duty


def why_not_solo(incident: Incident, person: Person) -> str:
    """Return why this person may not resume as sole approver, "" when they may."""
    refused = _not_sole(incident, person)
    return refused.says if refused else ""


def _not_sole(incident: Incident, person: Person) -> Refused | None:
    project = incident.run.project
    roles.need_approver(person, project, "resume as sole approver")
    if not policy_for(incident.run_id).resume.solo:
        return Refused("solo-off", "The policy of this run does not let one approver resume alone.")
    if roles.edited(incident, person) or roles.waived(incident, person):
        return Refused("not-you", roles.why_not_approver(incident, person, None), status=403)
    holder = on_call.of_project(project)
    others = [one for one in roles.approvers(project) if one.pk != person.pk]
    on_duty = holder.name == person.username if holder is not None else not others
    if not on_duty:
        who = holder.name if holder is not None else roles.names_of(others)
        return Refused("not-sole", f"You are not the sole approver on duty: {who} may.", status=403)
    return None


def why_not_simple(incident: Incident, plan: Plan | None) -> str:
    """Return why a plan is too much for one person alone, "" when it is not."""
    if plan is None:
        return "there is no plan"
    if plan.kind not in SOLO_PLANS:
        return f"a plan to {plan.get_kind_display()} needs a second person"
    if any(change.get("changes_regime") for change in plan.changes):
        return "the plan changes the training regime"
    if plan.kind == Plan.Kind.RESUME_IN_PLACE:
        return ""
    kept = plan.checkpoint
    verified = Checkpoint.objects.filter(
        run_id=incident.run_id,
        uri=kept.get("uri", ""),
        step=kept.get("step", -1),
        state=Checkpoint.State.VERIFIED,
    )
    return "" if verified.exists() else "its checkpoint is not verified"


def _solo(incident: Incident, person: Person, digest: str, why: str) -> ResumeRequest | Refused:
    if refused := _not_sole(incident, person):
        return refused
    if over := _not_held(incident):
        return over
    live = permits.live_request(incident)
    if live is not None:
        return Refused("requested-already", "A resume is asked for already: approve or reject that.")
    plan = plans.newest(incident)
    missing = plans.lacks(plan)
    if plan is None or missing:
        return Refused("plan-incomplete", f"The plan is not complete: {'; '.join(missing)}.")
    if too_much := why_not_simple(incident, plan):
        return Refused("not-simple", f"Not alone: {too_much}.")
    if shut := permits.evidence_words(incident):
        return Refused("gate-shut", f"Not resumed: {shut}.")
    if digest != subjects.subject(incident, plan=plan, kind=K.SOLO)[1]:
        return Refused("changed", "What you saw has changed since: look again, then decide.")
    delay = policy_for(incident.run_id).resume.solo_delay_s
    request = _request(incident, K.SOLO, plan, person, why.strip())
    request.grants_at = request.requested_at + timedelta(seconds=delay)
    request.save(update_fields=["grants_at"])
    _sign(request, person)
    states.record(
        incident,
        kind="request",
        text=f"{person.username} resumes as sole approver on duty by plan {plan.number} at "
        f"{request.grants_at:%H:%M:%S} UTC, {duration(delay)} from now, unless an approver rejects it",
        person=person,
        data={"request": request.pk, "digest": request.digest},
    )
    return request


def _grant_solo(incident: Incident, request: ResumeRequest) -> int:
    """Grant one whose delay is over, if everything that allowed it still holds."""
    person = request.requested_by
    assert person is not None
    if permits.revalidate(incident):
        return 0
    try:
        refused = _not_sole(incident, person)
    except Refused as lost:
        refused = lost
    too_much = why_not_simple(incident, request.plan)
    why = refused.says if refused else f"Not alone: {too_much}." if too_much else ""
    if why:
        permits.void(incident, request, [why])
        return 0
    if permits.evidence_words(incident):
        return 0
    granting.grant(incident, request, person=person, more=f"{count(1)} approver, nobody vetoed it in time")
    return 1


# --- what they share


def _not_held(incident: Incident) -> Refused | None:
    if incident.state not in Incident.UNRESOLVED or incident.state in (S.RESUMING, S.WATCHING):
        return Refused("over", f"Incident {incident.pk} is {incident.state}: nothing waits for you.")
    if not incident.holds:
        return Refused("not-held", "This incident does not hold its run: nothing to resume.")
    return None


def _end_live(incident: Incident, why: str) -> None:
    live = permits.live_request(incident)
    if live is not None:
        permits.void(incident, live, [why])


def _request(
    incident: Incident, kind: ResumeRequest.Kind, plan: Plan, person: Person | None, note: str
) -> ResumeRequest:
    signed, digest = subjects.subject(incident, plan=plan, kind=kind)
    now = timezone.now()
    return ResumeRequest.objects.create(
        incident=incident,
        kind=kind,
        plan=plan,
        requested_by=person,
        requested_at=now,
        digest=digest,
        subject=signed,
        note=note,
        approvers_needed=1,
        expires_at=now + timedelta(seconds=policy_for(incident.run_id).resume.approval_expires_s),
    )


def _sign(request: ResumeRequest, person: Person) -> None:
    Approval.objects.create(
        request=request, approver=person, requester=None, digest=request.digest, at=timezone.now()
    )
