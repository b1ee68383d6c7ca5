"""Opens incidents from findings, and lets later findings join.

The receivers run inside the transaction that stored the findings. Only the post that opens or worsens
an incident takes the run lock; posts that join it (thousands, when a NaN reaches every node within a
second) insert nothing here but their own finding's reference.
"""

import logging
from typing import Any

from django.db import connection, transaction
from django.dispatch import receiver
from django.utils import timezone

from incidents import (
    attached,
    describing,
    diagnosis,
    firstbad,
    holding,
    ledger,
    plans,
    positions,
    review,
    rules,
    states,
    subjects,
    worsening,
)
from incidents.models import Incident, StateChange
from incidents.rulebook import breaker
from incidents.rules import Effect
from runs.attempts import attempt_of
from runs.inserting import insert
from runs.locks import lock_run
from runs.models import Finding, Person, Run
from runs.policies import policy_for
from runs.signals import findings_stored
from runs.work import enqueued_together

log = logging.getLogger(__name__)


@receiver(findings_stored, dispatch_uid="incidents.opening")
def on_findings(
    sender: object, run: Run, findings: list[Finding], locked: bool = False, **kwargs: Any
) -> None:
    """Open or extend the incident these findings belong to."""
    take(run, findings, locked=locked)


def take(run: Run, findings: list[Finding], *, locked: bool = False) -> Incident | None:
    """Give each finding its place: the open incident, a new one, or none; returns the incident.

    Runs inside the caller's transaction. Backfill joins the incident of its attempt and changes no
    directive; what only observes opens nothing. Findings that joined while the run was held come
    here too, later and in batches.

    Args:
        locked: the caller has just locked the run, and `run` is its fresh row.
    """
    acting = [finding for finding in findings if rules.effect(finding) > Effect.NOTE]
    quiet = [finding for finding in findings if rules.effect(finding) == Effect.NOTE]
    _place_quiet(run, quiet)
    if not acting:
        return None
    incident = states.unresolved(run.pk)
    if incident is None and not locked:
        run = lock_run(run.pk)
        incident = states.unresolved(run.pk)
    if incident is None:
        return open_incident(run, acting)
    return _join(run, incident, acting)


def open_incident(
    run: Run, findings: list[Finding], *, person: Person | None = None, why: str = ""
) -> Incident:
    """Open the one unresolved incident of `run`; the caller holds the run lock.

    In this one transaction: the freeze plan with its holds, the incident, the directive, the ledger
    row, the first plan. Without findings it is a person's hold.
    """
    with enqueued_together():
        return _open(run, findings, person, why)


def _open(run: Run, findings: list[Finding], person: Person | None, why: str) -> Incident:
    now = timezone.now()
    policy = policy_for(run.pk)
    lead = rules.leading(findings) if findings else None
    attempt = lead.attempt if lead else subjects.newest_attempt(run.pk)
    kind = lead.kind if lead else rules.HELD_BY_HAND
    holds = lead is None or rules.effect(lead) == Effect.HOLD
    first_bad = firstbad.of_findings(run, attempt, findings)
    number = _next_id()
    dossier = describing.freeze_for(
        run=run,
        number=number,
        kind=kind,
        attempt=attempt,
        first_bad=first_bad,
        policy=policy,
        person=person,
        why=why,
    )
    mine = [finding for finding in findings if finding.attempt == attempt]
    answer = diagnosis.of(run, attempt, mine, first_bad)
    incident = Incident(
        id=number,
        run=run,
        attempt=attempt,
        severity=Finding.Severity.HALT if holds else Finding.Severity.WARN,
        holds=holds,
        kind=kind,
        title=describing.title(run, attempt, lead, first_bad, attempt_of(run, attempt)),
        symptom=answer.symptom,
        family=answer.family,
        family_why=answer.why,
        opened_at=now,
        first_bad=first_bad,
        dossier=dossier,
        policy_digest=policy.digest(),
        lead=person,
        watch_attempt=None if holds else attempt,
        watch_until_step=None if holds else worsening.watch_until(mine, policy),
    )
    opened = StateChange(incident=incident, before="", after=incident.state, at=now, person=person, why=why)
    insert(incident, opened)
    attached.attach(incident, findings)
    with states.recorded_together():
        _tell_opened(incident, lead, person, why)
        if holds:
            holding.end_live_permit(run, f"incident {incident.pk} opened")
            holding.hold(incident, finding=lead, policy=policy, person=person, why=why)
            if lead is not None:
                breaker.ask(incident)
        plans.draft_first(incident, policy=policy, findings=mine, answer=answer)
    return incident


def _place_quiet(run: Run, findings: list[Finding]) -> None:
    for finding in findings:
        home = None
        if finding.backfill and finding.mode == "act":
            home = (
                Incident.objects.filter(run=run, attempt=finding.attempt)
                .order_by("-opened_at", "-id")
                .first()
            )
        elif finding.mode == "act" and finding.kind in rules.BASELINE_RESETS:
            _write_reset(run, finding)
        finding.needs_incident = False
        finding.incident = str(home.pk) if home else ""
        finding.save(update_fields=["needs_incident", "incident"])
        if home is not None and home.state in Incident.UNRESOLVED:
            review.ask(home)


