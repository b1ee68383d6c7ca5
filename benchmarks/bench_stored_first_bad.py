"""First-bad cell read from the database: `python -m benchmarks first_bad`.

The two runs of `bench_first_bad`, posted frame by frame in shuffled order through the signed webhook: 16,384
ranks x 10,000 steps of which rank 61 breaks at step 9,000, and one hour of a dead run (11.8 million bad
cells). Then `runs.queries.first_bad` is asked as the pages and the API ask it. Both answers are checked.
"""

import time
from itertools import islice
from typing import Any

from andon.wire import encode_frame
from benchmarks.bench_first_bad import BROKE_AT, CULPRIT, GOAL_MS, run_frames, timed_ms
from benchmarks.bench_ingest import ARROW, count, drained_s, new_run, taken
from benchmarks.load import fire
from benchmarks.serving import granian, worker

AT_ONCE = 20  # frames prepared and posted together; all of a run would not fit into memory
ASKED = 200


def stored_run(port: int, first_step: int, steps: int) -> dict[str, Any]:
    """Post a run, ask for its first bad cell, and say how many frames of how many bytes it was."""
    from runs.models import Run
    from runs.queries import first_bad

    posts = new_run()
    frames = run_frames(first_step, steps, broke_at=BROKE_AT)
    posted = sent_bytes = 0
    took_s = 0.0
    while requests := [
        posts.signed("frames", encode_frame(one)[0], ARROW) for one in islice(frames, AT_ONCE)
    ]:
        took_s += taken(fire(port, requests, 4), len(requests)).wall_s
        posted += len(requests)
        sent_bytes += sum(map(len, requests))
    drain_s = drained_s(posts.run_id)
    run = Run.objects.get(pk=posts.run_id)
    answer, ask_ms = timed_ms(lambda: first_bad(run, 1), ASKED)
    if answer is None or (answer.step, answer.ranks) != (BROKE_AT, (CULPRIT,)):
        raise RuntimeError(f"expected step {BROKE_AT} and rank {CULPRIT}, got {answer}")
    return {
        "steps": steps,
        "frames": posted,
        "sent_mib": round(sent_bytes / 2**20),
        "posted_in_s": round(took_s, 1),
        "drain_s": round(drain_s, 1),
        "rows_kept": count("runs_firstbad", "WHERE run_id = %s", (posts.run_id,)),
        "first_bad_ms": ask_ms,
    }


def run(environment: dict[str, str]) -> dict[str, Any]:
    """Measure on running servers; returns figures with their goals."""
    with granian("config.wsgi", environment) as port, worker(environment):
        time.sleep(4)
        result = {
            "one_hour_dead": stored_run(port, BROKE_AT, 720),
            "ten_thousand_steps": stored_run(port, 0, 10_000),
        }
    goals = {
        f"{name.replace('_', ' ')}: p99 {GOAL_MS:g} ms": part["first_bad_ms"]["p99"] <= GOAL_MS
        for name, part in result.items()
    }
    return {"bench": "first_bad", **result, "goals": goals}
