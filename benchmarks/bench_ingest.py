"""Ingest against its floor: `python -m benchmarks.bench_ingest`.

Signed single-event webhooks against a bare Django view that parses JSON and does one durable insert;
rank frames of 16,384 ranks × 4 metrics, and frames of single nodes, against a bare view that stores the
body by a binary parameter. fsync is on, the client shares the cores, and a rate is only counted once
every row is stored and the worker has looked at all of it ("drained"). Prints JSON; exits 1 when a goal
is missed.
"""

import json
import secrets
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from andon.signing import sign_webhook
from andon.wire import Frame, encode_frame
from benchmarks.load import Answered, fire, percentile, request
from benchmarks.serving import granian, servers, worker

CONNECTIONS = 16
EVENTS = 8_000
RANKS, STEPS, FRAMES = 16_384, 10, 40
NODE_FRAMES = 2_000
GOAL_EVENTS, GOAL_FRAMES, GOAL_SAMPLES = 0.4, 0.5, 5e6


@dataclass(frozen=True)
class Posts:
    """Signed posts of one run."""

    run_id: int
    slug: str
    secret: str

    def signed(self, path: str, body: bytes, content_type: str) -> bytes:
        """Return one signed request."""
        webhook_id, at_s = f"b{secrets.token_hex(8)}", int(time.time())
        headers = {
            "webhook-id": webhook_id,
            "webhook-timestamp": str(at_s),
            "webhook-signature": sign_webhook(self.secret, webhook_id, at_s, body),
        }
        return request(f"/api/v1/runs/{self.slug}/{path}", body, content_type, headers)


def new_run() -> Posts:
    """Create a run that was launched."""
    from runs.actions import create_run
    from runs.models import Attempt

    made = create_run(name=f"bench-{secrets.token_hex(4)}")
    from django.utils import timezone

    Attempt.objects.create(run=made.run, number=1, launched_at=timezone.now())
    return Posts(made.run.pk, made.run.slug, made.secret)


def event(step: int) -> bytes:
    """Return one step as a trainer posts it."""
    data = {
        "loss": 2.5 - step * 1e-6,
        "grad_norm": 0.41,
        "lr": 3e-4,
        "tokens": step * 4096,
        "step_time_s": 1.1,
    }
    return json.dumps({"type": "step", "step": step, "node": f"n{step % 64}", "data": data}).encode()


def rank_frame(first_step: int, *, ranks: int = RANKS, first_rank: int = 0, steps: int = STEPS) -> bytes:
    """Return a healthy frame of four metrics as Arrow."""
    random = np.random.default_rng(first_step + first_rank)
    n = ranks * steps
    frame = Frame(
        stream="rank",
        attempt=1,
        node=f"n{first_rank // 8}",
        step=np.repeat(np.arange(first_step, first_step + steps, dtype=np.int64), ranks),
        lane=np.tile(np.arange(first_rank, first_rank + ranks, dtype=np.int32), steps),
        metrics={
            "loss": random.normal(2.5, 0.1, n).astype(np.float32),
            "grad_norm": random.normal(0.4, 0.01, n).astype(np.float32),
            "compute_s": random.normal(1.0, 0.01, n).astype(np.float32),
            "wait_s": random.normal(0.1, 0.01, n).astype(np.float32),
        },
    )
    return encode_frame(frame)[0]


ARROW = "application/vnd.apache.arrow.stream"


def drained_s(run_id: int) -> float:
    """Wait until nothing of a run is pending; returns how long that took."""
    from runs.models import Pending

    begun = time.perf_counter()
    while Pending.objects.filter(run_id=run_id).exists():
        if time.perf_counter() - begun > 300:
            raise RuntimeError("the worker did not drain what was posted")
        time.sleep(0.02)
    return time.perf_counter() - begun


