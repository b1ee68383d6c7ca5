"""After a restore from a backup: nothing that was approved before may let a run go on now.

Whoever took a permit since the backup, and what changed since, is not in these rows. So every unfinished
request and permit is void, and a person asks again.
"""

from django.db import transaction

from incidents import holding, permits
from incidents.models import Incident, Permit, ResumeRequest
from runs.locks import lock_run

WHY = "the database was restored from a backup: request again"


def void_all() -> int:
    """Void every request that is open or approved and every permit that is not spent; returns how many."""
    live = Permit.objects.filter(state__in=permits.LIVE).values_list("run_id", flat=True)
    asked = ResumeRequest.objects.filter(
        state__in=[ResumeRequest.State.OPEN, ResumeRequest.State.APPROVED]
    ).values_list("incident__run_id", flat=True)
    return sum(_void(run_id) for run_id in sorted({*live, *asked}))


def _void(run_id: int) -> int:
    with transaction.atomic():
        run = lock_run(run_id)
        ended = 0
        unresolved = Incident.objects.select_for_update(no_key=True, of=("self",)).filter(
            run_id=run_id, state__in=Incident.UNRESOLVED
        )
        for incident in unresolved.select_related("run", "dossier"):
            request = permits.live_request(incident)
            if request is not None:
                permits.void(incident, request, [WHY])
                ended += 1
        ended += Permit.objects.filter(run=run, state__in=permits.LIVE).count()
        holding.end_live_permit(run, WHY)
        return ended
