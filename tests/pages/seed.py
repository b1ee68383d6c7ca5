"""Fills a database with what the pages are looked at with: through the real receiver and actions.

`python -m tests.pages.seed [huge]` on a development database; tests call the functions.
"""

import json
import random
import sys
import time
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np


def post(run, secret, path, body, content_type, *, at=None):
    """Post one signed body as a trainer does, and return the decoded answer."""
    from django.test import Client

    from andon.signing import sign_webhook

    key, stamp = f"seed-{uuid.uuid4()}", int(time.time())
    answer = Client(SERVER_NAME="localhost").post(
        f"/api/v1/runs/{run}/{path}",
        data=body,
        content_type=content_type,
        headers={
            "webhook-id": key,
            "webhook-timestamp": str(stamp),
            "webhook-signature": sign_webhook(secret, key, stamp, body),
        },
    )
    assert answer.status_code == 202, (answer.status_code, answer.content[:500])
    return answer.json()


def post_events(run, secret, events):
    """Post events; NaN and infinities travel as the trainer writes them."""
    from andon.wire import encode_events

    return post(run, secret, "events", encode_events(events), "application/json")


def post_frame(run, secret, stream, attempt, step, lane, metrics, *, node=None, views=None, rank=None):
    """Post one frame of equal-length columns."""
    from andon.wire import Frame, encode_frame

    body, content_type = encode_frame(
        Frame(
            stream=stream,
            attempt=attempt,
            node=node,
            step=np.asarray(step, dtype=np.int64),
            lane=lane,
            time_ns=None,
            micro_batch=None,
            rank=rank,
            metrics=metrics,
            views=views or {},
            groups={},
        )
    )
    return post(run, secret, "frames", body, content_type)


