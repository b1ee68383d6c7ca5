"""The policy in force: the run's newest version, else its project's, else the defaults."""

from django.db import transaction
from django.db.models import Max

from andon import policy as rules
from andon.policy import Policy
from runs.locks import lock_run
from runs.models import Person, PolicyVersion, Project, Run
from runs.reading import kept

_IN_FORCE = """
SELECT * FROM runs_policyversion
WHERE run_id = %s OR run_id IS NULL AND project_id = (SELECT project_id FROM runs_run WHERE id = %s)
ORDER BY run_id NULLS LAST, number DESC LIMIT 1
"""


def policy_version(run_id: int) -> PolicyVersion | None:
    """Return the stored version in force for a run, None when the defaults are."""
    return kept(
        ("policy", run_id), lambda: next(iter(PolicyVersion.objects.raw(_IN_FORCE, [run_id, run_id])), None)
    )


def policy_for(run_id: int) -> Policy:
    """Return the policy in force for a run.

    Raises:
        ValueError: the stored document no longer reads as a policy.
    """
    version = policy_version(run_id)
    return Policy() if version is None else rules.decode(version.document)


def set_policy(*, run: Run, document: dict[str, object], person: Person | None, why: str) -> PolicyVersion:
    """Store a new version of a run's policy and return it.

    Raises:
        ValueError: the document is no policy; nothing is stored.
    """
    policy = rules.decode(document)
    with transaction.atomic():
        lock_run(run.pk)
        newest = PolicyVersion.objects.filter(run=run).aggregate(newest=Max("number"))["newest"] or 0
        return PolicyVersion.objects.create(
            project_id=run.project_id,
            run=run,
            number=newest + 1,
            document=policy.document(),
            digest=policy.digest(),
            why=why,
            created_by=person,
        )


def project_policy(project: Project) -> Policy:
    """Return the policy that runs of a project have unless they have one of their own."""
    newest = PolicyVersion.objects.filter(project=project, run=None).order_by("-number").first()
    return Policy() if newest is None else rules.decode(newest.document)


def set_project_policy(
    *, project: Project, document: dict[str, object], person: Person | None, why: str
) -> PolicyVersion:
    """Store a new version of a project's policy and return it: for every run without one of its own.

    Raises:
        ValueError: the document is no policy; nothing is stored.
    """
    policy = rules.decode(document)
    with transaction.atomic():
        Project.objects.select_for_update(no_key=True).get(pk=project.pk)
        known = PolicyVersion.objects.filter(project=project, run=None)
        newest = known.aggregate(newest=Max("number"))["newest"] or 0
        return PolicyVersion.objects.create(
            project=project,
            number=newest + 1,
            document=policy.document(),
            digest=policy.digest(),
            why=why,
            created_by=person,
        )
