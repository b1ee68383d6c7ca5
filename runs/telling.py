"""Sends a signal from inside the ingest transaction without letting a receiver take the data down."""

import logging
from typing import Any

from django.db import connection, transaction
from django.dispatch import Signal
from django.utils import timezone

from runs.models import Run, RunProgress

log = logging.getLogger(__name__)

WAIT = "2s"


def tell(signal: Signal, *, run_id: int, **facts: Any) -> bool:
    """Send `signal` with `run` and `facts` in a savepoint; False when a receiver failed.

    What the receiver wrote is rolled back then, the posted data stays, and the run is marked as not
    watched, because something that should have followed from the data did not.
    """
    try:
        with transaction.atomic():
            with connection.cursor() as cursor:
                cursor.execute("SELECT set_config('lock_timeout', %s, true)", [WAIT])
            signal.send(sender=Run, run=Run.objects.get(pk=run_id), **facts)
            with connection.cursor() as cursor:
                cursor.execute("SELECT set_config('lock_timeout', '0', true)")
    except Exception as error:
        log.exception("run %s: a receiver failed; the posted data is kept", run_id)
        mark_not_watched(run_id, f"what followed from a post failed: {type(error).__name__}: {error}")
        return False
    return True


def mark_not_watched(run_id: int, why: str) -> None:
    """Mark a run as not watched, keeping since when and the newest reason."""
    RunProgress.objects.get_or_create(run_id=run_id)
    progress = RunProgress.objects.filter(run_id=run_id)
    progress.filter(not_watched_since__isnull=True).update(not_watched_since=timezone.now())
    progress.update(not_watched_why=why[:2000])


def mark_watched(run_id: int) -> None:
    """Clear the mark: detection went through again."""
    RunProgress.objects.filter(run_id=run_id, not_watched_since__isnull=False).update(
        not_watched_since=None, not_watched_why=""
    )
