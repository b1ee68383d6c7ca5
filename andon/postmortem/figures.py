"""Static figures of a postmortem as SVG text: grid, layers, curves, all on one step axis.

Drawn from numbers alone, coordinates rounded to a tenth of a pixel, colours of the light theme: the same
numbers give the same bytes on every machine.
"""

import html
import math
from collections.abc import Iterable, Sequence
from itertools import groupby

import msgspec
import numpy as np
from numpy.typing import NDArray

WIDTH, LEFT, RIGHT, TOP = 860, 104, 12, 26
PLOT = WIDTH - LEFT - RIGHT
TEXT, TEXT2, LINE, SURFACE, HEALTHY, BAD = "#151A20", "#434D59", "#D3DAE1", "#FFFFFF", "#E6EBF0", "#A50021"
CURVE, BAND, MEDIAN = "#26323F", "#DDE7F1", "#5B6672"
FONT = "-apple-system, Segoe UI, Roboto, Noto Sans, Liberation Sans, Arial, sans-serif"

# State codes of a grid as `andon.detect.planes` numbers them, worst last; outside and healthy are the ground.
STATES: dict[int, tuple[str, str]] = {
    2: ("held", "#76828E"),
    3: ("missing", "#C3CBD3"),
    4: ("spread", "#DDA6A3"),
    5: ("straggler", "#00695F"),
    6: ("spike", "#DE5B00"),
    7: ("no progress", "#0B77E3"),
    8: ("checksum differs", "#5A14B8"),
    9: ("nonfinite", "#A50021"),
}
OUTSIDE, SPREAD, NONFINITE = 0, 4, 9
RAMP = ("#B7D2EC", "#84B1DD", "#558DC2", "#366494", "#1B3855")  # z from 1.5, 3, 4.5, 6 (warn), 12 (halt)
RAMP_WORDS = ("1.5", "3", "4.5", "6 warn", "12 halt")
RAMP_FIRST = 13  # code of the first step of the ramp in a plane of layers

Codes = NDArray[np.uint8]


class Axis(msgspec.Struct, frozen=True):
    """The steps a figure spans, both ends included."""

    first: int
    last: int

    def x(self, step: float) -> float:
        """Return the left edge of a step in pixels."""
        return LEFT + (step - self.first) * PLOT / max(1, self.last - self.first + 1)

    def middle(self, step: float) -> float:
        """Return the middle of a step in pixels."""
        return self.x(step + 0.5)


class Curve(msgspec.Struct, frozen=True):
    """One curve: steps with values (None = nonfinite), and its baseline band where there is one."""

    name: str
    log: bool
    points: tuple[tuple[int, float | None], ...]
    band: tuple[tuple[int, float, float, float], ...] = ()  # step, lower, median, upper


def grid(
    plane: Codes, axis: Axis, rows: Sequence[str], *, step: int | None, ringed: Sequence[int], words: str
) -> str:
    """Return the first-failure grid.

    Args:
        plane: codes uint8[rows, steps] with one column per step.
        rows: name of each row ("rank 61", "ranks 64–127").
        step: first bad step, None when none is known.
        ringed: rows of the first-bad cells.
        words: the label of the ring, and what a reader without the picture is told.
    """
    count = plane.shape[0]
    each = max(2.0, min(14.0, 240.0 / max(1, count)))
    height = each * count
    shapes = [_rect(LEFT, TOP, PLOT, height, HEALTHY)]
    shapes += _cells(plane, axis, each, {code: colour for code, (_, colour) in STATES.items()})
    shapes += _row_labels(rows, each)
    if step is not None and axis.first <= step <= axis.last:
        shapes += _guide(axis, step, height)
        for row in ringed[:8]:
            x, y = axis.middle(step), TOP + (row + 0.5) * each
            shapes.append(_ring(x, y, 8))
        if ringed:
            y = TOP + (ringed[0] + 0.5) * each
            shapes.append(_label(axis, step, max(TOP + 10, min(TOP + height - 4, y + 4)), words))
    shapes += _steps(axis, TOP + height)
    used = set(np.unique(plane).tolist())
    legend = [(word, colour) for code, (word, colour) in STATES.items() if code in used]
    shapes += _legend([("healthy", HEALTHY), *legend], TOP + height + 44)
    return _svg(TOP + height + 56, words, shapes)


