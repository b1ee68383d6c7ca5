"""System checks that look across the apps."""

from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error, Tags, register


@register(Tags.database, Tags.compatibility)
def check_pool_covers_threads(**_: Any) -> list[CheckMessage]:
    """A thread that finds no connection waits for another thread's request: a storm would time out."""
    threads = max(settings.WEB_THREADS, settings.WORKER_THREADS)
    if settings.DATABASE_POOL >= threads:
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
    from config.celery import app

    app.loader.import_default_modules()
    return [
        Error(
            f"the schedule rings for {entry['task']}, which no app defines",
            hint="Correct CELERY_BEAT_SCHEDULE in config/settings.py.",
            id="config.E002",
        )
        for entry in settings.CELERY_BEAT_SCHEDULE.values()
        if entry["task"] not in app.tasks
    ]
