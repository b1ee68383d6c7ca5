"""Celery's side of `evidence`: wrappers of what the clock asks for."""

from celery import shared_task

from evidence import fixity


@shared_task(name="evidence.tasks.sweep_fixity")
def sweep_fixity() -> None:
    """Have tonight's fixity sweep done, if nobody asked yet."""
    fixity.ask()
