"""After the resume, on the incident's page: how far the watch is, how it ended, and the loss run again."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from incidents import buttons, resumed, watching
from incidents.incident_page import IncidentPage
from incidents.models import Incident
from runs import formatting as words
from runs.models import RunProgress

WIDTH, HEIGHT = 600, 120
_PAD = 4


@dataclass(frozen=True, slots=True)
class End:
    """How one watch ended, from its row of the ledger."""

    at: datetime
    clean: bool
    says: str
    row: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """The loss of two attempts over the steps that both ran, as numbers and as lines."""

    old: int
    new: int
    says: str
    outcome: str
    old_lines: list[str]  # `points` of polylines: broken where the loss was nonfinite
    new_lines: list[str]
    bad_x: float | None  # the first bad step of the older attempt
    first: int
    last: int
    low: str
    high: str


@dataclass(frozen=True, slots=True)
class Watch:
    """What happened since the run went on."""

    now: str  # "412 of 500 steps clean", "" when nothing is watched
    attempt: int | None
    until: int | None
    ends: list[End]
    comparisons: list[Comparison]


def of_page(page: IncidentPage) -> Watch | None:
    """Return what to show, None while the run has not gone on and nothing was watched."""
    incident = page.incident
    done = resumed.of_incident(incident)
    ends = [
        End(
            row.at,
            (row.detector or {}).get("numbers", {}).get("outcome") == "clean",
            row.why[:1].upper() + row.why[1:],
            row.seq,
        )
        for row in watching.ends(incident)
    ]
    watched = incident.state in Incident.UNRESOLVED and incident.watch_until_step is not None
    if not (done or ends or watched):
        return None
    progress = RunProgress.objects.filter(run_id=incident.run_id).first()
    drawn = [_comparison(page, one) for one in reversed(done)]
    return Watch(
        now=buttons.watch_words(incident, progress) if watched else "",
        attempt=incident.watch_attempt,
        until=incident.watch_until_step,
        ends=ends[::-1],
        comparisons=[one for one in drawn if one is not None],
    )


def _comparison(page: IncidentPage, one: resumed.Resumed) -> Comparison | None:
    found = resumed.losses(page.run, one)
    if found is None or one.after is None:
        return None
    overlap = found.overlap
    reached = max((step for step in found.old if step > one.after), default=one.after)
    # As many steps past the overlap as it has, so that one sees where the newer attempt goes.
    last = max(reached, min(max(found.new, default=reached), 2 * reached - one.after))
    old = {step: value for step, value in found.old.items() if one.after < step <= last}
    new = {step: value for step, value in found.new.items() if one.after < step <= last}
    finite = [value for value in (*old.values(), *new.values()) if value is not None]
    if not finite:
        return None
    low, high = min(finite), max(finite)
    span = (low, high, one.after + 1, max(last, one.after + 2))
    bad = one.until is not None and one.after < one.until <= last
    return Comparison(
        old=one.old,
        new=one.new,
        says=overlap.says(),
        outcome=overlap.outcome,
        old_lines=_lines(old, *span),
        new_lines=_lines(new, *span),
        bad_x=_x(one.until or 0, span[2], span[3]) if bad else None,
        first=span[2],
        last=last,
        low=words.loss(low),
        high=words.loss(high),
    )


def _x(step: int, first: int, last: int) -> float:
    return round((step - first) / max(1, last - first) * WIDTH, 1)


def _lines(values: Mapping[int, float | None], low: float, high: float, first: int, last: int) -> list[str]:
    """Return polylines of at most two points a pixel: of many steps the lowest and the highest stay."""
    buckets: dict[int, list[tuple[int, float | None]]] = {}
    for step in sorted(values):
        buckets.setdefault(int(_x(step, first, last)), []).append((step, values[step]))
    lines: list[list[str]] = [[]]
    for bucket in buckets.values():
        for step, value in _ends(bucket):
            if value is None:
                lines.append([])
                continue
            share = (value - low) / (high - low) if high > low else 0.5
            y = round(HEIGHT - _PAD - share * (HEIGHT - 2 * _PAD), 1)
            lines[-1].append(f"{_x(step, first, last)},{y}")
    return [" ".join(line) for line in lines if line]


def _ends(bucket: list[tuple[int, float | None]]) -> list[tuple[int, float | None]]:
    if len(bucket) <= 2 or any(value is None for _, value in bucket):
        return bucket
    known = [(step, value) for step, value in bucket if value is not None]
    lowest, highest = min(known, key=lambda one: one[1]), max(known, key=lambda one: one[1])
    return [*sorted({lowest, highest})]