def _write_reset(run: Run, finding: Finding) -> None:
    """A baseline that restarts is an automatic action: what counts as a spike has changed."""
    known = positions.at(run, finding.attempt, finding.step) if finding.step is not None else None
    reasons = {"checkpoint": "none: a reset of a baseline loads nothing"}
    if known is None:
        reasons |= {"before": "the finding names no step", "after": "the finding names no step"}
    else:
        reasons |= known.reasons("before") | known.reasons("after")
    if finding.step is None:
        reasons["step"] = "the finding names no step"
    reasons["ranks"] = "a reduced value: it names no rank"
    ledger.append(
        run=run,
        action="reset",
        why=finding.detail or "the baseline restarts at a new level",
        decided_by=holding.rule_name(finding),
        attempt=finding.attempt,
        step=finding.step,
        before=known.values if known else None,
        after=known.values if known else None,
        detector=holding.detector_document(finding),
        none_because=reasons,
    )


def _join(run: Run, incident: Incident, findings: list[Finding]) -> Incident:
    if _needs_lock(incident, findings):
        lock_run(run.pk)
        fresh = (
            Incident.objects.select_for_update(no_key=True, of=("self",))
            .select_related("run", "dossier")
            .get(pk=incident.pk)
        )
        if fresh.state not in Incident.UNRESOLVED:
            # It ended while this post waited for the lock: what was seen is a new failure.
            return open_incident(fresh.run, findings)
        attached.attach(fresh, findings)
        _act_on_joined(fresh, findings)
        incident = fresh
    else:
        attached.attach(incident, findings)
    if any(_touches(incident, finding) for finding in findings):
        review.ask(incident)
    return incident


def _needs_lock(incident: Incident, findings: list[Finding]) -> bool:
    """Whether joining can change anything but the findings themselves.

    Under a hold that nobody has answered yet it cannot, unless an earlier bad step turns up: so the
    thousands of posts that follow the first one never wait for each other.
    """
    lead = rules.leading(findings)
    if rules.effect(lead) == Effect.HOLD and not incident.holds:
        return True
    if incident.state != Incident.State.OPEN and any(f.attempt >= incident.attempt for f in findings):
        return True
    return _watch_longer(incident, findings) or any(_may_move(incident, finding) for finding in findings)


def _watch_longer(incident: Incident, findings: list[Finding]) -> bool:
    """Whether a finding of a run that goes on asks for more clean steps than are watched now."""
    known = incident.watch_until_step
    if incident.holds or incident.state != Incident.State.OPEN or known is None:
        return False
    return (_watched_until(incident, findings) or 0) > known


def _watched_until(incident: Incident, findings: list[Finding]) -> int | None:
    mine = [one for one in findings if one.attempt == incident.watch_attempt]
    return worsening.watch_until(mine, policy_for(incident.run_id))


def _act_on_joined(incident: Incident, findings: list[Finding]) -> None:
    """Let joined findings move the first-bad cell, hold or reopen; the run lock is held."""
    if any(_may_move(incident, finding) for finding in findings):
        first_bad = firstbad.of_findings(incident.run, incident.attempt, attached.findings(incident))
        if firstbad.earlier(first_bad, incident.first_bad) and describing.move_first_bad(incident, first_bad):
            describing.redescribe(incident)
    if incident.state == Incident.State.WATCHING:
        if _recurs(incident, findings):
            worsening.reopen(incident, findings)
    elif rules.effect(rules.leading(findings)) == Effect.HOLD and not incident.holds:
        worsening.worsen(incident, findings)
    elif _watch_longer(incident, findings):
        incident.watch_until_step = _watched_until(incident, findings)
        incident.save(update_fields=["watch_until_step"])


def _may_move(incident: Incident, finding: Finding) -> bool:
    step = rules.first_flagged_step(finding)
    known = incident.first_bad.get("step")
    return finding.attempt == incident.attempt and step is not None and (known is None or step < known)


def _touches(incident: Incident, finding: Finding) -> bool:
    """Whether a joining finding can change what an approver signs: the first-bad cell or its ties."""
    step, known = rules.first_flagged_step(finding), incident.first_bad.get("step")
    return finding.attempt == incident.attempt and (step is None or known is None or step <= known)


def _recurs(incident: Incident, findings: list[Finding]) -> bool:
    """Whether findings reopen an incident in its watch window: any nonfinite value, or any halt."""
    since = incident.watch_attempt or 0
    return any(
        finding.attempt >= since
        and (finding.kind in rules.NONFINITE_KINDS or rules.effect(finding) == Effect.HOLD)
        for finding in findings
    )


def _tell_opened(incident: Incident, lead: Finding | None, person: Person | None, why: str) -> None:
    if lead is None:
        states.record(incident, kind="opened", text=f"held by hand: {why}", person=person)
        return
    states.record(
        incident,
        kind="opened",
        text=f"{incident.title}: {lead.detail}" if lead.detail else incident.title,
        by=holding.rule_name(lead),
        occurred_at=lead.occurred_at,
        received_at=lead.received_at,
        data={"finding": lead.pk},
    )


def _next_id() -> int:
    """Take the number first: the dossier that the incident needs already carries it in its label."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT nextval(pg_get_serial_sequence('incidents_incident', 'id'))")
        return int(cursor.fetchone()[0])


def sweep_findings() -> int:
    """Open what a failed receiver missed; returns how many runs were looked after.

    Safe to run twice and in two places at once: each run is looked at again under its lock.
    """
    missed = Finding.objects.filter(needs_incident=True, incident="")
    done = 0
    for run_id in missed.order_by().values_list("run_id", flat=True).distinct():
        try:
            with transaction.atomic():
                run = lock_run(run_id)
                findings = list(missed.filter(run=run).order_by("id"))
                take(run, findings, locked=True)
            done += 1
        except Exception:
            # One run that cannot be helped now must not keep the others waiting; it is tried again.
            log.exception("the incident of run %s could not be opened by the sweep", run_id)
    return done
