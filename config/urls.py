"""The URL map: machines under /api/v1, people everywhere else."""

from django.urls import URLPattern, URLResolver

urlpatterns: list[URLPattern | URLResolver] = []
