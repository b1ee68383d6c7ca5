"""What the agent watches: real files, real processes, and a server that speaks the wire."""

import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest

from andon.agent.watch_gpus import source_of
from andon.agent.watch_logs import Kmsg, rank_of
from andon.agent.watch_ranks import Ranks, alive
from andon.agent.watching import Watched, Watcher
from andon.client import Client
from tests.andon.listener import Listener
from tests.andon.readers.test_dumps import dump, entry

CASES = Path(__file__).resolve().parents[1] / "cases"


@pytest.fixture
def listener(tmp_path):
    made = Listener(tmp_path)
    yield made
    made.close()


@pytest.fixture
def disk(tmp_path):
    made = tmp_path / "disk"
    made.mkdir()
    return made


@pytest.fixture
def node(tmp_path, listener):
    def watch(**watched) -> Watcher:
        client = Client(
            listener.url, listener.run, listener.secret, node="n1", spool_dir=tmp_path / "state" / "spool"
        )
        return Watcher(Watched(**watched), client, state=tmp_path / "state", server="here", node="n1")

    return watch


def test_logs_are_read_and_offered_as_evidence_and_a_restart_repeats_nothing(node, disk, listener):
    log = disk / "rank-00003.log"
    log.write_text((CASES / "logs" / "failures.log").read_text())
    pattern = {"logs": (str(disk / "*.log"),)}
    node(**pattern).stop(at_end=True)
    (offered,) = listener.of("artifact.available")
    assert offered.data == {"kind": "rank_log", "uri": log.as_uri(), "node": "n1", "rank": 3}
    errors = len(listener.of("process.error"))
    assert errors == 8
    with log.open("a") as file:
        file.write("RuntimeError: after the restart\n")
    node(**pattern).stop(at_end=True)
    assert [event.data["message"] for event in listener.of("process.error")][errors:] == [
        "RuntimeError: after the restart"
    ]
    assert listener.of("process.error")[-1].rank == 3
    assert len(listener.of("artifact.available")) == 1


def test_dumps_and_error_files_are_posted_once_also_over_a_restart(node, disk, listener):
    (disk / "nccl_trace_rank_n1_2").write_bytes(pickle.dumps(dump(entry(7))))
    (disk / "nccl_trace_rank_n1_4").write_bytes(b"torn")
    error = disk / "attempt_0" / "1" / "error.json"
    error.parent.mkdir(parents=True)
    error.write_text(
        json.dumps({"message": "boom API_KEY=sk-aaaaaaaaaaaaaaaaaaaaaaaa", "timestamp": "1724779239"})
    )
    what = {"dumps": (str(disk / "nccl_*"),), "errors": (str(disk / "**" / "error.json"),)}
    for _ in range(2):
        node(**what).stop(at_end=True)
    (found,) = listener.of("flight_recorder.dump")
    assert (found.rank, found.node, found.data["entries"][0]["collective_seq_id"]) == (2, "n1", 7)
    (raised,) = listener.of("process.error")
    assert raised.data["local_rank"] == 1
    assert "sk-aaaa" not in raised.data["message"]


def test_reports_of_checks_are_read_and_posted_once(node, disk, listener):
    for name in ("dcgmi-diag-4.txt", "nccl-wrong.txt"):
        (disk / name).write_text((CASES / "fleet" / name).read_text())
    (disk / "other.txt").write_text("nothing of anybody's")
    for _ in range(2):
        node(reports=(str(disk / "*.txt"),)).stop(at_end=True)
    told = listener.of("preflight.report")
    assert [(one.node, one.data["tool"], one.data["verdict"]) for one in told] == [
        ("n1", "dcgmi diag", "fail"),
        ("n1", "nccl-tests", "fail"),
    ]


def test_a_kernel_log_in_a_file_is_followed(node, disk, listener):
    log = disk / "kern.log"
    log.write_text((CASES / "hardware" / "kernel.log").read_text())
    node(kernel_log=log).stop(at_end=True)
    assert [event.data["xid"] for event in listener.of("hardware.xid")][:3] == [119, 14, 48]


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK), reason="/dev/kmsg cannot be read here")
def test_the_kernels_buffer_is_read_to_its_end():
    kmsg = Kmsg(Path("/dev/kmsg"))
    assert isinstance(kmsg.read(), list)
    assert len(kmsg.boot) == 36
    kmsg.close()


def test_ranks_are_seen_from_outside_and_one_that_ends_is_told():
    rank = 104_729  # of no other process on this machine
    environment = {"RANK": str(rank), "LOCAL_RANK": "1", "WORLD_SIZE": "200000", "ANDON_RUN": "mine"}
    process = subprocess.Popen(
        [sys.executable, "-c", "print(1, flush=True); input()"],
        env=environment | {"SECRET": "x", "PATH": os.environ["PATH"]},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        process.stdout.readline()
        ranks = Ranks("mine")
        (beat,) = ranks.look()
        assert rank in beat["ranks"]
        assert [one["pid"] for one in beat["data"]["processes"] if one["rank"] == rank] == [process.pid]
        assert alive("mine")[rank].world_size == 200_000
        assert rank not in alive("another")
        assert "SECRET" not in json.dumps(beat)
    finally:
        process.kill()
        process.communicate()
    (told,) = ranks.look()
    assert [one["pid"] for one in told["data"]["gone"] if one["rank"] == rank] == [process.pid]


def test_counters_come_from_a_program_that_prints_them(node, listener, tmp_path):
    """nvidia-smi is not here: a script in its place prints what it would, worse at the second look."""
    program = tmp_path / "nvidia-smi"
    cells = "0, GPU-1, 00000000:8A:00.0, 61, 70, 300.1, 700, 1980, 2619, 0x0000000000000000, 0, {dbe}, No, No"
    program.write_text(
        f"#!/bin/sh\nif [ -e {tmp_path}/second ]; then echo '{cells.format(dbe=2)}'; "
        f"else echo '{cells.format(dbe=0)}'; touch {tmp_path}/second; fi\n"
    )
    program.chmod(0o755)
    watcher = node(gpus=str(program))
    watcher.turn()
    watcher._due["gpus"] = 0.0
    watcher.stop()
    (event,) = listener.of("hardware.ecc")
    assert event.data == {"gpu": 0, "gpu_uuid": "GPU-1", "pci": "0000:8a:00", "uncorrected": 2}
    sampled = listener.of("node.state")[0].data["gpus"][0]
    assert (sampled["gpu_temp_c"], sampled["power_w"]) == (61, 300.1)


def test_no_program_is_no_source():
    assert source_of("no-such-program-anywhere") is None


def test_the_thread_posts_while_nobody_calls_it(node, disk, listener):
    log = disk / "train.log"
    log.touch()  # a log that comes later is found within seconds
    watcher = node(logs=(str(log),))
    watcher.start()
    log.write_text("iteration: 5, loss: 2.5\n")
    end_s = time.monotonic() + 20
    while not listener.of("step"):
        assert time.monotonic() < end_s
        time.sleep(0.05)
    watcher.stop()
    assert listener.of("step")[0].data["loss"] == 2.5


@pytest.mark.parametrize(
    ("name", "rank"),
    [("rank-00012.log", 12), ("rank3/stdout.log", 3), ("train.log", None), ("n02/rank_7.out", 7)],
)
def test_a_logs_name_may_hold_its_rank(name, rank):
    assert rank_of(Path("/scratch") / name) == rank
