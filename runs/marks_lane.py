"""The lane of marks over a stack: words at their step, none of which runs into another."""

from collections.abc import Sequence

from runs.stack import Row, Stack

MERGE_PX = 12  # marks closer than this are one mark with a count
CHARACTER_PX, WORDS_APART_PX = 5.4, 10  # of the lane's 11 px letters, and between two of its words


class Lane:
    """Where words stand in a lane of marks, so that no two run together."""

    def __init__(self, width_px: float) -> None:
        """Begin with an empty lane."""
        self.width_px = width_px
        self.taken: list[tuple[float, float]] = []

    def side(self, x_px: float, text: str, *, strong: bool) -> str:
        """Return the side of a tick on which its words find room, and take it; "" where there is none.

        What is strong stands right of its tick first, the rest left; what is strong always stands. Where
        words do not fit the tick alone stands: the words are in the lists below the figure.
        """
        long = len(text) * CHARACTER_PX
        spans = {"right": (x_px, x_px + long), "left": (x_px - long, x_px)}
        order = ("right", "left") if strong else ("left", "right")
        free = [one for one in order if self._free(*spans[one])]
        at_end = x_px + long > self.width_px
        chosen = free[0] if free else ("left" if at_end else "right") if strong else ""
        if chosen:
            self.taken.append(spans[chosen])
        return chosen

    def _free(self, low: float, high: float) -> bool:
        inside = low >= 0 and high <= self.width_px
        apart = WORDS_APART_PX
        return inside and all(high + apart <= one or low >= other + apart for one, other in self.taken)


def add(stack: Stack, row: Row, marks: Sequence[tuple[int, str, bool]], width_px: int) -> None:
    """Add the marks lane: (step, words, strong), merged with a count where they would touch.

    What is strong merges only with what is strong, and keeps its words.
    """
    per_unit = width_px / (stack.range[1] - stack.range[0])
    placed: list[tuple[float, list[str], bool]] = []
    for step, words, strong in sorted(marks):
        if not stack.step_first <= step <= stack.step_last:
            continue
        x = stack.x(step)
        if placed and strong == placed[-1][2] and (x - placed[-1][0]) * per_unit < MERGE_PX:
            placed[-1][1].append(words)
        else:
            placed.append((x, [words], strong))
    lane = Lane(width_px)
    for x, words_of, strong in sorted(placed, key=lambda one: not one[2]):
        said = words_of[: 2 if strong else 1]
        more = f" and {len(words_of) - len(said)} more" if len(words_of) > len(said) else ""
        text = " · ".join(said) + more
        colour = "var(--text)" if strong else "var(--line2)"
        stack.shapes.append(
            {
                "type": "line",
                "xref": "x",
                "yref": row.y,
                "x0": x,
                "x1": x,
                "y0": 0,
                "y1": 1,
                "line": {"color": colour, "width": 1},
            }
        )
        side = lane.side((x - stack.range[0]) * per_unit, text, strong=strong)
        if side:
            stack.annotations.append(
                {
                    "xref": "x",
                    "yref": row.y,
                    "x": x,
                    "y": 0.5,
                    "text": f"<b>{text}</b>" if strong else text,
                    "showarrow": False,
                    "xanchor": "left" if side == "right" else "right",
                    "xshift": 3 if side == "right" else -3,
                    "font": {"size": 11, "color": "var(--text)" if strong else "var(--text2)"},
                }
            )
