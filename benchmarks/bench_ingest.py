"""Ingest against its floor: `python -m benchmarks.bench_ingest`.

Signed single-event webhooks against a bare Django view that parses JSON and does one durable insert;
rank frames of 16,384 ranks × 4 metrics, and frames of single nodes, against a bare view that stores the
body by a binary parameter. fsync is on, the client shares the cores, and a rate is only counted once
every row is stored and the worker has looked at all of it ("drained"). Prints JSON; exits 1 when a goal
is missed.
"""

import json
import secrets
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from andon.signing import sign_webhook
from andon.wire import Frame, encode_frame, encode_frame_json
from benchmarks.load import Answered, fire, percentile, request
from benchmarks.serving import granian, servers, worker

CONNECTIONS = 16
EVENTS = 9_000
RANKS, STEPS, METRICS = 16_384, 10, 4
FRAMES, JSON_FRAMES, NODE_FRAMES = 36, 9, 2_400
ROUNDS = 3
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


def rank_frame(first_step: int, *, ranks: int = RANKS, first_rank: int = 0, as_json: bool = False) -> bytes:
    """Return a healthy frame of ten steps and four metrics, as Arrow unless told otherwise."""
    random = np.random.default_rng(first_step + first_rank)
    n, steps = ranks * STEPS, STEPS
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
    return encode_frame_json(frame) if as_json else encode_frame(frame)[0]


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


def figures(rounds: list[Answered], posts: int) -> dict[str, Any]:
    """Return the median rate of rounds of `posts` each, and the latency over all of them."""
    latency_s = [one for answered in rounds for one in answered.latency_s]
    return {
        "per_s": round(statistics.median(posts / answered.wall_s for answered in rounds), 1),
        "p50_ms": round(percentile(latency_s, 0.5) * 1e3, 2),
        "p99_ms": round(percentile(latency_s, 0.99) * 1e3, 2),
    }


def offer_bare(port: int, path: str, bodies: list[bytes], content_type: str) -> Answered:
    """Post bodies to a bare view; every row must be there afterwards."""
    table = {"insert": "bare_event", "body": "bare_body"}[path]
    before = count(table)
    requests = [request(f"/{path}", body, content_type) for body in bodies]
    answered = taken(fire(port, requests, CONNECTIONS), len(bodies))
    if count(table) - before != len(bodies):
        raise RuntimeError("the bare view lost rows")
    return answered


def offer_andon(port: int, path: str, bodies: list[bytes], content_type: str) -> tuple[Answered, float]:
    """Post signed bodies to a new run; returns the answers and how long its worker then took to drain."""
    table = {"events": "runs_event", "frames": "runs_frame"}[path]
    posts = new_run()
    requests = [posts.signed(path, body, content_type) for body in bodies]
    answered = taken(fire(port, requests, CONNECTIONS), len(bodies))
    drain_s = drained_s(posts.run_id)
    stored = count(table, "WHERE run_id = %s", (posts.run_id,))
    if stored != len(bodies):
        raise RuntimeError(f"{len(bodies)} posts were answered and {stored} stored")
    return answered, drain_s


