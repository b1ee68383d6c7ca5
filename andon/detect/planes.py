"""State planes: one small code per cell, for the first-failure grid.

Codes grow with how bad a state is, so that "worst wins" is a maximum.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from andon.detect.frame_health import JUDGED, RowHealth, row_health
from andon.wire import Frame

OUTSIDE, HEALTHY, HELD, MISSING, SPREAD, STRAGGLER, SPIKE, NO_PROGRESS, CHECKSUM, NONFINITE = range(10)


def state_plane(
    frame: Frame, health: RowHealth | None = None, *, poisoned_after: int | None = None
) -> NDArray[np.uint8]:
    """Return the state code of every cell of a frame.

    Args:
        frame: the frame.
        health: `row_health(frame)` when already known.
        poisoned_after: first step whose nonfinite update was applied. Later steps ran on nonfinite
            weights, so their cells followed it and are drawn as spread.

    Returns:
        uint8[steps × lanes] over `axes(frame)`: 9 nonfinite (local), 4 spread, 1 healthy, 0 outside
        (nothing posted, or not applicable: nothing that is judged was measured);
        where several rows fall on one cell (micro-batches), the worst.
    """
    health = row_health(frame) if health is None else health
    where = health.axes
    shape = (len(where.steps), len(where.lanes))
    if health.healthy:
        code = np.full(len(where.row), HEALTHY, dtype=np.uint8)
    else:
        origin = health.local
        if poisoned_after is not None:
            origin = origin & (where.steps[where.row] <= poisoned_after)
        code = np.where(origin, NONFINITE, np.where(health.bad, SPREAD, HEALTHY)).astype(np.uint8)
    unmeasured = _unmeasured(frame)
    if unmeasured is not None:
        code[unmeasured & (code == HEALTHY)] = OUTSIDE
    if where.regular:
        return code.reshape(shape)
    plane = np.zeros(shape, dtype=np.uint8)
    if health.healthy and unmeasured is None:
        plane[where.row, where.column] = HEALTHY
    else:
        np.maximum.at(plane, (where.row, where.column), code)
    return plane


def _unmeasured(frame: Frame) -> NDArray[np.bool_] | None:
    """Return the rows in which nothing that is judged was measured: a pipeline stage without a loss.

    None where every row measured something; a bit set always says something.
    """
    judged = [name for name in JUDGED[frame.stream] if name in frame.metrics]
    if not judged or "nonfinite" in frame.metrics or not all(name in frame.missing for name in judged):
        return None
    missing: NDArray[np.bool_] = np.logical_and.reduce([frame.missing[name] for name in judged])
    return missing if missing.any() else None


def combine_planes(
    parts: Iterable[tuple[NDArray[np.int64], NDArray[Any], NDArray[np.uint8]]],
) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[np.uint8]]:
    """Lay planes (steps, lanes, codes) over each other; where two meet, the worst state wins.

    Returns:
        Ascending steps, ascending lanes (str lanes in order of first appearance), uint8[steps × lanes]
        with 0 where no part says anything.
    """
    listed = list(parts)
    if not listed:
        return np.empty(0, np.int64), np.empty(0, np.int32), np.zeros((0, 0), np.uint8)
    steps = np.unique(np.concatenate([part[0] for part in listed]))
    if all(part[1].dtype.kind == "i" for part in listed):
        lanes: NDArray[Any] = np.unique(np.concatenate([part[1] for part in listed]))
        columns = [np.searchsorted(lanes, part[1]) for part in listed]
    else:
        index: dict[Any, int] = {}
        columns = [
            np.array([index.setdefault(lane, len(index)) for lane in part[1].tolist()], dtype=np.intp)
            for part in listed
        ]
        lanes = np.array(list(index), dtype=object)
    plane = np.zeros((len(steps), len(lanes)), dtype=np.uint8)
    for (part_steps, _, codes), column in zip(listed, columns, strict=True):
        at = np.ix_(np.searchsorted(steps, part_steps), column)
        plane[at] = np.maximum(plane[at], codes)
    return steps, lanes, plane


def coarsen(plane: NDArray[np.uint8], step_factor: int, lane_factor: int = 1) -> NDArray[np.uint8]:
    """Return the plane with blocks of cells drawn as one, the worst of each; short edges count as full.

    Raises:
        ValueError: a factor is below 1.
    """
    if step_factor < 1 or lane_factor < 1:
        raise ValueError(f"factors must be at least 1, got {step_factor} and {lane_factor}")
    if not plane.size:
        return plane
    by_step = np.maximum.reduceat(plane, np.arange(0, plane.shape[0], step_factor), axis=0)
    worst: NDArray[np.uint8] = np.maximum.reduceat(by_step, np.arange(0, plane.shape[1], lane_factor), axis=1)
    return worst
