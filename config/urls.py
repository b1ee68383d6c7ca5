"""The URL map: machines under /api/v1, people everywhere else.

`/healthz` and `/readyz` are answered before any URL is looked at (`config.health`).
"""

from django.urls import URLPattern, URLResolver, include, path
from ninja import NinjaAPI

import evidence.api
import incidents.api
import incidents.ledger_api
import runs.api
import runs.hooks_api
from runs import problems

api = NinjaAPI(
    title="Andon",
    version="1",
    description="Signed webhooks of training jobs, and what people's tools may read.",
    openapi_url="/openapi.json",
    docs_url="/docs",
)
problems.install(api)
for _router in (
    runs.api.router,
    runs.hooks_api.router,
    evidence.api.router,
    incidents.api.router,
    incidents.ledger_api.router,
):
    api.add_router("", _router)

urlpatterns: list[URLPattern | URLResolver] = [
    path("api/v1/", api.urls),
    path(".well-known/andon-keys.json", runs.api.well_known_keys),
    path("", include("runs.urls")),
    path("", include("evidence.urls")),
    path("", include("incidents.urls")),
]

# Error pages stand inside the frame, so that the alarm line stays.
handler400 = "runs.errors.bad_request"
handler403 = "runs.errors.forbidden"
handler404 = "runs.errors.not_found"
handler500 = "runs.errors.server_error"