def layers(plane: Codes, axis: Axis, names: Sequence[str], *, step: int | None, origin: int | None) -> str:
    """Return the layers' heat map: z of log gradient norm in five steps, nonfinite above them."""
    count = plane.shape[0]
    each = max(3.0, min(14.0, 200.0 / max(1, count)))
    height = each * count
    colours = {RAMP_FIRST + index: colour for index, colour in enumerate(RAMP)}
    colours |= {SPREAD: STATES[SPREAD][1], NONFINITE: BAD}
    shapes = [_rect(LEFT, TOP, PLOT, height, HEALTHY), *_cells(plane, axis, each, colours)]
    shapes += _row_labels(names, each)
    words = "layers"
    if step is not None and axis.first <= step <= axis.last:
        shapes += _guide(axis, step, height)
        if origin is not None:
            y = TOP + (origin + 0.5) * each
            words = f"{names[origin]} first"
            shapes += [
                _ring(axis.middle(step), y, 6),
                _label(axis, step, max(TOP + 10, min(TOP + height - 4, y + 4)), words),
            ]
    shapes += _steps(axis, TOP + height)
    legend = [("z below 1.5", HEALTHY), *zip(RAMP_WORDS, RAMP, strict=True), ("nonfinite", BAD)]
    shapes += _legend(legend, TOP + height + 44)
    return _svg(TOP + height + 56, words, shapes)


def curves(lines: Sequence[Curve], axis: Axis, *, step: int | None) -> str:
    """Return curves under each other, each with its own scale; ▲ NaN where a value was nonfinite."""
    each, gap = 92.0, 34.0
    shapes: list[str] = []
    top = float(TOP)
    for line in lines:
        shapes += _curve(line, axis, top, each)
        top += each + gap
    height = top - gap
    if step is not None and axis.first <= step <= axis.last:
        shapes += _guide(axis, step, height - TOP)
    shapes += _steps(axis, height)
    return _svg(height + 28, ", ".join(line.name for line in lines), shapes)


def _curve(line: Curve, axis: Axis, top: float, height: float) -> list[str]:
    shapes = [_text(LEFT, top - 6, line.name + (", log" if line.log else ""), size=12)]
    finite = [value for _, value in line.points if value is not None and (value > 0 or not line.log)]
    edges = [edge for _, low, _, high in line.band for edge in (low, high) if edge > 0 or not line.log]
    if not finite:
        return [*shapes, _text(LEFT + 8, top + height / 2, "not measured in this window", colour=TEXT2)]
    low, high = _range([*finite, *edges], line.log)

    def y(value: float) -> float:
        at = math.log10(value) if line.log else value
        return top + height - (at - low) / (high - low) * height

    for tick, words in _ticks(low, high, line.log):
        at = top + height - (tick - low) / (high - low) * height
        shapes.append(f'<path d="M{LEFT} {_n(at)}H{WIDTH - RIGHT}" stroke="#E9EDF1"/>')
        shapes.append(_text(LEFT - 6, at + 4, words, anchor="end", colour=TEXT2))
    if line.band:
        clipped = [(s, max(lo, _back(low, line.log)), m, hi) for s, lo, m, hi in line.band]
        upper = " ".join(f"{_n(axis.middle(s))},{_n(y(hi))}" for s, _, _, hi in clipped)
        lower = " ".join(f"{_n(axis.middle(s))},{_n(y(lo))}" for s, lo, _, _ in reversed(clipped))
        shapes.append(f'<polygon points="{upper} {lower}" fill="{BAND}"/>')
        median = " ".join(f"{_n(axis.middle(s))},{_n(y(m))}" for s, _, m, _ in clipped)
        shapes.append(f'<polyline points="{median}" fill="none" stroke="{MEDIAN}" stroke-dasharray="3 3"/>')
    drawn = [(s, v if v is not None and (v > 0 or not line.log) else None) for s, v in line.points]
    for known, part in groupby(drawn, key=lambda point: point[1] is not None):
        run = list(part)
        if known:
            points = " ".join(f"{_n(axis.middle(s))},{_n(y(v))}" for s, v in run if v is not None)
            shapes.append(f'<polyline points="{points}" fill="none" stroke="{CURVE}" stroke-width="1.4"/>')
    for known, part in groupby(line.points, key=lambda point: point[1] is not None):
        run = list(part)
        if not known:
            x = axis.middle(run[0][0])
            words = "NaN" if len(run) == 1 else f"NaN × {len(run)}"
            shapes.append(f'<path d="M{_n(x)} {_n(top + 2)}l5 9h-10z" fill="{BAD}"/>')
            end = x > WIDTH - 90
            shapes.append(
                _text(x - 8 if end else x + 8, top + 11, words, anchor="end" if end else "start", colour=BAD)
            )
    return shapes


def _range(values: Iterable[float], log: bool) -> tuple[float, float]:
    scaled = [math.log10(value) if log else value for value in values]
    low, high = min(scaled), max(scaled)
    pad = (high - low) * 0.06 or (0.5 if log else max(abs(high) * 0.1, 1e-6))
    return low - pad, high + pad


