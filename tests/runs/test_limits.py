"""Rate buckets: shared through Redis, per process without it."""

import secrets
import time

import pytest
import redis
from django.conf import settings

from runs.limits import Buckets


@pytest.fixture
def run_id() -> int:
    """A run whose bucket nobody used."""
    return int.from_bytes(secrets.token_bytes(6), "big")


def take(buckets: Buckets, run_id: int, n: int, *, per_s: float, burst: int, large: bool = False) -> int:
    return sum(buckets.take(run_id, large=large, per_s=per_s, burst=burst) == 0 for _ in range(n))


def test_processes_share_one_bucket(run_id: int) -> None:
    redis.Redis.from_url(settings.BROKER_URL).ping()
    first, second = Buckets(settings.BROKER_URL), Buckets(settings.BROKER_URL)
    granted = take(first, run_id, 30, per_s=1, burst=20) + take(second, run_id, 30, per_s=1, burst=20)
    assert 20 <= granted <= 21


def test_small_and_large_are_counted_apart(run_id: int) -> None:
    buckets = Buckets(settings.BROKER_URL)
    assert take(buckets, run_id, 10, per_s=0.1, burst=3) == 3
    assert take(buckets, run_id, 10, per_s=0.1, burst=2, large=True) == 2


def test_it_refills_and_says_when(run_id: int) -> None:
    buckets = Buckets(settings.BROKER_URL)
    assert take(buckets, run_id, 3, per_s=10, burst=2) == 2
    assert buckets.take(run_id, large=False, per_s=0.25, burst=2) >= 1
    time.sleep(0.25)
    assert take(buckets, run_id, 1, per_s=10, burst=2) == 1


def test_most_posts_ask_nobody(run_id: int) -> None:
    client = redis.Redis.from_url(settings.BROKER_URL)
    buckets = Buckets(settings.BROKER_URL)
    before = client.info("commandstats").get("cmdstat_eval", {}).get("calls", 0)
    assert take(buckets, run_id, 1000, per_s=5000, burst=10_000) == 1000
    asked = client.info("commandstats")["cmdstat_eval"]["calls"] - before
    assert asked <= 11


def test_without_redis_each_process_counts_alone(run_id: int) -> None:
    buckets = Buckets("redis://127.0.0.1:9/0")
    before = time.monotonic()
    assert take(buckets, run_id, 10, per_s=0.1, burst=4) == 4
    assert time.monotonic() - before < 1
