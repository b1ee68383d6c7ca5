"""What a person may press on an incident, and what opens each thing that is still shut."""

from datetime import datetime

from incidents import plans, roles
from incidents.models import Incident, Permit, Plan, ResumeRequest
from incidents.page import Button, NextAnswer
from runs import formatting as words
from runs.access import project_member
from runs.models import Person, RunProgress

S = Incident.State


def next_answer(
    incident: Incident,
    person: Person,
    *,
    plan: Plan | None,
    request: ResumeRequest | None,
    permit: Permit | None,
    evidence_lacks: str,
    progress: RunProgress | None,
    now: datetime,
) -> NextAnswer:
    """Return the one main thing to do, by what the gate lacks, and the rest."""
    project = incident.run.project
    responder = project_member(person, project, *roles.RESPONDERS)
    acknowledge = _acknowledge(incident, responder)
    ask = _request(incident, responder, plan=plan, request=request, evidence_lacks=evidence_lacks)
    approve = _approve(incident, person, request, now)
    hold = _hold(incident, responder)
    check = Button("check-plan", "Check the plan", True)
    rest = [
        _reject(incident, person, request),
        Button("change-plan", "Change the plan", *_may_change(incident, responder)),
        Button("false-alarm", "False alarm", *_may_false_alarm(incident, person)),
        Button("note", "Add a note", project_member(person, project)),
    ]
    if incident.state == S.RESOLVED:
        main, says = Button("postmortem", "Write the postmortem", True), "The incident is resolved."
    elif incident.state == S.FALSE_ALARM:
        main, says = Button("none", "Nothing to do", False, "false alarm"), "It was a false alarm."
    elif incident.state == S.WATCHING:
        main, says = Button("none", "Watching", False, "nothing to press"), watch_words(incident, progress)
    elif incident.state in (S.APPROVED, S.RESUMING):
        main, says = check, _permit_words(incident, permit, now)
    elif incident.acknowledged_at is None:
        main, says = acknowledge, _resume_words(ask, plan) if incident.holds else ""
    elif not incident.holds:
        main, says = check, "The run goes on; this resolves itself after a clean window."
    elif request is not None:
        main, says = approve, approve.why or _waiting_words(incident, request)
    elif ask.allowed:
        main, says = ask, f"The gate is open. {_resume_words(ask, plan)}"
    else:
        main, says = check, ask.why
    listed = [acknowledge, check, ask, hold, approve, *rest]
    return NextAnswer(main, says, [button for button in listed if button.code != main.code])


def watch_words(incident: Incident, progress: RunProgress | None) -> str:
    """Return "412 of 500 steps clean", "" when nothing is watched."""
    until = incident.watch_until_step
    if until is None:
        return ""
    at = progress.step if progress and progress.attempt == incident.watch_attempt else None
    if at is None:
        return f"No step of attempt {incident.watch_attempt} yet; watched to step {words.count(until)}."
    if at >= until:
        return f"Watched to step {words.count(until)}: nothing that reopens it."
    return f"{words.plural(until - at, 'step')} of the watch window left, to step {words.count(until)}."


def _acknowledge(incident: Incident, responder: bool) -> Button:
    if incident.acknowledged_at is not None:
        by = incident.acknowledged_by.username if incident.acknowledged_by else "somebody"
        return Button("acknowledge", "Acknowledge", False, f"acknowledged by {by}")
    if not responder:
        return Button("acknowledge", "Acknowledge", False, "A responder may acknowledge.", never=True)
    return Button("acknowledge", "Acknowledge", incident.state in Incident.UNRESOLVED)


def _request(
    incident: Incident,
    responder: bool,
    *,
    plan: Plan | None,
    request: ResumeRequest | None,
    evidence_lacks: str,
) -> Button:
    label = "Request resume"
    if not responder:
        return Button("request", label, False, "A responder may request a resume.", never=True)
    if incident.state not in Incident.UNRESOLVED or not incident.holds or incident.state == S.WATCHING:
        return Button("request", label, False, "The run is not held by this incident.")
    if request is not None:
        by = request.requested_by.username if request.requested_by else "Andon"
        return Button("request", label, False, f"{by} asked already.")
    lacks = plans.lacks(plan)
    if lacks:
        return Button("request", label, False, f"The plan is not complete: {lacks[0]}.")
    if evidence_lacks:
        return Button("request", label, False, f"Resume cannot be requested: {evidence_lacks}.")
    return Button("request", label, True)


