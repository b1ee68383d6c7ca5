"""Whether Andon itself is well, in one word for a line that is asked every two seconds.

The System page asks every part; here only what one query tells: is work taken, is this run watched.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import Min

from runs import formatting as words
from runs.models import RunProgress, Work

# The sweep runs every 5 s; work that has been due this long means that nobody works.
NOBODY_WORKS_AFTER = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class Health:
    """Well or not, and the words for it."""

    well: bool
    says: str


def oldest_due(now: datetime) -> datetime | None:
    """Return since when the oldest work has been due, None when nothing is."""
    due = Work.objects.filter(state=Work.State.DUE, not_before__lte=now)
    oldest: datetime | None = due.aggregate(oldest=Min("not_before"))["oldest"]
    return oldest


def of_andon(progress: RunProgress | None, now: datetime) -> Health:
    """Return Andon's health as far as it concerns one run."""
    due = oldest_due(now)
    if due is not None and now - due > NOBODY_WORKS_AFTER:
        lasting = words.duration((now - due).total_seconds())
        return Health(False, f"Andon: no worker took work for {lasting}")
    if progress is not None and progress.not_watched_since is not None:
        return Health(
            False, f"Andon: this run is not watched since {words.clock(progress.not_watched_since, now)} UTC"
        )
    return Health(True, "Andon healthy")
