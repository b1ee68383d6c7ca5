"""kill -9 of worker, web and `up`, each at three moments of the demo: nothing is lost or done twice."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from config.embedded.valkey import free_port
from demo.__main__ import APPROVER, REQUESTER, RUN, Demo
from demo.check import Checker
from demo.people import Person
from demo.trainers import RecordedTrainer
from tests.config.up import ROOT, clean_environment, parent_of, processes_with
from tests.faults.demos import all_obey, eventually, inside, sealed, started
from tests.faults.house import House

pytestmark = [pytest.mark.xdist_group("demos"), pytest.mark.timeout(300)]
PARTS = {"worker": "config.celery worker", "web": "granian"}
KILLED = [*PARTS, "up"]


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    with started(tmp_path / "d") as demo:
        yield demo


def kill(demo: Demo, part: str) -> None:
    """Kill a part and start again what nobody else does."""
    up = demo.server.process
    assert up is not None
    if part == "up":
        up.send_signal(signal.SIGKILL)
        up.wait(10)
        eventually("its children went with it", lambda: not processes_with(f"ANDON_DATA_DIR={demo.data_dir}"))
        demo.server.start()
        return

    def running() -> list[int]:
        found = processes_with(f"ANDON_DATA_DIR={demo.data_dir}")
        return [pid for pid, line in found.items() if PARTS[part] in line and parent_of(pid) == up.pid]

    (killed,) = eventually("it runs", running)
    os.kill(killed, signal.SIGKILL)


def test_parts_killed_at_every_stage_lose_nothing_and_do_nothing_twice(demo: Demo):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)

    def kill_each() -> None:
        for part in chance.sample(KILLED, len(KILLED)):
            time.sleep(chance.uniform(0, 1.0))
            kill(demo, part)

    house = inside(demo)
    trainer = demo.launch()
    assert isinstance(trainer, RecordedTrainer)
    token = demo.server.manage("create_token", REQUESTER).strip().splitlines()[-1]
    checker = Checker(demo.server, RUN, token, trainer.answer)

    # While it posts.
    posting_until = chance.randrange(20, 110)
    eventually("it posts", lambda: trainer.replay.step >= posting_until)
    kill_each()

    # While evidence is frozen and collected.
    eventually("an incident opens", checker.incident)
    kill_each()

    eventually("the first bad cell is right", lambda: checker.incident()["first_bad"]["ranks"] == [3])
    incident = checker.incident()
    assert incident["first_bad"]["step"] == trainer.answer["step"]
    eventually("the directive holds", lambda: checker.incident()["directive"]["kind"] == "hold")
    # Work that a killed worker had taken is free again when its lease ends, after 90 s at most.
    eventually("the evidence is sealed", lambda: sealed(checker.incident()["evidence"]), 150)
    eventually("the trainer waits", (trainer.checkpoint_dir / "andon-hold.json").exists)
    eventually("all ranks obey", lambda: all_obey(checker))

    # What came late out of a spool may move last good; the plan follows within a sweep.
    eventually("the plan goes back to it", lambda: planned_step(house) == trainer.answer["last_good_step"])

    # Between approval and exchange.
    mira = Person(demo.server.url, REQUESTER, demo.passwords[REQUESTER])
    jonas = Person(demo.server.url, APPROVER, demo.passwords[APPROVER])
    mira.sign_in()
    page = mira.submit(mira.get(f"/incidents/{incident['id']}"), "/request", note="")
    assert page.status == 200
    jonas.sign_in()
    assert checker.approve(jonas, incident["id"]).status == 200
    kill_each()
    document = demo.wait_and_continue(trainer, 2)
    assert document is not None
    assert document["checkpoint"]["step"] == trainer.answer["last_good_step"]

    eventually("the next attempt ends", lambda: trainer.ended_well() is not None, 120)
    assert trainer.ended_well()
    eventually("the incident is watched", lambda: checker.incident()["state"] in {"watching", "resolved"})
    assert checker.incident()["id"] == incident["id"]

    trainer.replay.close()
    nothing_lost(house, trainer)
    nothing_twice(house)
    chains_hold(demo)


def planned_step(house: House) -> int:
    step = "SELECT checkpoint->>'step' FROM incidents_plan ORDER BY number DESC LIMIT 1"
    return int(house.one(step) or 0)


def nothing_lost(house: House, trainer: RecordedTrainer) -> None:
    """What the client was told is stored is there, once; and nothing of it still waits."""
    status = [client.status() for client in trainer.replay.clients.values()]
    assert [one["pending"] for one in status] == [0] * len(status)
    assert [one["gap_posts"] for one in status] == [0] * len(status)
    assert [one["rejected"] for one in status] == [0] * len(status)
    run = house.run_id(RUN)
    receipts = house.one("SELECT count(*) FROM runs_receipt WHERE run_id = %s", run)
    assert receipts == sum(one["sent"] for one in status)
    stored = (
        "SELECT (r.answer->>'accepted')::int,"
        " (SELECT count(*) FROM runs_event e WHERE e.run_id = r.run_id AND e.webhook_id = r.webhook_id),"
        " (SELECT count(*) FROM runs_frame f WHERE f.run_id = r.run_id AND f.webhook_id = r.webhook_id)"
        " FROM runs_receipt r WHERE r.run_id = %s"
    )
    for accepted, events, frames in house.sql(stored, run):
        assert (events, frames) in {(accepted, 0), (0, 1)}
    for table in ("runs_event", "runs_frame"):
        orphans = (
            f"SELECT count(*) FROM {table} t WHERE run_id = %s AND NOT EXISTS"
            " (SELECT 1 FROM runs_receipt r WHERE r.run_id = t.run_id AND r.webhook_id = t.webhook_id)"
        )
        assert house.one(orphans, run) == 0
    repeated = "SELECT webhook_id, index FROM runs_event WHERE run_id = %s GROUP BY 1, 2 HAVING count(*) > 1"
    assert house.sql(repeated, run) == []
    eventually(
        "the detectors looked at all of it",
        lambda: house.one("SELECT count(*) FROM runs_pending WHERE run_id = %s", run) == 0,
    )


def nothing_twice(house: House) -> None:
    """One incident, one dossier, one permit, one stored version of each key, and no half-written file."""
    assert house.one("SELECT count(*) FROM incidents_incident") == 1
    assert house.one("SELECT count(*) FROM evidence_dossier") == 1
    assert house.one("SELECT count(*) FROM incidents_permit") == 1
    assert house.one("SELECT count(*) FROM incidents_ledgerrow WHERE action = 'rollback'") == 1
    rows = house.sql("SELECT key, version_id, bytes_total FROM evidence_storedobject")
    assert len(rows) > 9
    versions: dict[str, set[str]] = {}
    for key, version, _ in rows:
        versions.setdefault(key, set()).add(version)
    assert {key: found for key, found in versions.items() if len(found) > 1} == {}
    vault = house.up.data_dir / "vault"
    files = {path for path in vault.rglob("*") if path.is_file() and not path.is_symlink()}
    named = {path for path in files if any(key in str(path) for key in versions)}
    assert len(named) == len(versions)


def chains_hold(demo: Demo) -> None:
    """Ledger and custody verify, by the server's own keys."""
    script = (
        "from evidence.custody import verify_custody; from evidence.models import Dossier;"
        "from incidents import ledger; from runs.models import Run;"
        "print([verify_custody(d) for d in Dossier.objects.all()],"
        " [ledger.verify(r) for r in Run.objects.all()])"
    )
    assert demo.server.manage("shell", "-v0", "-c", script).strip().endswith("[[]] [[]]")


def test_a_demo_killed_in_its_terminal_leaves_no_process(tmp_path: Path):
    data_dir = tmp_path / "d"
    environment = clean_environment(ANDON_DATA_DIR=str(data_dir), ANDON_PORT=str(free_port()), CHECK="1")
    log = tmp_path / "demo.log"
    with log.open("wb") as output:
        demo = subprocess.Popen(
            [sys.executable, "-m", "demo"], cwd=ROOT, env=environment, stdout=output, stderr=output
        )
    try:
        eventually("it trains", lambda: "starts posting" in log.read_text())
    finally:
        demo.kill()
        demo.wait(10)
    eventually("all is gone", lambda: not processes_with(f"ANDON_DATA_DIR={data_dir}"), 40)
