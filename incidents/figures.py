"""The incident's stack: first-failure grid, layers, gradient norm and loss on one step axis."""

import numpy as np
from django.urls import reverse
from django.utils import timezone
from numpy.typing import NDArray

from andon.detect.cells import depth_key
from andon.policy import Policy
from incidents.models import Incident
from runs import baseline, figures, formatting, grid, grid_png, marks, queries
from runs.grid_clock import Clock
from runs.grid_progress import InProgress
from runs.grid_rows import Rows
from runs.models import FirstBad
from runs.stack import JSON, Row, Stack

LAYERS_PX = 100
CURVE_PX = 52
MAX_RINGS = 8
HELD_WORD_PX = 34  # the word stands in its block, or not at all
RAMP = (1.5, 3.0, 4.5, 6.0, 12.0)
MAX_LAYER_STEPS = 4_000


def first_bad_step(incident: Incident) -> int | None:
    """Return the step of the first-bad cell, None when nothing is known to be bad."""
    step = incident.first_bad.get("step")
    return step if isinstance(step, int) else None


def first_bad_ranks(incident: Incident) -> list[int]:
    """Return the ranks of the first-bad cell; empty when the rank is not known."""
    found = incident.first_bad.get("ranks") or []
    return [rank for rank in found if isinstance(rank, int)]


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


def incident_figure(incident: Incident, view: grid.View, *, policy: Policy, width: int, theme: str) -> JSON:
    """Return the Plotly figure of an incident's window and, in `layout.meta`, what the page needs with it."""
    run, attempt, extent = incident.run, incident.attempt, view.extent
    narrow = width < figures.NARROW_BELOW_PX
    height = figures.grid_height(extent.ranks)
    view = view.over(view.window.snapped(width, height, extent.ranks))
    window = view.window
    step, ranks = first_bad_step(incident), first_bad_ranks(incident)
    rows_bad = [row for rank in ranks if (row := view.rows.row(rank)) is not None]

    layer = layer_plane(incident, window, policy)
    before = max(0, window.step_first - policy.spike.window)
    if window.steps > baseline.MAX_STEPS:
        before = window.step_first
    found = queries.series(run, attempt, ["grad_norm", "loss"], before, window.step_last, figures.MAX_POINTS)

    rows = [
        Row("marks", 17, axis={"range": [0, 1], "visible": False, "fixedrange": True}),
        Row(
            "grid",
            height,
            axis=figures.row_axis(view, height, rows_bad, ranks=extent.ranks, characters=8 if narrow else 10),
        ),
    ]
    if layer is not None:
        names, _ = layer
        rows.append(Row("layers", LAYERS_PX, above=172 if narrow else 78, axis=_layer_axis(names, incident)))
    judged = window.steps <= baseline.MAX_STEPS

    def band(name: str) -> tuple[float, float] | None:
        if not judged:
            return None
        _, below, _, over = figures.curve_band(found.get(name, []), name, policy, window.step_first)
        return (below[-1], over[-1]) if below else None

    for name in ("grad_norm", "loss"):
        above = 24 if len(rows) > 2 else (120 if narrow else 76)
        rows.append(
            Row(
                name,
                CURVE_PX,
                above=above,
                axis=figures.curve_axis(
                    name, found.get(name, []), window.step_first, CURVE_PX, band=band(name)
                ),
            )
        )
    key = ":".join(map(str, (run.pk, attempt, window, view.rows.kind, view.rows.sort, view.by_time)))
    stack = Stack(
        rows,
        step_first=window.step_first,
        step_last=window.step_last,
        key=key,
        clock=view.clock(width),
    )
    captions: dict[str, str] = {}

    stack.image(
        stack.rows["grid"],
        figures.tile_url(
            reverse("incident_grid", args=[incident.pk]),
            window,
            width=width,
            height=height,
            theme=theme,
            version=extent.version,
            rows=view.rows,
            by_time=stack.clock is not None,
        ),
        width=width,
        height=height,
        y_first=window.row_first,
        y_last=window.row_last,
    )
    if layer is not None:
        stack.image(
            stack.rows["layers"],
            figures.tile_url(
                reverse("incident_layers", args=[incident.pk]),
                window,
                width=width,
                height=LAYERS_PX,
                theme=theme,
                version=extent.version,
                rows=view.rows,
                by_time=stack.clock is not None,
            ),
            width=width,
            height=LAYERS_PX,
            y_first=0,
            y_last=len(layer[0]) - 1,
        )
        _layer_marks(stack, incident, layer[0])
    # A second set of step labels under the grid, where the eye is.
    _grid_steps(stack)
    for name, words in (("grad_norm", "Gradient norm"), ("loss", "Loss")):
        banded = figures.add_curve(
            stack, stack.rows[name], found.get(name, []), words=words, form=name, policy=policy
        )
        captions[name] = _curve_caption(name, banded, found.get(name, []))

    if step is not None:
        stack.guide(step)
        _first_bad_marks(stack, step, view, ranks, rows_bad)
    if extent.progress is not None:
        _progress_mark(stack, view, extent.progress)
    if extent.held_after is not None and extent.held_after < window.step_last:
        _held_mark(stack, window, extent.held_after, width)
    at_marks = marks.of_checkpoints(run, [attempt], window.step_first, window.step_last)
    if step is not None:
        at_marks.append((step, formatting.count(step), True))
    stack.marks(stack.rows["marks"], at_marks, width)

    figure = stack.figure()
    figure["layout"].update(_extra_axes(stack))
    meta = figure["layout"]["meta"]
    meta["captions"] = captions
    meta["ranks"] = [window.row_first, window.row_last]
    meta["order"] = {"rows": view.rows.kind, "sort": view.rows.sort, "pieces": view.rows.pieces()}
    meta["extent"] = [extent.step_first, max(extent.step_last, window.step_last)]
    meta["first_bad"] = {"step": step, "ranks": ranks}
    meta["overview"] = figures.tile_url(
        reverse("incident_grid", args=[incident.pk]),
        grid.Window(extent.step_first, max(extent.step_last, window.step_last), 0, extent.ranks - 1),
        width=width,
        height=1,
        theme=theme,
        version=extent.version,
        rows=Rows("rank", "rank", extent.ranks),
    )
    return figure


