"""First-bad rows: the earliest bad cell of every lane, moved only to an earlier cell.

A dead run of 16,384 ranks makes 11.8 million bad cells an hour, and none of them may cost a row or
an update: one statement takes all lanes of a post and touches only rows that it truly moves.
"""

from dataclasses import dataclass
from datetime import datetime

from andon.detect.cells import SOURCES, VALUES, BadCells, earliest_per_lane
from runs.rows import raw_cursor

_LAST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Seen:
    """Where bad cells were seen, and when."""

    stream: str  # rank | layer
    occurred_at: datetime | None
    received_at: datetime


# An applied value orders before a skipped one; inside a step the micro-batch orders, where it is
# known and the values are not yet reduced (as andon.detect.cells.order_key).
_KEY = (
    "({0}.skipped, {0}.step, CASE WHEN {0}.micro_batch >= 0 AND {0}.phase < 3"
    " THEN {0}.micro_batch ELSE {1} END, {0}.phase)"
)
_NEW_KEY, _OLD_KEY = _KEY.format("n", _LAST), _KEY.format("f", _LAST)

_ROWS = (
    "unnest(%s::text[], %s::text[], %s::int[], %s::bigint[], %s::int[], %s::smallint[], %s::bool[],"
    " %s::int[], %s::text[], %s::text[])"
    " AS n (view, lane, rank, step, micro_batch, phase, skipped, bits, series, value)"
)
# Known lanes are left out before ON CONFLICT sees them: a conflict costs more than this join. DO
# NOTHING and not DO UPDATE, which would lock every row it meets, moved or not.
_INSERT = f"""
INSERT INTO runs_firstbad (run_id, attempt, stream, view, lane, rank, step, micro_batch, phase, skipped,
                           bits, series, value, occurred_at, received_at)
SELECT %s, %s, %s, n.view, n.lane, n.rank, n.step, n.micro_batch, n.phase, n.skipped, n.bits,
       n.series, n.value, %s, %s
FROM {_ROWS}
WHERE NOT EXISTS (SELECT FROM runs_firstbad f WHERE f.run_id = %s AND f.attempt = %s AND f.stream = %s
                  AND f.view = n.view AND f.lane = n.lane AND f.rank = n.rank)
ORDER BY n.view, n.lane, n.rank
ON CONFLICT DO NOTHING
"""  # noqa: S608
# Rows to move are locked in one order, so that two posts about the same lanes cannot deadlock.
_MOVE = f"""
UPDATE runs_firstbad f SET step = n.step, micro_batch = n.micro_batch, phase = n.phase,
       skipped = n.skipped, bits = n.bits, series = n.series, value = n.value,
       occurred_at = %s, received_at = %s
FROM {_ROWS}, (
    SELECT f.id FROM runs_firstbad f JOIN {_ROWS}
        ON f.view = n.view AND f.lane = n.lane AND f.rank = n.rank
    WHERE f.run_id = %s AND f.attempt = %s AND f.stream = %s AND {_NEW_KEY} < {_OLD_KEY}
    ORDER BY f.id FOR NO KEY UPDATE OF f
) AS earlier
WHERE f.id = earlier.id AND f.view = n.view AND f.lane = n.lane AND f.rank = n.rank
      AND {_NEW_KEY} < {_OLD_KEY}
"""  # noqa: S608


def take(run_id: int, attempt: int, cells: BadCells, seen: Seen) -> int:
    """Take in bad cells of one post; returns how many lanes are newly bad or bad earlier than known.

    The caller's transaction decides whether it counts. Compare-and-set: the outcome does not depend
    on the order in which posts arrive.
    """
    moved = 0
    if not len(cells):
        return moved
    # A lane keeps a local and a reduced cell apart: only the local one may name a rank.
    for local in (True, False):
        part = cells.take(cells.local == local)
        if len(part):
            moved += _take_view(
                run_id, attempt, earliest_per_lane(part), "local" if local else "reduced", seen
            )
    return moved


def _take_view(run_id: int, attempt: int, part: BadCells, view: str, seen: Seen) -> int:
    n = len(part)
    # A reduced value posted without any rank has the lane −1.
    lanes = [str(lane)[:200] for lane in part.lane.tolist()]
    ranks = [-1] * n if part.rank is None else part.rank.tolist()
    columns = (
        [view] * n,
        lanes,
        ranks,
        part.step.tolist(),
        part.micro_batch.tolist(),
        part.phase.tolist(),
        part.skipped.tolist(),
        part.bits.tolist(),
        [SOURCES[source] for source in part.source.tolist()],
        [VALUES[value] for value in part.value.tolist()],
    )
    told = (seen.occurred_at, seen.received_at)
    where = (run_id, attempt, seen.stream)
    with raw_cursor() as cursor:
        cursor.execute(_INSERT, (*where, *told, *columns, *where))
        inserted = cursor.rowcount
        if inserted == n:
            return n
        cursor.execute(_MOVE, (*told, *columns, *columns, *where))
        return inserted + cursor.rowcount
