"""System checks that look across the apps."""

from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error, Tags, register


@register(Tags.compatibility)
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
