"""Celery's side of `incidents`: wrappers around sweeps that look in the database for what is due."""

from celery import shared_task

from incidents import alone, launches, opening, review, traits, watching
from incidents.paging import deadman, on_call, raising


@shared_task(name="incidents.tasks.sweep_findings")
def sweep_findings() -> None:
    """Open what a failed receiver missed."""
    opening.sweep_findings()


@shared_task(name="incidents.tasks.sweep_incidents")
def sweep_incidents() -> None:
    """Review what waits, grant what nobody vetoed, judge launches, end what is over, keep traits."""
    review.sweep()
    alone.sweep_solo()
    launches.sweep_launches()
    launches.sweep_expired()
    watching.sweep()
    traits.sweep()


@shared_task(name="incidents.tasks.sweep_pages")
def sweep_pages() -> None:
    """Page for what nobody raised, and leave a trace that the sweeps run."""
    raising.sweep()
    deadman.beat()


@shared_task(name="incidents.tasks.ask_on_call")
def ask_on_call() -> None:
    """Ask the external on-call address who has the pager."""
    on_call.ask_external()


@shared_task(name="incidents.tasks.forget_pages")
def forget_pages() -> None:
    """Delete pages that ended long ago."""
    raising.forget()