def launch(ranks, per_node=8):
    """Return the launch event of `ranks` ranks on nodes of `per_node`."""
    return {
        "type": "attempt.launched",
        "attempt": 1,
        "data": {
            "world_size": ranks,
            "nodes": [
                {"node": f"node-{n:02d}", "ranks": list(range(n * per_node, min((n + 1) * per_node, ranks)))}
                for n in range(-(-ranks // per_node))
            ],
            "groups": {"dp": [list(range(ranks))]},
            "precision": "bf16",
        },
    }


def train(run, secret, *, ranks, steps, layers=12, bad_rank=None, spread=True, per_frame=400):
    """Post a run whose rank `bad_rank` goes nonfinite in backward at the last but one step.

    Returns:
        the first-bad step, None without `bad_rank`.
    """
    noise = random.Random(7)
    numbers = np.random.default_rng(7)
    post_events(run, secret, [launch(ranks)])
    bad = steps - 1 if bad_rank is not None else None
    every = np.arange(ranks, dtype=np.int32)
    events = []
    for step in range(1, (bad or steps + 1)):
        loss = 2.1 + 1.2 * float(np.exp(-step / 90)) + noise.gauss(0, 0.012)
        norm = 0.38 * float(np.exp(noise.gauss(0, 0.05))) * (6.0 if step == steps - 60 else 1.0)
        events.append({"type": "step", "step": step, "attempt": 1, "data": _data(step, loss, norm)})
    for start in range(0, len(events), per_frame):
        post_events(run, secret, events[start : start + per_frame])
    # Frames of ranks and layers for the newest 200 steps only: enough for the window.
    first = max(1, (bad or steps) - 330)
    clean = np.arange(first, bad or steps + 1)
    for chunk in np.array_split(clean, max(1, len(clean) * ranks // 400_000 + 1)):
        cells = np.repeat(chunk, ranks)
        lane = np.tile(every, len(chunk))
        values = (2.1 + numbers.normal(0, 0.05, len(cells))).astype(np.float32)
        post_frame(run, secret, "rank", 1, cells, lane, {"loss": values})
    names = [f"layers.{n}.attn.qkv" for n in range(layers)]
    rows = np.exp(numbers.normal(-1, 0.06, (len(clean), layers)))
    if bad is not None and layers > 6:
        rows[-8:, 6] *= np.linspace(1.1, 2.6, 8)
    post_frame(
        run,
        secret,
        "layer",
        1,
        np.repeat(clean, layers),
        names * len(clean),
        {"grad_norm": rows.astype(np.float32).ravel()},
    )
    if bad is None:
        return None
    _fail(run, secret, ranks=ranks, bad=bad, bad_rank=bad_rank, names=names, spread=spread)
    return bad


def _data(step, loss, norm):
    return {
        "loss": loss,
        "grad_norm": norm,
        "lr": 2.4e-4,
        "tokens": 65536,
        "consumed_samples": step * 32,
        "step_time_s": 0.9,
    }


def _fail(run, secret, *, ranks, bad, bad_rank, names, spread):
    every = np.arange(ranks, dtype=np.int32)
    bits = np.zeros(ranks, dtype=np.int32)
    bits[bad_rank] = 4
    node = every // 8 == bad_rank // 8
    if spread:
        bits[node & (every != bad_rank)] = 8
    layer = np.where(np.arange(len(names)) <= 6, np.nan, 0.4)
    post_frame(
        run,
        secret,
        "layer",
        1,
        np.full(len(names), bad),
        names,
        {"grad_norm": layer},
        rank=np.full(len(names), bad_rank, dtype=np.int32),
        views={"grad_norm": "local"},
    )
    post_frame(
        run, secret, "rank", 1, np.full(ranks, bad), every, {"loss": np.full(ranks, 2.113), "nonfinite": bits}
    )
    post_events(
        run,
        secret,
        [
            {
                "type": "step",
                "step": bad,
                "rank": bad_rank,
                "attempt": 1,
                "data": {"nonfinite": 4, "grad_norm": float("nan"), "view": "local"},
            },
            {
                "type": "step",
                "step": bad,
                "attempt": 1,
                "data": {"loss": 2.113, "grad_norm": float("nan"), "view": "reduced"},
            },
        ],
    )
    post_frame(
        run,
        secret,
        "rank",
        1,
        np.full(ranks, bad + 1),
        every,
        {"loss": np.full(ranks, np.nan)},
        views={"loss": "reduced"},
    )
    post_events(
        run,
        secret,
        [
            {
                "type": "step",
                "step": bad + 1,
                "attempt": 1,
                "data": {"loss": float("nan"), "grad_norm": float("nan")},
            }
        ],
    )


def checkpoints(run_row, root, *, steps, verified=True):
    """Write small real checkpoints under `root` and post their commits."""
    import hashlib

    from runs.models import Checkpoint

    made = []
    for step in steps:
        folder = Path(root) / f"step-{step}"
        folder.mkdir(parents=True, exist_ok=True)
        body = (f"weights of step {step} " * 4000).encode()
        (folder / "model.bin").write_bytes(body)
        files = [{"path": "model.bin", "bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}]
        made.append(
            Checkpoint.objects.create(
                run=run_row,
                attempt=1,
                step=step,
                uri=folder.as_uri(),
                state="verified" if verified else "committed",
                digest=hashlib.sha256(json.dumps(files).encode()).hexdigest(),
                files=files,
                bytes_total=len(body),
                loader_position=step * 32,
                consumed_samples=step * 32,
                optimizer_step=step,
                schedule_position=step,
                committed_at=datetime.now(UTC) - timedelta(minutes=5),
                verified_at=datetime.now(UTC) if verified else None,
            )
        )
    return made


def acknowledge_hold(run, secret, *, ranks, step):
    """Post that every rank is held."""
    from runs.directives import current
    from runs.models import Run

    seq = current(Run.objects.get(slug=run).pk).seq
    data = {"seq": seq, "step": step, "state": "held", "ranks": f"0-{ranks - 1}"}
    post_events(run, secret, [{"type": "directive.ack", "attempt": 1, "step": step, "data": data}])


def failing_run(
    slug="pt-13b-web3", *, ranks=64, steps=700, root="/tmp", bad_rank=None, saved=(300, 400, 500, 600)
):
    """Make a run that failed and is held; returns (run, secret, first-bad step)."""
    from runs.actions import create_run

    made = create_run(name=slug)
    bad_rank = ranks - 3 if bad_rank is None else bad_rank
    checkpoints(made.run, Path(root) / slug, steps=[step for step in saved if step < steps])
    bad = train(slug, made.secret, ranks=ranks, steps=steps, bad_rank=bad_rank)
    acknowledge_hold(slug, made.secret, ranks=ranks, step=bad + 1)
    work_through()
    return made.run, made.secret, bad


def work_through():
    """Do all that is due here, as worker and scheduler would."""
    from incidents.tasks import sweep_findings, sweep_incidents
    from runs.progress import board
    from runs.tasks import look
    from runs.work import run_due

    board.flush()
    for _ in range(2):
        look()
        sweep_findings()
        sweep_incidents()
        run_due()


def ask_to_resume(incident, name):
    """Waive what keeps the gate shut and ask to resume, as the person `name`."""
    from evidence.actions import waive
    from evidence.models import Item
    from incidents import approval
    from runs.models import Person

    person = Person.objects.get(username=name)
    for item in Item.objects.filter(dossier=incident.dossier, required=True, waived_at=None):
        if item.state not in {"sealed", "not_applicable"}:
            waive(item=item, person=person, why="not posted by this trainer")
    digest = approval.subject(incident)[1]
    return approval.request_resume(incident=incident, person=person, digest=digest)


def people():
    """Make mira.k (responder) and jonas.w (approver) of `default`, and charlie who belongs to nothing."""
    from runs.models import Membership, Person, Project

    project, _ = Project.objects.get_or_create(slug="default", defaults={"name": "Default"})
    for name, roles in (("mira.k", ["responder"]), ("jonas.w", ["approver"]), ("charlie", None)):
        person, fresh = Person.objects.get_or_create(username=name)
        if fresh:
            person.set_password(f"{name}-password")
            person.save()
        if roles is not None:
            Membership.objects.get_or_create(project=project, person=person, defaults={"roles": roles})


def main(which):
    """Seed the development database."""
    people()
    if which == "empty":
        return
    root = "/tmp/pages/sources"
    if which == "huge":
        failing_run("moe-1t-fleet", ranks=16_384, steps=260, root=root, bad_rank=9_217)
        return
    from runs.actions import create_run

    failing_run(root=root)
    healthy = create_run(name="sft-7b-math")
    train("sft-7b-math", healthy.secret, ranks=8, steps=500)
    work_through()
    create_run(name="not-started-yet")


if __name__ == "__main__":
    import os

    import django

    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")
    django.setup()
    main(sys.argv[1] if len(sys.argv) > 1 else "normal")
