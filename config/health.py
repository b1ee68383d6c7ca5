"""`/healthz` (this process lives) and `/readyz` (what it needs answers), for load balancers.

Both are answered before every other middleware: a probe comes with any Host header and over plain
HTTP, and has to be told the truth while sessions or the database are down. They say one word per
part and never an address, since anybody may ask.
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

logger = logging.getLogger(__name__)
_BROKER_TIMEOUT_S = 0.3  # a broker that accepts and never answers must not hold the probe
_DATABASE_TIMEOUT_S = 2  # libpq's least
_KEEP_S = 1.0  # anybody may ask as often as they like; the servers behind are asked once a second


def database_is_ready() -> bool:
    """Tell whether the database lets us in, on a connection of its own (the pool may be full or stale)."""
    entry = connections.settings["default"]
    if entry["ENGINE"] != "django.db.backends.postgresql":
        return False
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
        logger.warning("database is not ready: %s", error)
        return False
    return True


def broker_is_ready() -> bool:
    """Tell whether the broker answers a PING within the doorbell's own patience."""
    client = redis.Redis.from_url(
        settings.BROKER_URL,
        socket_timeout=_BROKER_TIMEOUT_S,
        socket_connect_timeout=_BROKER_TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
    )
    try:
        return bool(client.ping())
    except (redis.RedisError, OSError) as error:
        logger.warning("broker is not ready: %s", error)
        return False
    finally:
        client.close()


def vault_is_ready() -> bool:
    """Tell whether the vault can be reached."""
    try:
        from evidence import vault

        return vault.ready()
    except Exception as error:
        # Whatever a store's client raises, the answer of the probe is the same: not ready.
        logger.warning("vault is not ready: %s", error)
        return False


_PARTS: dict[str, Callable[[], bool]] = {
    "database": database_is_ready,
    "broker": broker_is_ready,
    "vault": vault_is_ready,
}
_lock = threading.Lock()
_last: tuple[float, dict[str, bool]] = (float("-inf"), {})


def readiness() -> dict[str, bool]:
    """Return what is ready, at most a second old."""
    global _last  # noqa: PLW0603
    with _lock:
        if time.monotonic() - _last[0] > _KEEP_S:
            parts = {name: is_ready() for name, is_ready in _PARTS.items()}
            _last = (time.monotonic(), parts)
        return _last[1]


def _plain(lines: str, status: int = 200) -> HttpResponse:
    return HttpResponse(
        lines, status=status, content_type="text/plain; charset=utf-8", headers={"Cache-Control": "no-store"}
    )


def healthz() -> HttpResponse:
    """200 whenever this process can answer at all."""
    return _plain("ok\n")


def readyz() -> HttpResponse:
    """One line per part; 503 when one is not ready."""
    parts = readiness()
    lines = "".join(f"{name}: {'ready' if ready else 'unready'}\n" for name, ready in parts.items())
    return _plain(lines, 200 if all(parts.values()) else 503)


Handler = Callable[[HttpRequest], HttpResponse]
_PROBES = {"/healthz": healthz, "/readyz": readyz}


def answer_probes(
    get_response: Callable[[HttpRequest], HttpResponse],
) -> Callable[[HttpRequest], HttpResponse]:
    """Middleware: answer the two probes, pass everything else on."""

    def middleware(request: HttpRequest) -> HttpResponse:
        probe = _PROBES.get(request.path)
        if probe is None:
            return get_response(request)
        if request.method not in {"GET", "HEAD"}:
            return HttpResponseNotAllowed(["GET", "HEAD"])
        return probe()

    return middleware
