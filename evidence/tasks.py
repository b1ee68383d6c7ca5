"""Celery's side of `evidence`: wrappers of what the clock asks for."""

from typing import Any

from celery import shared_task, signals

from evidence.proof import fixity
from evidence.retention import dates, overdue
from evidence.stores import spool
from evidence.stores.directory import DirectoryVault
from evidence.vault import vault


@shared_task(name="evidence.tasks.sweep_fixity")
def sweep_fixity() -> None:
    """Have tonight's fixity sweep done, if nobody asked yet."""
    fixity.ask()


@shared_task(name="evidence.tasks.sweep_vault")
def sweep_vault() -> None:
    """Extend what would expire while its dossier is open, say what should be sealed by now, and tidy up."""
    dates.renew_open()
    overdue.sweep()
    spool.sweep()
    store = vault()
    if isinstance(store, DirectoryVault):  # a bucket's are given up by the daily probe
        store.abort_abandoned()


@signals.worker_ready.connect
def _tidy_up(**_: Any) -> None:
    """Remove what killed workers left on this machine's disk."""
    spool.sweep()
