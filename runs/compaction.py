"""Compaction: what was posted goes into the blocks of grid and curves, level by level, in a worker.

`leave` runs in the transaction that looked at the posts; the work row then does the rest. Taking a frame in
twice changes nothing, a kill at any moment leaves it waiting, and a late one repairs the blocks it touches
and the coarser ones above them: worst state wins, except that a cell that came is no longer missing.
"""

import logging
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta

import numpy as np
from django.db import transaction
from django.utils import timezone
from numpy.typing import NDArray

from andon.wire import decode_frame
from runs import blocks, curve_taking, curve_values, points, work
from runs.block_store import BlockStore
from runs.blocks import BAND, COLUMNS, MAX_RANKS, Block
from runs.ingest_frames import with_masks
from runs.models import Event, Frame, Grid, GridWaiting, Pending
from runs.planes import unpack
from runs.points import ALL_RANKS, Points
from runs.rows import raw_cursor
from runs.seen import Seen

log = logging.getLogger(__name__)

KIND = "grid"
DELAY_S = 2.0  # what arrives within it is taken in together: a block is rewritten once for all of it
SETTLE_S = 15.0  # for so long a cell that others posted may still be on its way; then it is missing
BATCH = 1_000  # waiting rows of one transaction
OPEN_BLOCKS = 64  # blocks in memory at once, 1 MiB each
MAX_SPREAD = 4_096  # blocks that one frame may touch: a million steps

_FRAMES = """
SELECT id, attempt, step_first, step_last, state_plane, content_type,
       CASE WHEN state_plane IS NULL THEN body END, received_at
FROM runs_frame WHERE run_id = %s AND id = ANY(%s) AND received_at BETWEEN %s AND %s
      AND stream = 'rank' AND lane_first IS NOT NULL
ORDER BY attempt, step_first
"""


def leave(run_id: int, pending: Sequence[Pending], events: Sequence[Event], frames: Sequence[Frame]) -> None:
    """Leave what was looked at for compaction. Runs in the transaction that deletes `pending`."""
    try:
        # A savepoint: the grid must never keep a detector from looking.
        with transaction.atomic():
            _leave(run_id, pending, events, frames)
    except Exception:
        log.exception("run %s: %s posts are not left for the grid", run_id, len(pending))


def _leave(run_id: int, pending: Sequence[Pending], events: Sequence[Event], frames: Sequence[Frame]) -> None:
    # Frames of layers have no cells here, but they may move where an attempt went bad, which tiles show.
    rows = [
        GridWaiting(run_id=run_id, attempt=frame.attempt, frame=frame.pk, received_at=frame.received_at)
        for frame in frames
    ]
    received = max((row.received_at for row in pending), default=timezone.now())
    cells, curves = points.of_events(events), curve_values.of_events(events)
    rows += [
        GridWaiting(
            run_id=run_id,
            attempt=attempt,
            points=cells[attempt].pack() if attempt in cells else None,
            curves=curve_values.pack(curves[attempt]) if attempt in curves else None,
            received_at=received,
        )
        for attempt in sorted(cells.keys() | curves.keys())
    ]
    if rows:
        GridWaiting.objects.bulk_create(rows)
        due = timezone.now() + timedelta(seconds=DELAY_S)
        work.enqueue(kind=KIND, key=str(run_id), payload={"run": run_id}, not_before=due)


@work.handler(KIND)
def compact(payload: work.Payload, lease: work.Lease) -> None:
    """Take in all that waits of one run; ends in `Retry` while cells may still become missing."""
    run_id = int(str(payload["run"]))
    taken = False
    while _round(run_id, lease):
        taken = True
    wait_s = settle(run_id, lease)
    if taken:
        wait_s = DELAY_S
    if wait_s is not None:
        raise work.Retry(wait_s, "looks again for cells that are on their way")


def _round(run_id: int, lease: work.Lease) -> bool:
    with transaction.atomic():
        lease.guard()
        waiting = list(GridWaiting.objects.filter(run_id=run_id).order_by("pk")[:BATCH])
        if not waiting:
            return False
        take_in(run_id, waiting)
        GridWaiting.objects.filter(pk__in=[row.pk for row in waiting]).delete()
    return True


def take_in(run_id: int, waiting: Sequence[GridWaiting]) -> None:
    """Take waiting cells into the blocks of their attempts. Inside a transaction; safe to run twice."""
    takers = {attempt: _Taker(run_id, attempt) for attempt in sorted({row.attempt for row in waiting})}
    for row in waiting:
        if row.points is not None:
            takers[row.attempt].points(Points.unpack(bytes(row.points)))
    frames = [row for row in waiting if row.frame is not None]
    if frames:
        times = [row.received_at for row in frames]
        for attempt, found, step_last, received_at in _read_frames(run_id, frames, min(times), max(times)):
            taker = takers.get(attempt)
            if taker is None:
                continue
            if isinstance(found, Points):
                taker.points(found)
            else:
                taker.plane(*found, step_last=step_last, received_ms=_ms(received_at))
    for taker in takers.values():
        taker.finish()
    _draw(run_id, waiting)