def count(table: str, where: str = "", values: tuple[object, ...] = ()) -> int:
    """Return the number of rows, so that what was answered was stored."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(f"SELECT count(*) FROM {table} {where}", list(values))
        return int(cursor.fetchone()[0])


def taken(answered: Answered, expected: int) -> Answered:
    """Check that every post was taken."""
    if answered.status != {202: expected}:
        raise RuntimeError(f"expected {expected} × 202, got {answered.status}")
    return answered


def figures(answered: Answered, posts: int) -> dict[str, Any]:
    """Return rate and latency of one load."""
    return {
        "per_s": round(posts / answered.wall_s, 1),
        "p50_ms": round(percentile(answered.latency_s, 0.5) * 1e3, 2),
        "p99_ms": round(percentile(answered.latency_s, 0.99) * 1e3, 2),
    }


def bare(environment: dict[str, str], path: str, bodies: list[bytes], content_type: str) -> dict[str, Any]:
    """Measure a bare view."""
    table = {"insert": "bare_event", "body": "bare_body"}[path]
    with granian("benchmarks.bare", environment) as port:
        warm = [request(f"/{path}", body, content_type) for body in bodies[:40]]
        fire(port, warm, CONNECTIONS)
        before = count(table)
        answered = taken(
            fire(port, [request(f"/{path}", body, content_type) for body in bodies], CONNECTIONS), len(bodies)
        )
        if count(table) - before != len(bodies):
            raise RuntimeError("the bare view lost rows")
    return figures(answered, len(bodies))


def andon(environment: dict[str, str], path: str, bodies: list[bytes], content_type: str) -> dict[str, Any]:
    """Measure Andon, with its worker running, until all is stored and looked at."""
    table = {"events": "runs_event", "frames": "runs_frame"}[path]
    with granian("config.wsgi", environment) as port, worker(environment):
        time.sleep(4)  # the worker imports for a while; on two cores that is not the receiver's time
        warm = new_run()
        fire(port, [warm.signed(path, body, content_type) for body in bodies[:40]], CONNECTIONS)
        drained_s(warm.run_id)
        posts = new_run()
        requests = [posts.signed(path, body, content_type) for body in bodies]
        answered = taken(fire(port, requests, CONNECTIONS), len(bodies))
        drain_s = drained_s(posts.run_id)
        stored = count(table, "WHERE run_id = %s", (posts.run_id,))
        if stored != len(bodies):
            raise RuntimeError(f"{len(bodies)} posts were answered and {stored} stored")
    return figures(answered, len(bodies)) | {
        "drain_s": round(drain_s, 2),
        "drained_per_s": round(len(bodies) / (answered.wall_s + drain_s), 1),
    }


def measure(environment: dict[str, str]) -> dict[str, Any]:
    """Run all of it."""
    events = [event(step) for step in range(EVENTS)]
    big = [rank_frame(first * STEPS) for first in range(FRAMES)]
    small = [rank_frame(n // 64 * STEPS, ranks=8, first_rank=n % 64 * 8) for n in range(NODE_FRAMES)]
    result: dict[str, Any] = {
        "events": {
            "bare": bare(environment, "insert", events, "application/json"),
            "andon": andon(environment, "events", events, "application/json"),
        },
        "rank_frames": {
            "bytes": len(big[0]),
            "bare": bare(environment, "body", big, ARROW),
            "andon": andon(environment, "frames", big, ARROW),
        },
        "node_frames": {
            "bytes": len(small[0]),
            "bare": bare(environment, "body", small, ARROW),
            "andon": andon(environment, "frames", small, ARROW),
        },
    }
    for part, samples in (("rank_frames", RANKS * STEPS), ("node_frames", 8 * STEPS)):
        for who in ("bare", "andon"):
            rate = result[part][who]["per_s"]
            result[part][who]["rank_steps_per_s"] = round(rate * samples)
            result[part][who]["rank_samples_per_s"] = round(rate * samples * 4)
    for part in result.values():
        rate = part["andon"].get("drained_per_s", part["andon"]["per_s"])
        part["ratio"] = round(part["andon"]["per_s"] / part["bare"]["per_s"], 3)
        part["ratio_drained"] = round(rate / part["bare"]["per_s"], 3)
    return result


def main() -> int:
    """Measure, print, judge."""
    with servers() as environment:
        import psycopg

        from benchmarks import bare as floor

        with psycopg.connect(environment["ANDON_DATABASE_OWNER_URL"], autocommit=True) as connection:
            connection.execute(floor.TABLES)
        result = measure(environment)
    goals = {
        f"events ≥ {GOAL_EVENTS} × bare": result["events"]["ratio_drained"] >= GOAL_EVENTS,
        f"rank frames ≥ {GOAL_FRAMES} × bare": result["rank_frames"]["ratio_drained"] >= GOAL_FRAMES,
        "rank-samples ≥ 5 million/s": result["rank_frames"]["andon"]["rank_samples_per_s"] >= GOAL_SAMPLES,
    }
    print(json.dumps({"bench": "ingest", **result, "goals": goals}, indent=2))
    return 0 if all(goals.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
