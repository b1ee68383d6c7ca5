"""The grid at full size: `python -m benchmarks pages`.

A run of 16,384 ranks × 100,000 steps: every step with its summary, state plane and first-bad rows, written by
the store's own function; the frames of 2,000 steps around the planted cells as a trainer posts them, values
and all; and a loss for each step. Beside it one hour of a dead run, every rank NaN at every step. A worker
looks and compacts. Then first-bad is asked, and pages (of a warm server) and tiles (the first time counts)
are fetched over HTTP as a browser does. Every tile is checked for the planted cell. `BENCH_STEPS` makes the
run shorter.
"""

import http.client
import os
import time
import uuid
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any
from urllib.parse import urlencode

import numpy as np

from andon.detect.planes import HEALTHY
from andon.wire import Frame, encode_events, encode_frame
from benchmarks import in_browser
from benchmarks.bench_first_bad import (
    BROKE_AT,
    CULPRIT,
    RANKS,
    STEPS_PER_FRAME,
    frame,
    run_frames,
    spread,
    timed_ms,
)
from benchmarks.bench_ingest import ARROW, Posts, count, drained_s, taken
from benchmarks.load import fire
from benchmarks.serving import granian, worker

STEPS = int(os.environ.get("BENCH_STEPS", "100000"))
RAW_STEPS = min(1_000, STEPS // 50)  # around each of the two planted cells
PLANTED, PLANTED_RANK = STEPS // 8 + 345, 9_217  # skipped: shown, and no incident's origin
DEAD_STEPS = min(720, STEPS // 50)  # an hour at 5 s a step
AT_ONCE = 20
ASKED = 200
TILE_TIMES = 5
WARM = 8  # each process of a server that was just started compiles its templates once
FIRST_BAD_MS, HTML_MS, TILE_MS = 50.0, 200.0, 150.0
SETUP_S, SETUP_BYTES = 600.0, 8e9


def launch() -> dict[str, Any]:
    """Return a launch of 2,048 nodes: tensor groups on a node, pipelines over 16, the rest data."""
    ranks = np.arange(RANKS)
    return {
        "type": "attempt.launched",
        "attempt": 1,
        "data": {
            "world_size": RANKS,
            "nodes": [{"node": f"node-{n:04d}", "ranks": f"{8 * n}-{8 * n + 7}"} for n in range(RANKS // 8)],
            "groups": {
                "tp": [f"{8 * n}-{8 * n + 7}" for n in range(RANKS // 8)],
                "pp": [ranks[ranks // 128 * 8 + ranks % 8 == g].tolist() for g in range(RANKS // 16)],
                "dp": [ranks[ranks % 128 == g].tolist() for g in range(128)],
            },
        },
    }


def new_run(name: str) -> Posts:
    """Create a run; its launch is posted."""
    from runs.actions import create_run

    made = create_run(name=f"{name}-{uuid.uuid4().hex[:6]}")
    return Posts(made.run.pk, made.run.slug, made.secret)


def post(port: int, requests: list[bytes]) -> None:
    """Post all of it and see that it was taken."""
    taken(fire(port, requests, 4), len(requests))


def in_raw(step: int) -> bool:
    """Return whether the frame of a step is posted with its values."""
    return step >= STEPS - RAW_STEPS or abs(step - PLANTED) <= RAW_STEPS // 2


def store_planes(posts: Posts) -> None:
    """Write every frame that is not posted: summary and plane, by the function that posts go through."""
    from django.db import transaction
    from django.utils import timezone
    from psycopg.types.json import Jsonb

    from runs import planes
    from runs.rows import raw_cursor

    arguments = ", ".join(["%s"] * 18 + ["%b", "%b"])
    ranks = np.arange(RANKS, dtype=np.int32)
    codes = np.full((STEPS_PER_FRAME, RANKS), HEALTHY, np.uint8)
    starts = [start for start in range(0, STEPS, STEPS_PER_FRAME) if not in_raw(start)]
    for chunk in (starts[at : at + 500] for at in range(0, len(starts), 500)):
        with transaction.atomic(), raw_cursor() as cursor:
            for start in chunk:
                plane = planes.pack(np.arange(start, start + STEPS_PER_FRAME), ranks, codes)
                last = start + STEPS_PER_FRAME - 1
                head = (posts.run_id, uuid.uuid4().hex, timezone.now(), 1, 1, "rank", "", "", start, last)
                rest = (0, RANKS - 1, None, codes.size, Jsonb([]), 0, False, False, plane, b"")
                cursor.execute(f"SELECT andon_store_frame({arguments})", (*head, *rest))


def raw_frames() -> Iterator[Frame]:
    """Yield the frames with values: healthy but for the skipped cell, and the end in which rank 61 breaks."""
    for start in range(0, STEPS, STEPS_PER_FRAME):
        if not in_raw(start):
            continue
        one = frame(start, broke_at=STEPS - 3)
        at = (one.step == PLANTED) & (one.lane == PLANTED_RANK)
        if at.any():
            bits = one.metrics["nonfinite"].copy()
            bits[one.step == PLANTED] |= 64  # all ranks skip together
            bits[at] |= 4
            one.metrics["nonfinite"] = bits
        yield one


def post_frames(port: int, posts: Posts, frames: Iterator[Frame]) -> None:
    """Post frames a few at a time; all of a run would not fit into memory."""
    while requests := [
        posts.signed("frames", encode_frame(one)[0], ARROW) for one in islice(frames, AT_ONCE)
    ]:
        post(port, requests)


def post_losses(port: int, posts: Posts) -> None:
    """Post the reduced loss of every step."""
    chunks = np.array_split(np.arange(STEPS - 3), max(1, STEPS // 1_000))
    made = [
        [{"type": "step", "step": step, "data": {"loss": 2.1, "grad_norm": 0.4}} for step in chunk.tolist()]
        for chunk in chunks
    ]
    post(port, [posts.signed("events", encode_events(events), "application/json") for events in made])


def compacted_s(run_id: int) -> float:
    """Wait until nothing of a run waits for compaction; returns how long that took."""
    begun = time.perf_counter()
    while count("runs_gridwaiting", "WHERE run_id = %s", (run_id,)):
        if time.perf_counter() - begun > SETUP_S:
            raise RuntimeError("the worker did not compact what was posted")
        time.sleep(0.1)
    return time.perf_counter() - begun


class Browser:
    """A signed-in person on one kept connection."""

    def __init__(self, port: int) -> None:
        """Sign in somebody who may see every run."""
        from django.test import Client

        from runs.models import Membership, Person, Project, Role

        person, _ = Person.objects.get_or_create(username="bench", defaults={"is_active": True})
        project = Project.objects.get(slug="default")
        Membership.objects.get_or_create(project=project, person=person, defaults={"roles": [Role.RESPONDER]})
        client = Client()
        client.force_login(person)
        self.session = client.cookies["sessionid"].value
        self.port = port
        self.cookie = "; ".join(f"{name}={morsel.value}" for name, morsel in client.cookies.items())
        self.connection = http.client.HTTPConnection("127.0.0.1", port)

    def get(self, path: str) -> bytes:
        """Fetch a page or a tile."""
        self.connection.request("GET", path, headers={"Host": "localhost", "Cookie": self.cookie})
        answer = self.connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status}")
        return body

    def timed(self, path: str, times: int) -> tuple[bytes, dict[str, float]]:
        """Fetch `times` times; the first counts too."""
        took, body = [], b""
        for _ in range(times):
            began = time.perf_counter()
            body = self.get(path)
            took.append((time.perf_counter() - began) * 1e3)
        return body, spread(took)


def tiles(last_step: int, bad_step: int) -> dict[str, dict[str, object]]:
    """Return the tiles that are measured: every kind of rows, zooms from all steps to one, wide screens."""
    whole = {"x0": 0, "x1": last_step, "y0": 0, "y1": RANKS - 1, "w": 856, "h": 320, "theme": "light"}
    opening = {**whole, "x0": max(0, bad_step - 128), "x1": bad_step + 11}
    found: dict[str, dict[str, object]] = {
        "whole attempt": whole,
        "whole attempt, 1,700 px": {**whole, "w": 1_700, "h": 640},
        "overview lane": {**whole, "h": 1},
        "opening window": opening,
        "opening window, dark": {**opening, "theme": "dark"},
    }
    for rows in ("rank", "tp", "pp", "dp"):
        found[f"whole attempt by {rows}"] = {**whole, "rows": rows}
    for rows in ("node", "rank", "dp"):
        found[f"whole attempt by {rows}, first failure on top"] = {**whole, "rows": rows, "sort": "failure"}
    found["opening window, first failure on top"] = {**opening, "sort": "failure"}
    found["whole attempt by dp, 1,700 px"] = {**whole, "rows": "dp", "w": 1_700, "h": 640}
    span = 1
    while span < last_step:
        found[f"{span:,} steps"] = {**whole, "x0": max(0, bad_step - span // 2), "x1": bad_step + span // 2}
        span *= 8
    found["one rank, all steps"] = {**whole, "y0": CULPRIT, "y1": CULPRIT}
    return found


def measured(browser: Browser, run_id: int, last_step: int, bad_step: int) -> dict[str, Any]:
    """Ask for the first bad cell, the incident's page and its tiles."""
    from incidents.models import Incident
    from runs.models import Run
    from runs.queries import first_bad

    run = Run.objects.get(pk=run_id)
    answer, ask_ms = timed_ms(lambda: first_bad(run, 1), ASKED)
    if answer is None or (answer.step, answer.ranks) != (bad_step, (CULPRIT,)):
        raise RuntimeError(f"expected step {bad_step} and rank {CULPRIT}, got {answer}")
    incident = Incident.objects.get(run_id=run_id)
    for _ in range(WARM):
        browser.get(f"/incidents/{incident.pk}")
    page, html_ms = browser.timed(f"/incidents/{incident.pk}", 20)
    if f"{CULPRIT} on node-0007".encode() not in page and f"rank {CULPRIT}".encode() not in page:
        raise RuntimeError("the page does not name the rank")
    took: dict[str, dict[str, float]] = {}
    for name, query in tiles(last_step, bad_step).items():
        body, took[name] = browser.timed(f"/incidents/{incident.pk}/grid.png?{urlencode(query)}", TILE_TIMES)
        if not has_nonfinite(body):
            raise RuntimeError(f"tile {name}: the planted cell is lost")
    _, figure_ms = browser.timed(f"/incidents/{incident.pk}/figure.json?width=856", 5)
    _, cells_ms = browser.timed(f"/incidents/{incident.pk}/cells.json", 5)
    return {
        "in_browser": in_browser.measured(browser.port, browser.session, f"/incidents/{incident.pk}"),
        "first_bad_ms": ask_ms,
        "incident_html_ms": html_ms,
        "incident_html_bytes": len(page),
        "figure_ms": figure_ms,
        "exact_cells_ms": cells_ms,
        "tile_ms": took,
        "tile_worst_ms": max(one["max"] for one in took.values()),
        "tiles": len(took),
    }


def has_nonfinite(png: bytes) -> bool:
    """Return whether a tile shows a nonfinite cell, read from the file itself."""
    import struct
    import zlib

    at, data = 8, b""
    while at < len(png):
        size, kind = struct.unpack(">I4s", png[at : at + 8])
        if kind == b"IDAT":
            data += png[at + 8 : at + 8 + size]
        at += 12 + size
    return b"\x09" in zlib.decompress(data)


def database_bytes() -> int:
    """Return how large the database is."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_database_size(current_database())")
        return int(cursor.fetchone()[0])


def vacuum(environment: dict[str, str]) -> None:
    """Do now what autovacuum would do in the minute after such a load, in the middle of the measuring."""
    import psycopg

    with psycopg.connect(environment["ANDON_DATABASE_OWNER_URL"], autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE")


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    begun = time.perf_counter()
    call()
    return round(time.perf_counter() - begun, 1)


def run(environment: dict[str, str]) -> dict[str, Any]:
    """Measure on running servers; returns figures with their goals."""
    from django.core.management import call_command

    call_command("collectstatic", interactive=False, verbosity=0)
    with granian("config.wsgi", environment) as port:
        begun = time.perf_counter()
        fleet, dead = new_run("fleet"), new_run("dead")
        setup: dict[str, Any] = {}
        with worker(environment):
            for posts in (fleet, dead):
                post(port, [posts.signed("events", encode_events([launch()]), "application/json")])
            setup["planes_s"] = seconds(lambda: store_planes(fleet))
            setup["losses_s"] = seconds(lambda: post_losses(port, fleet))
            setup["raw_frames_s"] = seconds(lambda: post_frames(port, fleet, raw_frames()))
            dead_frames = run_frames(BROKE_AT, DEAD_STEPS, broke_at=BROKE_AT)
            setup["dead_frames_s"] = seconds(lambda: post_frames(port, dead, dead_frames))
            for posts in (fleet, dead):
                setup[f"look_{posts.slug.split('-')[0]}_s"] = round(drained_s(posts.run_id), 1)
                setup[f"compact_{posts.slug.split('-')[0]}_s"] = round(compacted_s(posts.run_id), 1)
            time.sleep(17)  # what did not come is missing after 15 s, and the tiles stand still
        setup["vacuum_s"] = seconds(lambda: vacuum(environment))
        setup["all_s"] = round(time.perf_counter() - begun, 1)
        setup["database_mb"] = round(database_bytes() / 1e6)
        setup["block_rows"] = count("runs_gridblock")
        print(setup, flush=True)
        browser = Browser(port)
        result: dict[str, Any] = {
            "ranks": RANKS,
            "steps": STEPS,
            "setup": setup,
            "fleet": measured(browser, fleet.run_id, STEPS - 1, STEPS - 3),
            "dead_hour": measured(browser, dead.run_id, BROKE_AT + DEAD_STEPS - 1, BROKE_AT),
        }
    goals = {
        f"set-up within {SETUP_S:g} s": setup["all_s"] <= SETUP_S,
        f"set-up within {SETUP_BYTES / 1e9:g} GB": setup["database_mb"] <= SETUP_BYTES / 1e6,
    }
    for name in ("fleet", "dead_hour"):
        part = result[name]
        goals |= {
            f"{name}: first bad, p99 {FIRST_BAD_MS:g} ms": part["first_bad_ms"]["p99"] <= FIRST_BAD_MS,
            f"{name}: incident page, p99 {HTML_MS:g} ms": part["incident_html_ms"]["p99"] <= HTML_MS,
            f"{name}: any tile, worst {TILE_MS:g} ms": part["tile_worst_ms"] <= TILE_MS,
            **in_browser.goals(name, part["in_browser"]),
        }
    return {"bench": "pages", **result, "goals": goals}
