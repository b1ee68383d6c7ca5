"""The incident's stack: first-failure grid, layers, gradient norm and loss on one step axis."""

import numpy as np
from django.urls import reverse
from numpy.typing import NDArray

from andon.detect.cells import depth_key
from andon.policy import Policy
from incidents.models import Incident
from runs import baseline, figures, formatting, grid, grid_png, queries
from runs.models import FirstBad
from runs.stack import JSON, Row, Stack

LAYERS_PX = 100
CURVE_PX = 52
MAX_RINGS = 8
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


def layer_tile(plane: NDArray[np.uint8], width: int, height: int) -> NDArray[np.uint8]:
    """Return the layers enlarged to a tile; more layers or steps than pixels keep the worst code.

    Codes of the ramp lie above the states, so a nonfinite cell is lifted over them while they shrink.
    """
    layers, steps = plane.shape
    order = np.arange(18, dtype=np.uint8)
    order[[grid_png.SPREAD, grid_png.NONFINITE]] = [30, 31]
    shown = order[plane]
    if steps > width:
        edges = np.arange(width) * steps // width
        shown = np.maximum.reduceat(shown, edges, axis=1)
    if layers > height:
        edges = np.arange(height) * layers // height
        shown = np.maximum.reduceat(shown, edges, axis=0)
    shown = np.where(shown == 30, grid_png.SPREAD, np.where(shown == 31, grid_png.NONFINITE, shown))
    return grid_png.paint(shown.astype(np.uint8), width, height)


def incident_figure(
    incident: Incident,
    window: grid.Window,
    extent: grid.Extent,
    *,
    policy: Policy,
    width: int,
    theme: str,
) -> JSON:
    """Return the Plotly figure of an incident's window and, in `layout.meta`, what the page needs with it."""
    run, attempt = incident.run, incident.attempt
    narrow = width < figures.NARROW_BELOW_PX
    height = figures.grid_height(extent.ranks)
    step, ranks = first_bad_step(incident), first_bad_ranks(incident)
    nodes = grid.nodes(run, attempt)

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
            axis=figures.rank_axis(window, height, nodes, ranks, characters=8 if narrow else 10),
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
    key = f"{run.pk}:{attempt}:{window.step_first}-{window.step_last}:{window.rank_first}-{window.rank_last}"
    stack = Stack(rows, step_first=window.step_first, step_last=window.step_last, key=key)
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
        ),
        width=width,
        height=height,
        y_first=window.rank_first,
        y_last=window.rank_last,
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
        _first_bad_marks(stack, incident, window, ranks, extent)
    if extent.held_after is not None and extent.held_after < window.step_last:
        _held_mark(stack, window, extent.held_after, width)
    marks = figures.checkpoint_marks(run, attempt, window.step_first, window.step_last)
    if step is not None:
        marks.append((step, formatting.count(step), True))
    stack.marks(stack.rows["marks"], marks, width)

    figure = stack.figure()
    figure["layout"].update(_extra_axes(stack))
    meta = figure["layout"]["meta"]
    meta["captions"] = captions
    meta["ranks"] = [window.rank_first, window.rank_last]
    meta["extent"] = [extent.step_first, max(extent.step_last, window.step_last)]
    meta["first_bad"] = {"step": step, "ranks": ranks}
    meta["overview"] = figures.tile_url(
        reverse("incident_grid", args=[incident.pk]),
        grid.Window(extent.step_first, max(extent.step_last, window.step_last), 0, extent.ranks - 1),
        width=width,
        height=1,
        theme=theme,
        version=extent.version,
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
            "x": [stack.step_first, stack.step_last],
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
            "range": [stack.step_first - 0.5, stack.step_last + 0.5],
            "tickformat": ",d",
            "nticks": 8,
            "ticks": "outside",
            "ticklen": 3,
            "tickcolor": "var(--line2)",
            "showgrid": False,
            "zeroline": False,
        }
    }


def _first_bad_marks(
    stack: Stack, incident: Incident, window: grid.Window, ranks: list[int], extent: grid.Extent
) -> None:
    """Ring the first-bad cells; a bracket for many ties, and for a rank that is not known."""
    step = first_bad_step(incident)
    if step is None or not window.step_first <= step <= window.step_last:
        return
    row = stack.rows["grid"]
    right = step < window.step_first + window.steps * 0.25
    seen = [rank for rank in ranks if window.rank_first <= rank <= window.rank_last]
    middle = (window.rank_first + window.rank_last) / 2
    if not ranks:
        stack.bracket(row, step, window.rank_first, window.rank_last)
        stack.label(row, step, middle, "the rank is not known", right=right)
    elif len(ranks) > MAX_RINGS:
        if seen:
            stack.bracket(row, step, seen[0], seen[-1])
            stack.label(
                row, step, (seen[0] + seen[-1]) / 2, f"first bad: {len(ranks):,} ranks, tie", right=right
            )
    else:
        for rank in seen:
            stack.ring(row, step, rank)
        if seen:
            tie = ", tie" if len(ranks) > 1 else ""
            # The label stays inside the grid on the first and last rows.
            margin = window.ranks * 0.045
            y = min(max(seen[-1], window.rank_first + margin), window.rank_last - margin)
            stack.label(row, step, y, f"first bad: {formatting.rank_words(ranks)}{tie}", right=right)


def _held_mark(stack: Stack, window: grid.Window, held_after: int, width: int) -> None:
    columns = window.step_last - max(held_after, window.step_first - 1)
    if columns * width / window.steps < 34:
        return
    row = stack.rows["grid"]
    stack.annotations.append(
        {
            "xref": "x",
            "yref": row.y,
            "x": window.step_last - columns / 2 + 0.5,
            "y": window.rank_first + window.ranks * 0.3,
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
