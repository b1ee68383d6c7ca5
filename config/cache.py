"""The cache of all web processes: Valkey where it answers, this process's memory where it does not.

It holds counters (sign-in, codes) and nothing that must survive. With the broker gone each process counts
alone: a brake is then looser by the number of processes, and nobody is kept out of a held run.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

import redis
from django.core.cache.backends.locmem import LocMemCache
from django.core.cache.backends.redis import RedisCache

log = logging.getLogger(__name__)

TIMEOUT_S = 0.1
QUIET_S = 5.0


class Cache(RedisCache):
    """Django's Redis cache; where the server does not answer at once, local memory for five seconds."""

    def __init__(self, server: str, params: dict[str, Any]) -> None:
        """Take the broker's URL as `LOCATION`."""
        options = params.setdefault("OPTIONS", {})
        options |= {"socket_timeout": TIMEOUT_S, "socket_connect_timeout": TIMEOUT_S}
        super().__init__(server, params)
        self._own = LocMemCache("andon", {})
        self._quiet_until = 0.0

    def _or_own(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if time.monotonic() >= self._quiet_until:
            call: Callable[..., Any] = getattr(super(), name)
            try:
                return call(*args, **kwargs)
            except (redis.RedisError, OSError) as error:
                self._quiet_until = time.monotonic() + QUIET_S
                log.warning("sign-in counters per process for %s s: %s", QUIET_S, error)
        return getattr(self._own, name)(*args, **kwargs)

    def add(self, *args: Any, **kwargs: Any) -> Any:
        """Set a key that is absent; returns whether it was."""
        return self._or_own("add", *args, **kwargs)

    def get(self, *args: Any, **kwargs: Any) -> Any:
        """Return the value of a key."""
        return self._or_own("get", *args, **kwargs)

    def set(self, *args: Any, **kwargs: Any) -> Any:
        """Set a key."""
        return self._or_own("set", *args, **kwargs)

    def touch(self, *args: Any, **kwargs: Any) -> Any:
        """Give a key a new time to live."""
        return self._or_own("touch", *args, **kwargs)

    def delete(self, *args: Any, **kwargs: Any) -> Any:
        """Forget a key."""
        return self._or_own("delete", *args, **kwargs)

    def has_key(self, *args: Any, **kwargs: Any) -> Any:
        """Return whether a key is there."""
        return self._or_own("has_key", *args, **kwargs)

    def incr(self, *args: Any, **kwargs: Any) -> Any:
        """Add to a number."""
        return self._or_own("incr", *args, **kwargs)

    def clear(self) -> None:
        """Forget the keys of this cache, here and there; the broker's queues lie beside them and stay."""
        self._own.clear()
        try:
            client = self._cache.get_client(write=True)
            for key in client.scan_iter(match=f"{self.key_prefix}:*"):
                client.delete(key)
        except (redis.RedisError, OSError) as error:
            log.warning("sign-in counters not cleared: %s", error)
