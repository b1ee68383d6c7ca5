"""What the newest probe saw, for all who store by it: asked of the database now and then, by one thread."""

import threading
import time
from datetime import timedelta
from typing import Any

from django.db import DatabaseError
from django.utils import timezone

from evidence.models import StoreProbe
from runs.work import enqueue

PROBE = "evidence.probe"  # kind of the work that probes the vault
NEVER_ENABLED = "never enabled"  # what a bucket's "versioning" says where there never were versions
OLD_AFTER = timedelta(days=1)
_REMEMBER_S = 30.0
_NEVER: tuple[float, dict[str, Any]] = (0.0, {})
_newest: dict[str, tuple[float, dict[str, Any]]] = {}
_asking = threading.Lock()


def ask_if_old(store: str, older_than: timedelta = OLD_AFTER) -> None:
    """Have the vault probed when nobody did for so long, after the caller's transaction."""
    if not StoreProbe.objects.filter(store=store[:300], probed_at__gt=timezone.now() - older_than).exists():
        enqueue(kind=PROBE, key="vault")


def newest_result(store: str) -> dict[str, Any]:
    """Return the newest probe's result of a store by name, {} when it was never probed.

    One thread asks; the others go on with what is known. Each thread that copies would otherwise take a
    connection of its own, and the last of them would wait until the pool gives up.
    """
    asked_at, known = _newest.get(store, _NEVER)
    if _is_fresh(asked_at) or not _asking.acquire(blocking=not asked_at):
        return known
    try:
        asked_at, known = _newest.get(store, _NEVER)
        if _is_fresh(asked_at):  # by who had the lock before
            return known
        row = StoreProbe.objects.filter(store=store[:300]).order_by("-probed_at").first()
        found: dict[str, Any] = row.result if row is not None else {}
        _newest[store] = (time.monotonic(), found)
        return found
    except DatabaseError:
        return {}
    finally:
        _asking.release()


def forget(store: str) -> None:
    """Have the next who wants to know ask the database: there is a newer result."""
    _newest.pop(store, None)


def _is_fresh(asked_at: float) -> bool:
    return bool(asked_at) and time.monotonic() - asked_at < _REMEMBER_S
