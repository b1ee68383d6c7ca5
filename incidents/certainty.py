"""How sure the first-bad cell is, and what followed it, in words."""

from dataclasses import dataclass
from typing import Any

from django.db import connection

from andon.detect.cells import AT_OR_BEFORE, REDUCED_ONLY
from incidents.models import Incident
from runs import formatting as words
from runs.models import Attempt

# Frames that begin nearest below the step: one per rank of the largest fleets and then some.
_FRAMES = 20_000
_REPORTED = """
WITH near AS (
    SELECT lane_first, lane_last, step_last FROM runs_frame
    WHERE run_id = %(run)s AND attempt = %(attempt)s AND stream = 'rank' AND step_first <= %(step)s
          AND lane_first IS NOT NULL
    ORDER BY step_first DESC LIMIT %(frames)s
), said AS (
    SELECT generate_series(lane_first, lane_last) AS rank FROM near WHERE step_last >= %(step)s
    UNION
    SELECT rank FROM runs_event
    WHERE run_id = %(run)s AND attempt = %(attempt)s AND type = 'step' AND step = %(step)s
          AND rank IS NOT NULL
)
SELECT count(*) FROM said WHERE rank < %(world)s
"""
_FOLLOWED = """
WITH first AS (
    SELECT lane, min(step) AS step FROM runs_firstbad
    WHERE run_id = %(run)s AND attempt = %(attempt)s AND stream = 'rank' AND lane <> '-1'
          AND lane <> ALL(%(first)s)
    GROUP BY lane
), after AS (
    SELECT step, count(*) AS ranks, sum(count(*)) OVER () AS everyone FROM first
    GROUP BY step ORDER BY step LIMIT 2
)
SELECT step, ranks, CASE WHEN ranks <= 256 THEN ARRAY(
    SELECT lane::int FROM first WHERE first.step = after.step AND lane ~ '^[0-9]{1,9}$' ORDER BY 1
) END, everyone FROM after ORDER BY step
"""
# What was once complete stays so; an incomplete answer is asked for again. (run, attempt, step, world size)
_complete: set[tuple[int, int, int, int]] = set()
_MOST_KEPT = 10_000


@dataclass(frozen=True, slots=True)
class Followed:
    """Ranks that went bad after the first: how many in all, and the first two steps in words."""

    ranks: int
    says: str


def of_first_bad(incident: Incident, attempt: Attempt | None, document: dict[str, Any]) -> str:
    """Return "local values, all 64 ranks reported, no tie", or that the rank is not known."""
    if document["step"] is None:
        return ""
    bounded = f"; {AT_OR_BEFORE}" if AT_OR_BEFORE in document["certainty"] else ""
    if not document["ranks"]:
        return REDUCED_ONLY + bounded
    tie = f"a tie: {document['tie_reason']}" if document["tie"] else "no tie"
    if attempt is not None and attempt.world_size == 1:
        return "the only rank of this run" + bounded
    said = ["local values", _reported_words(incident, attempt, int(document["step"])), tie]
    return ", ".join(said) + bounded


def _reported_words(incident: Incident, attempt: Attempt | None, step: int) -> str:
    world = attempt.world_size if attempt else None
    if not world:
        return "how many ranks there are is not known"
    told = reported(incident.run_id, incident.attempt, step, world)
    if told >= world:
        return f"all {words.count(world)} ranks reported"
    if told == 0:
        return "who else reported this step is not known"
    return f"{words.count(told)} of {words.count(world)} ranks reported this step"


def reported(run_id: int, attempt: int, step: int, world_size: int) -> int:
    """Return how many ranks of an attempt posted anything of their own about `step`."""
    key = (run_id, attempt, step, world_size)
    if key in _complete:
        return world_size
    with connection.cursor() as cursor:
        cursor.execute(
            _REPORTED,
            {"run": run_id, "attempt": attempt, "step": step, "frames": _FRAMES, "world": world_size},
        )
        told = int(cursor.fetchone()[0])
    if told >= world_size and len(_complete) < _MOST_KEPT:
        _complete.add(key)
    return told


def followed(incident: Incident, attempt: Attempt | None, document: dict[str, Any]) -> Followed:
    """Return which ranks went bad next: "rank 9 one step later", "all other ranks in the same step"."""
    if document["step"] is None or not document["ranks"]:
        return Followed(0, "")
    with connection.cursor() as cursor:
        first = [str(rank) for rank in document["ranks"]]
        of: dict[str, Any] = {"run": incident.run_id, "attempt": incident.attempt, "first": first}
        cursor.execute(_FOLLOWED, of)
        rows = cursor.fetchall()
    if not rows:
        return Followed(0, "")
    world = attempt.world_size if attempt else None
    before = len(document["ranks"])
    said = []
    for step, number, ranks, _ in rows:
        everyone = bool(world) and before + number >= (world or 0) and number > 1
        before += number
        who = "all other ranks" if everyone else words.rank_words(ranks or []) if ranks else ""
        who = who or words.plural(number, "rank")
        said.append(f"{who} {_later(int(step) - int(document['step']))}")
    more = int(rows[0][3]) - sum(int(row[1]) for row in rows)
    if more:
        said.append(f"{words.plural(more, 'more rank')} after that")
    return Followed(int(rows[0][3]), ", ".join(said))


def _later(steps: int) -> str:
    if steps == 0:
        return "in the same step"
    if steps < 0:  # of a skipped update, which is judged after every applied one
        return f"{words.plural(-steps, 'step')} earlier, skipped"
    return "one step later" if steps == 1 else f"{words.plural(steps, 'step')} later"
