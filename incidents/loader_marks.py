"""Where a run's loader stood, as its events tell.

Trainers report a loader position at most steps. The database gives only those reports at which the line
bends, and both sides of an update that was not applied: a million steps of one batch size are two marks.
"""

import numpy as np

from andon.seen import Mark
from andon.wire import decode_frame
from runs.ingest_frames import with_masks
from runs.models import Frame, Run
from runs.rows import raw_cursor

_FRAMES = 400  # newest rank frames that tell of a skipped update and are opened
_DROPPED_BIT = 64
_LARGEST = 2**63

# Ranks of one step report the same position; a straggler's smaller one is its local view. Under an action
# other than a skip `loader_after` is where somebody *will* go, so it is not read.
_MARKS = """
WITH told AS (
    SELECT attempt, step, type,
           data ->> 'skipped' = 'true' OR type = 'skip' OR data ->> 'action' = 'skip'
           OR CASE WHEN jsonb_typeof(data -> 'nonfinite') = 'number'
                   THEN (data ->> 'nonfinite')::numeric::bigint & 64 <> 0 END AS dropped,
           CASE WHEN type <> 'action' OR data ->> 'action' = 'skip' THEN coalesce(
               data -> 'loader_position', data -> 'position', data -> 'loader_after', data -> 'next_sample',
               data -> 'positions' -> 'loader_position') END AS position,
           coalesce(data -> 'consumed_samples', data -> 'positions' -> 'consumed_samples') AS consumed
    FROM runs_event
    WHERE run_id = %(run)s AND step IS NOT NULL
          AND type IN ('step', 'loader.position', 'batch.seen', 'skip', 'action', 'checkpoint.committed')
), said AS (
    SELECT attempt, step, bool_or(coalesce(dropped, false)) OR (attempt, step) IN (
               SELECT * FROM unnest(%(attempts)s::int[], %(steps)s::bigint[])) AS dropped,
           max(CASE WHEN jsonb_typeof(position) = 'number' THEN trunc(position::numeric) END) AS position,
           max(CASE WHEN jsonb_typeof(consumed) = 'number' THEN trunc(consumed::numeric) END) AS consumed
    FROM told GROUP BY attempt, step
), line AS (
    SELECT attempt, step, dropped, position, consumed,
           step - lag(step) OVER w AS step_in, position - lag(position) OVER w AS position_in,
           consumed - lag(consumed) OVER w AS consumed_in,
           lead(step) OVER w - step AS step_out, lead(position) OVER w - position AS position_out,
           lead(consumed) OVER w - consumed AS consumed_out, lead(dropped) OVER w AS next_dropped
    FROM said WHERE position IS NOT NULL OR dropped WINDOW w AS (PARTITION BY attempt ORDER BY step)
)
SELECT attempt, step, dropped, position, consumed FROM line
WHERE dropped OR next_dropped OR step_in IS NULL OR step_out IS NULL
      OR position_in * step_out IS DISTINCT FROM position_out * step_in
      OR consumed_in * step_out IS DISTINCT FROM consumed_out * step_in
ORDER BY attempt, step
"""


def of_run(run: Run) -> tuple[dict[int, list[Mark]], dict[int, set[int]]]:
    """Return marks, and steps whose update was not applied, by attempt."""
    by_frames = _dropped_in_frames(run)
    marks: dict[int, list[Mark]] = {}
    dropped: dict[int, set[int]] = {}
    for attempt, step in by_frames:
        dropped.setdefault(attempt, set()).add(step)
    with raw_cursor() as cursor:
        cursor.execute(
            _MARKS,
            {
                "run": run.pk,
                "attempts": [attempt for attempt, _ in by_frames],
                "steps": [step for _, step in by_frames],
            },
        )
        for attempt, step, is_dropped, position, consumed in cursor.fetchall():
            if is_dropped:
                dropped.setdefault(attempt, set()).add(step)
            if position is not None and 0 <= position < _LARGEST:
                known = None if consumed is None else int(consumed)
                marks.setdefault(attempt, []).append(Mark(int(step), int(position), known))
    return marks, dropped


def _dropped_in_frames(run: Run) -> list[tuple[int, int]]:
    """Return (attempt, step) of updates that only a frame of ranks says were not applied."""
    found: set[tuple[int, int]] = set()
    frames = Frame.objects.filter(run_id=run.pk, stream="rank", skips=True).order_by("-step_first", "-pk")
    for attempt, body, kind in frames.values_list("attempt", "body", "content_type")[:_FRAMES]:
        frame = with_masks(decode_frame(bytes(body), kind))
        for name, bit in (("skipped", 1), ("nonfinite", _DROPPED_BIT)):
            column = frame.metrics.get(name)
            if column is None:
                continue
            bits = np.nan_to_num(np.ma.filled(np.ma.masked_invalid(column), 0)).astype(np.int64)
            found |= {(attempt, int(step)) for step in frame.step[(bits & bit) != 0].tolist()}
    return sorted(found)
