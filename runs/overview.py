"""What the Runs page and the head of a Run page say about a run.

The state of every run is needed to count and to sort them, so it is told by narrow columns only; values,
nodes and curves are read for the runs that are shown.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.db.models import QuerySet
from django.dispatch import Signal
from django.utils import timezone

from runs import formatting, sparks
from runs.attempts import NAMED
from runs.models import Run, RunProgress
from runs.rows import raw_cursor
from runs.signals import goodput_wanted, incidents_wanted
from runs.sparks import Spark

# Without a learnt step time: a first step after a launch (compile, data) takes minutes, not ten.
NO_PROGRESS_AFTER = timedelta(minutes=10)
FRESH = timedelta(minutes=1)  # a node that posted within it is alive

OPEN_INCIDENT, WATCHING = "open incident", "watching"
ORDER = ("held", "resuming", "not watched", "no progress", "running", "no steps yet", "finished")


@dataclass(frozen=True, slots=True)
class Standing:
    """Where one run stands, as far as the list is sorted and filtered by it."""

    pk: int
    slug: str
    state: str
    since: datetime | None
    oldest: datetime  # the newest step, or when the run was made
    incident: str  # "open incident" | "watching" | "" (none that is not resolved)

    @property
    def urgency(self) -> tuple[float, datetime, str]:
        """What the list is sorted by: who needs a person first, then the oldest progress."""
        place: float = ORDER.index(self.state)
        # A run that goes on with an open incident waits for a person as a held one does, just after it.
        if self.incident == OPEN_INCIDENT:
            place = min(place, 0.5)
        return place, self.oldest, self.slug

    def fits(self, chip: str) -> bool:
        """Whether the run is one of those a chip counts."""
        return chip in (self.state, self.incident)


@dataclass(frozen=True, slots=True)
class RunLine:
    """One run as a person sees it from afar."""

    run: Run
    state: str
    since: datetime | None
    attempt: int | None
    world_size: int | None
    progress: RunProgress | None
    loss: str
    grad_norm: str
    alive: str
    silent: int  # nodes not heard within a minute
    not_watched: str
    tokens_per_s: str
    goodput: str  # what share of today's GPU time was kept
    sparks: Mapping[str, Spark] = field(default_factory=dict)

    @property
    def step(self) -> int | None:
        """The newest step."""
        return self.progress.step if self.progress is not None else None


def latest(last: dict[str, Any], name: str) -> tuple[str, object]:
    """Return (formatted newest value, raw value) of a metric from the progress row."""
    entry = last.get(name)
    value: object = entry
    if isinstance(entry, dict):
        flag = str(entry.get("flag") or "")
        value = flag if formatting.nonfinite(flag) else entry.get("value")
    return formatting.metric(name, value), value


_STANDINGS = """
SELECT r.id, r.slug, r.created_at, r.finished_at, p.step_at, p.not_watched_since, d.kind, d.since
FROM runs_run r LEFT JOIN runs_runprogress p ON p.run_id = r.id
LEFT JOIN LATERAL (
    SELECT kind, since FROM runs_directive WHERE run_id = r.id ORDER BY seq DESC LIMIT 1) d ON true
WHERE r.id = ANY(%s)
"""


def standings(runs: QuerySet[Run], *, now: datetime | None = None) -> list[Standing]:
    """Return where each run stands: those that need a person first, then by oldest progress."""
    now = now or timezone.now()
    with raw_cursor() as cursor:
        ids = list(runs.order_by().values_list("pk", flat=True))
        cursor.execute(_STANDINGS, (ids,))
        rows = cursor.fetchall()
    incidents = _asked(incidents_wanted, ids)
    found = []
    for pk, slug, created_at, finished_at, step_at, not_watched_since, kind, since in rows:
        word, of = _state(finished_at, kind, since, step_at, not_watched_since, now)
        found.append(Standing(pk, slug, word, of, step_at or created_at, incidents.get(pk, "")))
    return sorted(found, key=lambda one: one.urgency)


def _asked(signal: Signal, ids: Sequence[int]) -> dict[int, Any]:
    """Return what higher apps answer of these runs."""
    answers: Any = signal.send(sender=Run, runs=ids)
    return {pk: value for _, found in answers for pk, value in found.items()}


def _state(
    finished_at: datetime | None,
    kind: str | None,
    since: datetime | None,
    step_at: datetime | None,
    not_watched_since: datetime | None,
    now: datetime,
) -> tuple[str, datetime | None]:
    """Return the run's state as a word, and since when."""
    if finished_at is not None:
        return "finished", finished_at
    if kind == "hold":
        return "held", since
    if kind in {"resume", "rollback"} and since is not None and (step_at is None or step_at < since):
        return "resuming", since
    if not_watched_since is not None:
        return "not watched", not_watched_since
    if step_at is None:
        return "no steps yet", None
    if now - step_at > NO_PROGRESS_AFTER:
        return "no progress", step_at
    return "running", None


