"""The three figures of a postmortem, read from the same rows as the incident page."""

import io
from typing import Any

import numpy as np

from andon.detect.cells import depth_key
from andon.postmortem import figures as draw
from andon.postmortem.document import Figure
from incidents.layer_figure import layer_plane
from incidents.postmortem.book import Book
from incidents.postmortem.facts import Facts
from incidents.postmortem.words import plain
from runs import baseline, formatting, grid, queries

BEFORE, AFTER = 128, 11  # the window that the incident page opens on
_RANK_ROWS = 256
_LAYER_ROWS = 64
_BINS = 280  # twice the steps of the window, so that each step keeps a column of its own
_WORDS = {"grad_norm": "Gradient norm", "loss": "Loss"}


def figures(book: Book, facts: Facts) -> list[Figure]:
    """Return grid, layers, curves; a figure without any value is left out."""
    step = facts.first_bad["step"]
    if step is None:
        return []
    axis = draw.Axis(max(0, step - BEFORE), step + AFTER)
    found = [_grid(book, facts, axis), _layers(book, facts, axis), _curves(book, facts, axis)]
    return [figure for figure in found if figure is not None]


def _grid(book: Book, facts: Facts, axis: draw.Axis) -> Figure | None:
    incident, document = facts.incident, facts.first_bad
    ranks = (facts.attempt.world_size if facts.attempt else None) or 1
    plane = queries.grid_states(
        incident.run, incident.attempt, axis.first, axis.last, _BINS, 0, ranks - 1, _RANK_ROWS
    )
    if not plane.size or plane.shape[1] != axis.last - axis.first + 1:
        return None
    each = 1
    while -(-ranks // each) > plane.shape[0]:
        each *= 2
    names = [_rank_row(row * each, min(ranks, (row + 1) * each) - 1) for row in range(plane.shape[0])]
    ringed = sorted({rank // each for rank in document["ranks"] if rank < ranks})
    label = (
        f"first bad: {formatting.rank_words(document['ranks'])}" if document["ranks"] else "rank not known"
    )
    svg = draw.grid(plane, axis, names, step=document["step"], ringed=ringed, words=label)
    bad = int((plane >= draw.SPREAD).sum())
    text = (
        f"{formatting.plural(ranks, 'rank')} at steps {axis.first:,} to {axis.last:,} of attempt"
        f" {incident.attempt}; {label} at step {document['step']:,}; {bad:,} cells are not healthy."
    )
    return Figure(
        "grid",
        "Figure 1, first-failure grid",
        book.say(text, facts.origin or incident),
        svg,
        _runs(plane, axis, names),
    )


def _rank_row(first: int, last: int) -> str:
    return f"rank {first}" if first == last else f"ranks {first}–{last}"


def _runs(plane: draw.Codes, axis: draw.Axis, names: list[str]) -> str:
    """Return the cells that are not healthy as text: a line per run of equal states."""
    out = io.StringIO()
    out.write("rows,state,step_first,step_last\n")
    for row, codes in enumerate(plane.tolist()):
        start = 0
        for at in range(1, len(codes) + 1):
            if at == len(codes) or codes[at] != codes[start]:
                if codes[start] in draw.STATES:
                    state = draw.STATES[codes[start]][0]
                    out.write(f"{names[row]},{state},{axis.first + start},{axis.first + at - 1}\n")
                start = at
    return out.getvalue()


def _layers(book: Book, facts: Facts, axis: draw.Axis) -> Figure | None:
    incident = facts.incident
    window = grid.Window(axis.first, axis.last, 0, 0)
    found = layer_plane(incident, window, facts.policy)
    if found is None:
        return None
    names, plane = found.names, found.codes
    each = -(-len(names) // _LAYER_ROWS)
    if each > 1:
        plane = np.maximum.reduceat(plane, np.arange(0, len(names), each), axis=0)
    shown = [plain(name, 60) for name in names[::each]]
    layer = facts.first_bad["layer"]
    origin = names.index(str(layer)) // each if layer is not None and str(layer) in names else None
    svg = draw.layers(plane, axis, shown, step=facts.first_bad["step"], origin=origin)
    text = (
        f"Gradient norm of {formatting.plural(len(names), 'layer')}, z of its log against each layer's past"
    )
    text += (
        f"; {plain(layer, 120)} was nonfinite first."
        if origin is not None
        else "; no layer was nonfinite first."
    )
    caption = book.say(text, facts.origin or incident)
    return Figure("layers", "Figure 2, layers", caption, svg, _layer_values(facts, axis))


def _layer_values(facts: Facts, axis: draw.Axis) -> str:
    """Return gradient norms of the last good posted step and of the first bad one, by layer."""
    step = facts.first_bad["step"]
    names, steps, values = queries.layer_series(
        facts.incident.run, facts.incident.attempt, "grad_norm", axis.first, step
    )
    if not len(steps):
        return "layer,step,grad_norm\n"
    wanted = [index for index, at in enumerate(steps.tolist()) if at < step][-1:]
    wanted += [index for index, at in enumerate(steps.tolist()) if at == step]
    out = ["layer,step,grad_norm"]
    for row in sorted(range(len(names)), key=lambda index: depth_key(names[index])):
        for column in wanted:
            value = float(values[row, column])
            text = "nonfinite" if np.isnan(value) else f"{value:.6g}"
            out.append(f"{plain(names[row], 120)},{int(steps[column])},{text}")
    return "\n".join(out) + "\n"


def _curves(book: Book, facts: Facts, axis: draw.Axis) -> Figure | None:
    incident, policy = facts.incident, facts.policy
    before = max(0, axis.first - policy.spike.window)
    found = queries.series(
        incident.run, incident.attempt, ["grad_norm", "loss"], before, axis.last, 2 * (axis.last - before + 1)
    )
    lines, rows = [], []
    for name in ("grad_norm", "loss"):
        points: list[Any] = found.get(name, [])
        log = name == "grad_norm"
        rules = policy.grad_norm if log else policy.spike
        band = baseline.band(points, rules, log=log, step_first=axis.first) if points else ([], [], [], [])
        shown = tuple((point["step"], point["value"]) for point in points if point["step"] >= axis.first)
        lines.append(draw.Curve(_WORDS[name], log, shown, tuple(zip(*band, strict=True))))
        rows += [f"{name},{at},{'nonfinite' if value is None else f'{value:.6g}'}" for at, value in shown]
    if not rows:
        return None
    svg = draw.curves(lines, axis, step=facts.first_bad["step"])
    text = f"{_curve_words(lines[0])}; {_curve_words(lines[1])}; the bands are median ± 6 σ of 200 steps."
    data = "\n".join(["series,step,value", *rows]) + "\n"
    return Figure(
        "curves", "Figure 3, gradient norm and loss", book.say(text, facts.origin or incident), svg, data
    )


def _curve_words(line: draw.Curve) -> str:
    finite = [(value, step) for step, value in line.points if value is not None]
    bad = [step for step, value in line.points if value is None]
    if not finite and not bad:
        return f"{line.name} was not measured"
    said = line.name
    if finite:
        value, step = max(finite, key=lambda point: (point[0], -point[1]))
        said += f" peaked at {formatting.significant(value, 3)} at step {step:,}"
    if bad:
        said += f"{' and' if finite else ''} was nonfinite from step {min(bad):,} on"
    return said
