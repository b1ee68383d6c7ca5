"""The Celery application: `celery -A config.celery worker` and `… beat`."""

import os
from typing import Any

from celery import Celery, signals

from config import alive, stuck
from config.embedded.files import private_directory

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")

app = Celery("andon")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()


def _seen(part: str) -> None:
    from django.conf import settings

    file = alive.file_of(part, settings.DATA_DIR)
    private_directory(file.parent)
    file.touch(mode=0o600)


@signals.worker_init.connect
def _step_back(**_: Any) -> None:
    # Evidence can be collected a second later; a run that must be told to stop cannot wait for it. On a
    # machine of its own a worker loses nothing by this.
    os.nice(10)


@signals.worker_ready.connect
def _take_over(**_: Any) -> None:
    # `up` says so where the database is its own child, as every worker on it is: one is started after the
    # other is dead.
    if os.environ.get("ONLY_WORKER") == "1":
        from runs import work

        work.take_over()


signals.worker_ready.connect(stuck.watch)


@signals.task_postrun.connect
def _worker_answered(**_: Any) -> None:
    _seen("worker")


@signals.beat_init.connect
def _scheduler_starts(**_: Any) -> None:
    # Only in the scheduler's own process: the web publishes too.
    signals.after_task_publish.connect(_scheduler_rang)


def _scheduler_rang(**_: Any) -> None:
    _seen("scheduler")
