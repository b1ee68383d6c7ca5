"""Goodput: the share of allocated GPU time whose progress was kept, and where the rest went.

The time from an attempt's launch to the next one's is split, in wall-clock time, at its first step, at the
last step that is still in the weights, and at its last step; what lies under a hold is held, whatever else
it was. Names are those of ml-goodput (`BadputType` in ml_goodput_measurement), with three it lacks:
`NUMERIC_ROLLBACK`, `HELD_FOR_APPROVAL` and `HELD_BY_FALSE_ALARM`. Productive is what the kept steps need at
the attempt's own median step time; the remainder of their time is `OTHER` (saves, evaluation, stalls).

Times are seconds since the epoch; amounts are GPU-seconds.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Literal

import msgspec

Cause = Literal[
    "PRODUCTIVE",
    "PROGRAM_STARTUP",
    "NUMERIC_ROLLBACK",
    "WASTED_PROGRESS_FROM_DISRUPTION",
    "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    "HELD_FOR_APPROVAL",
    "FALSE_ALARM",
    "OTHER",
]
CAUSES: dict[Cause, str] = {
    "PRODUCTIVE": "steps that were kept",
    "PROGRAM_STARTUP": "from a launch to its first step",
    "NUMERIC_ROLLBACK": "steps thrown away by a rollback that was approved",
    "WASTED_PROGRESS_FROM_DISRUPTION": "steps thrown away because an attempt ended after its checkpoint",
    "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION": "from the last step of an attempt to the next launch",
    "HELD_FOR_APPROVAL": "held until somebody let the run go on",
    "FALSE_ALARM": "false alarms of Andon: held and started again, and nothing was wrong",
    "OTHER": "saves, evaluation and stalls between kept steps",
}


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """When an attempt did what.

    Args:
        gpus: how many it had; None: not told, and nothing of it is counted.
        launched: its launch. `ended`: when it exited, None while it runs or where nobody said.
        first, last: when its first and last step were done; None: it made no step.
        kept_to: when the last step that is in the weights was done; None: none of its steps is.
        kept_steps: how many these are.
        step_s: its median step time; None: not known, and its kept time counts as productive.
        numeric: its thrown steps were given up by an approved rollback, not lost in a crash.
        false_alarm: the incident after whose false alarm it began, "" = none.
    """

    number: int
    gpus: int | None
    launched: float
    ended: float | None = None
    first: float | None = None
    last: float | None = None
    kept_to: float | None = None
    kept_steps: int = 0
    step_s: float | None = None
    numeric: bool = False
    false_alarm: str = ""


class Hold(msgspec.Struct, frozen=True):
    """A time under a hold. `incident`: which one, "" = none."""

    start: float
    end: float
    incident: str = ""
    false_alarm: bool = False


class Span(msgspec.Struct, frozen=True):
    """A stretch of time of all GPUs of an attempt. `share` of it is `cause`, the rest is OTHER."""

    start: float
    end: float
    gpus: int
    cause: Cause
    attempt: int
    share: float = 1.0
    incident: str = ""

    def within(self, start: float, end: float) -> "Span | None":
        """Return the part between two moments, None where there is none."""
        low, high = max(self.start, start), min(self.end, end)
        return None if low >= high else msgspec.structs.replace(self, start=low, end=high)

    @property
    def amount(self) -> float:
        """GPU-seconds of its cause."""
        return (self.end - self.start) * self.gpus * self.share


def spans(attempts: Sequence[Attempt], holds: Iterable[Hold], until: float) -> list[Span]:
    """Return where the time of a run went, from its first launch to `until`, in order and without a gap.

    Args:
        attempts: in the order of their launches.
        holds: not overlapping.
        until: the end of what is counted: the run's end, its last sign of life, or now while it is held.
    """
    found: list[Span] = []
    held = sorted(holds, key=lambda hold: hold.start)
    for attempt, following in zip(attempts, [*attempts[1:], None], strict=True):
        end = until if following is None else min(until, following.launched)
        if attempt.gpus:
            for span in _of(attempt, end, following):
                found += _under(span, held)
    return found


def _of(attempt: Attempt, end: float, following: Attempt | None) -> list[Span]:
    gpus, number = attempt.gpus or 0, attempt.number
    step_s = attempt.step_s or 0.0
    first = end if attempt.first is None else attempt.first - step_s
    last = first if attempt.last is None else attempt.last
    kept_to = first if attempt.kept_to is None else attempt.kept_to
    cuts = [attempt.launched]
    for cut in (first, kept_to, last, end):
        # A clock that is off, or a launch told late, must not make time run backwards.
        cuts.append(min(max(cut, cuts[-1]), max(end, cuts[-1])))
    thrown: Cause = "NUMERIC_ROLLBACK" if attempt.numeric else "WASTED_PROGRESS_FROM_DISRUPTION"
    # What follows the last step of a run that still runs is its next step, or a save.
    runs_on = following is None and attempt.ended is None
    after: Cause = "OTHER" if runs_on else "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION"
    before, ends = attempt.false_alarm, following.false_alarm if following is not None else ""
    pieces: tuple[tuple[Cause, str], ...] = (
        ("FALSE_ALARM", before) if before else ("PROGRAM_STARTUP", ""),
        ("PRODUCTIVE", ""),
        ("FALSE_ALARM", ends) if ends else (thrown, ""),
        ("FALSE_ALARM", ends) if ends else (after, ""),
    )
    # Of the whole time its kept steps took, also where only a part of it is counted.
    needed = attempt.kept_steps * step_s
    share = min(1.0, needed / (kept_to - first)) if needed and kept_to > first else 1.0
    made = []
    for (low, high), (cause, incident) in zip(pairwise(cuts), pieces, strict=True):
        if high > low:
            part = share if cause == "PRODUCTIVE" else 1.0
            made.append(Span(low, high, gpus, cause, number, part, incident))
    return made


def _under(span: Span, holds: Iterable[Hold]) -> list[Span]:
    """Split a span by the holds that lie over it. What was productive stays so in what is left."""
    left: list[Span] = []
    at = span.start
    for hold in holds:
        part = Span(hold.start, hold.end, 1, "OTHER", 0).within(at, span.end)
        if part is None:
            continue
        if part.start > at:
            left.append(msgspec.structs.replace(span, start=at, end=part.start))
        cause: Cause = "FALSE_ALARM" if hold.false_alarm else "HELD_FOR_APPROVAL"
        left.append(Span(part.start, part.end, span.gpus, cause, span.attempt, 1.0, hold.incident))
        at = part.end
    if at < span.end:
        left.append(msgspec.structs.replace(span, start=at))
    return left


def amounts(found: Iterable[Span], start: float, end: float) -> dict[Cause, float]:
    """Return GPU-seconds by cause between two moments; causes without any are left out."""
    total: dict[Cause, float] = {}
    for span in found:
        part = span.within(start, end)
        if part is None:
            continue
        total[part.cause] = total.get(part.cause, 0.0) + part.amount
        rest = (part.end - part.start) * part.gpus - part.amount
        if rest > 0:
            total["OTHER"] = total.get("OTHER", 0.0) + rest
    return total


def kept(total: dict[Cause, float]) -> tuple[float, float]:
    """Return productive and allocated GPU-seconds."""
    return total.get("PRODUCTIVE", 0.0), sum(total.values())