def _draw(run_id: int, waiting: Sequence[GridWaiting]) -> None:
    try:
        # A savepoint: what a curve stumbles over must not keep the cells out of the grid.
        with transaction.atomic():
            curve_taking.take_in(run_id, waiting)
    except Exception:
        log.exception("run %s: %s posts are not in its curves", run_id, len(waiting))


Found = tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.uint8]] | Points


def _read_frames(
    run_id: int, waiting: Sequence[GridWaiting], first: datetime, last: datetime
) -> Iterator[tuple[int, Found, int, datetime]]:
    """Yield the frames that are still stored, by step: attempt, cells, last step, received."""
    with raw_cursor() as cursor:
        cursor.execute(_FRAMES, (run_id, [row.frame for row in waiting], first, last))
        for pk, attempt, _, step_last, plane, content_type, body, received_at in cursor:
            found = cells_of(pk, plane, content_type, body)
            if found is not None:
                yield attempt, found, step_last, received_at


def cells_of(pk: int, plane: bytes | None, content_type: str, body: bytes | None) -> Found | None:
    """Return the cells of a stored frame, from its body where it has no plane; None where it has none."""
    try:
        if plane is not None:
            return unpack(plane)
        return None if body is None else points.of_frame(with_masks(decode_frame(body, content_type)))
    except Exception:
        # One frame that cannot be read must not keep the others out of the grid.
        log.exception("frame %s: its cells cannot be read and are not drawn", pk)
        return None


