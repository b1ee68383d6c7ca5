"""Celery's side of `runs`: wrappers that find the work in the database and do it."""

from celery import shared_task

from runs import sweeps, watching, work
from runs.accounts import sessions


@shared_task(name="runs.tasks.run_work")
def run_work(work_id: int) -> None:
    """Do one unit of work."""
    work.run_one(work_id)


@shared_task(name="runs.tasks.sweep_work")
def sweep_work() -> None:
    """Ring again for all that is due."""
    work.sweep()


@shared_task(name="runs.tasks.look")
def look(run_id: int | None = None) -> None:
    """Let the detectors look at what one run posted, or at what any run posted."""
    if run_id is None:
        watching.look_at_all()
    else:
        watching.look(run_id)


@shared_task(name="runs.tasks.make_partitions")
def make_partitions() -> None:
    """Prepare the days ahead."""
    sweeps.make_partitions()


@shared_task(name="runs.tasks.forget_receipts")
def forget_receipts() -> None:
    """Forget ids of posts that no client sends again."""
    sweeps.forget_receipts()


@shared_task(name="runs.tasks.forget_sessions")
def forget_sessions() -> None:
    """Forget sessions whose time is over."""
    sessions.forget()
