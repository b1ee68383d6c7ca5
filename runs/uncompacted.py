"""Cells that are stored and not in the blocks yet: the grid's right edge, and whatever came late.

A post waits first for the worker's look and then for compaction. Asked for in one statement, so that
whatever moves meanwhile is met in one place or in the other; twice does no harm.
"""

import hashlib
from dataclasses import dataclass, field
from datetime import datetime

from runs import points
from runs.compaction import Found, cells_of
from runs.models import Event
from runs.points import Points
from runs.rows import raw_cursor

_WAITING = """
SELECT what, ref, received_at, NULL::bytea FROM runs_pending WHERE run_id = %(run)s AND what <> 'finding'
UNION ALL
SELECT CASE WHEN points IS NULL THEN 'frame' ELSE 'points' END, coalesce(frame, id), received_at, points
FROM runs_gridwaiting
WHERE run_id = %(run)s AND attempt = %(attempt)s AND (points IS NOT NULL OR frame IS NOT NULL)
"""
_FRAMES = """
SELECT id, step_first, step_last, coalesce(lane_last, -1) FROM runs_frame
WHERE run_id = %s AND id = ANY(%s) AND received_at BETWEEN %s AND %s AND attempt = %s AND stream = 'rank'
"""
_PLANES = """
SELECT id, state_plane, content_type, CASE WHEN state_plane IS NULL THEN body END FROM runs_frame
WHERE run_id = %s AND id = ANY(%s) AND received_at BETWEEN %s AND %s AND lane_first IS NOT NULL
"""


@dataclass(slots=True)
class Uncompacted:
    """What waits of one attempt: frames by id with their steps, and cells of events.

    `key` changes with everything that waits.
    """

    run_id: int
    key: str = ""
    frames: list[tuple[int, int, int, int]] = field(default_factory=list)  # id, steps, last rank
    received: tuple[datetime, datetime] | None = None
    cells: list[Points] = field(default_factory=list)

    @property
    def step_first(self) -> int | None:
        """The first step of it, None where nothing waits."""
        steps = [frame[1] for frame in self.frames]
        return min(steps + [int(one.steps.min()) for one in self.cells if len(one)], default=None)

    @property
    def step_last(self) -> int | None:
        """The last step of it, None where nothing waits."""
        steps = [frame[2] for frame in self.frames]
        return max(steps + [int(one.steps.max()) for one in self.cells if len(one)], default=None)

    @property
    def rank_last(self) -> int:
        """The highest rank of it, −1 where none is named."""
        ranks = [frame[3] for frame in self.frames]
        return max(ranks + [int(one.ranks.max()) for one in self.cells if len(one)], default=-1)

    def between(self, first: int, last: int) -> list[Found]:
        """Return the cells of steps `first` to `last`, and perhaps of some beside them."""
        found: list[Found] = []
        for one in self.cells:
            inside = (one.steps >= first) & (one.steps <= last)
            if inside.any():
                found.append(
                    Points(one.steps[inside], one.ranks[inside], one.codes[inside], one.clock[inside])
                )
        wanted = [frame[0] for frame in self.frames if frame[1] <= last and frame[2] >= first]
        if wanted and self.received:
            with raw_cursor() as cursor:
                cursor.execute(_PLANES, (self.run_id, wanted, *self.received))
                for row in cursor:
                    cells = cells_of(*row)
                    if cells is not None:
                        found.append(cells)
        return found


def uncompacted(run_id: int, attempt: int) -> Uncompacted:
    """Return what waits of one attempt."""
    waiting = Uncompacted(run_id)
    with raw_cursor() as cursor:
        cursor.execute(_WAITING, {"run": run_id, "attempt": attempt})
        rows = cursor.fetchall()
    if not rows:
        return waiting
    times = [row[2] for row in rows]
    waiting.received = (min(times), max(times))
    refs = sorted({(str(row[0]), int(row[1])) for row in rows})
    waiting.key = hashlib.sha256(repr(refs).encode()).hexdigest()[:16]
    waiting.cells = [Points.unpack(row[3]) for row in rows if row[3] is not None]
    frames = [ref for what, ref in refs if what == "frame"]
    if frames:
        with raw_cursor() as cursor:
            cursor.execute(_FRAMES, (run_id, frames, *waiting.received, attempt))
            waiting.frames = [tuple(map(int, row)) for row in cursor]  # type: ignore[misc]
    events = [ref for what, ref in refs if what == "event"]
    if events:
        stored = Event.objects.filter(
            run_id=run_id, pk__in=events, received_at__range=waiting.received, attempt=attempt
        )
        said = points.of_events(stored).get(attempt)
        if said is not None:
            waiting.cells.append(said)
    return waiting
