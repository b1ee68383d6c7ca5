"""How a run went on after an incident, and how its loss compares over the steps it ran again."""

from dataclasses import dataclass

from andon.overlap import NOISE_STEPS, Other, Overlap, compare
from incidents import plans
from incidents.models import Incident, Permit, Plan
from runs.models import Run
from runs.rows import raw_cursor

MOST_STEPS = 20_000  # run again and compared; a rollback that goes back further is compared up to there


@dataclass(frozen=True, slots=True)
class Resumed:
    """One resume: the attempt that failed, the one that went on, and the step they parted at.

    `after` is None where no step was run again; `until` is the first bad step, None where none was bad.
    """

    permit: Permit
    old: int
    new: int
    after: int | None
    until: int | None
    other: Other

    @property
    def plan(self) -> Plan:
        """The plan it went on by."""
        return self.permit.request.plan


@dataclass(frozen=True, slots=True)
class Losses:
    """The losses of both attempts over the steps around the overlap, by step; None: nonfinite."""

    old: dict[int, float | None]
    new: dict[int, float | None]
    overlap: Overlap


def of_incident(incident: Incident) -> list[Resumed]:
    """Return the resumes of an incident that were carried out, oldest first."""
    found = Permit.objects.filter(incident=incident, launches__gt=0).select_related("request__plan")
    return [_resumed(permit) for permit in found.order_by("id")]


def _resumed(permit: Permit) -> Resumed:
    plan = permit.request.plan
    old = plan.numbers.get("attempt") or max(1, permit.attempt - 1)
    other: Other = "other data" if plan.skip else ""
    if not other and any(change.get("changes_regime") for change in plan.changes):
        other = "a changed regime"
    return Resumed(
        permit=permit,
        old=int(old),
        new=permit.attempt,
        after=plan.checkpoint.get("step") if plan.kind in plans.ROLLBACKS else None,
        until=plan.numbers.get("first_bad_step"),
        other=other,
    )


def losses(run: Run, resumed: Resumed) -> Losses | None:
    """Return the losses of both attempts, None where no step was run again."""
    if resumed.after is None:
        return None
    first, last = max(0, resumed.after - NOISE_STEPS), resumed.after + MOST_STEPS
    old = _losses(run, resumed.old, first, last)
    new = _losses(run, resumed.new, first, last)
    overlap = compare(old, new, after=resumed.after, until=resumed.until, other=resumed.other)
    return Losses(old, new, overlap)


# One value per step, in full precision: the first reduced one that was stored; where nobody reported one, the
# mean over the ranks that reported their own. Nonfinite (or not finite on some rank) is NULL.
_LOSSES = """
WITH said AS (
    SELECT step, id, rank IS NULL OR view = 'reduced' AS reduced,
           CASE WHEN jsonb_typeof(data -> 'loss') = 'number' THEN (data ->> 'loss')::float8 END AS value,
           coalesce(flags ->> 'data.loss', '') AS flag
    FROM runs_event
    WHERE run_id = %s AND attempt = %s AND type = 'step' AND step BETWEEN %s AND %s AND data ? 'loss'
), kept AS (
    SELECT * FROM said WHERE value IS NOT NULL OR flag IN ('nan', '+inf', '-inf')
), one AS (
    SELECT DISTINCT ON (step) step, value FROM kept WHERE reduced ORDER BY step, id
)
SELECT step, value FROM one
UNION ALL
SELECT step, CASE WHEN bool_and(value IS NOT NULL) THEN avg(value) END FROM kept
WHERE NOT reduced AND step NOT IN (SELECT step FROM one) GROUP BY step
"""


def _losses(run: Run, attempt: int, first: int, last: int) -> dict[int, float | None]:
    with raw_cursor() as cursor:
        cursor.execute(_LOSSES, (run.pk, attempt, first, last))
        return dict(cursor.fetchall())
