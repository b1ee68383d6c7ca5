"""`andon tail` as a process beside a log and a server that speaks the wire."""

import json
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from andon.cli import main
from andon.tail.moments import Moments
from tests.agents.beside import RUN, STOP
from tests.andon.listener import Listener

ROOT = Path(__file__).resolve().parents[3]
CASES = ROOT / "tests" / "cases" / "logs"
LINE = (
    " iteration {step:8d}/    9000 | consumed samples: {step:8d} | elapsed time per iteration (ms): 10.0 | "
    "learning rate: 1.0E-04 | lm loss: {loss} | grad norm: 1.000 | number of skipped iterations:   0 | "
    "number of nan iterations:   0 |\n"
)


@pytest.fixture
def listener(tmp_path):
    made = Listener(tmp_path)
    yield made
    made.close()


class Tails:
    """Processes that tail one log."""

    def __init__(self, tmp_path, listener):
        self.log, self.listener = tmp_path / "train.log", listener
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("ANDON_")},
            "ANDON_RUN_SECRET": listener.secret,
            "ANDON_SPOOL_DIR": str(tmp_path / "spool"),
            "XDG_STATE_HOME": str(tmp_path / "state"),
        }
        self.running = []

    def start(self, *more, stage="", after=0):
        arguments = ["tail", str(self.log), "--url", self.listener.url, "--run", self.listener.run, *more]
        code = STOP.format(stage=stage, after=after) if stage else ""
        started = subprocess.Popen(
            [sys.executable, "-c", code + RUN.format(arguments=arguments)],
            cwd=ROOT,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.running.append(started)
        return started

    def write(self, *steps, loss="2.5"):
        with self.log.open("a") as file:
            file.writelines(LINE.format(step=step, loss=loss) for step in steps)

    def end(self):
        for process in self.running:
            process.kill()
            process.communicate()


@pytest.fixture
def tails(tmp_path, listener):
    made = Tails(tmp_path, listener)
    yield made
    made.end()


def wait_for(holds, timeout_s=30.0):
    end_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def told(listener):
    return [event.step for event in listener.of("step")]


# Where the process is killed: in front of these, after so many calls.
STAGES = {
    "a batch is read and nothing written down": ("andon.tail.posting/Notes:save", 1),
    "written down and not handed over": ("andon.tail.posting/LogTail:_send", 1),
    "handed over and not sent": ("andon.client_http/Connection:post", 1),
    "sent, and the spool does not know": ("andon.spool/Spool:done", 1),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_kill_at_any_moment_loses_and_repeats_nothing(stage, tails, listener):
    where, after = STAGES[stage]
    tails.write(1, 2)
    first = tails.start(stage=where, after=after)
    wait_for(lambda: told(listener) == [1, 2])
    tails.write(3, 4)
    assert first.stdout.readline() == "here\n"
    first.kill()
    first.wait()
    tails.write(5)
    second = tails.start("--once")
    assert second.wait(30) == 0
    assert told(listener) == [1, 2, 3, 4, 5]


def test_it_follows_rotation_obeys_sigterm_and_goes_on(tails, listener):
    first = tails.start()
    tails.write(1)
    wait_for(lambda: told(listener) == [1])
    tails.log.rename(f"{tails.log}.1")
    tails.write(2)
    wait_for(lambda: told(listener) == [1, 2])
    first.send_signal(signal.SIGTERM)
    assert first.wait(30) == 0
    tails.write(3)
    assert tails.start("--once").wait(30) == 0
    assert told(listener) == [1, 2, 3]


def test_a_nan_holds_the_run_and_whoever_reads_along_is_told(tails, listener):
    listener.hold_when = lambda event: event.type == "step" and "data.loss" in event.flags
    running = tails.start()
    tails.write(1, 2)
    tails.write(3, loss="nan")
    assert "the run is held (incident 2041)" in running.stderr.readline()


def test_two_tails_of_one_log_would_tell_everything_twice(tails):
    tails.write(1)
    first = tails.start()
    wait_for(lambda: told(tails.listener) == [1])
    second = tails.start("--once")
    assert second.wait(30) == 2
    assert "another andon tail" in second.stderr.read()
    assert first.poll() is None


def test_secrets_are_masked_before_anything_is_written_or_sent(tails, listener, tmp_path):
    tails.log.write_text((CASES / "failures.log").read_text())
    assert tails.start("--once").wait(30) == 0
    (error,) = [one for one in listener.of("process.error") if "OutOfMemory" in one.data["message"]]
    assert "HF_TOKEN=[masked]" in error.data["message"]
    kept = [path for name in ("state", "spool") for path in (tmp_path / name).rglob("*") if path.is_file()]
    assert kept
    assert not any(b"SECRETSECRET" in path.read_bytes() for path in kept)


class TestDryRun:
    def test_it_prints_what_it_would_send_and_keeps_nothing(self, capsys, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        assert main(["tail", str(CASES / "megatron.log"), "--once", "--print"]) == 0
        events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [event["step"] for event in events if event["type"] == "step"] == [
            10,
            20,
            20,
            30,
            40,
            50,
            30,
            40,
        ]
        assert not (tmp_path / "state").exists()

    def test_a_reader_that_leaves_early_is_no_fault_of_the_log(self):
        line = f"{sys.executable} -m andon.cli tail {CASES / 'megatron.log'} --once --print | head -c 1"
        shown = subprocess.run(
            line, shell=True, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False
        )
        assert "megatron.log" not in shown.stderr

    def test_a_log_of_no_known_format_is_1(self, capsys, tmp_path):
        log = tmp_path / "other.log"
        log.write_text("hello\nworld\n")
        assert main(["tail", str(log), "--once", "--print"]) == 1
        assert "no record of a known format in 2 lines" in capsys.readouterr().err

    @pytest.mark.parametrize("more", [[], ["--once", "--print"]])
    def test_wrong_use_is_2_and_says_what_is_missing(self, more, capsys, tmp_path, monkeypatch):
        for name in ("ANDON_URL", "ANDON_RUN", "ANDON_RUN_SECRET"):
            monkeypatch.delenv(name, raising=False)
        assert main(["tail", str(tmp_path / "none.log"), *more]) == 2
        said = capsys.readouterr().err
        assert "is not there" in said or "--url, --run, --secret-file: needed" in said


class TestMoments:
    """A log prints no zone; the file's modification time tells it."""

    NOW = datetime(2026, 3, 4, 12, 0, 5, tzinfo=UTC)

    @pytest.mark.parametrize("hours", [-7, 0, 1, 5.5, 9])
    def test_the_zone_is_that_of_the_last_line_against_the_files_time(self, hours, tmp_path):
        log = tmp_path / "log"
        local = self.NOW + timedelta(hours=hours)
        log.write_text(f"[{local:%Y-%m-%d %H:%M:%S}] iteration 1\nno time here\n")
        written_ns = int(self.NOW.timestamp() * 1e9)
        os.utime(log, ns=(written_ns, written_ns + 90 * 10**9))
        moments = Moments()
        moments.learn(log)
        said_ns = int(local.timestamp() * 1e9)  # as read: as if it were UTC
        settled = moments.settle({"type": "step", "time": said_ns, "zoned": False}, written_ns)
        assert settled == {"type": "step", "time": written_ns}

    def test_a_zone_that_is_printed_is_believed_and_nothing_lies_in_the_future(self):
        moments = Moments()
        assert moments.settle({"time": 10**18, "zoned": True}, 5)["time"] == 10**18
        before_ns = time.time_ns()
        assert before_ns <= moments.settle({"time": 2**62}, 5)["time"] <= time.time_ns()

    def test_a_line_without_time_happened_with_the_one_before_it_or_just_now(self):
        moments = Moments()
        assert moments.settle({"type": "step"}, 10**18)["time"] == 10**18
        moments.settle({"time": 10**17, "zoned": True}, 10**18)
        assert moments.settle({"type": "step"}, 10**18)["time"] == 10**17
        moments.catching_up = False
        assert moments.settle({"type": "step"}, 10**18)["time"] == 10**18
