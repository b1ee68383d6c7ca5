"""What happens when a run goes on: the permit is used, watched over, and spent; or it goes on without one."""

import logging
import uuid
from datetime import timedelta
from typing import Any

from django.db import transaction
from django.dispatch import receiver
from django.utils import timezone

from incidents import (
    caps,
    holding,
    ledger,
    opening,
    permits,
    relaunching,
    resumptions,
    rules,
    states,
    watching,
)
from incidents.exchanging import is_past
from incidents.models import Incident, LedgerRow, Permit, ResumeRequest
from incidents.paging import raising
from incidents.rulebook import breaker
from runs.directives import current, set_directive
from runs.locks import lock_run
from runs.models import Attempt, Checkpoint, Finding, Run
from runs.policies import policy_for
from runs.signals import attempt_launched, checkpoint_changed

log = logging.getLogger(__name__)
S = Incident.State
RULE = "launch"
VERSION = "1"
REPORT_WITHIN = timedelta(seconds=60)  # posts of a new attempt may overtake the report of its launch


@receiver(attempt_launched, dispatch_uid="incidents.launches.attempt")
def on_launch(sender: object, run: Run, attempt: Attempt, permit_id: str, **kwargs: Any) -> None:
    """Judge a launch in the transaction that stored its report."""
    judge(run, attempt, permit_id)


def judge(run: Run, attempt: Attempt, permit_id: str) -> None:
    """Judge a launch: under continue it is free, under anything else it needs its permit."""
    run = lock_run(run.pk)
    directive = current(run.pk)
    incident = states.unresolved(run.pk)
    permit = _permit(run, permit_id)
    if directive is None or directive.kind == "continue":
        if permit is not None and _allows_again(permit, attempt):
            _hold_past_cap(run, relaunching.accept(permit, attempt))
        if incident is not None and incident.state == S.WATCHING:
            watching.watch_newer(incident, attempt)
        return
    if permit is not None and _allows(permit, attempt):
        _hold_past_cap(run, _accept(permit, attempt))
    elif _already_refused(run, attempt) or _may_still_report(run, attempt):
        return
    else:
        _refuse(run, incident, attempt, permit_id, permit)


@receiver(checkpoint_changed, dispatch_uid="incidents.launches.checkpoint")
def on_checkpoint(sender: object, run: Run, checkpoint: Checkpoint, **kwargs: Any) -> None:
    """Spend a permit when the first checkpoint past its window is verified; let a waiting plan know."""
    if checkpoint.state != Checkpoint.State.VERIFIED:
        return
    permit = (
        Permit.objects.select_related("incident", "request__plan")
        .filter(run=run, state=Permit.State.EXCHANGED, launches__gt=0)
        .first()
    )
    if permit is not None and checkpoint.attempt >= permit.attempt and is_past(checkpoint, permit):
        spent = Permit.objects.filter(pk=permit.pk, state=Permit.State.EXCHANGED).update(
            state=Permit.State.SPENT,
            ended_at=timezone.now(),
            ended_why=f"checkpoint {checkpoint.step} verified",
        )
        if spent:
            states.record(
                permit.incident,
                kind="permit",
                text=f"permit spent: checkpoint of step {checkpoint.step} is past the window and verified",
            )


def sweep_expired() -> int:
    """End requests and permits whose time has passed; returns how many. Safe to run twice."""
    now, ended = timezone.now(), 0
    due = ResumeRequest.objects.filter(
        state=ResumeRequest.State.OPEN, expires_at__lte=now
    ) | ResumeRequest.objects.filter(
        state=ResumeRequest.State.APPROVED, permit__expires_at__lte=now, permit__launches=0
    )
    for request_id, incident_id, run_id in due.values_list(
        "pk", "incident_id", "incident__run_id"
    ).distinct():
        with transaction.atomic():
            lock_run(run_id)
            incident = (
                Incident.objects.select_for_update(no_key=True, of=("self",))
                .select_related("run", "dossier")
                .get(pk=incident_id)
            )
            request = permits.live_request(incident)
            if request is None or request.pk != request_id:
                continue
            what = "the request" if request.state == ResumeRequest.State.OPEN else "the permit"
            permits.expire(incident, request, f"{what} expired")
            ended += 1
    return ended


def _already_refused(run: Run, attempt: Attempt) -> bool:
    """Each node may report the same launch; it is refused once."""
    return Finding.objects.filter(run=run, attempt=attempt.number, kind=rules.LAUNCH_WITHOUT_PERMIT).exists()


def _may_still_report(run: Run, attempt: Attempt) -> bool:
    """Whether this attempt's posts only overtook the report of its launch.

    Only while a permit for exactly this attempt is out, and only for a moment: the sweep asks again.
    """
    if attempt.launch_reported or attempt.launched_at < timezone.now() - REPORT_WITHIN:
        return False
    return Permit.objects.filter(
        run=run, attempt=attempt.number, state=Permit.State.EXCHANGED, launches=0
    ).exists()


def sweep_launches() -> int:
    """Judge launches that nobody judged: a receiver that failed, or a report that never came."""
    judged = 0
    for incident in Incident.objects.select_related("run").filter(
        state__in=[S.OPEN, S.APPROVED, S.RESUMING], holds=True
    ):
        newest = Attempt.objects.filter(run=incident.run).order_by("-number").first()
        directive = current(incident.run_id)
        if newest is None or directive is None or directive.kind == "continue":
            continue
        if newest.number > (directive.attempt or 0):
            with transaction.atomic():
                judge(incident.run, newest, newest.permit_id)
            judged += 1
    return judged