class _Taker:
    """Takes cells of one attempt in: collects them block by block and writes a block with all above it."""

    def __init__(self, run_id: int, attempt: int) -> None:
        self.store = BlockStore(run_id, attempt)
        # The row is this attempt's lock: the lease of the work row keeps others away, a test may not.
        self.grid, _ = Grid.objects.select_for_update(no_key=True).get_or_create(
            run_id=run_id, attempt=attempt, defaults={"step_first": blocks.NEVER, "step_last": -1}
        )
        self.seen = Seen(bytes(self.grid.seen))
        self.before = self.seen.first.copy()
        self.posted: dict[tuple[int, int], Block] = {}

    def plane(
        self,
        steps: NDArray[np.int64],
        lanes: NDArray[np.int32],
        codes: NDArray[np.uint8],
        *,
        step_last: int,
        received_ms: int,
    ) -> None:
        """Collect codes uint8[steps, lanes], both axes ascending."""
        known = int(np.searchsorted(lanes, 0)), int(np.searchsorted(lanes, MAX_RANKS))
        lanes, codes = lanes[slice(*known)], codes[:, slice(*known)]
        if not len(lanes) or not len(steps):
            return
        self._note(steps, lanes.astype(np.int64), codes)
        numbers = steps // COLUMNS
        for number in np.unique(numbers)[:MAX_SPREAD].tolist():
            rows = slice(*np.searchsorted(numbers, [number, number + 1]).tolist())
            columns = steps[rows] - number * COLUMNS
            for band in np.unique(lanes // BAND).tolist():
                of_band = slice(*np.searchsorted(lanes, [band * BAND, (band + 1) * BAND]).tolist())
                block = self._open(number, band, int(lanes[of_band][-1]) - band * BAND + 1)
                _worst(block.cells, columns, lanes[of_band] - band * BAND, codes[rows, of_band])
        last = self._open(step_last // COLUMNS, 0, 1)
        column = step_last % COLUMNS
        if last.clock[column] == 0:
            last.clock[column] = received_ms  # a frame says when its last step was there

    def points(self, found: Points) -> None:
        """Collect single cells."""
        inside = (found.ranks < MAX_RANKS) & (found.steps >= 0)
        steps, ranks, codes, clock = (
            column[inside] for column in (found.steps, found.ranks, found.codes, found.clock)
        )
        if not len(steps):
            return
        self.grid.step_first = min(self.grid.step_first, int(steps.min()))
        self.grid.step_last = max(self.grid.step_last, int(steps.max()))
        of_ranks = ranks != ALL_RANKS
        self.seen.take(ranks[of_ranks].astype(np.int64), steps[of_ranks], steps[of_ranks])
        places = np.stack([steps // COLUMNS, np.maximum(ranks, 0) // BAND], axis=1)
        kinds, which = np.unique(places, axis=0, return_inverse=True)
        for index, (number, band) in enumerate(kinds[: MAX_SPREAD * 4].tolist()):
            mine = which.reshape(-1) == index
            column, rank = steps[mine] % COLUMNS, ranks[mine]
            block = self._open(number, band, int(np.maximum(rank, 0).max()) - band * BAND + 1)
            single = rank != ALL_RANKS
            at = (column[single], rank[single] - band * BAND)
            np.maximum.at(block.cells, at, codes[mine][single])
            np.maximum.at(block.shared, column[~single], codes[mine][~single])
            times = np.where(clock[mine] == 0, blocks.NEVER, clock[mine])
            first = np.full(COLUMNS, blocks.NEVER, np.int64)
            np.minimum.at(first, column, times)
            block.clock = blocks.earliest(block.clock, np.where(first == blocks.NEVER, 0, first))

    def finish(self) -> None:
        """Write what is left, and the row of the attempt."""
        self._flush()
        self._repair()
        grid, now = self.grid, timezone.now()
        if grid.newest_at is not None and (now - grid.newest_at).total_seconds() >= SETTLE_S:
            first, grid.settled, grid.newest_at = grid.settled + 1, grid.newest, None
            self._mark(first, grid.settled)
        if grid.newest_at is None and grid.step_last > grid.settled:
            grid.newest, grid.newest_at = grid.step_last, now
        grid.step_first = min(grid.step_first, max(grid.step_last, 0))
        grid.seen, grid.ranks = self.seen.stored(), len(self.seen.first)
        grid.version += 1
        grid.save()

    def _repair(self) -> None:
        """Mark what is missing after a first post of a rank that came late, or was earlier than was known."""
        known = np.full(len(self.seen.first), blocks.NEVER, np.int64)
        known[: len(self.before)] = self.before
        moved = (self.seen.first < known) & (self.seen.first <= self.grid.settled)
        if moved.any():
            last = min(int(known[moved].max()), self.grid.settled)
            self._mark(int(self.seen.first[moved].min()), last)

    def _mark(self, first: int, last: int) -> None:
        numbers = {number for number, _ in self.store.between(first // COLUMNS, last // COLUMNS)}
        for number in sorted(numbers):
            self._mark_block(number)
            self.store.flush()

    def _mark_block(self, number: int) -> None:
        """Mark what is missing in all bands of a block: of a step that most ranks of the attempt posted."""
        steps = np.arange(number * COLUMNS, (number + 1) * COLUMNS)
        first = self.seen.first
        bands = {band: self.store.get(0, number, band) for band in range(-(-len(first) // BAND))}
        posted = np.sum([block.posted() for block in bands.values()], axis=0)
        joined = np.searchsorted(np.sort(first), steps, side="right")
        complete = (steps <= self.grid.settled) & (posted > 0) & (2 * posted >= joined)
        for band, block in bands.items():
            if block.mark_missing(steps, first[band * BAND : (band + 1) * BAND], complete):
                self.store.changed(number, band)

    def _note(self, steps: NDArray[np.int64], lanes: NDArray[np.int64], codes: NDArray[np.uint8]) -> None:
        said = codes > 0
        if said.all():
            self.seen.take(lanes, np.full(len(lanes), steps[0]), np.full(len(lanes), steps[-1]))
        else:
            some = said.any(axis=0)
            first = steps[said.argmax(axis=0)[some]]
            last = steps[len(steps) - 1 - said[::-1].argmax(axis=0)[some]]
            self.seen.take(lanes[some], first, last)
        self.grid.step_first = min(self.grid.step_first, int(steps[0]))
        self.grid.step_last = max(self.grid.step_last, int(steps[-1]))

    def _open(self, number: int, band: int, ranks: int) -> Block:
        block = self.posted.get((number, band))
        if block is None:
            if len(self.posted) >= OPEN_BLOCKS:
                self._flush()
            block = self.posted[number, band] = Block.empty(ranks)
        block.widen(ranks)
        return block

    def _flush(self) -> None:
        for (number, band), posted in sorted(self.posted.items()):
            self.store.get(0, number, band).merge(posted)
            self.store.changed(number, band)
        for number in sorted({number for number, _ in self.posted}):
            if number * COLUMNS <= self.grid.settled:
                self._mark_block(number)
        self.posted.clear()
        self.store.flush()


def _worst(
    cells: NDArray[np.uint8], columns: NDArray[np.int64], lanes: NDArray[np.int32], codes: NDArray[np.uint8]
) -> None:
    if lanes[-1] - lanes[0] + 1 == len(lanes):
        of_lanes = slice(int(lanes[0]), int(lanes[-1]) + 1)
        if columns[-1] - columns[0] + 1 == len(columns):
            part = cells[columns[0] : columns[-1] + 1, of_lanes]
            np.maximum(part, codes, out=part)
            return
        cells[columns, of_lanes] = np.maximum(cells[columns, of_lanes], codes)
        return
    at = np.ix_(columns, lanes)
    cells[at] = np.maximum(cells[at], codes)


def settle(run_id: int, lease: work.Lease) -> float | None:
    """Mark what is missing among the newest steps; seconds until they may be marked, or None."""
    wait_s: float | None = None
    now = timezone.now()
    for grid in Grid.objects.filter(run_id=run_id, newest_at__isnull=False).only("attempt", "newest_at"):
        left_s = SETTLE_S - (now - (grid.newest_at or now)).total_seconds()
        if left_s <= 0:
            with transaction.atomic():
                lease.guard()
                _Taker(run_id, grid.attempt).finish()
        else:
            wait_s = min(left_s, wait_s or left_s)
    return wait_s


def _ms(moment: datetime) -> int:
    return int(moment.timestamp() * 1000)