# Times of nodes are written by us in one form, so that texts compare as times do.
_SHOWN = f"""
SELECT r.id, a.number, a.world_size, a.named,
       (SELECT count(*) FROM jsonb_object_keys(p.nodes)),
       (SELECT count(*) FROM jsonb_each_text(p.nodes) n WHERE n.value >= %s)
FROM runs_run r LEFT JOIN runs_runprogress p ON p.run_id = r.id
LEFT JOIN LATERAL (
    SELECT number, world_size, {NAMED} AS named
    FROM runs_attempt WHERE run_id = r.id ORDER BY number DESC LIMIT 1) a ON true
WHERE r.id = ANY(%s)
"""  # noqa: S608 (constants)


def lines(standing: Iterable[Standing], *, curves: bool = True, now: datetime | None = None) -> list[RunLine]:
    """Return what is shown of each run, in the order given."""
    standing, now = list(standing), now or timezone.now()
    ids = [one.pk for one in standing]
    runs = Run.objects.select_related("progress", "project").defer("progress__nodes").in_bulk(ids)
    with raw_cursor() as cursor:
        cursor.execute(_SHOWN, (f"{now - FRESH:%Y-%m-%dT%H:%M:%S}", ids))
        facts = {row[0]: row[1:] for row in cursor}
    drawn: dict[tuple[int, str], Spark] = {}
    if curves:
        newest = [
            (pk, run.progress.attempt or facts[pk][0] or 1, run.progress.step)
            for pk, run in runs.items()
            if hasattr(run, "progress") and run.progress.step is not None
        ]
        drawn = sparks.of_runs(newest)
    kept = _asked(goodput_wanted, ids) if curves else {}
    return [
        _line(one, runs[one.pk], facts[one.pk], drawn, kept.get(one.pk)) for one in standing if one.pk in runs
    ]


def _line(
    one: Standing,
    run: Run,
    facts: tuple[Any, ...],
    drawn: Mapping[tuple[int, str], Spark],
    kept: float | None,
) -> RunLine:
    number, world_size, named, known, fresh = facts
    progress = getattr(run, "progress", None)
    last = progress.last if progress is not None else {}
    total = named or known or 0
    return RunLine(
        run=run,
        state=one.state,
        since=one.since,
        attempt=number if number is not None else (progress.attempt if progress is not None else None),
        world_size=world_size,
        progress=progress,
        loss=latest(last, "loss")[0],
        grad_norm=latest(last, "grad_norm")[0],
        alive=alive(progress, total, known or 0, fresh or 0),
        silent=max(0, total - (fresh or 0)) if known else 0,
        not_watched=progress.not_watched_why if progress is not None and progress.not_watched_since else "",
        tokens_per_s=tokens_per_s(last, one.state),
        goodput="" if kept is None else formatting.percent(kept, 1.0),
        sparks={name: drawn[run.pk, name] for name in sparks.NAMES if (run.pk, name) in drawn},
    )


def tokens_per_s(last: dict[str, Any], state: str) -> str:
    """Return tokens of the newest step by its seconds, `890 k`; `0, was 890 k` of one that does not step."""
    tokens, seconds = (latest(last, name)[1] for name in ("tokens", "step_time_s"))
    if not _positive(tokens) or not _positive(seconds):
        return ""
    speed = formatting.amount(float(str(tokens)) / float(str(seconds)))
    return speed if state in {"running", "not watched"} else f"0, was {speed}"


def _positive(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(float(str(value))) and float(str(value)) > 0


def alive(progress: RunProgress | None, total: int, known: int, fresh: int) -> str:
    """Return how many nodes were heard from in the last minute: `8 of 8 nodes`.

    Args:
        total: nodes that the launch named, or, where it named none, all that posted.
        known: nodes that ever posted.
        fresh: those of them that did within the last minute.
    """
    if not known:
        return "not heard yet" if progress is None or progress.last_post_at is None else "nodes not named"
    return f"{min(fresh, total):,} of {formatting.plural(total, 'node')}"