def _ticks(low: float, high: float, log: bool) -> list[tuple[float, str]]:
    if log and high - low >= 1:
        decades = range(math.ceil(low), math.floor(high) + 1)
        every = max(1, len(decades) // 4)
        return [(decade, _short(10.0**decade)) for decade in list(decades)[::every]]
    span = high - low
    step = 10.0 ** math.floor(math.log10(span / 3))
    step = next(step * by for by in (1, 2, 5, 10) if span / (step * by) <= 4)
    first = math.ceil(low / step)
    ticks = [(first + index) * step for index in range(int((high - first * step) / step) + 1)]
    return [(tick, _short(10.0**tick if log else tick)) for tick in ticks]


def _back(value: float, log: bool) -> float:
    return 10.0**value if log else value


def _short(value: float) -> str:
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.3g}"
    head, _, exponent = f"{value:.1e}".partition("e")
    return f"{head.removesuffix('.0')}e{int(exponent)}"


def _cells(plane: Codes, axis: Axis, each: float, colours: dict[int, str]) -> list[str]:
    """Return one rectangle per run of equal cells in a row; outside is the surface, healthy the ground."""
    shapes = []
    for row, codes in enumerate(plane.tolist()):
        at = 0
        for code, run in groupby(codes):
            length = sum(1 for _ in run)
            colour = SURFACE if code == OUTSIDE else colours.get(code)
            if colour is not None:
                x = axis.x(axis.first + at)
                width = axis.x(axis.first + at + length) - x
                shapes.append(_rect(x, TOP + row * each, width, each, colour))
            at += length
    return shapes


def _row_labels(names: Sequence[str], each: float) -> list[str]:
    every = max(1, math.ceil(13 / each))
    return [
        _text(
            LEFT - 6, TOP + (row + 0.5) * each + 4, name if len(name) <= 16 else f"{name[:15]}…", anchor="end"
        )
        for row, name in enumerate(names)
        if row % every == 0
    ]


def _steps(axis: Axis, y: float) -> list[str]:
    span = axis.last - axis.first + 1
    step = 10 ** math.floor(math.log10(max(1, span / 5)))
    step = next(step * by for by in (1, 2, 5, 10) if span / (step * by) <= 8)
    shapes = [f'<path d="M{LEFT} {_n(y)}H{WIDTH - RIGHT}" stroke="{LINE}"/>']
    for at in range(-(-axis.first // step) * step, axis.last + 1, step):
        x = axis.middle(at)
        shapes.append(f'<path d="M{_n(x)} {_n(y)}v4" stroke="{TEXT2}"/>')
        shapes.append(_text(x, y + 16, f"{at:,}", anchor="middle", colour=TEXT2))
    return shapes


def _legend(entries: Sequence[tuple[str, str]], y: float) -> list[str]:
    shapes, x = [], float(LEFT)
    for words, colour in entries:
        shapes.append(_rect(x, y - 9, 10, 10, colour))
        shapes.append(_text(x + 14, y, words, colour=TEXT2))
        x += 30 + 6.2 * len(words)
    return shapes


def _guide(axis: Axis, step: int, height: float) -> list[str]:
    x = _n(axis.middle(step))
    shown = f"step {step:,}"
    return [
        f'<path d="M{x} {TOP}v{_n(height)}" stroke="{TEXT}" stroke-opacity="0.5"/>',
        _text(float(x), TOP - 8, shown, anchor="middle" if LEFT + 40 < float(x) < WIDTH - 50 else "end"),
    ]


def _ring(x: float, y: float, radius: int) -> str:
    circle = f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{radius}" fill="none"'
    return f'{circle} stroke="{SURFACE}" stroke-width="5"/>{circle} stroke="{TEXT}" stroke-width="2"/>'


def _label(axis: Axis, step: int, y: float, words: str) -> str:
    x = axis.middle(step)
    right = x < LEFT + PLOT * 0.3
    at, anchor = (x + 14, "start") if right else (x - 14, "end")
    halo = f'stroke="{HEALTHY}" stroke-width="4" stroke-linejoin="round" paint-order="stroke"'
    return _text(at, y, words, anchor=anchor, extra=f' font-weight="600" {halo}')


def _rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    return (
        f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" fill="{colour}"'
        ' shape-rendering="crispEdges"/>'
    )


def _text(
    x: float,
    y: float,
    words: str,
    *,
    anchor: str = "start",
    colour: str = TEXT,
    size: int = 11,
    extra: str = "",
) -> str:
    place = f'x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}" fill="{colour}" font-size="{size}"{extra}'
    return f"<text {place}>{html.escape(words)}</text>"


def _svg(height: float, words: str, shapes: Sequence[str]) -> str:
    shape = f'viewBox="0 0 {WIDTH} {_n(height)}" width="{WIDTH}" height="{_n(height)}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {shape} role="img" font-family="{FONT}">'
    return "\n".join([head, f"<title>{html.escape(words)}</title>", *shapes, "</svg>"])


def _n(value: float) -> str:
    """Return a coordinate to a tenth of a pixel, without a trailing zero or a negative zero."""
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text
