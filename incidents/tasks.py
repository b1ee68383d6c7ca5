"""Celery's side of `incidents`: wrappers around sweeps that look in the database for what is due."""

from celery import shared_task

from incidents import launches, opening, review, traits


@shared_task(name="incidents.tasks.sweep_findings")
def sweep_findings() -> None:
    """Open what a failed receiver missed."""
    opening.sweep_findings()


@shared_task(name="incidents.tasks.sweep_incidents")
def sweep_incidents() -> None:
    """Review what waits, judge launches, end what expired or was watched long enough, keep traits."""
    review.sweep()
    launches.sweep_launches()
    launches.sweep_expired()
    launches.sweep_watching()
    traits.sweep()
