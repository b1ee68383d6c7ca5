"""Celery's side of `evidence`: wrappers of what the clock asks for."""

from typing import Any

from celery import shared_task, signals

from evidence import fixity, overdue, retention, spool
from evidence.vault import vault
from evidence.vault_directory import DirectoryVault


@shared_task(name="evidence.tasks.sweep_fixity")
def sweep_fixity() -> None:
    """Have tonight's fixity sweep done, if nobody asked yet."""
    fixity.ask()


@shared_task(name="evidence.tasks.sweep_vault")
def sweep_vault() -> None:
    """Extend what would expire while its dossier is open, say what should be sealed by now, and tidy up."""
    retention.renew_open()
    overdue.sweep()
    spool.sweep()
    store = vault()
    if isinstance(store, DirectoryVault):  # a bucket's are given up by the daily probe
        store.abort_abandoned()


@signals.worker_ready.connect
def _tidy_up(**_: Any) -> None:
    """Remove what killed workers left on this machine's disk."""
    spool.sweep()
