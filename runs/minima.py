"""First-bad rows: the earliest bad cell of every lane, moved only to an earlier cell.

A dead run of 16,384 ranks makes 11.8 million bad cells an hour, and none of them may cost a row or
an update: one statement (`runs.sql_ingest`) takes all lanes of a post and touches only rows that it
truly moves.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from andon.detect.cells import NO_MICRO_BATCH, SOURCES, VALUES, BadCells, earliest_per_lane
from andon.detect.nonfinite import EventCells
from runs.rows import raw_cursor

_TAKE = (
    f"SELECT andon_move_first_bad({', '.join(['%s'] * 14)}, array_fill(%s::timestamptz, ARRAY[%s::integer]))"
)


Columns = list[list[Any]]  # the eleven arrays of `andon_move_first_bad`, one entry per lane
Seen = tuple[BadCells, datetime | None]  # cells of one event or frame, and when it occurred


def take(*, run_id: int, attempt: int, stream: str, received_at: datetime, seen: Sequence[Seen]) -> int:
    """Take in the bad cells of one post; returns how many lanes are newly bad or bad earlier than known.

    The caller's transaction decides whether it counts. Compare-and-set: the outcome does not depend
    on the order in which posts arrive.

    Args:
        stream: rank or layer.
    """
    columns = columns_of(seen)
    if not columns[0]:
        return 0
    with raw_cursor() as cursor:
        cursor.execute(_TAKE, (run_id, attempt, stream, *columns, received_at, len(columns[0])))
        row = cursor.fetchone()
    return int(row[0]) if row else 0


def rows_of_event(cells: EventCells, occurred_at: datetime | None) -> list[dict[str, Any]]:
    """Return the cells of one event as rows of `andon_take_joined`."""
    row = {
        "view": "local" if cells.local else "reduced",
        "rank": -1,
        "step": cells.step,
        "micro_batch": NO_MICRO_BATCH,
        "phase": int(cells.phase),
        "skipped": cells.skipped,
        "bits": cells.bits,
        "series": cells.source,
        "value": cells.value,
        "occurred": occurred_at,
    }
    return [row | {"lane": str(rank)} for rank in cells.ranks]


def columns_of(seen: Sequence[Seen]) -> Columns:
    """Return the earliest cell per lane and view, as columns for the database."""
    columns: Columns = [[] for _ in range(11)]
    for cells, occurred_at in seen:
        # A lane keeps a local and a reduced cell apart: only the local one may name a rank.
        for local in (True, False):
            part = cells if len(cells) == 1 else cells.take(cells.local == local)
            if not len(part) or bool(part.local[0]) != local:
                continue
            if len(part) > 1:
                part = earliest_per_lane(part)
            for column, values in zip(
                columns, _columns(part, "local" if local else "reduced", occurred_at), strict=True
            ):
                column.extend(values)
    return _one_per_lane(columns) if len(seen) > 1 and columns[0] else columns


def _columns(part: BadCells, view: str, occurred_at: datetime | None) -> list[list[Any]]:
    n = len(part)
    return [
        [view] * n,
        # A reduced value posted without any rank has the lane −1.
        [str(lane)[:200] for lane in part.lane.tolist()],
        [-1] * n if part.rank is None else part.rank.tolist(),
        part.step.tolist(),
        part.micro_batch.tolist(),
        part.phase.tolist(),
        part.skipped.tolist(),
        part.bits.tolist(),
        [SOURCES[source] for source in part.source.tolist()],
        [VALUES[value] for value in part.value.tolist()],
        [occurred_at] * n,
    ]


def _one_per_lane(columns: list[list[Any]]) -> list[list[Any]]:
    """Keep the earliest of the cells that several events of one post gave for a lane."""
    kept: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for row in zip(*columns, strict=True):
        known = kept.get(row[:3])
        if known is None or _order(row) < _order(known):
            kept[row[:3]] = row
    return [list(column) for column in zip(*kept.values(), strict=True)]


def _order(row: tuple[Any, ...]) -> tuple[Any, ...]:
    _, _, _, step, micro_batch, phase, skipped = row[:7]
    known = micro_batch >= 0 and phase < 3
    return skipped, step, micro_batch if known else 2**31 - 1, phase
