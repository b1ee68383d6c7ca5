"""A stack of rows on one axis of steps, or of time, as one Plotly figure, laid out in pixels on the server.

One figure and one x axis, so that a zoom is one relayout and the spike line crosses every row.
Colours are left as `var(--token)`; the page's script puts in the tokens of the theme at draw time.
Attributes: Plotly figure reference (https://plotly.com/javascript/reference/).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runs import formatting
from runs.grid_clock import Clock
from runs.queries import Point

AXIS_PX = 18  # tick labels under the last row: the figure's bottom margin
NAN_AT = 0.86  # where nonfinite marks stand on a row's hidden 0..1 axis
MARKS_ACROSS = 70  # nonfinite marks over the width, which at 12 px each still stand beside each other
FORMS = {"loss": ".4g", "lr": ".2g"}  # of values under the pointer; others have three digits

JSON = dict[str, Any]


@dataclass(slots=True)
class Row:
    """One row: its name, height and the free space above it (for a caption), in pixels."""

    name: str
    height: int
    above: int = 0
    axis: JSON = field(default_factory=dict)
    top: int = 0
    number: int = 0

    @property
    def y(self) -> str:
        """Name of the row's axis in a trace (`y`, `y2`)."""
        return "y" if self.number == 1 else f"y{self.number}"


