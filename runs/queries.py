"""Reads over what trainers posted: first-bad cell, series, grid, events."""

from dataclasses import dataclass
from datetime import datetime
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from andon.detect.cells import FirstBad
from runs.models import Run


class Point(TypedDict):
    """One point of a series: `value` is null where it was nonfinite, and `flag` says which."""

    step: int
    value: float | None
    flag: str


@dataclass(frozen=True, slots=True)
class BadGroup:
    """Bad cells that read as one line: one step, phase and column, folded ranks."""

    step: int
    phase: str
    ranks: str
    series: str
    value: str
    view: str
    received_at: datetime


def first_bad(run: Run, attempt: int) -> FirstBad | None:
    """Return the first-bad cell of an attempt with its ties, None when nothing was bad."""
    raise NotImplementedError


def series(  # noqa: PLR0917
    run: Run, attempt: int, names: list[str], step_first: int, step_last: int, max_points: int
) -> dict[str, list[Point]]:
    """Return reduced series by name, at most `max_points` each (min and max of each bucket kept)."""
    raise NotImplementedError


def grid_states(  # noqa: PLR0917
    run: Run,
    attempt: int,
    step_first: int,
    step_last: int,
    width: int,
    rank_first: int,
    rank_last: int,
    height: int,
) -> NDArray[np.uint8]:
    """Return the worst state code per pixel, uint8[height, width]; codes as in the page's legend."""
    raise NotImplementedError


def bad_cells(run: Run, attempt: int, limit: int = 20) -> list[BadGroup]:
    """Return the first `limit` groups of bad cells as text, earliest first."""
    raise NotImplementedError


def layer_series(
    run: Run, attempt: int, metric: str, step_first: int, step_last: int
) -> tuple[list[str], NDArray[np.int64], NDArray[np.float64]]:
    """Return layer names, steps and values float64[layers, steps] (NaN = nonfinite or not posted)."""
    raise NotImplementedError


def events(
    run: Run, *, attempt: int | None = None, types: list[str] | None = None, limit: int = 100
) -> list[dict[str, object]]:
    """Return the newest events first."""
    raise NotImplementedError
