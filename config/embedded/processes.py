"""Start children that cannot outlive us, and find out whether a pid is still who it was."""

import contextlib
import os
import pwd
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO

_LAUNCHER = str(Path(__file__).with_name("launch.py"))


class EmbeddedError(Exception):
    """An embedded server cannot run; the text says why and what to do."""


def spawn(
    command: Sequence[str],
    *,
    death_signal: signal.Signals = signal.SIGKILL,
    identity: str = "plain",
    environment: Mapping[str, str] | None = None,
    output: IO[bytes] | int | None = None,
    directory: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start `command` so that it gets `death_signal` when this process dies, however it dies.

    Call it from the main thread: the kernel ties the child to the *thread* that made it. `identity`
    is one of `launch.py`'s; `output` takes both stdout and stderr.
    """
    return subprocess.Popen(
        [
            *(sys.executable, "-I", "-S", _LAUNCHER),
            *(str(os.getpid()), str(int(death_signal)), identity),
            *command,
        ],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT if output is not None else None,
        env=None if environment is None else dict(environment),
        cwd=directory,
    )


def stop(child: subprocess.Popen[bytes], first: signal.Signals, grace_s: float) -> None:
    """Ask `child` to stop with `first`; after `grace_s` seconds kill it."""
    if child.poll() is None:
        child.send_signal(first)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(grace_s)
    if child.poll() is None:
        child.kill()
    child.wait()


def _names_a_user(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


@cache
def unprivileged_identity(data_dir: Path) -> str:
    """Return how a program that refuses root is to be started here (an identity of `launch.py`).

    An ordinary user stays who they are. Root enters a user namespace; where the kernel or a
    container forbids that, it becomes the owner of the nearest directory above `data_dir` that is
    not root's, else `nobody`.
    """
    if os.geteuid() != 0:
        return "plain"
    # initdb looks its user up by number, so the number must have a name; 65534 is nobody everywhere.
    inside = next((uid for uid in (1000, 65534) if _names_a_user(uid)), 1000)
    identity = f"userns:{inside}"
    if _can_run(identity):
        return identity
    for directory in (data_dir, *data_dir.parents):
        with contextlib.suppress(FileNotFoundError):
            owner = directory.stat()
            if owner.st_uid != 0:
                return f"user:{owner.st_uid}:{owner.st_gid}"
    return "user:65534:65534"


def _can_run(identity: str) -> bool:
    child = spawn(["true"], identity=identity, output=subprocess.DEVNULL)
    return child.wait() == 0


def is_alive(pid: int) -> bool:
    """Tell whether a process with this pid exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
    except OSError:
        return False
    return state.split()[0] not in {"Z", "X"}


def working_directory(pid: int) -> Path | None:
    """Return the working directory of a process; None if it is gone or not ours to see."""
    try:
        return Path(os.readlink(f"/proc/{pid}/cwd"))
    except OSError:
        return None


def started_at(pid: int) -> str | None:
    """Return the kernel's start time of a pid, which tells a process from a later one with its number."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()[19]


def wait_gone(pid: int, timeout_s: float) -> bool:
    """Wait until no process has this pid; True if it went within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while is_alive(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
