"""What waits of one run goes into its curves: values of events, and of frames of ranks and of nodes."""

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import datetime

from andon.wire import Frame, decode_frame
from runs import curve_store, curve_values, node_readings
from runs.curve_values import FRAME_METRICS, Said
from runs.models import GridWaiting
from runs.rows import raw_cursor

log = logging.getLogger(__name__)

# A body is read only where it says something that is drawn, and a batch of a thousand never all at once.
_FRAMES = """
SELECT id, attempt, stream, content_type, body, received_at FROM runs_frame
WHERE run_id = %s AND id = ANY(%s) AND received_at BETWEEN %s AND %s AND (stream = 'node' OR (stream = 'rank'
      AND EXISTS (SELECT FROM jsonb_array_elements(metrics) m WHERE m ->> 'name' = ANY(%s))))
ORDER BY attempt, step_first, id
"""
_READ_AT_ONCE = 16


def take_in(run_id: int, waiting: Sequence[GridWaiting]) -> None:
    """Take what waits into the curves of its attempts. Inside the transaction that forgets it."""
    said: dict[int, list[Said]] = defaultdict(list)
    nodes: dict[int, list[tuple[Frame, datetime]]] = defaultdict(list)
    for row in waiting:
        if row.curves is not None:
            said[row.attempt].append(curve_values.unpack(bytes(row.curves)))
    for attempt, frame, received_at in _frames(run_id, [row for row in waiting if row.frame is not None]):
        if frame.stream == "node":
            nodes[attempt].append((frame, received_at))
        else:
            said[attempt].append(curve_values.of_rank_frame(frame))
    for attempt, frames in nodes.items():
        said[attempt].append(node_readings.take(run_id, attempt, frames))
    for attempt in sorted(said):
        curve_store.take(run_id, attempt, curve_values.joined(said[attempt]))


def _frames(run_id: int, waiting: Sequence[GridWaiting]) -> Iterator[tuple[int, Frame, datetime]]:
    for at in range(0, len(waiting), _READ_AT_ONCE):
        part = waiting[at : at + _READ_AT_ONCE]
        times = [row.received_at for row in part]
        ids = [row.frame for row in part]
        with raw_cursor() as cursor:
            cursor.execute(_FRAMES, (run_id, ids, min(times), max(times), list(FRAME_METRICS)))
            rows = cursor.fetchall()
        for pk, attempt, _, content_type, body, received_at in rows:
            try:
                yield int(attempt), decode_frame(bytes(body), content_type), received_at
            except Exception:
                # One frame that cannot be read must not keep the others out of the curves.
                log.exception("frame %s: its values cannot be read and are not drawn", pk)
