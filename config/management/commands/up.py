"""`manage.py up`: everything Andon needs, on one machine, as children of one process."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO, Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from config import static_files
from config.embedded import processes, servers
from config.embedded.files import private_directory
from config.embedded.postgres import APP, OWNER, Postgres
from config.embedded.processes import EmbeddedError
from config.embedded.valkey import Valkey
from config.supervise import Child, Stopped, Supervisor, raise_on

_LOG_MAX_BYTES = 10 << 20
_LOOK_EVERY_S = 0.2
_READY_TIMEOUT_S = 60.0


class Command(BaseCommand):
    """Start PostgreSQL, Valkey, web, worker and scheduler; stop them all on Ctrl-C.

    `ANDON_DATABASE_URL` and `ANDON_BROKER_URL` each take the place of the embedded server.
    """

    help = "Run the whole of Andon on this machine until Ctrl-C."
    requires_system_checks = ()  # they would want the database that this command starts

    def handle(self, *args: Any, **options: Any) -> None:
        self.data_dir: Path = settings.DATA_DIR
        self.environment = os.environ | {"DIE_WITH_PARENT": "1", "PYTHONUNBUFFERED": "1"}
        self.supervisor = Supervisor(say=self.say)
        raise_on([signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
        lock: IO[str] | None = None
        try:
            private_directory(self.data_dir)
            lock = servers.hold(self.data_dir)
            self._refuse_taken_port()
            self._start_all()
            self._watch()
        except Stopped as reason:
            self.say(f"stopping ({reason})")
        except EmbeddedError as error:
            raise CommandError(str(error)) from error
        finally:
            self.supervisor.stop()
            if lock is not None:
                servers.withdraw(self.data_dir)
                lock.close()
        self.say("stopped")

    def say(self, line: str) -> None:
        """Print one line at once: who started us may read it through a pipe."""
        self.stdout.write(f"andon: {line}")
        self.stdout.flush()

    def _refuse_taken_port(self) -> None:
        family = socket.AF_INET6 if ":" in settings.BIND else socket.AF_INET
        with socket.socket(family) as probe:
            # As the web server will: connections of its predecessor in TIME_WAIT are no obstacle.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((settings.BIND, settings.PORT))
            except OSError as error:
                raise EmbeddedError(
                    f"port {settings.PORT} on {settings.BIND} cannot be used ({error.strerror}): "
                    "stop what listens there, or set ANDON_PORT"
                ) from error

    def _start_all(self) -> None:
        announced: dict[str, str] = {}
        if not _is_set("ANDON_DATABASE_URL"):
            announced |= self._start_postgres()
            self.environment["ONLY_WORKER"] = "1"
        if not _is_set("ANDON_BROKER_URL"):
            announced |= self._start_valkey()
        self.environment |= announced
        servers.announce(self.data_dir, announced)
        if static_files.are_collected():
            self._run_together("migrate")
        else:
            self._run_together("migrate", "collectstatic")
            static_files.say_collected()
        python = [sys.executable, "-m"]
        celery = [*python, "celery", "-A", "config.celery"]
        self._add("worker", [*celery, "worker", *WORKER_OPTIONS], grace_s=15)
        # The schedule is in the settings and all of it is intervals, so there is nothing to remember.
        self._add("scheduler", [*celery, "beat", "--scheduler", "celery.beat:Scheduler"], grace_s=5)
        self._add(
            "web",
            [*python, "granian", *web_options(settings.BIND, settings.PORT), "config.wsgi:application"],
            grace_s=15,
        )
        self._wait_until_ready()

    def _start_postgres(self) -> dict[str, str]:
        postgres = Postgres(
            home=self.data_dir / "postgres",
            run_dir=self.data_dir / "run",
            secrets_dir=self.data_dir / "secrets",
            log_file=self._log_file("postgres"),
            settings={},
        )
        postgres.initialise()

        def start() -> "subprocess.Popen[bytes]":
            postgres.start()
            assert postgres.process is not None
            return postgres.process

        self.supervisor.add(Child("postgres", start, lambda _: postgres.stop()))
        postgres.prepare()
        self.say(f"PostgreSQL runs, data in {postgres.data}")
        return {"ANDON_DATABASE_URL": postgres.url(APP), "ANDON_DATABASE_OWNER_URL": postgres.url(OWNER)}

    def _start_valkey(self) -> dict[str, str]:
        valkey = Valkey(
            home=self.data_dir / "valkey",
            secrets_dir=self.data_dir / "secrets",
            log_file=self._log_file("valkey"),
        )

        def start() -> "subprocess.Popen[bytes]":
            valkey.start()
            assert valkey.process is not None
            return valkey.process

        self.supervisor.add(Child("valkey", start, lambda _: valkey.stop()))
        self.say(f"Valkey runs on 127.0.0.1:{valkey.port}")
        return {"ANDON_BROKER_URL": valkey.url()}

    def _run_together(self, *commands: str) -> None:
        """Run management commands that do not need each other side by side, to the end of all."""
        quietly = ("--no-input", "--verbosity", "0")
        children = {
            command: processes.spawn(
                [sys.executable, str(settings.BASE_DIR / "manage.py"), command, *quietly],
                environment=self.environment,
            )
            for command in commands
        }
        try:
            codes = {command: child.wait() for command, child in children.items()}
        finally:
            for child in children.values():
                processes.stop(child, signal.SIGTERM, 10)
        for command, code in codes.items():
            if code != 0:
                raise EmbeddedError(f"`manage.py {command}` ended with status {code}; what it said is above")

    def _add(self, name: str, command: list[str], *, grace_s: float) -> None:
        def start() -> "subprocess.Popen[bytes]":
            return processes.spawn(
                command,
                environment=self.environment,
                directory=settings.BASE_DIR,
            )

        def stop(process: "subprocess.Popen[bytes]") -> None:
            processes.stop(process, signal.SIGTERM, grace_s)

        self.supervisor.add(Child(name, start, stop))

    def _wait_until_ready(self) -> None:
        host = "127.0.0.1" if settings.BIND in {"0.0.0.0", "::"} else settings.BIND  # noqa: S104
        host = f"[{host}]" if ":" in host else host
        deadline = time.monotonic() + _READY_TIMEOUT_S
        said = "nothing yet"
        while time.monotonic() < deadline:
            self.supervisor.look()
            try:
                with urllib.request.urlopen(f"http://{host}:{settings.PORT}/readyz", timeout=5):
                    self.say(f"ready: {settings.PUBLIC_URL}")
                    return
            except urllib.error.HTTPError as error:
                said = ", ".join(error.read().decode(errors="replace").split("\n")).strip(", ")
            except OSError as error:
                said = str(error)
            time.sleep(0.1)
        self.say(f"still not ready after {_READY_TIMEOUT_S:g} s ({said}); carrying on")

    def _watch(self) -> None:
        while True:
            time.sleep(_LOOK_EVERY_S)
            self.supervisor.look()

    def _log_file(self, name: str) -> Path:
        """Return the log of a server; one that grew large becomes `NAME.log.1`."""
        path = private_directory(self.data_dir / "log") / f"{name}.log"
        if path.exists() and path.stat().st_size > _LOG_MAX_BYTES:
            path.replace(path.with_suffix(".log.1"))
        return path


def _is_set(name: str) -> bool:
    return bool(os.environ.get(name, "").strip() or os.environ.get(f"{name}_FILE", "").strip())


# Threads, not forked processes: what a worker waits for is the database, the store and hashing, all of
# which let other threads run, and a single process dies with its parent without leaving pool children.
WORKER_OPTIONS = (
    *("--pool", "threads", "--concurrency", str(settings.WORKER_THREADS), "--loglevel", settings.LOG_LEVEL),
    *("--without-gossip", "--without-mingle", "--without-heartbeat"),
)


def web_options(bind: str, port: int) -> list[str]:
    """Return granian's arguments before the module; the benchmarks serve their floor with the same."""
    return [
        *("--interface", "wsgi", "--host", bind, "--port", str(port)),
        *("--workers", str(settings.WEB_WORKERS), "--blocking-threads", str(settings.WEB_THREADS)),
        # A fleet posts within one second when something breaks; those posts wait in line, none is refused.
        *("--backlog", "4096", "--backpressure", "4096"),
        *("--respawn-failed-workers", "--workers-kill-timeout", "10", "--no-ws", "--log-level", "warning"),
    ]
