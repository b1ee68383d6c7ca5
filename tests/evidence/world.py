"""A small training run on disk and in the database, for the tests of evidence."""

import hashlib
import json
import os
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from django.db import transaction
from django.utils import timezone

from andon import chain
from andon.policy import EvidenceRule, Policy
from evidence.models import Dossier
from evidence.plan import freeze
from runs.locks import lock_run
from runs.models import Attempt, Checkpoint, Event, Project, Run, Work
from runs.work import run_due


def make_run(slug: str = "pt-13b", project: Project | None = None) -> Run:
    project = project or Project.objects.get_or_create(slug="default", defaults={"name": "Default"})[0]
    run = Run.objects.create(project=project, slug=slug)
    Attempt.objects.create(
        run=run,
        number=1,
        launched_at=timezone.now(),
        world_size=4,
        nodes=[
            {"node": "n0", "ranks": [0, 1], "gpu_uuids": []},
            {"node": "n1", "ranks": [2, 3], "gpu_uuids": []},
        ],
        groups={"dp": [[0, 1, 2, 3]]},
        precision="fp16",
        data={"config": {"lr": "3e-4"}, "env": {"HF_TOKEN": "hf_" + "a" * 30}},
    )
    return run


def post(run: Run, kind: str, step: int | None = None, *, attempt: int = 1, **more: Any) -> Event:
    now = timezone.now()
    fields: dict[str, Any] = {"received_at": now, "occurred_at": now, "webhook_id": f"w-{kind}-{step}"}
    return Event.objects.create(run_id=run.pk, attempt=attempt, type=kind, step=step, **(fields | more))


def write_checkpoint(
    root: Path, step: int, *, size: int = 3000, files: int = 3
) -> tuple[Path, list[dict[str, Any]]]:
    """Write a checkpoint directory with random files and its commit manifest; returns it and its table."""
    directory = root / f"step-{step:08d}"
    directory.mkdir(parents=True)
    table = []
    for number in range(files):
        body = os.urandom(size + number)
        name = f"shard-{number:05d}.bin"
        (directory / name).write_bytes(body)
        table.append({"path": name, "bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()})
    (directory / "commit.json").write_text(json.dumps({"step": step, "files": table}))
    return directory, table


def commit(
    run: Run,
    step: int,
    uri: str,
    table: list[dict[str, Any]],
    *,
    attempt: int = 1,
    state: str = "verified",
    **told: Any,
) -> Checkpoint:
    """Write the row and the event of a committed checkpoint."""
    digest = chain.file_table_digest(table) if table else ""
    post(
        run,
        "checkpoint.committed",
        step,
        attempt=attempt,
        data={"uri": uri, "files": table, "digest": digest, "finite": True, "manifest": "commit.json"} | told,
    )
    return Checkpoint.objects.create(
        run=run,
        attempt=attempt,
        step=step,
        uri=uri,
        state=state,
        digest=digest,
        files=table,
        bytes_total=sum(entry["bytes"] for entry in table),
        loader_position=step * 8,
        consumed_samples=step * 8,
        optimizer_step=step,
        schedule_position=step,
        committed_at=timezone.now(),
        verified_at=timezone.now() if state == "verified" else None,
        verification={"manifest": "commit.json"} if state == "verified" else {},
    )


def on_disk(run: Run, root: Path, step: int, **more: Any) -> Checkpoint:
    directory, table = write_checkpoint(root, step)
    return commit(run, step, directory.as_uri(), table, **more)


def policy(*kinds: str) -> Policy:
    return Policy(evidence=tuple(EvidenceRule(kind) for kind in kinds)) if kinds else Policy()


def open_dossier(run: Run, *, b: int | None = 1000, margin: int = 0, rules: Policy | None = None) -> Dossier:
    with transaction.atomic():
        lock_run(run.pk)
        return freeze(
            run=run,
            label="incident 7",
            url="/incidents/7",
            why="nonfinite loss",
            opened_by="",
            attempt=1,
            first_bad_step=b,
            margin_steps=margin,
            policy=rules or policy(),
        )


def age(dossier: Dossier, seconds: float) -> None:
    """Let time pass for a dossier: it was opened that much earlier, and all its work is due."""
    Dossier.objects.filter(pk=dossier.pk).update(opened_at=dossier.opened_at - timedelta(seconds=seconds))
    Work.objects.filter(state="due").update(not_before=timezone.now())


def work(dossier: Dossier, rounds: int = 6) -> None:
    """Do all work of a dossier that can be done now, also what waits for time to pass."""
    for _ in range(rounds):
        run_due()
        age(dossier, 30)
        dossier.refresh_from_db()


def now() -> datetime:
    return timezone.now()
