"""The floor: bare Django views that do the least a durable receiver must do.

`/insert` parses JSON and does one durable insert; `/body` stores the body by a binary parameter. No
middleware, no signature, no idempotency, no answer worth reading. Same Django, driver, pool, server and
database as Andon.
"""

import json
import os
from urllib.parse import unquote, urlsplit

import psycopg
from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.db import connection
from django.http import HttpRequest, HttpResponse
from django.urls import path

TABLES = """
CREATE TABLE IF NOT EXISTS bare_event (
    id bigserial PRIMARY KEY, at timestamptz NOT NULL DEFAULT now(), data jsonb NOT NULL);
CREATE TABLE IF NOT EXISTS bare_body (
    id bigserial PRIMARY KEY, at timestamptz NOT NULL DEFAULT now(), body bytea NOT NULL);
ALTER TABLE bare_body ALTER COLUMN body SET STORAGE EXTERNAL;
"""


def _answer() -> HttpResponse:
    body = b'{"accepted": 1}'
    headers = {"Content-Length": str(len(body))}  # no middleware that would add it
    return HttpResponse(body, content_type="application/json", status=202, headers=headers)


def insert(request: HttpRequest) -> HttpResponse:
    """Parse JSON, insert one row, answer."""
    event = json.loads(request.body)
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO bare_event (data) VALUES (%s)", [json.dumps(event)])
    return _answer()


def body(request: HttpRequest) -> HttpResponse:
    """Store the body, answer."""
    connection.ensure_connection()
    with psycopg.Cursor(connection.connection) as cursor:
        cursor.execute("INSERT INTO bare_body (body) VALUES (%b)", (request.body,))
    return _answer()


urlpatterns = [path("insert", insert), path("body", body)]

if not settings.configured:
    _url = urlsplit(os.environ["ANDON_DATABASE_URL"])
    _options = dict(part.split("=", 1) for part in _url.query.split("&") if part)
    settings.configure(
        ALLOWED_HOSTS=["*"],
        ROOT_URLCONF=__name__,
        SECRET_KEY="bench",
        USE_TZ=True,
        DATA_UPLOAD_MAX_MEMORY_SIZE=64 << 20,
        DATABASES={
            "default": {
                "ENGINE": "django.db.backends.postgresql",
                "NAME": unquote(_url.path.lstrip("/")),
                "USER": unquote(_url.username or ""),
                "PASSWORD": unquote(_url.password or ""),
                "HOST": unquote(_options.get("host", "")) or _url.hostname or "",
                "PORT": str(_url.port or ""),
                "OPTIONS": {"pool": {"min_size": 1, "max_size": 20}},
            }
        },
    )
application = get_wsgi_application()
