"""The layers of an incident as a heat map of layer × step, the first nonfinite one marked."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from andon.detect.cells import depth_key
from andon.policy import LayerRules, Policy
from incidents.layer_view import PLAIN, WORDS, LayerView
from incidents.models import Incident
from runs import baseline, formatting, grid, grid_png
from runs.grid_clock import Clock
from runs.layers import LayerCells, has_layers, layer_cells
from runs.models import FirstBad
from runs.stack import JSON, Stack

LAYERS_PX = 100
RAMP = (1.5, 3.0, 4.5, 6.0, 12.0)
MAX_LAYER_STEPS = 4_000
MAX_RINGS = 8
MAX_NAMES = 2_000  # that a list to choose from holds


@dataclass(frozen=True, slots=True)
class LayerPlane:
    """The heat map: layers in forward order and palette codes uint8[layers, steps] of the window.

    Attributes:
        cells: every replica's value, with a baseline's worth of steps before the window.
        words: what each of the six steps of the ramp begins with, the lowest first.
        says: what the picture cannot show, "" for nothing.
        began: of each layer that went nonfinite, its first such step.
    """

    names: list[str]
    codes: NDArray[np.uint8]
    cells: LayerCells
    words: list[str]
    says: str
    began: dict[str, int]


def layer_plane(
    incident: Incident, window: grid.Window, policy: Policy, view: LayerView = PLAIN
) -> LayerPlane | None:
    """Return the heat map of a window; None without layers, or where there are too many steps.

    Steps between two posted ones show the earlier one: layers are often posted less often than steps.
    """
    run, attempt = incident.run, incident.attempt
    if window.steps > MAX_LAYER_STEPS or not has_layers(run, attempt):
        return None
    first = max(0, window.step_first - policy.layer.window)
    cells = layer_cells(run, attempt, view.metric, first, window.step_last)
    if not len(cells.step) and view.metric != "grad_norm":
        # The row stays, so that another number can be chosen.
        cells = layer_cells(run, attempt, "grad_norm", first, window.step_last)
        cells = LayerCells(cells.names, cells.layer, cells.rank, cells.step, np.full(len(cells.step), np.inf))
    if not len(cells.step):
        return None
    shown = cells.of(rank=view.replica)
    names, steps, values = shown.table()
    order = sorted(range(len(names)), key=lambda index: depth_key(_number(names[index])))
    names, values, bad = [names[index] for index in order], values[order], shown.nonfinite()[order]
    if not len(steps):
        steps, values = window_steps(window), np.full((len(names), window.steps), np.nan)
        bad = np.zeros(values.shape, np.bool_)
    codes, words, says = _codes(values, steps >= window.step_first, policy.layer, view)
    if not np.isfinite(cells.value).any() and not np.isnan(cells.value).any():
        says = f"{WORDS[view.shown]}: not measured in this window"
    began = layer_began(run.pk, attempt)
    firsts = first_layers(incident, began)
    codes[bad] = grid_png.SPREAD
    for name in firsts:
        if name in names:
            index = names.index(name)
            codes[index, bad[index] & (steps == began.get(name))] = grid_png.NONFINITE
    return LayerPlane(names, _per_step(codes, steps, window), cells, words, says, began)


def window_steps(window: grid.Window) -> NDArray[np.int64]:
    """Return every step of a window."""
    return np.arange(window.step_first, window.step_last + 1)


def _codes(
    values: NDArray[np.float64], seen: NDArray[np.bool_], rules: LayerRules, view: LayerView
) -> tuple[NDArray[np.uint8], list[str], str]:
    """Return palette codes, the words of the ramp, and what is to be said."""
    codes = np.full(values.shape, grid_png.OUTSIDE, dtype=np.uint8)
    codes[np.isfinite(values)] = grid_png.HEALTHY
    if view.shown == "z":
        level, words, says = (
            baseline.layer_z(values, rules),
            ["below 1.5", "1.5", "3", "4.5", "6 warn", "12 halt"],
            "",
        )
        edges = np.asarray(RAMP)
    else:
        usable = np.isfinite(values) & (values > 0)
        level = np.full(values.shape, np.nan)
        level[usable] = np.log10(values[usable])
        edges, words = _even_ramp(level[:, seen])
        zero = int(((values == 0) & seen).any(axis=1).sum())
        says = (
            f"{formatting.plural(zero, 'layer')} at 0: not updated" if zero and view.shown == "ratio" else ""
        )
    known = np.isfinite(level)
    ramp = np.zeros(values.shape, dtype=np.uint8)
    ramp[known] = np.digitize(level[known], edges)
    codes[ramp > 0] = (grid_png.RAMP1 - 1 + ramp[ramp > 0]).astype(np.uint8)
    return codes, words, says


def _even_ramp(level: NDArray[np.float64]) -> tuple[NDArray[np.float64], list[str]]:
    """Return five edges that part log10 values into six equal steps, and the value at each step's start."""
    known = level[np.isfinite(level)]
    if not len(known):
        return np.full(5, np.inf), ["none"] + [""] * 5
    low, high = float(known.min()), float(known.max())
    high = max(high, low + 0.3)  # a factor of two: less is noise, and takes no colour of its own
    starts = np.linspace(low, high, 7)[:6]
    return starts[1:], [formatting.significant(10.0**at, 2) for at in starts.tolist()]


