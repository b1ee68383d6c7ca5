"""Switching a rule, and judging what it saw: each by a person, with a reason, under history."""

from typing import get_args

from django.db import transaction
from django.utils import timezone

from andon.policy import Mode
from incidents import roles
from incidents.models import Incident
from incidents.refused import Refused
from incidents.rulebook import record
from incidents.rulebook.models import RuleJudgement
from runs.access import project_member
from runs.locks import lock_run
from runs.models import Finding, Person, PolicyVersion, Role, Run
from runs.policies import policy_for, set_policy

MAY_SET = (Role.APPROVER, Role.ADMIN)


def set_mode(*, run: Run, rule: str, mode: str, person: Person, why: str, seen: str = "") -> PolicyVersion:
    """Let a rule do nothing, observe or act on one run, as a new version of its policy.

    A live approval of the run is void by it, since what an approver signs names the policy.

    Args:
        seen: digest of the observe record that the person read; needed to let the rule act.

    Raises:
        Refused: not-allowed, bad-mode, reason-needed, no-change, record-first.
    """
    if not project_member(person, run.project, *MAY_SET):
        raise Refused(
            "not-allowed", "Only an approver or admin of the project may switch a rule.", status=403
        )
    if mode not in get_args(Mode):
        raise Refused("bad-mode", "A rule is off, observes or acts.", status=422)
    if not why.strip():
        raise Refused("reason-needed", "Say why: whoever is woken by it, or is not, will ask.")
    with transaction.atomic():
        lock_run(run.pk)
        policy = policy_for(run.pk)
        before = policy.mode(rule)
        if before == mode:
            raise Refused("no-change", f"{rule} is set to {mode} already.")
        if mode == "act" and seen != record.of(run, rule).digest:
            raise Refused(
                "record-first",
                f"Look at what {rule} would have done on this run first: the record is another than you saw.",
            )
        document = policy.document()
        document["modes"] = {**policy.modes, rule: mode}
        return set_policy(
            run=run, document=document, person=person, why=f"{rule}: {before} → {mode}. {why.strip()}"
        )


def judge(*, run: Run, rule: str, finding_id: int, right: bool, person: Person, why: str = "") -> None:
    """Say whether a rule that only observed was right. The newest word counts; all are kept.

    Raises:
        Refused: not-allowed, no-finding, reason-needed (a false one names what was well).
    """
    roles.need_responder(person, run.project, "judge what a rule saw")
    finding = Finding.objects.filter(pk=finding_id, run=run, rule=rule, mode="observe").first()
    if finding is None:
        raise Refused("no-finding", f"{rule} has no such finding on {run.slug}.", status=404)
    if not right and not why.strip():
        raise Refused("reason-needed", "Say why nothing was wrong: the rule is corrected by it.")
    RuleJudgement.objects.create(
        run=run, rule=rule, finding=finding, right=right, person=person, at=timezone.now(), why=why.strip()
    )


def is_held(run: Run) -> bool:
    """Whether an unresolved incident holds the run."""
    return Incident.objects.filter(run=run, holds=True, state__in=Incident.UNRESOLVED).exists()
