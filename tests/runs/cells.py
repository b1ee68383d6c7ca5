"""Cells stored by the store's own function, without a trainer that would have to compute them."""

import uuid
from datetime import datetime
from typing import Any

import numpy as np
from django.utils import timezone
from numpy.typing import NDArray
from psycopg.types.json import Jsonb

from andon.detect.planes import NONFINITE, SPREAD
from runs import compaction, minima, planes, work
from runs.models import Event, Frame, Pending, Work
from runs.rows import raw_cursor

_STORE = f"SELECT andon_store_frame({', '.join(['%s'] * 18)}, %b, %b)"


def store_plane(
    run_id: int,
    steps: NDArray[np.int64],
    ranks: NDArray[np.int32],
    codes: NDArray[np.uint8],
    *,
    attempt: int = 1,
    received_at: datetime | None = None,
) -> None:
    """Store a frame of which only the summary and the state plane are kept, with its first-bad rows."""
    received_at = received_at or timezone.now()
    bad = int(((codes == NONFINITE) | (codes == SPREAD)).sum())
    row: tuple[Any, ...] = (
        *(run_id, str(uuid.uuid4()), received_at, attempt, attempt, "rank", "", ""),
        *(int(steps[0]), int(steps[-1]), int(ranks[0]), int(ranks[-1]), None),
        *(codes.size, Jsonb([]), bad, False, False),
        *(planes.pack(steps, ranks.astype(np.int32), codes), b""),
    )
    with raw_cursor() as cursor:
        cursor.execute(_STORE, row)
    if bad:
        _store_first_bad(run_id, attempt, steps, ranks, codes, received_at)


def _store_first_bad(
    run_id: int,
    attempt: int,
    steps: NDArray[np.int64],
    ranks: NDArray[np.int32],
    codes: NDArray[np.uint8],
    received_at: datetime,
) -> None:
    from andon.detect.cells import cells

    at, lane = np.nonzero(codes >= SPREAD)
    found = cells(
        step=steps[at],
        lane=ranks[lane].astype(np.int32),
        phase=np.full(len(at), 1),
        local=codes[at, lane] == NONFINITE,
    )
    minima.take(
        run_id=run_id, attempt=attempt, stream="rank", received_at=received_at, seen=[(found, received_at)]
    )


def hand_over(run_id: int) -> None:
    """Leave all that is pending for compaction, as the worker's look does."""
    pending = list(Pending.objects.filter(run_id=run_id))
    of = {what: [row.ref for row in pending if row.what == what] for what in ("event", "frame")}
    events = list(Event.objects.filter(run_id=run_id, pk__in=of["event"]))
    frames = list(Frame.objects.filter(run_id=run_id, pk__in=of["frame"]).defer("body", "state_plane"))
    compaction.leave(run_id, pending, events, frames)
    Pending.objects.filter(run_id=run_id).delete()


def compact(run_id: int) -> None:
    """Let the worker compact what waits, now rather than in two seconds."""
    hand_over(run_id)
    for row in Work.objects.filter(kind=compaction.KIND, key=str(run_id), state=Work.State.DUE):
        Work.objects.filter(pk=row.pk).update(not_before=timezone.now())
        assert work.run_one(row.pk)
