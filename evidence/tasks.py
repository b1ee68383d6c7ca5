"""Celery's side of `evidence`: wrappers of what the clock asks for."""

import logging
from datetime import timedelta
from typing import Any

from celery import shared_task, signals
from django.db import DatabaseError, connection

from evidence.proof import fixity
from evidence.retention import dates, overdue
from evidence.stores import spool
from evidence.stores.directory import DirectoryVault
from evidence.stores.probed import ask_if_old
from evidence.vault import vault

log = logging.getLogger(__name__)

AT_START = timedelta(minutes=10)


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
def at_start(**_: Any) -> None:
    """Remove what killed workers left on this machine's disk, and have the store tried.

    Workers that start together, or again and again, have it tried once.
    """
    spool.sweep()
    try:
        ask_if_old(vault().name, AT_START)
    except DatabaseError:
        log.exception("the vault is not probed at start-up")  # it is before the first dossier, and each night
    finally:
        connection.close()  # of the worker's main process, which does no work