def _permit(run: Run, permit_id: str) -> Permit | None:
    try:
        public_id = uuid.UUID(permit_id)
    except ValueError:
        return None
    return (
        Permit.objects.select_related("incident", "incident__run", "incident__dossier", "request__plan")
        .filter(run=run, public_id=public_id)
        .first()
    )


def _allows(permit: Permit, attempt: Attempt) -> bool:
    return (
        permit.state == Permit.State.EXCHANGED
        and permit.attempt == attempt.number
        and permit.launches == 0
        and permit.incident.state == S.RESUMING
        and permit.expires_at > timezone.now()
    )


def _allows_again(permit: Permit, attempt: Attempt) -> bool:
    """Whether a launch under continue is one its permit was taken for: each exchange lets one happen."""
    return (
        permit.state == Permit.State.EXCHANGED
        and permit.attempt == attempt.number
        and permit.launches < len(permit.exchanges)
    )


def _accept(permit: Permit, attempt: Attempt) -> list[LedgerRow]:
    incident, request, plan = permit.incident, permit.request, permit.request.plan
    Permit.objects.filter(pk=permit.pk).update(launches=permit.launches + 1)
    ResumeRequest.objects.filter(pk=request.pk).update(
        state=ResumeRequest.State.USED, ended_at=timezone.now()
    )
    why = f"attempt {attempt.number} was launched with its permit"
    if request.kind == ResumeRequest.Kind.FALSE_ALARM:
        states.move(incident, S.FALSE_ALARM, why=why)
        breaker.ask(incident)
        # Nothing failed, so there is no window to get past: the resume it let happen has happened.
        Permit.objects.filter(pk=permit.pk).update(
            state=Permit.State.SPENT, ended_at=timezone.now(), ended_why="false alarm: resumed in place"
        )
    else:
        policy = policy_for(incident.run_id)
        until = watching.watch_from(incident, plan, policy.rollback.watch_steps)
        states.move(incident, S.WATCHING, why=why, watch_until_step=until, watch_attempt=attempt.number)
    directive = set_directive(
        run=incident.run,
        kind="continue",
        attempt=attempt.number,
        permit=str(permit.public_id),
        why=why,
    )
    states.record(incident, kind="directive", text=f"continue, directive {directive.seq}: {why}")
    return resumptions.write(permit, attempt)


def _hold_past_cap(run: Run, rows: list[LedgerRow]) -> None:
    """Hold a run that went on by itself once more than its day allows: a person decides what comes next."""
    if rows:
        policy = policy_for(run.pk)
        opening.take(run, [caps.finding(run, row, policy) for row in rows], locked=True)


def _refuse(
    run: Run, incident: Incident | None, attempt: Attempt, permit_id: str, permit: Permit | None
) -> None:
    """A launch while held without its permit: a finding, a ledger row, and the hold reaches the newcomer."""
    said = _why_refused(attempt, permit_id, permit)
    policy, now = policy_for(run.pk), timezone.now()
    finding = Finding.objects.create(
        run=run,
        attempt=attempt.number,
        kind=rules.LAUNCH_WITHOUT_PERMIT,
        rule=RULE,
        mode="act",
        severity=Finding.Severity.HALT,
        detail=said,
        detector=RULE,
        detector_version=VERSION,
        policy_digest=policy.digest(),
        numbers={"permit": permit_id},
        occurred_at=attempt.launched_at,
        received_at=now,
        needs_incident=True,
        incident=str(incident.pk) if incident else "",
    )
    changes = [said]
    if incident is not None:
        live = permits.live_request(incident)
        if live is not None:
            # The permit names an attempt number that is used up now.
            permits.void(incident, live, changes)
        # Who acknowledged the first failure has not seen this one: it is nobody's until it is taken anew.
        raising.again(incident)
        states.record(
            incident,
            kind="launch",
            text=said,
            by=f"{RULE} v{VERSION}",
            occurred_at=attempt.launched_at,
            data={"attempt": attempt.number, "permit": permit_id},
        )
    holding.end_live_permit(run, said)
    set_directive(
        run=run,
        kind="hold",
        attempt=attempt.number,
        incident=str(incident.pk) if incident else "",
        mode=policy.hold.mode,
        deadline=now,
        why=said,
    )
    nothing = "none: the launch was refused, so nothing moved"
    ledger.append(
        run=run,
        action="refused_launch",
        why=said,
        decided_by=f"{RULE} v{VERSION}",
        attempt=attempt.number,
        ranks=holding.everyone(run, attempt.number)[0],
        detector=holding.detector_document(finding),
        none_because=dict.fromkeys(("step", "ranks", "before", "after", "checkpoint"), nothing),
        incident=incident,
    )
    if incident is None:
        opening.take(run, [finding])


def _why_refused(attempt: Attempt, permit_id: str, permit: Permit | None) -> str:
    number = attempt.number
    if not permit_id:
        return f"attempt {number} was launched while the run is held, without a permit"
    if permit is None:
        return f"attempt {number} was launched while the run is held, with a permit Andon never issued"
    if permit.state == Permit.State.ISSUED:
        return f"attempt {number} was launched with a permit that nobody had taken"
    if permit.state == Permit.State.EXCHANGED and permit.attempt != number:
        return f"attempt {number} was launched with the permit of attempt {permit.attempt}"
    if permit.expires_at <= timezone.now():
        return f"attempt {number} was launched with a permit that expired"
    return f"attempt {number} was launched with a permit that is {permit.state}"