class Stack:
    """Rows from top to bottom, with the traces, shapes and annotations that belong to them."""

    def __init__(
        self, rows: Sequence[Row], *, step_first: int, step_last: int, key: str, clock: Clock | None = None
    ) -> None:
        """Lay out `rows`; the x axis runs from half a step before to half a step after, or over a clock."""
        self.rows = {row.name: row for row in rows}
        self.step_first, self.step_last, self.clock = step_first, step_last, clock
        self.range = [step_first - 0.5, step_last + 0.5]
        if clock is not None:
            self.range = [clock.begin, clock.end]
        self.traces: list[JSON] = []
        self.shapes: list[JSON] = []
        self.annotations: list[JSON] = []
        self.overlays: dict[str, JSON] = {}
        self._key = key
        top = 0
        for number, row in enumerate(rows, start=1):
            row.number = number
            row.top = top + row.above
            top = row.top + row.height
        self.height = top + AXIS_PX
        self._plot_px = top
        self._last = rows[-1]

    def x(self, step: float) -> float:
        """Return where a step lies on the x axis."""
        return step if self.clock is None else self.clock.at(step)

    def xs(self, steps: Sequence[int]) -> list[float]:
        """Return where many steps lie on the x axis."""
        if self.clock is None:
            return list(steps)
        return [round(at, 3) for at in self.clock.of(steps)]

    def domain(self, row: Row) -> list[float]:
        """Return the row's share of the plot, from its bottom."""
        return [
            max(0.0, 1 - (row.top + row.height) / self._plot_px),
            min(1.0, 1 - row.top / self._plot_px),
        ]

    def overlay(self, row: Row) -> str:
        """Return the name of a hidden 0..1 axis over `row`, for marks that have no value."""
        number = len(self.rows) + row.number
        self.overlays[f"yaxis{number}"] = {
            "overlaying": row.y,
            "range": [0, 1],
            "visible": False,
            "fixedrange": True,
        }
        return f"y{number}"

    def image(self, row: Row, url: str, *, width: int, height: int, y_first: float, y_last: float) -> None:
        """Add a tile that fills `row`; the page's script fetches `url` and puts its bytes in.

        Plotly's `x0` is the centre of the first pixel, not its edge.
        """
        dx = (self.range[1] - self.range[0]) / width
        dy = (y_last - y_first + 1) / height
        self.traces.append(
            {
                "type": "image",
                "source": "",
                "meta": {"tile": url, "size": [width, height]},
                "x0": self.range[0] + dx / 2,
                "dx": dx,
                "y0": y_first - 0.5 + dy / 2,
                "dy": dy,
                "yaxis": row.y,
                "zsmooth": False,
                "hoverinfo": "skip",
            }
        )

    def curve(
        self,
        row: Row,
        points: Sequence[Point],
        words: str,
        form: str,
        *,
        colour: str = "var(--curve)",
        who: Mapping[int, str] | None = None,
    ) -> None:
        """Add a line that stops before nonfinite values and marks them at the row's upper edge.

        Args:
            who: words for the lanes that said a value, by the key that points carry.
        """
        finite = [point["value"] for point in points]
        trace: JSON = {
            "type": "scatter",
            "mode": "lines" if sum(v is not None for v in finite) > 1 else "markers",
            "x": self.xs([point["step"] for point in points]),
            "y": finite,
            "yaxis": row.y,
            "line": {"color": colour, "width": 1.4 if colour == "var(--curve)" else 1, "simplify": False},
            "marker": {"color": colour, "size": 5},
            "connectgaps": False,
            "name": words,
            "hovertemplate": f"{words} %{{y:{FORMS.get(form, '.3g')}}}<extra></extra>",
        }
        if who and any("who" in point for point in points):
            trace["text"] = [
                f" on {formatting.figure_text(who[point['who']])}" if point.get("who") in who else ""
                for point in points
            ]
            trace["hovertemplate"] = f"{words} %{{y:.4g}}%{{text}}<extra></extra>"
        self.traces.append(trace)
        marks = nonfinite_runs(points, apart=(self.step_last - self.step_first) // MARKS_ACROSS)
        near_end = self.step_last - 0.12 * (self.step_last - self.step_first)
        if marks:
            self.traces.append(
                {
                    "type": "scatter",
                    "mode": "markers+text",
                    "x": [self.x(step) for step, _, _ in marks],
                    "y": [NAN_AT] * len(marks),
                    "yaxis": self.overlay(row),
                    "marker": {"symbol": "triangle-up", "size": 9, "color": "var(--bad)"},
                    "text": [
                        f" {word}" + (f" × {number:,}" if number > 1 else "") for _, word, number in marks
                    ],
                    "textposition": [
                        "middle left" if step > near_end else "middle right" for step, _, _ in marks
                    ],
                    "textfont": {"color": "var(--bad)", "size": 11},
                    "cliponaxis": False,
                    "name": f"{words} nonfinite",
                    "hovertemplate": f"{words}%{{text}}<extra></extra>",
                }
            )

    def bar(self, row: Row, first: float, last: float, y: float, *, newest: bool) -> None:
        """Add a bar over some steps; the newest of several is drawn in full."""
        self.shapes.append(
            {
                "type": "line",
                "xref": "x",
                "yref": row.y,
                "x0": first,
                "x1": last,
                "y0": y,
                "y1": y,
                "line": {"color": "var(--text)" if newest else "var(--line2)", "width": 3},
            }
        )

    def thin(self, row: Row, steps: Sequence[int], values: Sequence[float | None], words: str) -> None:
        """Add a thin line of something beside the named one: another replica, an abandoned tail."""
        self.traces.append(
            {
                "type": "scatter",
                "mode": "lines" if len(steps) > 1 else "markers",
                "x": [self.x(step) for step in steps],
                "y": list(values),
                "yaxis": row.y,
                "line": {"color": "var(--line2)", "width": 1, "simplify": False},
                "marker": {"color": "var(--line2)", "size": 4},
                "connectgaps": False,
                "name": words,
                "hovertemplate": f"{words} %{{y:.3g}}<extra></extra>",
            }
        )

    def band(self, row: Row, steps: Sequence[int], low: Sequence[float], high: Sequence[float]) -> None:
        """Add the detector's baseline band behind the row's line."""
        edge = {"width": 0, "color": "var(--band)"}
        shared = {
            "type": "scatter",
            "mode": "lines",
            "x": [self.x(step) for step in steps],
            "yaxis": row.y,
            "line": edge,
            "hoverinfo": "skip",
        }
        self.traces.append({**shared, "y": list(low)})
        self.traces.append({**shared, "y": list(high), "fill": "tonexty", "fillcolor": "var(--band)"})

    def median(self, row: Row, steps: Sequence[int], middle: Sequence[float]) -> None:
        """Add the dashed median of the baseline."""
        self.traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": [self.x(step) for step in steps],
                "y": list(middle),
                "yaxis": row.y,
                "line": {"color": "var(--line2)", "width": 1, "dash": "3px,3px"},
                "hoverinfo": "skip",
            }
        )

    def guide(self, step: int) -> None:
        """Add the thin line at one step through all rows, and not through the words between them."""
        if not self.step_first <= step <= self.step_last:
            return
        for row in self.rows.values():
            self.shapes.append(
                {
                    "type": "line",
                    "xref": "x",
                    "yref": f"{row.y} domain",
                    "x0": self.x(step),
                    "x1": self.x(step),
                    "y0": 0,
                    "y1": 1,
                    "opacity": 0.5,
                    "line": {"color": "var(--text)", "width": 1},
                }
            )

    def ring(self, row: Row, step: int, y: float, *, radius: int = 8) -> None:
        """Add the ring of a first-bad cell, with a halo so that it shows on every state."""
        for radius_px, colour, width in ((radius + 2, "var(--surface)", 2), (radius, "var(--text)", 2)):
            self.shapes.append(
                {
                    "type": "circle",
                    "xref": "x",
                    "yref": row.y,
                    "xsizemode": "pixel",
                    "ysizemode": "pixel",
                    "xanchor": self.x(step),
                    "yanchor": y,
                    "x0": -radius_px,
                    "x1": radius_px,
                    "y0": -radius_px,
                    "y1": radius_px,
                    "line": {"color": colour, "width": width},
                }
            )

    def bracket(self, row: Row, step: int, y_first: float, y_last: float) -> None:
        """Add one bracket beside a column: many tied ranks, or a rank that is not known."""
        for x0, x1, y0, y1 in (
            (-7, -7, y_first, y_last),
            (-7, -2, y_first, y_first),
            (-7, -2, y_last, y_last),
        ):
            self.shapes.append(
                {
                    "type": "line",
                    "xref": "x",
                    "yref": row.y,
                    "xsizemode": "pixel",
                    "xanchor": self.x(step),
                    "x0": x0,
                    "x1": x1,
                    "y0": y0,
                    "y1": y1,
                    "line": {"color": "var(--text)", "width": 2},
                }
            )

    def label(self, row: Row, step: float, y: float, text: str, *, right: bool = False) -> None:
        """Add a boxed label left (or right) of a cell; the anchor keeps it inside the row."""
        self.annotations.append(
            {
                "xref": "x",
                "yref": row.y,
                "x": self.x(step),
                "y": y,
                "text": text,
                "showarrow": False,
                "xanchor": "left" if right else "right",
                "xshift": 14 if right else -14,
                "bgcolor": "var(--surface)",
                "bordercolor": "var(--line2)",
                "borderpad": 2,
                "font": {"size": 12, "color": "var(--text)", "weight": 600},
            }
        )

    def ticks(self) -> JSON:
        """Return what marks the x axis: round steps, or round times of day in UTC."""
        if self.clock is None:
            return {"tickformat": ",d", "nticks": 8}
        values, texts = self.clock.ticks()
        return {"tickmode": "array", "tickvals": values, "ticktext": texts}

    def figure(self) -> JSON:
        """Return `data` and `layout` for Plotly, with the rows' places in `layout.meta`."""
        layout: JSON = {
            "template": None,
            "autosize": True,
            "height": self.height,
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"family": "var(--sans)", "size": 11, "color": "var(--text2)"},
            "margin": {"l": "var(--gutter)", "r": 0, "t": 0, "b": AXIS_PX, "pad": 0},
            "showlegend": False,
            "hovermode": "x",
            "hoverdistance": 24,
            "spikedistance": -1,
            "dragmode": "zoom",
            "uirevision": self._key,
            "separators": ".,",
            "colorway": ["var(--curve)"],
            "hoverlabel": {
                "bgcolor": "var(--surface)",
                "bordercolor": "var(--line2)",
                "font": {"size": 12, "color": "var(--text)"},
            },
            "shapes": self.shapes,
            "annotations": self.annotations,
            "xaxis": {
                "anchor": self._last.y,
                "range": self.range,
                **self.ticks(),
                "ticks": "outside",
                "ticklen": 3,
                "tickcolor": "var(--line2)",
                "showgrid": False,
                "zeroline": False,
                "showspikes": True,
                "spikemode": "across",
                "spikethickness": 1,
                "spikedash": "solid",
                "spikecolor": "var(--text)",
                "spikesnap": "cursor",
                "constrain": "range",
            },
            "meta": {
                "rows": {row.name: [row.top, row.height] for row in self.rows.values()},
                "steps": [self.step_first, self.step_last],
                "clock": None if self.clock is None else self.clock.document(),
            },
        }
        for row in self.rows.values():
            layout["yaxis" + ("" if row.number == 1 else str(row.number))] = {
                "domain": self.domain(row),
                "fixedrange": True,
                "nticks": 4,
                "gridcolor": "var(--sunken)",
                "zeroline": False,
                "automargin": False,
                **row.axis,
            }
        layout.update(self.overlays)
        return {"data": self.traces, "layout": layout}


def nonfinite_runs(points: Sequence[Point], *, apart: int = 0) -> list[tuple[int, str, int]]:
    """Return (first step, word, how many) for each run of nonfinite points of one kind.

    Args:
        apart: runs of one kind that begin no further apart than this many steps would touch, and are one.
    """
    found: list[tuple[int, str, int]] = []
    open_run = False
    for point in points:
        word = formatting.nonfinite(point["flag"]) if point["value"] is None else None
        if word is None:
            open_run = False
            continue
        count = point.get("count", 1)
        near = bool(found) and 0 <= point["step"] - found[-1][0] <= apart
        if (open_run or near) and found[-1][1] == word:
            found[-1] = (found[-1][0], word, found[-1][2] + count)
        else:
            found.append((point["step"], word, count))
        open_run = True
    return found


def value_axis(title: str = "", **more: Any) -> JSON:
    """Return the axis of a row of values: few ticks, hairline grid."""
    return {"showgrid": True, "ticks": "", **({"title": {"text": title}} if title else {}), **more}
