"""What incidents add to the list of runs: whether one waits for a person, and what today cost."""

from collections.abc import Sequence
from functools import lru_cache

from django.dispatch import receiver
from django.utils import timezone

from incidents import goodput
from incidents.models import Incident
from runs.models import Run
from runs.overview import OPEN_INCIDENT, WATCHING
from runs.signals import goodput_wanted, incidents_wanted


@receiver(incidents_wanted, dispatch_uid="incidents.run_columns.incidents")
def incidents(sender: object, runs: Sequence[int], **_: object) -> dict[int, str]:
    """Return what is not resolved yet, of the runs that have it."""
    found = Incident.objects.filter(run__in=runs, state__in=Incident.UNRESOLVED)
    return {
        run: WATCHING if state == Incident.State.WATCHING else OPEN_INCIDENT
        for run, state in found.values_list("run_id", "state")
    }


@receiver(goodput_wanted, dispatch_uid="incidents.run_columns.goodput")
def goodput_today(sender: object, runs: Sequence[int], **_: object) -> dict[int, float]:
    """Return what share of today's GPU time (since 00:00 UTC) each run kept."""
    # The list is asked for every few seconds by everybody who looks at it; a minute changes no share.
    return _today(tuple(runs), int(timezone.now().timestamp()) // 60)


@lru_cache(maxsize=64)
def _today(runs: tuple[int, ...], minute: int) -> dict[int, float]:
    now = timezone.now()
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    launched = Run.objects.filter(pk__in=runs, attempts__isnull=False).distinct()
    counted = goodput.of_runs(list(launched), now)
    lines = {one.run.pk: goodput.line("", "", [one], midnight, now) for one in counted}
    return {pk: line.kept / line.allocated for pk, line in lines.items() if line.allocated}
