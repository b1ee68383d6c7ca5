"""With every process that production has: a checkpoint on a node's disk, which the server may not read."""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.agents.beside import ROOT
from tests.config.up import wait_until
from tests.faults.house import House, Poster

FILES = 4_096  # told in three posts; 16,384 are held in the benchmark
PATIENCE_S = 120.0


@pytest.fixture
def start(house: House, tmp_path: Path) -> Iterator[Callable[[Poster], "subprocess.Popen[bytes]"]]:
    """Start the agent of node n1."""
    started: list[subprocess.Popen[bytes]] = []

    def agent(poster: Poster) -> "subprocess.Popen[bytes]":
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("ANDON_", "DJANGO_"))
        }
        words = [
            *("agent", "--url", house.up.url, "--run", poster.run, "--node", "n1", "--every", "1"),
            *("--root", str(tmp_path / "disk"), "--state", str(tmp_path / "state")),
        ]
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "andon.cli", *words],
                cwd=ROOT,
                env=kept | {"ANDON_RUN_SECRET": poster.secret},
            )
        )
        return started[-1]

    yield agent
    for process in started:
        process.kill()
        process.wait()


def test_a_checkpoint_of_thousands_of_files_outlives_its_rotation(
    house: House, start: Callable[[Poster], "subprocess.Popen[bytes]"], tmp_path: Path
) -> None:
    poster = house.new_run()
    step = tmp_path / "disk" / "step-00000900"
    step.mkdir(parents=True)
    digests = {}
    for number in range(FILES):
        body = number.to_bytes(4, "big") * 16
        (step / f"{number:05d}.bin").write_bytes(body)
        digests[f"{number:05d}.bin"] = hashlib.sha256(body).hexdigest()
    log = tmp_path / "disk" / "rank3.log"
    log.write_bytes(b"export HF_TOKEN=hf_" + b"a" * 34 + b"\nstep 1000 loss nan\n")
    files = [{"path": path, "bytes": 64, "sha256": sha256} for path, sha256 in digests.items()]
    committed = {"uri": step.as_uri(), "files": files, "finite": True, "read_back": True}
    offered = {"kind": "rank_log", "uri": log.as_uri(), "rank": 3, "node": "n1"}
    nodes = [{"node": "n1", "ranks": [0, 1, 2, 3], "gpu_uuids": []}]
    poster.events({"type": "attempt.launched", "data": {"world_size": 4, "nodes": nodes}})
    poster.events({"type": "checkpoint.committed", "step": 900, "data": committed})
    poster.events({"type": "artifact.available", "rank": 3, "data": offered})
    assert poster.step(1000, rank=3, loss=float("nan")).directive["kind"] == "hold"
    poster.events({"type": "attempt.exited", "data": {"code": 93}})

    def item(kind: str) -> tuple[object, ...]:
        rows = house.sql(
            "SELECT i.state, i.held_at, i.id FROM evidence_item i"
            " JOIN evidence_dossier d ON d.id = i.dossier_id JOIN runs_run r ON r.id = d.run_id"
            " WHERE r.slug = %s AND i.kind = %s",
            poster.run,
            kind,
        )
        return rows[0] if rows else ("none", None, 0)

    agent = start(poster)
    assert wait_until(lambda: item("last_good_checkpoint")[1] is not None, PATIENCE_S), house.up.said()[
        -3000:
    ]
    shutil.rmtree(step)  # rotation
    (tree,) = (tmp_path / "disk" / ".andon-holds").glob("*/*")
    held = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in tree.iterdir()}
    assert held == digests
    agent.kill()
    agent.wait()
    start(poster)
    assert wait_until(lambda: item("rank_logs")[0] == "sealed", PATIENCE_S), item("rank_logs")
    key = house.one("SELECT key FROM evidence_storedobject WHERE item_id = %s", item("rank_logs")[2])
    kept = (house.up.data_dir / "vault" / "objects" / str(key)).read_bytes()
    assert kept == b"export HF_TOKEN=[masked]\nstep 1000 loss nan\n"

    def arrived() -> int:
        counted = house.one(
            "SELECT count(*) FROM evidence_storedobject WHERE item_id = %s", item("last_good_checkpoint")[2]
        )
        return int(str(counted))

    # Copies come from the tree. All of them would take minutes: that is for the benchmarks.
    assert wait_until(lambda: arrived() > 20, PATIENCE_S), house.up.said()[-3000:]
    assert item("last_good_checkpoint")[0] == "collecting"