def _curve_caption(name: str, banded: bool, points: list[queries.Point]) -> str:
    if not points:
        return "not measured in this window"
    band = "band is median ± 6 σ of 200 steps" if banded else "no baseline in this view"
    return f"global, log; {band}" if name == "grad_norm" else f"global; {band}"


def _grid_steps(stack: Stack) -> None:
    row = stack.rows["grid"]
    stack.traces.append(
        {
            "type": "scatter",
            "mode": "markers",
            "x": stack.range,
            "y": [None, None],
            "xaxis": "x2",
            "yaxis": row.y,
            "hoverinfo": "skip",
        }
    )


def _extra_axes(stack: Stack) -> JSON:
    return {
        "xaxis2": {
            "matches": "x",
            "anchor": stack.rows["grid"].y,
            "range": stack.range,
            **stack.ticks(),
            "ticks": "outside",
            "ticklen": 3,
            "tickcolor": "var(--line2)",
            "showgrid": False,
            "zeroline": False,
        }
    }


def _first_bad_marks(stack: Stack, step: int, view: grid.View, ranks: list[int], rows_bad: list[int]) -> None:
    """Ring the first-bad cells; a bracket for many ties, and for a rank that is not known."""
    window = view.window
    if not window.step_first <= step <= window.step_last:
        return
    row = stack.rows["grid"]
    right = step < window.step_first + window.steps * 0.25
    seen = sorted(place for place in rows_bad if window.row_first <= place <= window.row_last)
    middle = (window.row_first + window.row_last) / 2
    if not ranks:
        stack.bracket(row, step, window.row_first, window.row_last)
        stack.label(row, step, middle, "the rank is not known", right=right)
    elif len(ranks) > MAX_RINGS:
        if seen:
            stack.bracket(row, step, seen[0], seen[-1])
            stack.label(
                row, step, (seen[0] + seen[-1]) / 2, f"first bad: {len(ranks):,} ranks, tie", right=right
            )
    else:
        for place in seen:
            stack.ring(row, step, place)
        if seen:
            tie = ", tie" if len(ranks) > 1 else ""
            # The label stays inside the grid on the first and last rows.
            margin = window.rows * 0.045
            y = min(max(seen[-1], window.row_first + margin), window.row_last - margin)
            stack.label(row, step, y, f"first bad: {formatting.rank_words(ranks)}{tie}", right=right)


