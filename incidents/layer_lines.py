"""Lines of chosen layers under their heat map, each with its own median and band, and per replica."""

import math

import numpy as np

from andon.policy import LayerRules, Policy, SpikeRules
from incidents.layer_figure import LayerPlane
from incidents.layer_view import LayerView
from runs import baseline, figures, formatting, grid
from runs.curves import Point
from runs.layers import LayerCells
from runs.stack import JSON, Row, Stack

LINE_PX = 52
MAX_OTHERS = 8  # lines of other replicas; of more, the lowest and the highest
SAME = 1e-5  # replicas of equal arithmetic differ by less, in float32 as posted


def line_rows(plane: LayerPlane, view: LayerView, window: grid.Window) -> list[Row]:
    """Return a row for each layer whose line was asked for and posted."""
    rows = []
    for number, name in enumerate(chosen(plane, view)):
        points = _points(plane.cells.of(layer=name), window)
        axis = figures.curve_axis("grad_norm", points, window.step_first, LINE_PX)
        rows.append(Row(f"line{number}", LINE_PX, above=24, axis=axis))
    return rows


def chosen(plane: LayerPlane, view: LayerView) -> list[str]:
    """Return the layers whose lines are drawn."""
    return [name for name in view.lines if name in plane.names]


def add_lines(
    stack: Stack, plane: LayerPlane, view: LayerView, policy: Policy, window: grid.Window, rank: int | None
) -> list[JSON]:
    """Draw each chosen layer with its own band, replica by replica where they differ.

    Args:
        rank: the first-bad rank, whose line is the named one unless another replica was chosen.

    Returns:
        what the page writes beside each line.
    """
    told = []
    for number, name in enumerate(chosen(plane, view)):
        row, mine = stack.rows[f"line{number}"], plane.cells.of(layer=name)
        replicas = mine.replicas
        named = next((one for one in (view.replica, rank) if one in replicas), None)
        differ = len(replicas) > 1 and _differ(mine)
        if differ and named is None:
            named = _worst(mine, replicas)
        shown = mine.of(rank=named) if named is not None else mine
        points = _points(shown, window)
        says = "" if named is None else f"rank {formatting.count(named)}"
        if differ:
            says += f"; {_others(stack, row, mine, [one for one in replicas if one != named], window)}"
        elif len(replicas) > 1:
            says += ("; " if says else "") + f"all {len(replicas):,} replicas agree"
        steps, low, middle, high = _band(points, policy.layer, window)
        if steps:
            stack.band(row, steps, low, high)
            stack.median(row, steps, middle)
        inside = [point for point in points if point["step"] >= window.step_first]
        stack.curve(row, inside, formatting.inert(name, 60), "grad_norm")
        band = f"band is median ± {policy.layer.warn_z:g} σ of its own last {policy.layer.window} steps"
        says += ("; " if says else "") + (band if steps else "no baseline in this view")
        told.append({"row": row.name, "layer": name, "label": formatting.inert(name, 60), "says": says})
    return told


def _differ(cells: LayerCells) -> bool:
    """Return whether replicas posted different values of one step."""
    finite = np.isfinite(cells.value)
    steps, at = np.unique(cells.step, return_inverse=True)
    low, high = np.full(len(steps), np.inf), np.full(len(steps), -np.inf)
    np.minimum.at(low, at[finite], cells.value[finite])
    np.maximum.at(high, at[finite], cells.value[finite])
    some = np.isfinite(high)
    wide = bool((high[some] - low[some] > SAME * np.abs(high[some])).any())
    bad = np.bincount(at[~finite], minlength=len(steps))
    return wide or bool(((bad > 0) & (bad < np.bincount(at, minlength=len(steps)))).any())


def _worst(cells: LayerCells, replicas: list[int]) -> int:
    """Return the replica that went nonfinite first, else the one with the largest value."""
    bad = np.isnan(cells.value)
    if bad.any():
        return int(cells.rank[bad][np.argmin(cells.step[bad])])
    return int(cells.rank[np.argmax(np.where(cells.rank >= 0, cells.value, -np.inf))]) if replicas else 0


def _others(stack: Stack, row: Row, cells: LayerCells, others: list[int], window: grid.Window) -> str:
    """Draw the other replicas thin; of many only their lowest and highest."""
    if len(others) <= MAX_OTHERS:
        for one in others:
            points = _points(cells.of(rank=one), window)
            stack.thin(row, [p["step"] for p in points], [p["value"] for p in points], f"rank {one}")
        return f"{formatting.plural(len(others), 'other replica')} thin"
    inside = np.isin(cells.rank, others) & (cells.step >= window.step_first) & np.isfinite(cells.value)
    steps, at = np.unique(cells.step[inside], return_inverse=True)
    for name, edge, start in (("lowest", np.minimum, np.inf), ("highest", np.maximum, -np.inf)):
        values = np.full(len(steps), start)
        edge.at(values, at, cells.value[inside])
        stack.thin(row, steps.tolist(), values.tolist(), f"{name} of {len(others):,} other replicas")
    return f"lowest and highest of {len(others):,} other replicas thin"


def _points(cells: LayerCells, window: grid.Window) -> list[Point]:
    """Return the worst value of each step as a series, baseline steps included."""
    steps = np.unique(cells.step)
    if not len(steps):
        return []
    _, steps, table = LayerCells(
        [""], np.zeros(len(cells.step), np.int64), cells.rank, cells.step, cells.value
    ).table()
    return [
        {
            "step": step,
            "value": None if math.isnan(value) else value,
            "flag": "nan" if math.isnan(value) else "",
        }
        for step, value in zip(steps.tolist(), table[0].tolist(), strict=True)
    ]


def _band(
    points: list[Point], rules: LayerRules, window: grid.Window
) -> tuple[list[int], list[float], list[float], list[float]]:
    judged = SpikeRules(window=rules.window, warm_up=rules.warm_up, warn_z=rules.warn_z)
    return baseline.band(points, judged, log=True, step_first=window.step_first)
