"""Real trainers, and what breaks around them: no server, kill -9, a full disk, a wrong clock, all at once.

The job goes on, and what was taken arrives exactly once (a repeat carries its id and counts as none).
"""

import json
import os
import socket
import subprocess
import sys
import threading
from collections import Counter

import pytest

from andon.client_http import Backoff
from andon.monitor_posting import Posting
from andon.monitor_posts import Place
from tests.andon.test_client import SECRET, Peer, connect, free_port  # noqa: F401  (connect is a fixture)

PLACE = Place("my-run", 1, 0, 1, "n1", (0,))


class Child:
    """One process of tests/andon/trainer_child.py."""

    def __init__(self, url, spool, first, last, *options):
        command = [sys.executable, "-m", "tests.andon.trainer_child", url, SECRET, str(spool)]
        self.process = subprocess.Popen(
            [*command, str(first), str(last), *map(str, options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.steps: list[int] = []

    def until(self, step):
        """Read on until this step was done."""
        while not self.steps or self.steps[-1] < step:
            self.steps.append(int(self.process.stdout.readline()))

    def kill(self):
        """Kill it in the middle of whatever it does; what it said before counts."""
        self.process.kill()
        rest = self.process.stdout.read()  # `communicate` would leave out what was read ahead
        self.process.communicate()
        self.steps += [int(line) for line in rest.splitlines(keepends=True) if line.endswith("\n")]

    def status(self):
        return json.loads(self.process.stdout.readline())

    def end(self):
        """Let it flush and leave; return its last status."""
        out, _ = self.process.communicate("\n", timeout=60)
        assert self.process.returncode == 0
        return json.loads(out.splitlines()[-1])


def arrived(peer):
    """Return how often each (type, step) came, repeats of a post left out."""
    return Counter((event.type, event.step) for event in peer.events())


@pytest.mark.parametrize("off_s", [0, -600])
def test_down_killed_and_started_again_everything_arrives_once(tmp_path, off_s):
    port = free_port()
    url, spool = f"http://127.0.0.1:{port}", tmp_path / "spool"
    killed = Child(url, spool, 0, 10_000, off_s)
    killed.until(60)
    killed.kill()
    second = Child(url, spool, 20_000, 20_040, off_s)
    second.until(20_039)
    second.status()
    peer = Peer(port)
    try:
        for status in (503, 429, 500):
            peer.answers.append((status, {"detail": "not now"}, {}))
        second.kill()  # while it sends, or before
        third = Child(url, spool, 30_000, 30_020, off_s)
        third.until(30_019)
        third.status()
        assert third.end()["pending"] == 0
        came = arrived(peer)
    finally:
        peer.close()
    assert set(came.values()) == {1}
    steps = [*killed.steps, *second.steps, *third.steps]
    assert len(steps) > 120
    for step in steps:
        assert came["step", step] == 1
        assert came["verdict", step] == (step % 25 == 0)
    # The one that was being handed over when its process died may be there too.
    assert len({step for _, step in came}) <= len(steps) + 2
    stamps = [event.occurred_ns for event in peer.events()]
    assert abs(max(stamps) - min(stamps)) < 300e9  # as the trainer's own clock had them
    if off_s:
        offsets = {post["headers"].get("andon-clock-offset-ms") for post in peer.posts} - {None}
        assert all(abs(int(offset) + 1000 * off_s) < 5000 for offset in offsets)


def test_a_disk_that_is_full_stops_nothing_and_loses_nothing(tmp_path):
    """A file may not grow past 16 KiB: writes fail in the middle of a record, as on a full disk."""
    port = free_port()
    child = Child(f"http://127.0.0.1:{port}", tmp_path / "spool", 0, 150, 0, 16 * 1024)
    child.until(149)
    status = child.status()
    assert status["disk_error"]
    assert status["pending"] == 150
    on_disk = sum(path.stat().st_size for path in (tmp_path / "spool").rglob("*.seg"))
    assert 0 < on_disk <= 16 * 1024
    peer = Peer(port)
    try:
        assert child.end()["gap_posts"] == 0
        came = arrived(peer)
    finally:
        peer.close()
    assert came == Counter([("step", n) for n in range(150)] + [("verdict", n) for n in range(0, 150, 25)])


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "none", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("no file system can be mounted here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=False)


def test_a_file_system_without_room_gets_its_posts_when_there_is_some(small_disk, connect):  # noqa: F811
    port = free_port()
    client = connect(f"http://127.0.0.1:{port}", spool_dir=small_disk)
    for step in range(200):
        client.send_events([{"type": "step", "step": step, "data": {"note": os.urandom(500).hex()}}])
    assert "No space left" in client.status()["disk_error"]
    assert client.status()["pending"] == 200
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    client.send_events([{"type": "step", "step": 200}])
    assert client.status()["disk_error"] is None
    peer = Peer(port)
    try:
        assert client.flush(30)
        assert [event.step for event in peer.events()] == list(range(201))
        assert client.status()["gap_posts"] == 0
    finally:
        peer.close()


def test_with_everything_broken_a_step_hands_over_and_goes_on(connect, monkeypatch):  # noqa: F811
    """The server takes connections and says nothing, the disk takes nothing and does not return, the clock is
    wrong. Most calls would not return within the test's time if one waited; afterwards every
    verdict is there and what is not there is counted."""
    monkeypatch.setattr("andon.client_sender.QUEUE_BYTES", 100_000)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(64)
        port = silent.getsockname()[1]
        client = connect(f"http://127.0.0.1:{port}", max_wait_s=0.05, timeout_s=0.3)
        client._spool_lock.acquire()  # as a write that does not return would
        posting = Posting(PLACE, client, 5.0, background=True)
        count = 6_000
        for step in range(count):
            posting.post([{"type": "step" if step % 1000 else "verdict", "step": step}])
        assert posting.outbox is not None
    client._spool_lock.release()
    peer = Peer(port)
    peer.clock_ahead_s = 600
    try:
        assert posting.outbox.drain(60)
        assert client.flush(60)
        came = arrived(peer)
    finally:
        peer.close()
    assert [step for kind, step in sorted(came) if kind == "verdict"] == list(range(0, count, 1000))
    steps = sum(n for (kind, _), n in came.items() if kind == "step")
    gaps = [event.data for event in peer.events() if event.type == "gap"]
    # Every call was about one event, and the client's posts hold those of several.
    assert steps + 6 + sum(gap.get("posts_lost", gap.get("events", 0)) for gap in gaps) == count
    assert {n for (kind, _), n in came.items() if kind != "gap"} == {1}


def test_a_disk_that_hangs_at_the_start_keeps_no_trainer_from_starting(tmp_path, monkeypatch):
    from andon import client_sender
    from andon.client import Client

    hangs = threading.Event()
    real = client_sender._open_spool
    monkeypatch.setattr(client_sender, "OPEN_S", 0.05)
    monkeypatch.setattr(Backoff.__init__, "__defaults__", (0.02, 0.1))
    monkeypatch.setattr(client_sender, "_open_spool", lambda *given: (hangs.wait(), real(*given))[1])
    peer = Peer()
    try:
        with Client(peer.url, "my-run", SECRET, spool_dir=tmp_path, max_wait_s=0.05) as client:
            assert client.send_events([{"type": "step", "step": 1}]) is None
            hangs.set()
            assert client.flush(10)
            assert arrived(peer) == Counter([("step", 1)])
    finally:
        hangs.set()
        peer.close()
