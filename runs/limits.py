"""Two rate buckets per run: bodies up to 64 KiB and larger ones, so that frames never delay a small post.

The counters live in Redis so that all web processes share one limit. A process takes tokens in
chunks, so that most posts ask nobody; where Redis does not answer within a blink, each process
counts alone for five seconds and then tries again.
"""

import logging
import math
import threading
import time
from dataclasses import dataclass

import redis
from django.conf import settings

log = logging.getLogger(__name__)

SMALL_BYTES = 64 * 1024
TIMEOUT_S = 0.05
QUIET_S = 5.0
CHUNKS_PER_S = 50.0

# Token bucket on the server's clock. Returns how many of the wanted tokens were granted.
_TAKE = """
local t = redis.call('TIME')
local now = t[1] + t[2] / 1e6
local rate, burst, want = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local kept = redis.call('HMGET', KEYS[1], 'tokens', 'at')
local tokens = tonumber(kept[1]) or burst
local at = tonumber(kept[2]) or now
tokens = math.min(burst, tokens + math.max(0, now - at) * rate)
local granted = math.min(want, math.floor(tokens))
redis.call('HSET', KEYS[1], 'tokens', tostring(tokens - granted), 'at', tostring(now))
redis.call('EXPIRE', KEYS[1], math.ceil(burst / rate) + 60)
return granted
"""


@dataclass(slots=True)
class _Own:
    """What this process holds of one bucket: tokens taken ahead, or its own count without Redis."""

    ahead: int = 0
    tokens: float = 0.0
    at: float = 0.0
    alone: bool = False


class Buckets:
    """The buckets of one process."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._lock = threading.Lock()
        self._own: dict[tuple[int, bool], _Own] = {}
        self._quiet_until = 0.0
        self._client: redis.Redis | None = None

    def take(self, run_id: int, *, large: bool, per_s: float, burst: int) -> int:
        """Take one token. Returns 0, or after how many whole seconds to try again."""
        key = (run_id, large)
        with self._lock:
            own = self._own.setdefault(key, _Own())
            if own.ahead > 0:
                own.ahead -= 1
                return 0
            asked = time.monotonic() >= self._quiet_until
        want = max(1, min(int(per_s / CHUNKS_PER_S), burst))
        granted = self._ask(key, per_s, burst, want) if asked else None
        with self._lock:
            if granted is None:
                return self._alone(own, per_s, burst)
            own.alone = False
            if granted:
                own.ahead += granted - 1
                return 0
        return max(1, math.ceil(1 / per_s))

    def _ask(self, key: tuple[int, bool], per_s: float, burst: int, want: int) -> int | None:
        try:
            if self._client is None:
                self._client = redis.Redis.from_url(
                    self._url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, retry=None
                )
            name = f"andon:rate:{key[0]}:{'large' if key[1] else 'small'}"
            answer = self._client.eval(_TAKE, 1, name, str(per_s), str(burst), str(want))
            return int(answer)
        except (redis.RedisError, OSError, ValueError) as error:
            self._quiet_until = time.monotonic() + QUIET_S
            log.warning("rate limits per process for %s s: %s", QUIET_S, error)
            return None

    def _alone(self, own: _Own, per_s: float, burst: int) -> int:
        now = time.monotonic()
        if not own.alone:
            own.alone, own.tokens, own.at = True, float(burst), now
        own.tokens = min(float(burst), own.tokens + (now - own.at) * per_s)
        own.at = now
        if own.tokens >= 1:
            own.tokens -= 1
            return 0
        return max(1, math.ceil((1 - own.tokens) / per_s))


_buckets: Buckets | None = None


def buckets() -> Buckets:
    """Return the buckets of this process."""
    global _buckets  # noqa: PLW0603
    if _buckets is None:
        _buckets = Buckets(settings.BROKER_URL)
    return _buckets


def limits_of(*, large: bool, policy_per_s: float, policy_burst: int) -> tuple[float, int]:
    """Return rate and burst: of the operator's settings where set, else of the policy."""
    rate: int = settings.RATE_LARGE if large else settings.RATE_SMALL
    if rate <= 0:
        return max(policy_per_s, 0.01), max(policy_burst, 1)
    # Keep the policy's proportion of burst to rate.
    return float(rate), max(1, round(rate * policy_burst / max(policy_per_s, 0.01)))
