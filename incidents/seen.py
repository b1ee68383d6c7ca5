"""What a run actually saw, as pages, API and command show it."""

from collections.abc import Iterable
from dataclasses import dataclass

from andon.intervals import Window, Windows, total
from andon.seen import Of, Seen, seen
from incidents import attempt_history
from runs import formatting as words
from runs.models import Run

BAR_PX = 600
RANGES = 12  # windows named on a page; the rest is in the JSON


class NotKnown(LookupError):
    """There is no such step of such an attempt; the text says what there is."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of sample: its name, how many, and which."""

    name: str
    says: str
    samples: int
    ranges: list[str]
    more: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a bar, in pixels of `BAR_PX`."""

    kind: str  # kept | thrown | skipped | dropped | again
    x: float
    width: float


@dataclass(frozen=True, slots=True)
class Bar:
    """One attempt: a bar over the samples, and its steps in words."""

    number: int
    says: str
    pieces: list[Piece]


@dataclass(frozen=True, slots=True)
class View:
    """The answer for a page."""

    seen: Seen
    kinds: list[Kind]
    bars: list[Bar]
    first: int
    last: int
    lineage: str


def of_run(run: Run, *, attempt: int | None = None, step: int | None = None) -> Seen | None:
    """Return what the weights of a run saw; None before any attempt.

    Args:
        attempt: whose weights; None: of the newest attempt.
        step: after which step of it; None: the last one it reached.

    Raises:
        NotKnown: there is no such attempt or step.
    """
    attempts = attempt_history.attempts_of(run)
    if not attempts and attempt is None:
        return None
    by_number = {one.number: one for one in attempts}
    chosen = by_number.get(max(by_number) if attempt is None else attempt) if by_number else None
    if chosen is None:
        raise NotKnown(f"There is no attempt {attempt} of {run.slug}.")
    try:
        return seen(attempts, chosen.number, chosen.last if step is None else step)
    except ValueError as error:
        raise NotKnown(
            f"{str(error).capitalize()}; attempt {chosen.number} has steps"
            f" {chosen.began + 1:,} to {chosen.last:,}."
        ) from error


def view(answer: Seen) -> View:
    """Return the answer in words and bars."""
    every = [window for one in answer.attempts for window in (*one.kept, *one.thrown, *one.skipped)]
    first = min((window.start for window in every), default=0)
    last = max((window.stop for window in every), default=0)
    return View(
        seen=answer,
        kinds=[_kind(*line) for line in _lines(answer)],
        bars=[Bar(one.number, _steps(one), _pieces(one, first, last)) for one in answer.attempts],
        first=first,
        last=max(first, last - 1),
        lineage=_lineage(answer),
    )


def _lines(answer: Seen) -> list[tuple[str, str, Windows]]:
    lines = [
        ("trained", "their updates are in the weights", answer.trained),
        ("repeated", "in the weights more than once", answer.repeated),
        ("replayed", "trained, rolled back, and trained again", answer.replayed),
        ("rolled back", "trained once, by steps that were thrown away", answer.rolled_back),
        ("skipped", "left out on purpose", answer.skipped),
        ("not applied", "read, and the update of the step was dropped", answer.dropped),
        ("unaccounted", "passed by the loader, and nothing says what became of them", answer.unaccounted),
    ]
    return lines


def _kind(name: str, says: str, windows: Windows) -> Kind:
    return Kind(
        name, says, total(windows), [span(one) for one in windows[:RANGES]], max(0, len(windows) - RANGES)
    )


def span(window: Window) -> str:
    """Return "28,800–35,199", first and last sample of a window."""
    if window.stop == window.start + 1:
        return words.count(window.start)
    return f"{words.count(window.start)}{words.RANGE}{words.count(window.stop - 1)}"


def _lineage(answer: Seen) -> str:
    steps = [
        f"attempt {number} steps {span(Window(first, last + 1))}" for number, first, last in answer.lineage
    ]
    return ", then ".join(steps) or "no step yet"


def _steps(one: Of) -> str:
    kept = f"steps {span(one.kept_steps)} kept" if one.kept_steps else "no step kept"
    return kept + (f", {span(one.thrown_steps)} thrown away" if one.thrown_steps else "")


def _pieces(one: Of, first: int, last: int) -> list[Piece]:
    scale = BAR_PX / max(1, last - first)

    def drawn(kind: str, windows: Iterable[Window]) -> list[Piece]:
        return [
            Piece(
                kind,
                round((window.start - first) * scale, 1),
                # Narrower than a pixel it would not be seen at all.
                max(1.0, round((window.stop - window.start) * scale, 1)),
            )
            for window in windows
        ]

    return [
        *drawn("kept", one.kept),
        *drawn("thrown", one.thrown),
        *drawn("skipped", one.skipped),
        *drawn("again", one.again),
        *drawn("dropped", one.dropped),
    ]
