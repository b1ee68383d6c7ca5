"""The Django project: settings, URLs, processes."""

# `shared_task` needs the application to exist before the first task module is imported.
from config.celery import app as celery_app

__all__ = ["celery_app"]
