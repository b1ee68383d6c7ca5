"""The supervisor, with real processes: what it waits for before it kills, and when it may start a job."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from andon import checkpoint_states, checkpoints, hold, stacks
from andon.checkpoints import Positions
from andon.cli import main
from andon.client import Client
from andon.directive import Directive
from andon.supervise import runfile
from andon.supervise.launch import Launch
from andon.supervise.loop import Supervisor
from andon.supervise.record import FILE, Record
from andon.supervise.runfile import RunFile
from andon.wire import format_time
from tests.andon.listener import Listener

ROOT = Path(__file__).resolve().parents[2]
LOGS = {"kind": "rank_logs", "name": "rank logs", "state": "collecting", "says": "node n1 sends them"}


@pytest.fixture
def listener(tmp_path):
    made = Listener(tmp_path, run=f"run-{os.getpid()}-{tmp_path.name}")
    yield made
    made.close()


class Job:
    """A supervised job in a thread, and its notes."""

    def __init__(self, listener, tmp_path, mode, **changes):
        self.listener, self.notes = listener, tmp_path / "notes"
        self.directory = tmp_path / "checkpoints"
        self.notes.mkdir(exist_ok=True)
        self.file = RunFile(
            run=listener.run,
            url=listener.url,
            directory=str(self.directory),
            command=[sys.executable, "-m", "tests.andon.supervised", mode, str(self.notes)],
            keys=listener.trusted,
            environment={"PYTHONPATH": str(ROOT), "DIRECTORY": str(self.directory)},
            **{"node": "n1", "settle_s": 0.2, "kill_after_s": 0.5, "leave_grace_s": 0.0} | changes,
        )
        self.client = Client(
            listener.url,
            listener.run,
            listener.secret,
            node="n1",
            trusted=listener.trusted,
            spool_dir=tmp_path / "spool",
        )
        self.said: list[str] = []
        self.supervisor = Supervisor(self.file, self.client, say=self.said.append)
        self.code: int | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self):
        self.code = self.supervisor.run()

    def start(self):
        self._thread.start()
        return self

    def ends(self, *, is_away=False):
        self._thread.join(30)
        assert not self._thread.is_alive(), self.said
        if not is_away:
            self.client.flush(5)
        return self.code

    def note(self, name):
        until((self.notes / name).exists, self.said)
        return json.loads((self.notes / name).read_text())

    def ready(self):
        return [self.note(f"rank-{number}")["pid"] for number in range(2)]

    def stopped(self):
        until(lambda: self.listener.of("stop.requested"), self.said)
        (event,) = self.listener.of("stop.requested")
        return event.data


@pytest.fixture
def job(listener, tmp_path, monkeypatch):
    monkeypatch.setenv("ANDON_RUN_SECRET", listener.secret)
    made = []

    def make(mode, **changes):
        made.append(Job(listener, tmp_path, mode, **changes))
        return made[-1]

    yield make
    for one in made:
        one.supervisor.stop()
        one.supervisor.stop()
        if one._thread.ident is not None:
            one._thread.join(20)
        one.client.close()


def until(holds, what="", most_s=20.0):
    end = time.monotonic() + most_s
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def hold_now(listener, attempt=1):
    """The server holds the run, and its deadline has passed: ranks that hang do not leave."""
    now_ns = time.time_ns()
    listener.directive = Directive(
        kind="hold",
        seq=listener.directive.seq + 1,
        run=listener.run,
        attempt=attempt,
        deadline=format_time(now_ns),
        incident="2041",
        since=format_time(now_ns),
    )


def lives(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


class TestBeforeItKills:
    def test_it_waits_for_the_stacks_of_all_ranks_and_for_what_nodes_bring(self, listener, job):
        wanted = iter([[LOGS]] * 4)
        listener.volatile = lambda: next(wanted, [])
        one = job("hang").start()
        pids = one.ready()
        hold_now(listener)
        until(lambda: listener.of("stop.requested"), one.said)
        told = one.stopped()
        assert sorted(told["got"]) == ["stacks of rank 0", "stacks of rank 1"]
        assert told["not_got"] == []
        assert told["reason"].startswith("held, and still there")
        until(lambda: not any(lives(pid) for pid in pids), "ranks that ignore SIGTERM")
        for number in range(2):
            text = stacks.file_of(one.directory / "attempt-1" / "stacks", number).read_text()
            assert "most recent call first" in text
            assert "wait_in_a_collective" in text
        offered = {(event.rank, event.data["kind"]) for event in listener.of("artifact.available")}
        assert offered == {(0, "stacks"), (1, "stacks")}
        assert listener.asked_volatile > 4
        until(lambda: listener.of("attempt.exited"), one.said)
        (left,) = listener.of("attempt.exited")
        assert (left.attempt, left.data["exit_code"]) == (1, 137)
        one.supervisor.stop()
        assert one.ends() == hold.EXIT_HELD

    def test_what_it_did_not_get_in_time_it_writes_down(self, listener, job):
        listener.volatile = lambda: [LOGS]
        one = job("deaf", volatile_wait_s=1.0).start()
        pids = one.ready()
        hold_now(listener)
        until(lambda: listener.of("stop.requested"), one.said)
        told = one.stopped()
        assert told["got"] == ["stacks of rank 0"]
        deaf, logs = told["not_got"]
        why = "its process does not listen for SIGUSR2 (andon.stacks.listen)"
        assert deaf == {"what": "stacks of rank 1", "why": why}
        assert logs["what"] == "rank logs"
        assert logs["why"].endswith(" s: node n1 sends them")
        assert told["waited_s"] >= 1.0
        until(lambda: not any(lives(pid) for pid in pids))

    def test_a_halt_snapshot_under_way_is_waited_for(self, listener, job):
        one = job("hang").start()
        one.ready()
        place = checkpoints.directory_of(one.directory / "attempt-1", 7, quarantined=True)
        place.mkdir(parents=True)
        hold_now(listener)
        until(lambda: listener.of("artifact.available"), one.said)
        assert not listener.of("stop.requested")
        (place / checkpoints.MANIFEST).write_text("{}")
        until(lambda: listener.of("stop.requested"), one.said)
        assert one.stopped()["not_got"] == []

    def test_a_server_that_is_away_brings_nothing_and_is_not_waited_for(self, listener, job):
        one = job("hang").start()
        pids = one.ready()
        hold_now(listener)
        until(lambda: one.client.directive and one.client.directive["kind"] == "hold")
        listener.close()
        until(lambda: not any(lives(pid) for pid in pids), one.said)
        assert any("what nodes have still to bring: the server did not answer" in line for line in one.said)
        one.supervisor.stop()
        assert one.ends(is_away=True) == 143

    def test_a_healthy_job_is_ended_at_once_and_nobody_is_signalled_for_stacks(self, listener, job):
        one = job("work", kill_after_s=20.0).start()
        one.ready()
        one.supervisor.stop()
        assert one.ends() == 0
        told = one.stopped()
        assert (told["got"], told["not_got"], told["waited_s"]) == ([], [], 0.0)
        assert not list(one.directory.glob("attempt-1/stacks/*")) or all(
            not path.stat().st_size for path in one.directory.glob("attempt-1/stacks/*")
        )

    def test_a_batch_system_that_kills_sooner_shortens_the_wait(self, listener, job):
        listener.volatile = lambda: [LOGS]
        one = job("work", kill_after_s=20.0, ends_after_s=20.3).start()
        one.ready()
        one.supervisor.stop()
        assert one.ends() == 0
        told = one.stopped()
        assert told["limit_s"] <= 0.5
        assert told["not_got"][-1]["what"] == "rank logs"

    def test_a_person_who_says_now_is_obeyed(self, listener, job):
        listener.volatile = lambda: [LOGS]
        one = job("work", kill_after_s=20.0).start()
        one.ready()
        one.supervisor.stop()
        until(lambda: listener.asked_volatile >= 2)
        assert not listener.of("stop.requested")
        one.supervisor.stop()
        assert one.ends() == 0
        assert one.stopped()["not_got"] == [
            {"what": "rank logs", "why": "a person said now: node n1 sends them"}
        ]


class TestLeave:
    def test_a_failure_that_holds_nothing_is_started_again_within_a_budget(self, listener, job):
        one = job("crash", restarts_per_day=2)
        directory = checkpoints.directory_of(one.directory, 900)
        directory.mkdir(parents=True)
        file = checkpoints.write_document(directory, "state.json", {"w": 1})
        at = Positions(loader_position=1, consumed_samples=1, optimizer_step=1, schedule_position=1)
        checkpoints.commit(
            directory, run=listener.run, attempt=1, step=900, positions=at, parts={"state": [file.name]}
        )
        checkpoint_states.promote(directory)
        assert one.start().ends() == 1
        assert [event.attempt for event in listener.of("attempt.exited")] == [1, 2, 3]
        assert one.note("attempt-3")["ANDON_CHECKPOINT"] == str(directory)
        assert "2 restarts in 24 h, a person has to look" in one.said[-1]
        # The budget outlives the supervisor.
        assert len(Record(one.directory).today()) == 2
        again = job("crash", restarts_per_day=2).start()
        assert again.ends() == 1
        assert [event.attempt for event in listener.of("attempt.exited")] == [1, 2, 3, 4]

    def test_while_nobody_answers_after_a_failure_nothing_is_started(self, listener, job):
        one = job("crash")
        listener.close()
        one.start()
        one.note("attempt-1")
        until(lambda: any("nothing is started until it says so" in line for line in one.said))
        assert not (one.notes / "attempt-2").exists()
        one.supervisor.stop()
        assert one.ends(is_away=True) == 143

    def test_a_held_job_goes_on_only_by_a_permit_that_verifies(self, listener, job, tmp_path):
        one = job("resume").start()
        until(lambda: any("waiting for a permit" in line for line in one.said), one.said)
        hold_now(listener)
        (tmp_path / "other").mkdir()
        other = Listener(tmp_path / "other", run=listener.run)
        plan = {"checkpoint": None, "positions": {}, "skip": None, "kind": "resume_in_place"}
        listener.granted = other.permit(**plan)
        other.close()
        listener.let_go()
        until(lambda: any("still held" in line for line in one.said), one.said)
        assert not (one.notes / "attempt-2").exists()
        listener.granted = listener.permit(**plan)
        assert one.ends() == 0
        assert one.note("attempt-2")["ANDON_PERMIT"] == str(one.directory / "andon-permit-2.json")
        assert hold.read(one.directory) is None

    def test_a_directory_that_is_held_is_not_begun_in(self, listener, job):
        one = job("work")
        one.directory.mkdir()
        hold.write(one.directory, {"kind": "hold", "run": listener.run, "attempt": 4})
        one.start()
        until(lambda: any("is held since attempt 4" in line for line in one.said), one.said)
        one.supervisor.stop()
        assert one.ends() == hold.EXIT_HELD
        assert not list(one.notes.iterdir())

    def test_a_record_that_cannot_be_read_starts_nothing(self, listener, job):
        one = job("crash")
        one.directory.mkdir()
        (one.directory / FILE).write_text("{")
        assert one.start().ends() == 2
        assert not list(one.notes.iterdir())


class TestRunFile:
    def write(self, tmp_path, **changes):
        lines = {
            "run": '"pt-13b"',
            "url": '"http://localhost:8000"',
            "directory": f'"{tmp_path}"',
            "command": '["train"]',
            "keys": '["a"]',
        } | changes
        path = tmp_path / "RUN.toml"
        path.write_text("".join(f"{name} = {value}\n" for name, value in lines.items() if value))
        return path

    def test_it_is_read_and_checked_by_the_command(self, tmp_path, monkeypatch):
        monkeypatch.setenv("ANDON_RUN_SECRET", "whsec_x")
        path = self.write(tmp_path, volatile_wait_s="20")
        assert runfile.read(path).volatile_wait_s == 20.0
        assert main(["supervise", str(path), "--check"]) == 0

    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"volatile_wait_s": "61"}, "volatile_wait_s: 0 to 60"),
            ({"command": "[]"}, "command: what is started is missing"),
            ({"keys": "[]"}, "keys: pin the fingerprint"),
            ({"kill_after": "3"}, "kill_after"),
            ({"run": ""}, "missing required field `run`"),
            ({"run": "[1"}, "RUN.toml"),
        ],
    )
    def test_what_is_wrong_is_named(self, tmp_path, changes, says, monkeypatch, capsys):
        monkeypatch.setenv("ANDON_RUN_SECRET", "whsec_x")
        path = self.write(tmp_path, **changes)
        assert main(["supervise", str(path), "--check"]) == 2
        assert says in capsys.readouterr().err


def test_a_process_that_does_not_listen_is_left_alone(tmp_path):
    code = "import sys; sys.stdout.write('r'); sys.stdout.flush(); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1) as process:
        assert process.stdout.read(1) == b"r"
        assert stacks.ask(process.pid) is False
        process.stdin.close()
        assert process.wait(10) == 0  # SIGUSR2 would have ended it
    assert stacks.ask(process.pid) is False


def test_the_signal_of_a_launcher_is_said_as_a_shell_says_it():
    launch = Launch([sys.executable, "-c", "import time; time.sleep(60)"], {}, "no-run")
    os.kill(launch.process.pid, signal.SIGKILL)
    launch.process.wait(10)
    assert launch.code() == 137
