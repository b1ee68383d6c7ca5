"""The run lock around everything that lets a run go on."""

from collections.abc import Callable
from typing import TypeVar

from django.db import transaction

from incidents.models import Incident
from incidents.refused import Refused
from runs.locks import lock_run

T = TypeVar("T")


def within(incident: Incident, do: Callable[[Incident], T | Refused]) -> T:
    """Do something with the fresh incident under its run's lock; what it refuses is raised afterwards.

    A refusal that voided or expired something is returned by `do`, not raised, so that this commits.

    Raises:
        Refused: `do` returned it, or raised it and nothing was written.
    """
    with transaction.atomic():
        lock_run(incident.run_id)
        fresh = (
            Incident.objects.select_for_update(no_key=True, of=("self",))
            .select_related("run", "run__project", "dossier")
            .get(pk=incident.pk)
        )
        outcome = do(fresh)
    if isinstance(outcome, Refused):
        raise outcome
    incident.refresh_from_db()
    return outcome