def _per_step(codes: NDArray[np.uint8], steps: NDArray[np.int64], window: grid.Window) -> NDArray[np.uint8]:
    wanted = window_steps(window)
    newest = np.searchsorted(steps, wanted, side="right") - 1
    gap = int(np.median(np.diff(steps))) if len(steps) > 1 else 1
    held = (newest >= 0) & (wanted - steps[np.maximum(newest, 0)] < max(1, gap))
    plane = codes[:, np.maximum(newest, 0)]
    plane[:, ~held] = grid_png.OUTSIDE
    return plane


def layer_began(run_id: int, attempt: int) -> dict[str, int]:
    """Return layer name → first step on which it was nonfinite."""
    began: dict[str, int] = {}
    for lane, step in FirstBad.objects.filter(run_id=run_id, attempt=attempt, stream="layer").values_list(
        "lane", "step"
    ):
        began[lane] = min(step, began.get(lane, step))
    return began


def first_layers(incident: Incident, began: dict[str, int]) -> list[str]:
    """Return the first nonfinite layer; where the first-bad cell names none, all of the earliest step."""
    origin = incident.first_bad.get("layer")
    if origin is not None:
        return [str(origin)]
    earliest = min(began.values(), default=None)
    return [name for name, step in began.items() if step == earliest]


def layer_tile(
    plane: NDArray[np.uint8], width: int, height: int, clock: Clock | None = None
) -> NDArray[np.uint8]:
    """Return the layers enlarged to a tile; more layers or steps than pixels keep the worst code.

    Codes of the ramp lie above the states, so a nonfinite cell is lifted over them while they shrink.
    """
    layers, steps = plane.shape
    order = np.arange(18, dtype=np.uint8)
    order[[grid_png.SPREAD, grid_png.NONFINITE]] = [30, 31]
    shown = order[plane]
    if clock is not None:
        shown = clock.of_pixels(clock.of_steps(shown), width)
    elif steps > width:
        edges = np.arange(width) * steps // width
        shown = np.maximum.reduceat(shown, edges, axis=1)
    if layers > height:
        edges = np.arange(height) * layers // height
        shown = np.maximum.reduceat(shown, edges, axis=0)
    shown = np.where(shown == 30, grid_png.SPREAD, np.where(shown == 31, grid_png.NONFINITE, shown))
    rows, columns = shown.shape
    return grid_png.paint(
        shown.astype(np.uint8), grid_png.evenly(columns, width), grid_png.evenly(rows, height)
    )


# In the stack


def layer_axis(names: list[str], firsts: list[str]) -> JSON:
    """Return the axis of the heat map: its ends, its middle, and the first nonfinite layer in bold."""
    last = len(names) - 1
    places = {0, last // 2, last} if last > 2 else set(range(last + 1))
    origin = next((name for name in firsts if name in names), None)
    if origin is not None:
        at = names.index(origin)
        places = {place for place in places if abs(place - at) * LAYERS_PX > 14 * len(names)} | {at}
    texts = []
    for place in sorted(places):
        text = formatting.figure_text(_layer_label(names[place]))
        texts.append(f"<b>{text}</b>" if names[place] == origin else text)
    return {
        "range": [last + 0.5, -0.5],
        "tickmode": "array",
        "tickvals": sorted(places),
        "ticktext": texts,
        "ticks": "",
        "showgrid": False,
        "scaleanchor": False,
        "constrain": "range",
        "fixedrange": True,
    }


def mark_first(stack: Stack, names: list[str], firsts: list[str], step: int | None) -> None:
    """Ring the first nonfinite layer; a bracket where several went bad in the same step."""
    places = sorted(names.index(name) for name in firsts if name in names)
    if not places or step is None or not stack.step_first <= step <= stack.step_last:
        return
    row = stack.rows["layers"]
    if len(places) > MAX_RINGS:
        stack.bracket(row, step, places[0], places[-1])
        text = f"{len(places):,} layers first, in one step"
    else:
        for place in places:
            stack.ring(row, step, place, radius=6)
        text = f"{formatting.figure_text(names[places[0]])} first"
        if len(places) > 1:
            text = f"{len(places)} layers first, in one step"
    margin = len(names) * 0.11
    y = min(max(places[0], margin - 0.5), len(names) - 0.5 - margin)
    right = step < stack.step_first + (stack.step_last - stack.step_first) * 0.25
    stack.label(row, step, y, text, right=right)


def first_step(plane: LayerPlane, firsts: list[str], step: int | None) -> int | None:
    """Return the step at which the first layers went nonfinite: the first-bad step, where it is known."""
    return step if step is not None else min((plane.began[name] for name in firsts), default=None)


def document(plane: LayerPlane, view: LayerView, lines: list[JSON]) -> JSON:
    """Return what the page writes around the heat map: its ramp, its choices, the captions of lines."""
    return {
        "shown": view.shown,
        "title": WORDS[view.shown],
        "words": plane.words,
        "says": plane.says,
        "names": plane.names[:MAX_NAMES],
        "replicas": plane.cells.replicas[:MAX_NAMES],
        "replica": view.replica,
        "lines": lines,
    }


def _number(name: str) -> int | str:
    return int(name) if name.isdecimal() and len(name) < 10 else name


def _layer_label(name: str) -> str:
    """Return what fits the gutter: the block's number where the name has one."""
    depth, _ = depth_key(_number(name))
    digits = [part for part in name.replace("_", ".").split(".") if part.isdecimal()]
    if digits and depth not in (float("inf"), float("-inf")):
        return f"layer {digits[0]}"
    return name if len(name) <= 10 else f"{name[:9]}…"