def _resume_words(ask: Button, plan: Plan | None) -> str:
    """Return from where a resume would go on and what it runs again; what shuts it while it is shut."""
    if not ask.allowed or plan is None:
        return ask.why
    lost = plan.numbers.get("steps_lost")
    again = f", {words.plural(lost, 'step')} run again" if lost else ""
    if plan.checkpoint:
        return f"A resume goes on from the checkpoint of step {words.count(plan.checkpoint['step'])}{again}."
    return "A resume goes on from memory, in place."


def _hold(incident: Incident, responder: bool) -> Button:
    label = "Hold the run"
    if incident.state != S.OPEN or incident.holds:
        return Button("hold", label, False, "The run is held, or nothing is open.")
    if not responder:
        return Button("hold", label, False, "A responder may hold the run.", never=True)
    return Button("hold", label, True)


def _approve(incident: Incident, person: Person, request: ResumeRequest | None, now: datetime) -> Button:
    if not project_member(person, incident.run.project, *roles.APPROVERS):
        who = roles.names_of(roles.approvers(incident.run.project)) or "nobody yet"
        return Button("approve", "Approve", False, f"Approver: {who}.", never=True)
    if request is None or request.state != ResumeRequest.State.OPEN:
        return Button("approve", "Approve", False, "Nothing is requested.")
    if request.kind == ResumeRequest.Kind.SOLO and request.grants_at is not None:
        by = request.requested_by.username if request.requested_by else "Somebody"
        at = f"{words.clock(request.grants_at, now)} UTC"
        return Button(
            "approve", "Approve", False, f"{by} resumes as sole approver at {at}. Reject it to stop it."
        )
    why_not = roles.why_not_approver(incident, person, request.requested_by)
    if not why_not and request.approvals.filter(approver=person).exists():
        why_not = "You approved; another approver is needed."
    return Button("approve", "Approve", not why_not, why_not)


def _reject(incident: Incident, person: Person, request: ResumeRequest | None) -> Button:
    if not project_member(person, incident.run.project, *roles.APPROVERS):
        return Button("reject", "Reject", False, "An approver may reject.", never=True)
    if request is None or incident.state == S.RESUMING:
        return Button("reject", "Reject", False, "Nothing is requested.")
    return Button("reject", "Reject", True)


def _may_change(incident: Incident, responder: bool) -> tuple[bool, str]:
    if not responder:
        return False, "A responder may change the plan."
    if incident.state == S.RESUMING:
        return False, "The permit for this plan was taken."
    if incident.state not in (S.OPEN, S.APPROVED):
        return False, f"The incident is {incident.state}."
    return True, ""


def _may_false_alarm(incident: Incident, person: Person) -> tuple[bool, str]:
    if not project_member(person, incident.run.project, *roles.APPROVERS):
        return False, "An approver may declare a false alarm."
    if incident.state != S.OPEN:
        return False, f"The incident is {incident.state.replace('_', ' ')}."
    part = roles.why_not_approver(incident, person, None)
    if not part and roles.requested(incident, person):
        part = "You asked to resume; another approver may declare it."
    return not part, part


def _permit_words(incident: Incident, permit: Permit | None, now: datetime) -> str:
    if permit is None:
        return ""
    if incident.state == S.RESUMING and permit.exchanged_at is not None:
        ago = words.ago(permit.exchanged_at, now)
        return f"Permit taken {ago} for attempt {permit.attempt}; its launch is not reported yet."
    return f"Permit not taken yet, {words.duration((now - permit.issued_at).total_seconds())}."


def _waiting_words(incident: Incident, request: ResumeRequest) -> str:
    free = roles.free_approvers(incident, request.requested_by)
    return f"Waiting for {roles.names_of(free) or 'an approver: an admin can add one'}."
