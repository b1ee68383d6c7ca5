"""The figures of a run: its curves, and the rows that the run and the incident page share."""

import math
from collections.abc import Mapping, Sequence
from urllib.parse import urlencode

from andon.policy import Policy
from runs import baseline, formatting, grid, queries
from runs.grid_rows import Rows
from runs.stack import JSON, Row, Stack, value_axis

MAX_POINTS = 4_000
WIDE_PX, NARROW_PX = 856, 320  # when the browser did not say how wide the plot is
MIN_PX, MAX_PX = 200, 1_700
NARROW_BELOW_PX = 560
LABEL_EVERY_PX = 30  # rank and node labels are 12 px tall; closer ones are a grey wall
LABEL_EVERY_MANY_PX = 64


def plot_width(asked: str) -> int:
    """Return the plot's width in pixels from the query, within bounds."""
    if asked.isdecimal() and len(asked) < 6:
        return max(MIN_PX, min(MAX_PX, int(asked)))
    return WIDE_PX


def grid_height(ranks: int) -> int:
    """Return the grid's height in pixels: 240, or 320 above 256 ranks."""
    return 320 if ranks > 256 else 240


def tile_url(
    path: str,
    window: grid.Window,
    *,
    width: int,
    height: int,
    theme: str,
    version: str,
    rows: Rows | None = None,
    by_time: bool = False,
    more: Mapping[str, str] | None = None,
) -> str:
    """Return the address of a tile; its version makes the answer immutable."""
    order = {} if rows is None else {"rows": rows.kind, "sort": rows.sort}
    order |= {"x": "time"} if by_time else {}
    return f"{path}?" + urlencode(
        {
            "x0": window.step_first,
            "x1": window.step_last,
            "y0": window.row_first,
            "y1": window.row_last,
            "w": width,
            "h": height,
            **order,
            **(more or {}),
            "theme": theme,
            "v": version,
        }
    )


def row_axis(
    view: grid.View, height: int, strong: Sequence[int], *, ranks: int, characters: int = 10
) -> JSON:
    """Return the grid's y axis: groups (or ranks) at their middle, few enough to read.

    Args:
        strong: rows whose group is named in bold and never left out.
        ranks: of the whole attempt.
        characters: that fit the gutter; of a longer name the end is kept, where nodes differ.
    """
    window = view.window
    per_row = height / window.rows
    every = LABEL_EVERY_PX if ranks <= 256 else LABEL_EVERY_MANY_PX
    values: list[float] = []
    texts: list[str] = []
    last_px = -1e9
    starts = [first for _, first in view.rows.groups] + [view.rows.count]
    for (name, first), after in zip(view.rows.groups, starts[1:], strict=True):
        low, high = max(first, window.row_first), min(after - 1, window.row_last)
        if low > high:
            continue
        middle = (low + high) / 2
        at_px = (middle - window.row_first) * per_row
        bold = any(low <= row <= high for row in strong)
        if at_px - last_px < every and not bold:
            continue
        if at_px - last_px < 13 and values:
            # The group of the first-bad cell always has its name.
            values.pop()
            texts.pop()
        text = formatting.figure_text(name if len(name) <= characters else f"…{name[1 - characters :]}")
        values.append(middle)
        texts.append(f"<b>{text}</b>" if bold else text)
        last_px = at_px
    if not view.rows.groups:
        step = max(1, -(-window.rows * every // height))
        for row in range(window.row_first, window.row_last + 1, step):
            values.append(row)
            texts.append(f"rank {view.rows.rank(row)}")
    return {
        "range": [window.row_last + 0.5, window.row_first - 0.5],
        "tickmode": "array",
        "tickvals": values,
        "ticktext": texts,
        "ticks": "",
        "showgrid": False,
        # Plotly ties an image's axes to square pixels unless told not to.
        "scaleanchor": False,
        "constrain": "range",
        "fixedrange": False,
    }


def add_curve(
    stack: Stack,
    row: Row,
    points: Sequence[queries.Point],
    *,
    words: str,
    form: str,
    policy: Policy,
) -> bool:
    """Add a curve with its baseline band; return whether the band is there."""
    banded = False
    if stack.step_last - stack.step_first <= baseline.MAX_STEPS:
        banded = add_band(stack, row, points, form, policy)
    shown = [point for point in points if point["step"] >= stack.step_first]
    stack.curve(row, shown, words, form)
    return banded


def add_band(stack: Stack, row: Row, points: Sequence[queries.Point], form: str, policy: Policy) -> bool:
    """Add the baseline of a series that a detector judges; return whether there is one."""
    steps, low, middle, high = curve_band(points, form, policy, stack.step_first)
    if steps:
        stack.band(row, steps, low, high)
        stack.median(row, steps, middle)
    return bool(steps)


def curve_axis(
    name: str,
    points: Sequence[queries.Point],
    step_first: int,
    height: int,
    *,
    band: tuple[float, float] | None = None,
) -> JSON:
    """Return the axis of a curve: the range of the values in view, and three labels that fit.

    Args:
        height: of the row, in pixels.
        band: lower and upper bound the newest value was judged by; in range, but never so that it
            squeezes the values flat.
    """
    values = [v for point in points if (v := point["value"]) is not None and point["step"] >= step_first]
    if not values:
        return value_axis(showticklabels=False)
    log = name in {"grad_norm", "lr"} and _positive(points)
    low, high, middle = min(values), max(values), sorted(values)[len(values) // 2]
    if band is not None:
        low = min(low, max(band[0], low / 4)) if log else min(low, band[0])
        high = max(high, band[1])
    place = math.log10 if log else float
    bottom, top = place(low), place(high)
    span = (top - bottom) or max(abs(bottom) * 0.02, 1e-6)
    pad = 0.18 * span
    per_unit = height / (span + 2 * pad)
    # Labels are 12 px tall: a middle one that would touch another goes.
    ticks = [low, middle, high] if high > low else [low]
    if len(ticks) == 3 and min(place(middle) - bottom, top - place(middle)) * per_unit < 12:
        ticks = [low, high]
    return value_axis(
        type="log" if log else "linear",
        range=[bottom - pad, top + pad],
        tickmode="array",
        tickvals=ticks,
        ticktext=[formatting.metric(name, tick) for tick in ticks],
    )


def curve_band(
    points: Sequence[queries.Point], form: str, policy: Policy, step_first: int
) -> tuple[list[int], list[float], list[float], list[float]]:
    """Return the baseline of a series that a detector judges (loss; gradient norm in log), else nothing."""
    if form not in {"loss", "grad_norm"}:
        return [], [], [], []
    log = form == "grad_norm"
    rules = policy.grad_norm if log else policy.spike
    return baseline.band(points, rules, log=log, step_first=step_first)


def _positive(points: Sequence[queries.Point]) -> bool:
    """Return whether a log axis can show every finite value: a gradient norm of 0 is a real signal."""
    return all(point["value"] is None or point["value"] > 0 for point in points)