def compare(
    ports: tuple[int, int], paths: tuple[str, str], bodies: list[bytes], content_type: str
) -> dict[str, Any]:
    """Measure the bare view and Andon in turn, `ROUNDS` times; the ratio is the median of the rounds'.

    Machines drift by a third within minutes, so what is compared was measured within seconds.
    """
    warm = bodies[: max(4, len(bodies) // 100)]
    offer_bare(ports[0], paths[0], warm, content_type)
    offer_andon(ports[1], paths[1], warm, content_type)
    share = len(bodies) // ROUNDS
    of_bare, of_andon, drains = [], [], []
    for turn in range(ROUNDS):
        part = bodies[turn * share : (turn + 1) * share]
        # Who goes first alternates: the second of a pair meets the checkpoints that the first caused.
        for who in ("bare", "andon") if turn % 2 == 0 else ("andon", "bare"):
            if who == "bare":
                of_bare.append(offer_bare(ports[0], paths[0], part, content_type))
            else:
                answered, drain_s = offer_andon(ports[1], paths[1], part, content_type)
                of_andon.append(answered)
                drains.append(drain_s)
    ratios = [b.wall_s / a.wall_s for a, b in zip(of_andon, of_bare, strict=True)]
    drained = [b.wall_s / (a.wall_s + d) for a, b, d in zip(of_andon, of_bare, drains, strict=True)]
    return {
        "bytes": len(bodies[0]),
        "bare": figures(of_bare, share),
        "andon": figures(of_andon, share)
        | {
            "drained_per_s": round(
                statistics.median(share / (a.wall_s + d) for a, d in zip(of_andon, drains, strict=True)), 1
            ),
            "drain_s": [round(d, 2) for d in drains],
        },
        "ratio": round(statistics.median(ratios), 3),
        "ratio_drained": round(statistics.median(drained), 3),
        "ratio_rounds": [round(ratio, 3) for ratio in ratios],
    }


def measure(environment: dict[str, str]) -> dict[str, Any]:
    """Run all of it."""
    events = [event(step) for step in range(EVENTS)]
    big = [rank_frame(n * STEPS) for n in range(FRAMES)]
    json_big = [rank_frame(n * STEPS, as_json=True) for n in range(JSON_FRAMES)]
    small = [rank_frame(n // 64 * STEPS, ranks=8, first_rank=n % 64 * 8) for n in range(NODE_FRAMES)]
    with (
        granian("benchmarks.bare", environment) as floor,
        granian("config.wsgi", environment) as port,
        worker(environment),
    ):
        time.sleep(4)  # the worker imports for a while; on two cores that is not the receiver's time
        ports = (floor, port)
        result: dict[str, Any] = {
            "events": compare(ports, ("insert", "events"), events, "application/json"),
            "rank_frames": compare(ports, ("body", "frames"), big, ARROW),
            "rank_frames_json": compare(ports, ("body", "frames"), json_big, "application/json"),
            "node_frames": compare(ports, ("body", "frames"), small, ARROW),
        }
    for part, rank_steps in (
        ("rank_frames", RANKS * STEPS),
        ("rank_frames_json", RANKS * STEPS),
        ("node_frames", 8 * STEPS),
    ):
        for who, rate in (("bare", "per_s"), ("andon", "per_s"), ("andon", "drained_per_s")):
            of = result[part][who]
            name = "rank_samples_per_s" if rate == "per_s" else "drained_rank_samples_per_s"
            of[name] = round(of[rate] * rank_steps * METRICS)
    return result


def goals_of(result: dict[str, Any]) -> dict[str, bool]:
    """Return each goal and whether it was met."""
    frames = result["rank_frames"]
    return {
        f"events: {GOAL_EVENTS} x bare, drained": result["events"]["ratio_drained"] >= GOAL_EVENTS,
        f"rank frames (Arrow): {GOAL_FRAMES} x bare, drained": frames["ratio_drained"] >= GOAL_FRAMES,
        "rank frames (Arrow): 5 million rank-samples/s, drained": frames["andon"][
            "drained_rank_samples_per_s"
        ]
        >= GOAL_SAMPLES,
    }


def run(environment: dict[str, str]) -> dict[str, Any]:
    """Measure on running servers; returns figures with their goals."""
    import psycopg

    from benchmarks import bare as floor

    with psycopg.connect(environment["ANDON_DATABASE_OWNER_URL"], autocommit=True) as connection:
        connection.execute(floor.TABLES)
    result = measure(environment)
    return {"bench": "ingest", **result, "goals": goals_of(result)}


def main() -> int:
    """Measure, print, judge."""
    with servers() as environment:
        result = run(environment)
    print(json.dumps(result, indent=2))
    return 0 if all(result["goals"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
