"""Late events: backfill from a spool, or a sender whose clock is wrong."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from andon.detect.finding import Finding
from runs.judging import Judged
from runs.models import RunProgress
from runs.rows import Post

GAP = timedelta(seconds=60)  # no post for so long: what comes next is the first post after a gap
CONSTANT_S = 1.0  # a spool holds minutes of events; a wrong clock shifts all by the same
RULE = "clock"


@dataclass(frozen=True, slots=True)
class Late:
    """Which events are backfill; `skew_s` is the constant lag when the clock is wrong instead."""

    backfill: list[bool]
    skew_s: float | None


def late_events(post: Post, lags: Sequence[tuple[float, datetime]], after_s: float) -> Late:
    """Tell backfill from clock skew.

    Args:
        lags: per event, how late it was received in seconds, and when it occurred.
        after_s: an event later than this is backfill.

    A first post after a gap, of several events that all lag by one constant, comes from a clock that
    is wrong by that much. A single event says nothing about its clock and is taken at its word.
    """
    backfill = [lag_s > after_s for lag_s, _ in lags]
    if len(lags) < 2 or not all(backfill):
        return Late(backfill, None)
    low, high = min(lag_s for lag_s, _ in lags), max(lag_s for lag_s, _ in lags)
    if high - low > CONSTANT_S:
        return Late(backfill, None)
    heard = RunProgress.objects.filter(run_id=post.run_id).values_list("last_post_at", flat=True).first()
    if heard is not None and post.received_at - heard < GAP:
        return Late(backfill, None)
    return Late([False] * len(lags), low)


def skew_finding(lag_s: float, attempt: int, received_at: datetime) -> Judged:
    """Return the finding that a sender's clock is off."""
    said = Finding(
        kind="clock_skew",
        severity="info",
        rule=RULE,
        step=None,
        detector="clock",
        detector_version=1,
        series="time",
        numbers={"lag_s": round(lag_s, 3)},
        detail=f"all events of the first post after a gap lag by {lag_s:.0f} s: the sender's clock is behind",
    )
    return Judged(said, attempt, False, received_at)
