"""The incident's stack: first-failure grid, layers, gradient norm and loss on one step axis."""

from django.urls import reverse
from django.utils import timezone

from andon.policy import Policy
from evidence.freezing.checkpoints import passed_over
from evidence.queries import last_good
from incidents import layer_figure, layer_lines
from incidents.layer_view import PLAIN, LayerView
from incidents.models import Incident
from runs import baseline, figures, formatting, grid, marks, marks_lane, queries
from runs.grid_progress import InProgress
from runs.grid_rows import Rows
from runs.stack import JSON, Row, Stack

CURVE_PX = 52
MAX_RINGS = 8
ABOVE_LAYERS_PX, ABOVE_LAYERS_NARROW_PX = 104, 214  # the grid's axis and readout, the layers' caption
HELD_WORD_PX = 34  # the word stands in its block, or not at all


def first_bad_step(incident: Incident) -> int | None:
    """Return the step of the first-bad cell, None when nothing is known to be bad."""
    step = incident.first_bad.get("step")
    return step if isinstance(step, int) else None


def first_bad_ranks(incident: Incident) -> list[int]:
    """Return the ranks of the first-bad cell; empty when the rank is not known."""
    found = incident.first_bad.get("ranks") or []
    return [rank for rank in found if isinstance(rank, int)]


def incident_figure(
    incident: Incident,
    view: grid.View,
    *,
    policy: Policy,
    width: int,
    theme: str,
    layers: LayerView = PLAIN,
) -> JSON:
    """Return the Plotly figure of an incident's window and, in `layout.meta`, what the page needs with it."""
    run, attempt, extent = incident.run, incident.attempt, view.extent
    narrow = width < figures.NARROW_BELOW_PX
    height = figures.grid_height(extent.ranks)
    view = view.over(view.window.snapped(width, height, extent.ranks))
    window = view.window
    step, ranks = first_bad_step(incident), first_bad_ranks(incident)
    rows_bad = [row for rank in ranks if (row := view.rows.row(rank)) is not None]

    layer = layer_figure.layer_plane(incident, window, policy, layers)
    firsts = [] if layer is None else layer_figure.first_layers(incident, layer.began)
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
        rows.append(
            Row(
                "layers",
                layer_figure.LAYERS_PX,
                above=ABOVE_LAYERS_NARROW_PX if narrow else ABOVE_LAYERS_PX,
                axis=layer_figure.layer_axis(layer.names, firsts),
            )
        )
        rows += layer_lines.line_rows(layer, layers, window)
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
    lines: list[JSON] = []

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
                height=layer_figure.LAYERS_PX,
                theme=theme,
                version=extent.version,
                rows=view.rows,
                by_time=stack.clock is not None,
                more=layers.query(),
            ),
            width=width,
            height=layer_figure.LAYERS_PX,
            y_first=0,
            y_last=len(layer.names) - 1,
        )
        layer_figure.mark_first(stack, layer.names, firsts, layer_figure.first_step(layer, firsts, step))
        lines = layer_lines.add_lines(stack, layer, layers, policy, window, ranks[0] if ranks else None)
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
    at_marks = _checkpoint_marks(incident, window)
    # A bad checkpoint of that very step names it already: two words in one place cannot be read.
    if step is not None and not any(at == step and strong for at, _, strong in at_marks):
        at_marks.append((step, f"step {formatting.count(step)}", True))
    marks_lane.add(stack, stack.rows["marks"], at_marks, width)

    figure = stack.figure()
    figure["layout"].update(_extra_axes(stack))
    meta = figure["layout"]["meta"]
    meta["captions"] = captions
    meta["layers"] = None if layer is None else layer_figure.document(layer, layers, lines)
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


def _checkpoint_marks(incident: Incident, window: grid.Window) -> list[marks.Mark]:
    """Return the marks of checkpoints; the last good one, and nearer ones that were passed over, say so."""
    good = last_good(incident.dossier)
    passed = passed_over(incident.dossier)
    said = dict.fromkeys(passed, "passed over")
    if good is not None and good.attempt == incident.attempt:
        said[good.step] = "last good"
    found = marks.of_checkpoints(incident.run, [incident.attempt], window.step_first, window.step_last)
    return [
        (step, words.replace("verified", said[step]) if step in said else words, strong)
        for step, words, strong in found
    ]


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
