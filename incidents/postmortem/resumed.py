"""After the resume: how the watch ended, and the loss over the steps that were run again."""

from andon.postmortem import figures as draw
from andon.postmortem.document import Figure, Item
from incidents import resumed, watching
from incidents.postmortem.book import Book
from incidents.postmortem.facts import Facts
from incidents.postmortem.words import plain


def after(book: Book, facts: Facts) -> list[Item]:
    """Return a sentence for each end of a watch, and a figure for the newest resume that ran steps again."""
    ends = [row for row in facts.ledger if row.action == watching.ACTION]
    items: list[Item] = [book.say(f"The watch ended: {plain(row.why)}.", row) for row in ends]
    # Once its watch is over an attempt is past what it ran again: the figure moves no more.
    over = {row.attempt for row in ends}
    done = [one for one in resumed.of_incident(facts.incident) if one.new in over]
    figures = [_figure(book, facts, one) for one in done]
    drawn = [figure for figure in figures if figure is not None]
    return [*items, *drawn[-1:]]


def _figure(book: Book, facts: Facts, one: resumed.Resumed) -> Figure | None:
    found = resumed.losses(facts.incident.run, one)
    if found is None or one.after is None or not found.overlap.steps:
        return None
    last = max(step for step in found.old if step > one.after)
    axis = draw.Axis(one.after + 1, last)
    lines, rows = [], ["attempt,step,loss"]
    for attempt, values in ((one.old, found.old), (one.new, found.new)):
        points = tuple((step, values[step]) for step in sorted(values) if axis.first <= step <= axis.last)
        lines.append(draw.Curve(f"Loss, attempt {attempt}", False, points))
        rows += [f"{attempt},{at},{'nonfinite' if value is None else f'{value:.6g}'}" for at, value in points]
    svg = draw.curves(lines, axis, step=one.until)
    text = f"Attempt {one.new} against attempt {one.old}: {found.overlap.says()}."
    return Figure(
        "resumed",
        "Figure 4, loss over the steps run again",
        book.say(text, one.permit),
        svg,
        "\n".join(rows) + "\n",
    )
