"""What findings say about single cells: spike, straggler, checksum differs, no progress."""

from django.db.models import Q

from andon.detect.planes import CHECKSUM, NO_PROGRESS, SPIKE, STRAGGLER
from runs.models import Finding
from runs.points import Points

MAX_FINDINGS = 20_000
# A reduced spike is everyone's and names no rank; a slow or a stuck rank is named by comparing ranks.
_RULES = {
    "spike": SPIKE,
    "grad_norm": SPIKE,
    "straggler": STRAGGLER,
    "hang": NO_PROGRESS,
    "corruption": CHECKSUM,
}
_LOCAL_ONLY = ("spike", "grad_norm")


def of_attempt(run_id: int, attempt: int, first: int, last: int) -> Points:
    """Return the cells of steps `first` to `last` that findings name."""
    rows: list[tuple[int, int, int, int]] = []
    found = Finding.objects.filter(
        Q(view="local") | ~Q(rule__in=_LOCAL_ONLY),
        run_id=run_id,
        attempt=attempt,
        rule__in=_RULES,
        step__range=(first, min(last, 2**63 - 1)),
    )
    for rule, step, lanes in found.values_list("rule", "step", "lanes")[:MAX_FINDINGS]:
        ranks = [lane for lane in lanes if type(lane) is int and 0 <= lane < 2**31]
        rows += [(step or 0, rank, _RULES[rule], 0) for rank in ranks]
    return Points.of(rows)


def newest(run_id: int, attempt: int) -> int:
    """Return the highest id of the attempt's findings, 0 without one: it changes when a new one may show."""
    found = Finding.objects.filter(run_id=run_id, attempt=attempt, rule__in=_RULES)
    return found.order_by("-pk").values_list("pk", flat=True).first() or 0
