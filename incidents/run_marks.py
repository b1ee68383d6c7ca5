"""What incidents add to the curves of a run: where each began, and the samples that were skipped."""

from collections.abc import Sequence

from django.dispatch import receiver

from incidents.models import Incident, LedgerRow
from runs.formatting import count
from runs.marks import MOST, Mark
from runs.models import Run
from runs.signals import marks_wanted


@receiver(marks_wanted, dispatch_uid="incidents.run_marks")
def marks(
    sender: object, run: Run, attempts: Sequence[int], first: int, last: int, **_: object
) -> list[Mark]:
    """Return the marks of incidents and of skipped data in a window."""
    found: list[Mark] = []
    incidents = Incident.objects.filter(run=run, attempt__in=attempts).order_by("-pk")[:MOST]
    for key, where in incidents.values_list("pk", "first_bad"):
        step = where.get("step") if isinstance(where, dict) else None
        if isinstance(step, int) and first <= step <= last:
            found.append((step, f"▼ incident {key}", True))
    skips = LedgerRow.objects.filter(
        run=run, attempt__in=attempts, action="skip", step__gte=first, step__lte=last
    )
    for step, samples in skips.order_by("-seq").values_list("step", "samples_skipped")[:MOST]:
        words = f"▭ {count(samples)} samples skipped" if samples else "▭ skip"
        found.append((step or 0, words, False))
    return found
