"""The curves of a run on one axis of steps: what the model does, and under it what its machines do."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from andon.policy import Policy
from runs import (
    baseline,
    curve_values,
    curves,
    figures,
    formatting,
    marks,
    marks_lane,
    node_readings,
    queries,
)
from runs.curve_columns import Columns
from runs.curves import Point
from runs.grid_clock import Clock
from runs.run_view import RunView
from runs.stack import JSON, Row, Stack, value_axis

MAX_COLUMNS = 2_000  # each is drawn by its least and its greatest value: 4,000 points
STRIP_PX, ATTEMPTS_PX = 34, 12
ROWS = (
    ("loss", "Loss", 160),
    ("grad_norm", "Gradient norm", 110),
    ("lr", "Learning rate", 48),
    ("loss_scale", "Loss scale", 48),
    ("step_time_s", "Step time, s", 72),
)
STRIP = (
    (curve_values.TEMPERATURE, "Hottest GPU, °C"),
    (curve_values.CLOCK, "Lowest clock, MHz"),
    (curve_values.LINK_ERRORS, "Link errors a step"),
    (curve_values.RETRANSMITS, "Retransmits a step"),
    (curve_values.SKIPPED, "Updates skipped, %"),
    (curve_values.WAIT, "Time in collectives, s"),
)
WORDS = {name: words for name, words, *_ in (*ROWS, *STRIP)}
NAMES = [*WORDS]
Found = Mapping[tuple[int, str], Columns]


def run_figure(view: RunView, *, policy: Policy, width: int) -> JSON:
    """Return the stack of a run's window.

    Rows without a value in it are left out and named in `layout.meta.absent`; `layout.meta.text` is the same
    figure as a table.
    """
    shown = curves.window(view.first, view.last, min(MAX_COLUMNS, width))
    found = curves.read(view.run.pk, view.attempts, [*NAMES, curve_values.OCCURRED], shown)
    have = {name: parts for name in NAMES if (parts := _paths(found, view, name))}
    judged = {} if view.whole else _judged(view, have, policy)
    rows = [Row("marks", 17, axis={"range": [0, 1], "visible": False})]
    if view.whole and len(view.spans) > 1:
        rows.append(Row("attempts", ATTEMPTS_PX, axis={"range": [0, 1], "visible": False}))
    heights = {name: height for name, _, height in ROWS}
    for name in have:
        height = heights.get(name, STRIP_PX)
        points = have[name][0] + have[name][1]
        axis = figures.curve_axis(name, points, view.first, height)
        rows.append(Row(name, height, above=20 if name in heights else 18, axis=axis))
    if not have:
        rows.append(Row("loss", 160, above=20, axis=value_axis()))
    clock = _clock(found, view) if view.by_time else None
    stack = Stack(rows, step_first=shown.first, step_last=shown.last, key=f"{view.run.pk}", clock=clock)
    at_marks = marks.of_run(view.run, view.attempts, shown.first, shown.last)
    marks_lane.add(stack, stack.rows["marks"], at_marks, width)
    if "attempts" in stack.rows:
        _attempt_bars(stack, view)
    who = node_readings.names_of(
        point["who"] for kept, left in have.values() for point in kept + left if "who" in point
    )
    captions = {}
    for name, (kept, left) in have.items():
        row, words = stack.rows[name], WORDS[name]
        banded = name in judged and figures.add_band(stack, row, judged[name], name, policy)
        if left:
            stack.curve(row, left, f"{words}, run again later", name, colour="var(--line2)", who=who)
        stack.curve(row, kept, words, name, who=who)
        captions[name] = _caption(name, kept + left, who, band=policy.spike.window if banded else 0)
    figure = stack.figure()
    figure["layout"]["meta"] |= {
        "captions": captions,
        "absent": [_absent(name) for name in NAMES if name not in have and name != curve_values.SKIPPED],
        "extent": list(view.extent),
        "column": shown.width,
        "text": [_text(WORDS[name], name, kept + left, who) for name, (kept, left) in have.items()],
    }
    return figure


def _paths(found: Found, view: RunView, name: str) -> tuple[list[Point], list[Point]] | None:
    """Return the path that was kept, with a break at each launch, and what a later attempt ran again."""
    kept: list[Point] = []
    left: list[Point] = []
    for index, span in enumerate(view.spans):
        columns = found.get((span.number, name))
        if columns is None:
            continue
        points = _rate(columns) if name == curve_values.SKIPPED else curves.points(columns)
        cut = min((later.first for later in view.spans[index + 1 :]), default=None)
        _go_on(kept, [point for point in points if cut is None or point["step"] < cut])
        _go_on(left, [point for point in points if cut is not None and point["step"] >= cut])
    if name == curve_values.SKIPPED and not any(point["value"] for point in kept + left):
        return None
    return (kept, left) if kept or left else None


def _go_on(path: list[Point], part: Sequence[Point]) -> None:
    """Add what another attempt did to a path, after a break."""
    if part and path:
        path.append({"step": part[0]["step"], "value": None, "flag": ""})
    path.extend(part)


def _rate(columns: Columns) -> list[Point]:
    """Return the share of skipped updates of each column, at a step that was skipped where there is one."""
    return [
        {
            "step": int(row["hi_at"]),
            "value": round(100.0 * float(row["total"]) / int(row["n"]), 3),
            "flag": "",
        }
        for row in columns
        if row["n"]
    ]


def _judged(view: RunView, have: Mapping[str, Any], policy: Policy) -> dict[str, list[Point]]:
    """Return what a detector judges with its baseline's steps before it; nothing where steps are joined."""
    if view.last - view.first > baseline.MAX_STEPS:
        return {}
    names = [name for name in ("loss", "grad_norm") if name in have]
    before = max(0, view.first - policy.spike.window)
    most = view.last - before + 1
    return queries.series(view.run, view.spans[0].number, names, before, view.last, most)


