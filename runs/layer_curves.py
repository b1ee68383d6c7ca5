"""Norms per layer, read from the frames of a window."""

import math

import numpy as np
from numpy.typing import NDArray

from andon.wire import decode_frame
from runs.ingest_frames import with_masks
from runs.models import Frame, Run

MAX_FRAMES = 400  # layer frames read for one picture


def layer_series(
    run: Run, attempt: int, metric: str, step_first: int, step_last: int
) -> tuple[list[str], NDArray[np.int64], NDArray[np.float64]]:
    """Return layer names, steps and values float64[layers, steps] (NaN = nonfinite or not posted).

    Where several ranks reported a layer the largest value stands, and a nonfinite one above all.
    """
    frames = Frame.objects.filter(
        run_id=run.pk, attempt=attempt, stream="layer", step_first__lte=step_last, step_last__gte=step_first
    ).order_by("step_first", "pk")
    ids = list(frames.values_list("pk", "received_at", "bad_cells"))
    if len(ids) > MAX_FRAMES:
        stride = -(-len(ids) // MAX_FRAMES)
        ids = [one for i, one in enumerate(ids) if i % stride == 0 or one[2]][: 2 * MAX_FRAMES]
    names: dict[str, int] = {}
    cells: dict[tuple[int, int], float] = {}
    times = [received_at for _, received_at, _ in ids]
    wanted = (
        frames.filter(pk__in=[pk for pk, _, _ in ids], received_at__range=(min(times), max(times)))
        if ids
        else Frame.objects.none()
    )
    for body, content_type in wanted.values_list("body", "content_type"):
        frame = with_masks(decode_frame(bytes(body), content_type))
        column = frame.metrics.get(metric)
        if column is None:
            continue
        values = np.ma.getdata(column).astype(np.float64)
        known = ~np.ma.getmaskarray(column) & (frame.step >= step_first) & (frame.step <= step_last)
        lanes = frame.lane if isinstance(frame.lane, list) else [str(lane) for lane in frame.lane.tolist()]
        for i in np.flatnonzero(known).tolist():
            at = (names.setdefault(lanes[i], len(names)), int(frame.step[i]))
            value = float(values[i]) if np.isfinite(values[i]) else np.nan
            before = cells.get(at)
            if before is None or (not math.isnan(before) and not value <= before):
                cells[at] = value
    steps = np.unique(np.array([step for _, step in cells], dtype=np.int64))
    table = np.full((len(names), len(steps)), np.nan)
    for (layer, step), value in cells.items():
        table[layer, np.searchsorted(steps, step)] = value
    return list(names), steps, table