def _progress_mark(stack: Stack, view: grid.View, standing: InProgress) -> None:
    """Label the column of the step that nobody finishes."""
    window = view.window
    if not window.step_first <= standing.step <= window.step_last:
        return
    since = formatting.duration((timezone.now() - standing.since).total_seconds())
    right = standing.step < window.step_first + window.steps * 0.25
    y = window.row_first + window.rows * 0.1
    stack.label(stack.rows["grid"], standing.step, y, f"step in progress, {since}", right=right)


def _held_mark(stack: Stack, window: grid.Window, held_after: int, width: int) -> None:
    low, high = stack.x(max(held_after + 0.5, window.step_first - 0.5)), stack.range[1]
    if (high - low) * width / (high - stack.range[0]) < HELD_WORD_PX:
        return
    row = stack.rows["grid"]
    stack.annotations.append(
        {
            "xref": "x",
            "yref": row.y,
            "x": (low + high) / 2,
            "y": window.row_first + window.rows * 0.3,
            "text": "held",
            "showarrow": False,
            "bgcolor": "var(--surface)",
            "borderpad": 2,
            "font": {"size": 11, "color": "var(--text2)"},
        }
    )


# Layers


def layer_plane(
    incident: Incident, window: grid.Window, policy: Policy
) -> tuple[list[str], NDArray[np.uint8]] | None:
    """Return layer names in forward order and palette codes uint8[layers, steps]; None without layers.

    Steps between two posted ones show the earlier one: layers are often posted less often than steps.
    """
    run, attempt = incident.run, incident.attempt
    if window.steps > MAX_LAYER_STEPS:
        return None
    first = max(0, window.step_first - policy.layer.window)
    names, steps, values = queries.layer_series(run, attempt, "grad_norm", first, window.step_last)
    if not len(names) or not len(steps):
        return None
    order = sorted(range(len(names)), key=lambda index: depth_key(_number(names[index])))
    names, values = [names[index] for index in order], values[order]
    z = baseline.layer_z(values, policy.layer)
    codes = np.full(values.shape, grid_png.OUTSIDE, dtype=np.uint8)
    codes[np.isfinite(values)] = grid_png.HEALTHY
    known = np.isfinite(z)
    ramp = np.zeros(values.shape, dtype=np.uint8)
    ramp[known] = np.digitize(z[known], RAMP)
    codes[ramp > 0] = (grid_png.RAMP1 - 1 + ramp[ramp > 0]).astype(np.uint8)
    began = layer_began(run.pk, attempt)
    origin = incident.first_bad.get("layer")
    for index, name in enumerate(names):
        at = began.get(name)
        if at is None:
            continue
        bad = np.isnan(values[index]) & (steps >= at)
        codes[index, bad] = grid_png.SPREAD
        if origin is not None and str(origin) == name:
            codes[index, bad & (steps == at)] = grid_png.NONFINITE
    return names, _per_step(codes, steps, window)


def _per_step(codes: NDArray[np.uint8], steps: NDArray[np.int64], window: grid.Window) -> NDArray[np.uint8]:
    wanted = np.arange(window.step_first, window.step_last + 1)
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


def _number(name: str) -> int | str:
    return int(name) if name.isdecimal() and len(name) < 10 else name


def _layer_axis(names: list[str], incident: Incident) -> JSON:
    origin = str(incident.first_bad.get("layer"))
    last = len(names) - 1
    places = {0, last // 2, last} if last > 2 else set(range(last + 1))
    if origin in names:
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


def _layer_label(name: str) -> str:
    """Return what fits the gutter: the block's number where the name has one."""
    depth, _ = depth_key(_number(name))
    digits = [part for part in name.replace("_", ".").split(".") if part.isdecimal()]
    if digits and depth not in (float("inf"), float("-inf")):
        return f"layer {digits[0]}"
    return name if len(name) <= 10 else f"{name[:9]}…"


def _layer_marks(stack: Stack, incident: Incident, names: list[str]) -> None:
    origin, step = str(incident.first_bad.get("layer")), first_bad_step(incident)
    if origin not in names or step is None or not stack.step_first <= step <= stack.step_last:
        return
    at = names.index(origin)
    row = stack.rows["layers"]
    stack.ring(row, step, at, radius=6)
    margin = len(names) * 0.11
    y = min(max(at, margin - 0.5), len(names) - 0.5 - margin)
    right = step < stack.step_first + (stack.step_last - stack.step_first) * 0.25
    stack.label(row, step, y, f"{formatting.figure_text(origin)} first", right=right)
