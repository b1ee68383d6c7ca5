"""`/healthz` (this process lives) and `/readyz` (what it needs answers), for load balancers.

Both are answered before every other middleware: a probe comes with any Host header and over plain
HTTP, and has to be told the truth while sessions or the database are down. They say one word per
part and never an address, since anybody may ask; the reason goes to the log, once.
"""

import logging
import threading
import time
from collections.abc import Callable

import psycopg
import redis
from django.conf import settings
from django.db import connections
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed
from redis.backoff import NoBackoff
from redis.retry import Retry

from evidence import vault

logger = logging.getLogger(__name__)
_BROKER_TIMEOUT_S = 0.3  # a broker that accepts and never answers must not hold the probe
_DATABASE_TIMEOUT_S = 2  # libpq's least
_KEEP_S = 1.0  # anybody may ask as often as they like; the servers behind are asked once a second


def why_not_database() -> str | None:
    """Say why the database does not let us in, None if it does.

    On a connection of its own: the pool may be exhausted or hold connections of a server that is gone.
    """
    entry = connections.settings["default"]
    if entry["ENGINE"] != "config.postgresql":
        return "ANDON_DATABASE_URL is not set"
    try:
        with psycopg.connect(
            host=entry["HOST"] or None,
            port=entry["PORT"] or None,
            dbname=entry["NAME"],
            user=entry["USER"],
            password=entry["PASSWORD"],
            connect_timeout=_DATABASE_TIMEOUT_S,
            tcp_user_timeout=_DATABASE_TIMEOUT_S * 1000,
        ) as connection:
            connection.execute("SELECT 1")
    except psycopg.Error as error:
        return str(error)
    return None


def why_not_broker() -> str | None:
    """Say why the broker does not answer a PING within the doorbell's own patience, None if it does."""
    client = redis.Redis.from_url(
        settings.BROKER_URL,
        socket_timeout=_BROKER_TIMEOUT_S,
        socket_connect_timeout=_BROKER_TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
    )
    try:
        client.ping()
    except (redis.RedisError, OSError) as error:
        return str(error)
    finally:
        client.close()
    return None


def why_not_vault() -> str | None:
    """Say why the vault cannot be reached, None if it can."""
    try:
        return None if vault.ready() else "it is not reachable"
    except Exception as error:
        # Whatever a store's client raises, the answer of the probe is the same: not ready.
        return repr(error)


_PARTS: dict[str, Callable[[], str | None]] = {
    "database": why_not_database,
    "broker": why_not_broker,
    "vault": why_not_vault,
}
_lock = threading.Lock()
_asked_at = float("-inf")
_reasons: dict[str, str | None] = {}


def readiness() -> dict[str, bool]:
    """Return which parts are ready, at most a second old; log a part when it changes."""
    global _asked_at, _reasons  # noqa: PLW0603
    with _lock:
        if time.monotonic() - _asked_at > _KEEP_S:
            before, _reasons = _reasons, {part: why_not() for part, why_not in _PARTS.items()}
            _asked_at = time.monotonic()
            for part, reason in _reasons.items():
                if reason is not None and before.get(part) is None:
                    logger.warning("%s is not ready: %s", part, reason)
                elif reason is None and before.get(part) is not None:
                    logger.warning("%s is ready again", part)
        return {part: reason is None for part, reason in _reasons.items()}


def _plain(lines: str, status: int = 200) -> HttpResponse:
    response = HttpResponse(
        lines, status=status, content_type="text/plain; charset=utf-8", headers={"Cache-Control": "no-store"}
    )
    # Django logs every 503 as an error of the server; a probe asks every second, and what it is told
    # was logged above.
    response._has_been_logged = True  # type: ignore[attr-defined]
    return response


def healthz() -> HttpResponse:
    """200 whenever this process can answer at all."""
    return _plain("ok\n")


def readyz() -> HttpResponse:
    """One line per part; 503 when one is not ready."""
    parts = readiness()
    lines = "".join(f"{part}: {'ready' if ready else 'unready'}\n" for part, ready in parts.items())
    return _plain(lines, 200 if all(parts.values()) else 503)


Handler = Callable[[HttpRequest], HttpResponse]
_PROBES = {"/healthz": healthz, "/readyz": readyz}


def answer_probes(get_response: Handler) -> Handler:
    """Middleware: answer the two probes, pass everything else on."""

    def middleware(request: HttpRequest) -> HttpResponse:
        probe = _PROBES.get(request.path)
        if probe is None:
            return get_response(request)
        if request.method not in {"GET", "HEAD"}:
            return HttpResponseNotAllowed(["GET", "HEAD"])
        return probe()

    return middleware
