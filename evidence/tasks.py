"""Celery's side of `evidence`: wrappers of what the clock asks for."""

from celery import shared_task

from evidence import fixity, overdue, retention


@shared_task(name="evidence.tasks.sweep_fixity")
def sweep_fixity() -> None:
    """Have tonight's fixity sweep done, if nobody asked yet."""
    fixity.ask()


@shared_task(name="evidence.tasks.sweep_vault")
def sweep_vault() -> None:
    """Extend what would expire while its dossier is open, and say what should be sealed by now."""
    retention.renew_open()
    overdue.sweep()
