"""Run `manage.py up` as a person does: a process of its own, in a data directory of its own."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from config.embedded import processes
from config.embedded.processes import is_alive, started_at
from config.embedded.valkey import free_port
from tests.servers import session_dir

ROOT = Path(__file__).resolve().parent.parent.parent


def clean_environment(**more: str) -> dict[str, str]:
    """Return this environment without anything that configures Andon or the tests, plus `more`."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ANDON_", "TEST_SESSION_", "DJANGO_", "PYTEST_"))
    }
    return kept | more


def manage(*arguments: str, **more: str) -> "subprocess.CompletedProcess[str]":
    """Run one manage.py command to its end; stderr is joined to stdout."""
    return subprocess.run(
        [sys.executable, "manage.py", *arguments],
        cwd=ROOT,
        env=clean_environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )


class Up:
    """One `manage.py up` on a free port; `log` collects what it and its children say."""

    def __init__(self, data_dir: Path, **more: str) -> None:
        self.data_dir = data_dir
        self.port = free_port()
        self.log = data_dir.parent / f"{data_dir.name}.log"
        self.environment = {
            "ANDON_DATA_DIR": str(data_dir),
            "ANDON_PORT": str(self.port),
            "ANDON_WEB_WORKERS": "1",
            **more,
        }
        self.process: subprocess.Popen[bytes] | None = None
        self.seen: dict[int, str | None] = {}

    @property
    def url(self) -> str:
        return f"http://localhost:{self.port}"

    def start(self) -> "Up":
        with self.log.open("ab") as log:
            # Tied to us: a test run that is killed leaves no server behind.
            self.process = processes.spawn(
                [sys.executable, "manage.py", "up"],
                death_signal=signal.SIGTERM,
                environment=clean_environment(**self.environment),
                output=log,
                directory=ROOT,
            )
        return self

    def wait_ready(self, timeout_s: float = 90) -> "Up":
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            assert self.process is not None
            assert self.process.poll() is None, self.said()
            if self.get("/readyz")[0] == 200:
                return self
            time.sleep(0.1)
        raise AssertionError(f"not ready after {timeout_s} s; it said:\n{self.said()}")

    def get(self, path: str) -> tuple[int, str]:
        """Return status and body; status 0 when nobody answers."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def manage(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return manage(*arguments, **self.environment)

    def processes(self) -> dict[int, str]:
        """Return pid and command line of every live process that `up` started or that one of those started.

        Found by environment, since an orphan has no parent to be found by; a server that overwrites
        its environment with its title (Valkey does) is remembered from when it had one.
        """
        found = processes_with(f"ANDON_DATA_DIR={self.data_dir}")
        for pid in all_pids():
            if parent_of(pid) in found:
                self.seen[pid] = started_at(pid)
        for pid, since in self.seen.items():
            if is_alive(pid) and started_at(pid) == since:
                found.setdefault(pid, command_of(pid))
        return found

    def pid_of(self, part: str) -> int:
        """Return the pid of the child (of `up` itself) whose command line contains `part`."""
        assert self.process is not None
        found = [
            pid
            for pid, command in self.processes().items()
            if part in command and parent_of(pid) == self.process.pid
        ]
        assert len(found) == 1, f"{part}: {self.processes()}"
        return found[0]

    def end(self, how: signal.Signals = signal.SIGTERM, timeout_s: float = 40) -> int:
        assert self.process is not None
        self.processes()  # remember them
        self.process.send_signal(how)
        return self.process.wait(timeout_s)

    def kill_whatever_is_left(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)


def prepare(data_dir: Path) -> None:
    """Fill a data directory with what a first start leaves: databases with tables, keys and static files.

    For tests that are about what happens afterwards. The first start is made once a session.
    """
    template = session_dir() / "prepared"
    with (session_dir() / "prepared.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not template.exists():
            first = Up(session_dir() / "first")
            try:
                assert first.start().wait_ready().end() == 0, first.said()
            finally:
                first.kill_whatever_is_left()
            first.data_dir.rename(template)
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    # With owners: PostgreSQL may run as another user than the tests.
    subprocess.run(["cp", "-a", f"{template}/.", str(data_dir)], check=True)


def processes_with(variable: str) -> dict[int, str]:
    """Return the live processes whose environment holds this `NAME=value`."""
    found = {}
    for pid in all_pids():
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if variable.encode() in environment and is_alive(pid):
                found[pid] = command_of(pid)
    return found


def all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def wait_until(holds, timeout_s: float) -> bool:
    """Return True as soon as `holds()`; False if it does not within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
