"""System checks that look across the apps."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from celery import Task
from django.conf import settings
from django.core.checks import CheckMessage, Error, Tags, Warning, register


@register(Tags.database, Tags.compatibility)
def check_pool_covers_threads(**_: Any) -> list[CheckMessage]:
    """A thread that finds no connection waits for another thread's request: a storm would time out."""
    threads = max(settings.WEB_THREADS, settings.WORKER_THREADS)
    if threads <= settings.DATABASE_POOL:
        return []
    return [
        Error(
            f"ANDON_DATABASE_POOL is {settings.DATABASE_POOL}, below the {threads} threads of a process",
            hint="Raise ANDON_DATABASE_POOL, or lower ANDON_WEB_THREADS and ANDON_WORKER_THREADS.",
            id="config.E001",
        )
    ]


@register()
def check_sweeps_exist(**_: Any) -> list[CheckMessage]:
    """A schedule entry whose task nobody defines would do nothing, for ever, in silence."""
    return [
        Warning(
            f"the schedule rings for {entry['task']}, which no app defines",
            hint="Correct CELERY_BEAT_SCHEDULE in config/settings.py.",
            id="config.W002",
        )
        for entry in settings.CELERY_BEAT_SCHEDULE.values()
        if not _is_task(entry["task"])
    ]


def _is_task(name: str) -> bool:
    module_name, _, function = name.rpartition(".")
    return find_spec(module_name) is not None and isinstance(
        getattr(import_module(module_name), function, None), Task
    )
