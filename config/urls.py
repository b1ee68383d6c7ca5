"""The URL map: machines under /api/v1, people everywhere else.

`/healthz` and `/readyz` are answered before any URL is looked at (`config.health`).
"""

from importlib.util import find_spec

from django.urls import URLPattern, URLResolver, include, path
from django.utils.module_loading import import_string
from ninja import NinjaAPI

from runs import problems
from runs.api import well_known_keys

api = NinjaAPI(
    title="Andon",
    version="1",
    description="Signed webhooks of training jobs, and what people's tools may read.",
    openapi_url="/openapi.json",
    docs_url="/docs",
)
problems.install(api)
urlpatterns: list[URLPattern | URLResolver] = []
for _app in ("runs", "evidence", "incidents"):
    if find_spec(f"{_app}.api"):
        api.add_router("", import_string(f"{_app}.api.router"))
    if find_spec(f"{_app}.urls"):
        urlpatterns.append(path("", include(f"{_app}.urls")))
urlpatterns.append(path("api/v1/", api.urls))
urlpatterns.append(path(".well-known/andon-keys.json", well_known_keys))

# Error pages stand inside the frame, so that the alarm line stays.
handler400 = "runs.errors.bad_request"
handler403 = "runs.errors.forbidden"
handler404 = "runs.errors.not_found"
handler500 = "runs.errors.server_error"
