"""The demo's own server: `manage.py up` as a child, and commands against it."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from config.embedded import processes

REPOSITORY = Path(__file__).resolve().parent.parent
MARKER = ".andon-demo"  # only a directory that carries it is ever emptied


class CannotStart(Exception):
    """The demo cannot start; the text says why and what to do."""


def fresh_directory(path: Path) -> Path:
    """Return `path`, empty, marked as the demo's own and readable by nobody else.

    Raises:
        CannotStart: the directory holds something that no demo put there.
    """
    if path.exists() and any(path.iterdir()):
        if not (path / MARKER).exists():
            raise CannotStart(
                f"{path} is not empty and was not made by the demo: "
                "set ANDON_DATA_DIR to an empty directory, or unset it to use var/demo"
            )
        if _someone_runs(path):
            raise CannotStart(f"a demo is running in {path}: stop it first (Ctrl-C in its terminal)")
        for entry in path.iterdir():
            shutil.rmtree(entry, onerror=_make_writable_and_retry) if _is_tree(entry) else entry.unlink()
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o700)
    (path / MARKER).write_text("made by `make demo`; emptied by the next one\n", "utf-8")
    return path


def _is_tree(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _make_writable_and_retry(function: object, path: str, _: object) -> None:
    # The vault and held trees are read-only on purpose; the demo's own may go.
    os.chmod(Path(path).parent, 0o700)
    os.chmod(path, 0o700)
    if callable(function):
        function(path)


def _someone_runs(data_dir: Path) -> bool:
    try:
        pid = int((data_dir / "demo.pid").read_text("utf-8"))
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError):
        return False
    return b"demo" in command and pid != os.getpid()


def free_port(preferred: int) -> int:
    """Return `preferred` when nothing listens there, else a free port."""
    for port in (preferred, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise CannotStart("no free port on 127.0.0.1")


class Server:
    """`manage.py up` on the embedded default (or on the URLs in the environment)."""

    def __init__(self, data_dir: Path, port: int, source_roots: list[Path]) -> None:
        self.data_dir = data_dir
        self.url = f"http://localhost:{port}"
        self.environment = {
            **os.environ,
            "ANDON_DATA_DIR": str(data_dir),
            "ANDON_PORT": str(port),
            "ANDON_PUBLIC_URL": self.url,
            "ANDON_SOURCE_ROOTS": ",".join(map(str, source_roots)),
        }
        self.process: subprocess.Popen[bytes] | None = None
        self.log = data_dir / "up.log"

    def start(self, timeout_s: float = 120.0) -> None:
        """Start everything and wait until every part says it is ready."""
        with self.log.open("ab") as log:
            # A session of its own, so that Ctrl-C reaches this process only, which then stops the server
            # in order; and when this process is killed with -9 the kernel tells the server to stop.
            self.process = processes.spawn(
                [sys.executable, str(REPOSITORY / "manage.py"), "up"],
                death_signal=signal.SIGTERM,
                environment=self.environment,
                output=log,
                directory=REPOSITORY,
            )
        deadline = time.monotonic() + timeout_s
        said = ""
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise CannotStart(f"the server stopped at once:\n{self.tail()}")
            try:
                with urllib.request.urlopen(f"{self.url}/readyz", timeout=2) as answer:
                    said = answer.read().decode()
                return
            except urllib.error.HTTPError as error:
                said = error.read().decode(errors="replace")
            except OSError as error:
                said = str(error)
            time.sleep(0.2)
        raise CannotStart(f"not ready within {timeout_s:.0f} s ({said.strip()}):\n{self.tail()}")

    def tail(self, lines: int = 25) -> str:
        """Return the last lines of the server's log."""
        return "\n".join(self.log.read_text("utf-8", errors="replace").splitlines()[-lines:])

    def manage(self, *arguments: str) -> str:
        """Run one management command against the running servers; return what it printed."""
        return self.manage_all([arguments])[0]

    def manage_all(self, commands: Sequence[Sequence[str]], text: str = "") -> list[str]:
        """Run management commands in one process, each reading `text`; return what each printed."""
        done = subprocess.run(
            [sys.executable, "-m", "demo.commands"],
            env=self.environment,
            cwd=REPOSITORY,
            input=json.dumps([[list(command), text] for command in commands]),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            names = ", ".join(f"manage.py {' '.join(command)}" for command in commands)
            raise CannotStart(f"{names} failed:\n{done.stdout}{done.stderr}")
        printed: list[str] = json.loads(done.stdout.strip().splitlines()[-1])
        return printed

    def manage_json(self, *arguments: str) -> dict[str, object]:
        """Run one management command and read the JSON object it printed last."""
        return json_object(self.manage(*arguments))

    def stop(self, timeout_s: float = 40.0) -> None:
        """Stop everything in order; safe to call twice."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            # Its children die with it (parent-death signal), so nothing is left behind.
            self.process.kill()
            self.process.wait()


def json_object(printed: str) -> dict[str, object]:
    """Return the JSON object that a command printed last."""
    read = json.loads(printed.strip().splitlines()[-1])
    if not isinstance(read, dict):
        raise CannotStart(f"a JSON object was expected of the command, not {read!r}")
    return read
