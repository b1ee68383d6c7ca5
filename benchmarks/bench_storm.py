"""The storm: `python -m benchmarks.bench_storm`.

2,048 nodes post the same NaN within one second: one incident, one freeze plan, every reply says hold.
Then the same at 0.7 × the webhook rate measured just before, and NaNs alone, each on a run of its own.
Latency counts from the moment a post was due. Prints JSON; exits 1 when a goal is missed.
"""

import json
import sys
import time
from datetime import timedelta
from typing import Any

import numpy as np
from django.utils import timezone

from benchmarks.bench_ingest import Posts, count, drained_s, event, new_run, taken
from benchmarks.load import Answered, fire, percentile
from benchmarks.serving import granian, servers, worker

NODES = 2_048
ALONE = 100  # of fewer, the 99th percentile is the slowest
QUIET_S, IDLE_WITHIN_S = 0.3, 60.0
RATE_POSTS = 4_000
GOAL_ALL_S, GOAL_P99_MS, GOAL_ALONE_MS = 2.0, 250.0, 50.0


def bad_post(posts: Posts, node: int, step: int) -> bytes:
    """Return one node's post: its first rank's NaN, and the gradient norm that every node sees."""
    data = {"loss": "nan", "grad_norm": "nan", "lr": 3e-4, "nonfinite": 14}
    event = {"type": "step", "step": step, "rank": node * 8, "node": f"n{node}", "data": data}
    return posts.signed("events", json.dumps(event).encode(), "application/json")


def summary(answered: Answered, posts: int) -> dict[str, Any]:
    """Return what one storm looked like from outside."""
    return {
        "posts": posts,
        "arrival_per_s": round(posts / answered.offered_s, 1) if answered.offered_s else None,
        "answered_per_s": round(posts / answered.wall_s, 1),
        "all_answered_s": round(answered.wall_s, 3),
        "p50_ms": round(percentile(answered.latency_s, 0.5) * 1e3, 1),
        "p99_ms": round(percentile(answered.latency_s, 0.99) * 1e3, 1),
        "holds": answered.holds,
    }


def state_of(posts: Posts) -> dict[str, int]:
    """Return what the storm left behind."""
    from evidence.models import Dossier
    from incidents.models import Incident
    from runs.models import Directive, FirstBad

    return {
        "incidents": Incident.objects.filter(run_id=posts.run_id).count(),
        "freeze_plans": Dossier.objects.filter(run_id=posts.run_id).count(),
        "directives": Directive.objects.filter(run_id=posts.run_id).count(),
        "first_bad_lanes": FirstBad.objects.filter(run_id=posts.run_id, view="local").count(),
    }


def storm(port: int, over_s: float, seed: int) -> dict[str, Any]:
    """Let every node post once within `over_s`, at random moments, after a healthy step."""
    posts = new_run()
    taken(fire(port, [posts.signed("events", event(18_003), "application/json")], 1), 1)
    arrivals = sorted(np.random.default_rng(seed).uniform(0, over_s, NODES).tolist())
    requests = [bad_post(posts, node, 18_004) for node in range(NODES)]
    answered = taken(fire(port, requests, 1_024, arrivals), NODES)
    found = summary(answered, NODES) | state_of(posts)
    found["drain_s"] = round(drained_s(posts.run_id), 2)
    return found | {"after_drain": state_of(posts)}


def alone(port: int) -> dict[str, Any]:
    """Post NaNs, each the first of its run and alone: nothing else is posted, looked at or due meanwhile."""
    bad: list[float] = []
    holds, waited_s = 0, 0.0
    for _ in range(ALONE):
        posts = new_run()
        taken(fire(port, [posts.signed("events", event(1), "application/json")], 1), 1)
        waited_s += idle_s()
        answered = taken(fire(port, [bad_post(posts, 0, 2)], 1), 1)
        bad += answered.latency_s
        holds += answered.holds
        close(posts.run_id)
    return {
        "posts": len(bad),
        "p50_ms": round(percentile(bad, 0.5) * 1e3, 1),
        "p99_ms": round(percentile(bad, 0.99) * 1e3, 1),
        "max_ms": round(max(bad) * 1e3, 1),
        "waited_s": round(waited_s, 1),
        "holds": holds,
    }


def idle_s() -> float:
    """Wait until the worker has nothing to do, also a moment later; returns how long that took.

    Work that is due is put off, so that no evidence of the NaN before is collected beside the next one. What
    was posted is looked at all the same.
    """
    from runs.models import Work

    begun, quiet_since = time.monotonic(), None
    while quiet_since is None or time.monotonic() - quiet_since < QUIET_S:
        if time.monotonic() - begun > IDLE_WITHIN_S:
            raise RuntimeError(f"the worker was not idle within {IDLE_WITHIN_S:g} s")
        Work.objects.filter(state=Work.State.DUE).update(not_before=timezone.now() + timedelta(hours=1))
        busy = count("runs_work", "WHERE state = 'claimed'") or count("runs_pending")
        quiet_since = None if busy else quiet_since or time.monotonic()
        time.sleep(0.05)
    return time.monotonic() - begun


def close(run_id: int) -> None:
    """Close the incident of a NaN: a hundred that stay open are looked at again and again."""
    from incidents.models import Incident

    Incident.objects.filter(run_id=run_id).update(state=Incident.State.RESOLVED, resolved_at=timezone.now())


def measure(environment: dict[str, str]) -> dict[str, Any]:
    """Run all of it on one server."""
    with granian("config.wsgi", environment) as port, worker(environment):
        time.sleep(4)
        posts = new_run()
        requests = [posts.signed("events", event(step), "application/json") for step in range(RATE_POSTS)]
        fire(port, requests[:200], 16)
        rate = (RATE_POSTS - 200) / taken(fire(port, requests[200:], 16), RATE_POSTS - 200).wall_s
        drained_s(posts.run_id)
        nan_alone = alone(port)
        time.sleep(1)
        within_a_second = storm(port, 1.0, seed=1)
        time.sleep(1)
        paced = storm(port, NODES / (0.7 * rate), seed=2)
    return {
        "webhooks_per_s": round(rate, 1),
        "alone": nan_alone,
        "within_a_second": within_a_second,
        "at_0.7_of_the_rate": paced,
    }


def goals_of(result: dict[str, Any]) -> dict[str, bool]:
    """Return each goal and whether it was met."""
    second, paced = result["within_a_second"], result["at_0.7_of_the_rate"]
    return {
        "one incident, one freeze plan, every reply hold": all(
            (part["incidents"], part["freeze_plans"], part["directives"], part["holds"]) == (1, 1, 2, NODES)
            and part["first_bad_lanes"] == NODES
            for part in (second, paced)
        ),
        f"offered within 1 s: all answered within {GOAL_ALL_S} s": second["all_answered_s"] <= GOAL_ALL_S,
        f"at 0.7 x the rate: p99 {GOAL_P99_MS} ms": paced["p99_ms"] <= GOAL_P99_MS,
        f"a NaN alone: p99 {GOAL_ALONE_MS} ms": result["alone"]["p99_ms"] <= GOAL_ALONE_MS,
    }


def run(environment: dict[str, str]) -> dict[str, Any]:
    """Measure on running servers; returns figures with their goals."""
    result = measure(environment)
    return {"bench": "storm", **result, "goals": goals_of(result)}


def main() -> int:
    """Measure, print, judge."""
    with servers() as environment:
        result = run(environment)
    print(json.dumps(result, indent=2))
    return 0 if all(result["goals"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
