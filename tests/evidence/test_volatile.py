"""What vanishes with the processes: told to whoever must kill, collected before, or written down."""

import sys
import threading
import time
from pathlib import Path

import pytest

from andon import stacks
from andon.client import Client
from andon.client_http import AnswerError
from andon.signing import new_secret
from andon.supervise.launch import Launch
from andon.supervise.volatile import Report, collect
from evidence.custody import verify_custody
from evidence.models import Item, StoredObject
from evidence.receivers import STOPPED
from evidence.vault import vault
from runs.models import Run, RunSecret
from tests.evidence import world

pytestmark = pytest.mark.django_db(transaction=True)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return world.make_run(f"run-{tmp_path.name[-40:]}")


@pytest.fixture
def client(live_server, run: Run, tmp_path: Path):
    secret = new_secret()
    RunSecret.objects.create(run=run, secret=secret)
    made = Client(live_server.url, run.slug, secret, node="n0", attempt=1, spool_dir=tmp_path / "spool")
    yield made
    made.close()


def until(holds) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_only_what_vanishes_first_and_is_not_safe_is_told(
    client: Client, live_server, run: Run, vault_dir: Path
) -> None:
    assert client.volatile() == []
    made = world.open_dossier(
        run, rules=world.policy("flight_recorder", "rank_logs", "batch_ids", "topology")
    )
    assert [one["kind"] for one in client.volatile()] == ["flight_recorder", "batch_ids", "rank_logs"]
    made.items.filter(kind="batch_ids").update(state=Item.State.MISSING)
    made.items.filter(kind="rank_logs").update(waived_at=world.now())
    assert [one["kind"] for one in client.volatile()] == ["flight_recorder"]
    made.closed_at = world.now()
    made.save()
    assert client.volatile() == []
    stranger = Client(live_server.url, run.slug, new_secret())
    with pytest.raises(AnswerError, match="signature"):
        stranger.volatile()
    stranger.close()


def test_the_stacks_of_ranks_that_hang_are_sealed_before_they_are_killed(
    client: Client, run: Run, vault_dir: Path, sources: Path, tmp_path: Path
) -> None:
    notes, where = tmp_path / "notes", sources / "stacks"
    notes.mkdir()
    dossier = world.open_dossier(run, rules=world.policy("flight_recorder"))
    told = {
        "ANDON_RUN": run.slug,
        "ANDON_ATTEMPT": "1",
        stacks.ENVIRONMENT: str(where),
        "PYTHONPATH": str(ROOT),
    }
    launch = Launch([sys.executable, "-m", "tests.andon.supervised", "hang", str(notes)], told, run.slug)
    reports: list[Report] = []

    def wait() -> None:
        reports.append(
            collect(
                ranks=launch.ranks(),
                held=True,
                directory=tmp_path / "checkpoints",
                since=launch.began,
                environment=launch.environment,
                server=client,
                node="n0",
                limit_s=60.0,
            )
        )

    try:
        until(lambda: all((notes / f"rank-{number}").exists() for number in range(2)))
        waiting = threading.Thread(target=wait)
        waiting.start()
        until(lambda: all(stacks.file_of(where, number).exists() for number in range(2)))
        while waiting.is_alive():  # the worker's part
            world.work(dossier, rounds=1)
            waiting.join(0.2)
    finally:
        launch.end(0.1)
    (report,) = reports
    assert (sorted(report.got), report.not_got) == (["stacks of rank 0", "stacks of rank 1"], [])
    assert dossier.items.get().state == "sealed"
    texts = []
    for one in StoredObject.objects.filter(item__dossier=dossier).order_by("path"):
        with vault().open(one.key, one.version_id) as file:
            texts.append(file.read().decode())
    assert sum("wait_in_a_collective" in text for text in texts) == 2


def test_what_went_with_the_processes_is_a_row_of_custody_once(
    client: Client, run: Run, vault_dir: Path
) -> None:
    dossier = world.open_dossier(run, rules=world.policy("rank_logs"))
    lost = Report(60.04, ["stacks of rank 0"], [("rank logs", "not in 60 s: node n1 sends them")])
    data = {"reason": "held, and still there 61 s past the deadline", "by": "s", **lost.document()}
    event = {"type": "stop.requested", "data": data}
    for _ in range(2):
        answer = client.send_events([event])
        assert answer is not None
        assert answer["accepted"] == 1
    client.send_events([{"type": "stop.requested", "data": {"reason": "maintenance"}}])
    row = dossier.custody.get(what=STOPPED)
    assert row.data["not_got"] == [{"what": "rank logs", "why": "not in 60 s: node n1 sends them"}]
    assert (row.data["waited_s"], row.data["attempt"]) == ("60.0", 1)
    assert verify_custody(dossier) == []
