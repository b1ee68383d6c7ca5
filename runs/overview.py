"""What the Runs page and the head of a Run page say about a run."""

import math
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import QuerySet
from django.utils import timezone

from runs import formatting, queries
from runs.models import Attempt, Directive, Run, RunProgress
from runs.queries import Point

# Without a learnt step time: a first step after a launch (compile, data) takes minutes, not ten.
NO_PROGRESS_AFTER = timedelta(minutes=10)
SPARK_STEPS, SPARK_POINTS = 240, 60
SPARK_W, SPARK_H = 120, 24

ORDER = ("held", "resuming", "not watched", "no progress", "running", "no steps yet", "finished")


@dataclass(frozen=True, slots=True)
class Spark:
    """A small curve: SVG points, and where it became nonfinite."""

    points: str
    nonfinite_x: float | None


@dataclass(frozen=True, slots=True)
class RunLine:
    """One run as a person sees it from afar."""

    run: Run
    state: str
    since: datetime | None
    attempt: int | None
    world_size: int | None
    progress: RunProgress | None
    step: int | None
    loss: str
    grad_norm: str
    alive: str
    not_watched: str
    loss_spark: Spark | None = None
    grad_norm_spark: Spark | None = None


def latest(last: dict[str, Any], name: str) -> tuple[str, object]:
    """Return (formatted newest value, raw value) of a metric from the progress row."""
    entry = last.get(name)
    value: object = entry
    if isinstance(entry, dict):
        flag = str(entry.get("flag") or "")
        value = flag if formatting.nonfinite(flag) else entry.get("value")
    return formatting.metric(name, value), value


def lines(runs: QuerySet[Run], *, sparks: bool = True, now: datetime | None = None) -> list[RunLine]:
    """Return one line per run: those that need a person first, then by oldest progress."""
    now = now or timezone.now()
    rows = list(runs.select_related("progress", "project"))
    ids = [run.pk for run in rows]
    directives = {
        row.run_id: row
        for row in Directive.objects.filter(run__in=ids).order_by("run_id", "-seq").distinct("run_id")
    }
    attempts = {
        row.run_id: row
        for row in Attempt.objects.filter(run__in=ids).order_by("run_id", "-number").distinct("run_id")
    }
    found = [_line(run, directives.get(run.pk), attempts.get(run.pk), now, sparks=sparks) for run in rows]
    return sorted(found, key=lambda line: (ORDER.index(line.state), _oldest(line), line.run.slug))


def _oldest(line: RunLine) -> datetime:
    if line.progress is not None and line.progress.step_at is not None:
        return line.progress.step_at
    return line.run.created_at


def state_of(
    run: Run, directive: Directive | None, progress: RunProgress | None, now: datetime
) -> tuple[str, datetime | None]:
    """Return the run's state as a word, and since when."""
    if run.finished_at is not None:
        return "finished", run.finished_at
    if directive is not None and directive.kind == Directive.Kind.HOLD:
        return "held", directive.since
    stepped = progress.step_at if progress is not None else None
    if (
        directive is not None
        and directive.kind in {Directive.Kind.RESUME, Directive.Kind.ROLLBACK}
        and (stepped is None or stepped < directive.since)
    ):
        return "resuming", directive.since
    if progress is not None and progress.not_watched_since is not None:
        return "not watched", progress.not_watched_since
    if stepped is None:
        return "no steps yet", None
    if now - stepped > NO_PROGRESS_AFTER:
        return "no progress", stepped
    return "running", None


def _line(
    run: Run, directive: Directive | None, attempt: Attempt | None, now: datetime, *, sparks: bool
) -> RunLine:
    progress = getattr(run, "progress", None)
    state, since = state_of(run, directive, progress, now)
    last = progress.last if progress is not None else {}
    number = attempt.number if attempt is not None else (progress.attempt if progress is not None else None)
    sparkline: dict[str, Spark | None] = {}
    if sparks and progress is not None and progress.step is not None and number is not None:
        first = max(0, progress.step - SPARK_STEPS)
        names = ["loss", "grad_norm"]
        found = queries.series(run, number, names, first, progress.step, SPARK_POINTS)
        sparkline = {name: spark(points, log=name == "grad_norm") for name, points in found.items()}
    return RunLine(
        run=run,
        state=state,
        since=since,
        attempt=number,
        world_size=attempt.world_size if attempt is not None else None,
        progress=progress,
        step=progress.step if progress is not None else None,
        loss=latest(last, "loss")[0],
        grad_norm=latest(last, "grad_norm")[0],
        alive=alive(progress, attempt, now),
        not_watched=progress.not_watched_why if progress is not None and progress.not_watched_since else "",
        loss_spark=sparkline.get("loss"),
        grad_norm_spark=sparkline.get("grad_norm"),
    )


def alive(progress: RunProgress | None, attempt: Attempt | None, now: datetime) -> str:
    """Return how many nodes were heard from in the last minute: `8 of 8 nodes`."""
    heard: dict[str, str] = progress.nodes if progress is not None else {}
    if not heard:
        return "not heard yet" if progress is None or progress.last_post_at is None else "nodes not named"
    named = attempt.nodes if attempt is not None else []
    known = {str(node.get("node", "")) for node in named} or set(heard)
    fresh = sum(1 for node in known if node in heard and is_fresh(heard[node], now))
    return f"{fresh:,} of {formatting.plural(len(known), 'node')}"


def is_fresh(stamp: str, now: datetime) -> bool:
    """Return whether an RFC 3339 time lies in the last minute; what can not be read is not fresh."""
    try:
        moment = datetime.fromisoformat(stamp)
    except ValueError:
        return False
    return moment.tzinfo is not None and now - moment <= timedelta(minutes=1)


def spark(points: list[Point], *, log: bool = False) -> Spark | None:
    """Return a small curve of finite points; None with fewer than two."""
    usable = [
        (point["step"], math.log(value) if log else value)
        for point in points
        if (value := point["value"]) is not None and (not log or value > 0)
    ]
    if len(usable) < 2:
        return None
    first, last = points[0]["step"], points[-1]["step"]
    low, high = min(y for _, y in usable), max(y for _, y in usable)
    wide, tall = max(1, last - first), (high - low) or 1.0
    text = " ".join(
        f"{(x - first) / wide * SPARK_W:.1f},{2 + (1 - (y - low) / tall) * (SPARK_H - 4):.1f}"
        for x, y in usable
    )
    bad = next((point["step"] for point in points if point["value"] is None and point["flag"]), None)
    return Spark(text, None if bad is None else round(min((bad - first) / wide * SPARK_W, SPARK_W - 9), 1))
