"""One look at the curves of a run: which attempts and steps, by step or by time. Each is an address."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from runs import grid
from runs.models import Attempt, Grid, Run, RunProgress
from runs.rows import raw_cursor

RANGES = {"1k": 1_000, "10k": 10_000, "attempt": None}
ALL = "all"
MOST_ATTEMPTS = 200  # newest ones, drawn together


@dataclass(frozen=True, slots=True)
class Span:
    """What is known of one attempt: its number, its first and last step."""

    number: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class RunView:
    """What is looked at.

    Attributes:
        spans: of the attempts in view, by number.
        whole: all attempts of the run, one after the other, rather than one.
        range: 1k, 10k, attempt, all, or "" when the steps were named.
        version: changes whenever anything that is drawn may have changed.
    """

    run: Run
    spans: tuple[Span, ...]
    whole: bool
    range: str
    first: int
    last: int
    by_time: bool
    version: str

    @property
    def attempts(self) -> list[int]:
        """The numbers of the attempts in view."""
        return [span.number for span in self.spans]

    @property
    def extent(self) -> tuple[int, int]:
        """The first and the last step that there are."""
        return min(span.first for span in self.spans), max(span.last for span in self.spans)


def view_of(run: Run, query: Mapping[str, str]) -> RunView:
    """Return the look that a query asks for; what it does not say, or wrongly, is as a page opens."""
    spans = _spans(run)
    asked = query.get("attempt", "")
    wanted = query.get("range", "")
    whole = ALL in {asked, wanted}
    number = int(asked) if asked.isdecimal() and len(asked) < 9 else None
    chosen = [span for span in spans if span.number == number] or spans[-1:]
    shown = spans[-MOST_ATTEMPTS:] if whole else chosen
    first, last = min(span.first for span in shown), max(span.last for span in shown)
    steps = grid.read_steps(query.get("steps", ""))
    span = RANGES.get(wanted, None if whole else 1_000)
    if steps is not None:
        wanted, (first, last) = "", steps
    else:
        wanted = ALL if whole else wanted if wanted in RANGES else "1k"
        first = first if span is None or whole else max(first, last - span + 1)
    if whole:
        shown = [span for span in shown if span.first <= last and span.last >= first] or shown[-1:]
    by_time = query.get("x") == "time" and not whole
    return RunView(run, tuple(shown), whole, wanted, first, last, by_time, _version(run))


def _spans(run: Run) -> list[Span]:
    """Return every attempt with its steps; what no worker took in yet is known from the newest post."""
    known = {
        number: (first, last)
        for number, first, last in Grid.objects.filter(run=run, step_last__gte=0).values_list(
            "attempt", "step_first", "step_last"
        )
    }
    progress = RunProgress.objects.filter(run=run).values_list("attempt", "step").first() or (None, None)
    attempts = dict(Attempt.objects.filter(run=run).order_by("number").values_list("number", "first_step"))
    spans = []
    for number in sorted({*attempts, *known}) or [progress[0] or 1]:
        first, last = known.get(number, (attempts.get(number), None))
        if progress[0] == number and progress[1] is not None:
            last = max(last or 0, progress[1])
        last = last if last is not None else first or 0
        spans.append(Span(number, min(first or 0, last), last))
    return spans


_VERSION = """
SELECT (SELECT array_agg((attempt, version) ORDER BY attempt)::text FROM runs_grid WHERE run_id = %(run)s),
       (SELECT max(id) FROM runs_gridwaiting WHERE run_id = %(run)s),
       (SELECT max(id) FROM runs_pending WHERE run_id = %(run)s),
       (SELECT (count(*), max(verified_at), count(*) FILTER (WHERE state = 'bad'))::text
        FROM runs_checkpoint WHERE run_id = %(run)s),
       (SELECT max(seq) FROM runs_directive WHERE run_id = %(run)s),
       (SELECT max(number) FROM runs_attempt WHERE run_id = %(run)s)
"""


def _version(run: Run) -> str:
    with raw_cursor() as cursor:
        cursor.execute(_VERSION, {"run": run.pk})
        return hashlib.sha256(repr(cursor.fetchone()).encode()).hexdigest()[:20]