def _clock(found: Found, view: RunView) -> Clock | None:
    """Return when the steps of one attempt were over; None where too few of them said so."""
    columns = found.get((view.spans[0].number, curve_values.OCCURRED))
    if columns is None or len(columns) < 2:
        return None
    steps, times = columns["hi_at"], np.maximum.accumulate(columns["hi"])
    if times[-1] <= times[0]:
        return None  # all at once, as a replay posts them
    usual = float(np.median(np.diff(times) / np.diff(steps)))
    edges = np.concatenate([[steps[0]], steps + 1])
    ends = np.concatenate([[times[0] - usual], times])
    return Clock(edges, ends, np.zeros(len(steps), np.int64), float(ends[0]), float(ends[-1]))


def _attempt_bars(stack: Stack, view: RunView) -> None:
    """Draw a bar for each attempt over the steps it ran, in two lanes, so that what was run again is seen."""
    row = stack.rows["attempts"]
    for index, span in enumerate(view.spans):
        y = 0.75 if index % 2 == 0 else 0.25
        ends = max(span.first, stack.step_first) - 0.5, min(span.last, stack.step_last) + 0.5
        stack.bar(row, *ends, y, newest=index == len(view.spans) - 1)


def _caption(name: str, points: Sequence[Point], who: Mapping[int, str], *, band: int) -> str:
    words = WORDS[name]
    if band:
        return f"{words}, band is median ± 6 σ of {band} steps"
    if name not in {curve_values.TEMPERATURE, curve_values.CLOCK}:
        return words
    worst = _extreme(points, low=name == curve_values.CLOCK)
    if worst is None or worst["value"] is None or worst.get("who") not in who:
        return words
    value = formatting.significant(worst["value"], 4)
    lane = formatting.inert(who[worst["who"]], 48)
    return f"{words}: {value} on {lane} at step {formatting.count(worst['step'])}"


def _extreme(points: Sequence[Point], *, low: bool) -> Point | None:
    finite = [point for point in points if point["value"] is not None]
    return (min if low else max)(finite, key=lambda point: point["value"] or 0.0, default=None)


def _absent(name: str) -> str:
    return WORDS[name].split(",")[0]


def _text(words: str, name: str, points: Sequence[Point], who: Mapping[int, str]) -> list[str]:
    """Return one row of the figure as a table: series, lowest, highest, last, nonfinite."""
    cells = [words]
    for point in (_extreme(points, low=True), _extreme(points, low=False), _last(points)):
        if point is None:
            cells.append("no finite value")
            continue
        place = f" on {formatting.inert(who[point['who']], 48)}" if point.get("who") in who else ""
        value = formatting.metric(name, point["value"])
        cells.append(f"{value} at step {formatting.count(point['step'])}{place}")
    bad = [point for point in points if point["value"] is None and point["flag"]]
    total = sum(point.get("count", 1) for point in bad)
    cells.append(
        f"{formatting.plural(total, 'step')}, first at {formatting.count(bad[0]['step'])}"
        if bad
        else "none found"
    )
    return cells


def _last(points: Sequence[Point]) -> Point | None:
    finite = [point for point in points if point["value"] is not None]
    return max(finite, key=lambda point: point["step"], default=None)
