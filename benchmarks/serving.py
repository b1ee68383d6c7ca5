"""Servers for benchmarks: an own PostgreSQL that syncs, an own Valkey, granian as `manage.py up` runs it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from config.embedded import processes
from config.embedded.files import private_directory
from config.embedded.postgres import APP, OWNER, Postgres
from config.embedded.valkey import Valkey, free_port

ROOT = Path(__file__).resolve().parent.parent


@contextlib.contextmanager
def servers() -> Iterator[dict[str, str]]:
    """Start both, migrate, set this process up as Django; yields the environment for children."""
    with tempfile.TemporaryDirectory(prefix="andon-bench-") as name:
        directory = Path(name)
        logs = private_directory(directory / "log")
        postgres = Postgres(
            home=directory / "postgres",
            run_dir=private_directory(directory / "run"),
            secrets_dir=directory / "secrets",
            log_file=logs / "postgres.log",
            settings={},
        )
        valkey = Valkey(
            home=directory / "valkey", secrets_dir=directory / "secrets", log_file=logs / "valkey.log"
        )
        try:
            postgres.initialise()
            postgres.start()
            postgres.prepare()
            valkey.start()
            environment = os.environ | {
                "ANDON_DATABASE_URL": postgres.url(APP),
                "ANDON_DATABASE_OWNER_URL": postgres.url(OWNER),
                "ANDON_BROKER_URL": valkey.url(),
                "ANDON_DATA_DIR": str(directory / "data"),
                "ANDON_SECRET_KEY": "bench-" * 12,
                "ANDON_RATE_SMALL": "1000000",
                "ANDON_RATE_LARGE": "1000000",
                "ANDON_BREAKER_RUNS": "1000",  # a hundred runs fail here within minutes, on purpose
                "ANDON_LOG_LEVEL": "WARNING",
                "DJANGO_SETTINGS_MODULE": "config.settings",
            }
            subprocess.run(
                [sys.executable, "manage.py", "migrate", "--verbosity", "0"],
                cwd=ROOT,
                env=environment,
                check=True,
            )
            os.environ.update(environment)
            import django

            django.setup()
            yield environment
        finally:
            from django.db import connections

            connections.close_all()
            valkey.stop()
            postgres.stop()


@contextlib.contextmanager
def process(arguments: list[str], environment: dict[str, str], *, port: int | None = None) -> Iterator[None]:
    """Run a child until the block ends; with `port`, wait until it accepts."""
    child = subprocess.Popen(
        [sys.executable, "-m", *arguments], cwd=ROOT, env=environment, start_new_session=True
    )
    try:
        until = time.monotonic() + 60
        while port is not None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            if child.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{arguments[0]} did not start")
            time.sleep(0.05)
        yield
    finally:
        processes.stop(child, signal.SIGTERM, 15)


@contextlib.contextmanager
def granian(module: str, environment: dict[str, str]) -> Iterator[int]:
    """Serve a WSGI module; yields the port."""
    from config.management.commands.up import web_options

    port = free_port()
    arguments = ["granian", *web_options("127.0.0.1", port), f"{module}:application"]
    with process(arguments, environment, port=port):
        time.sleep(0.5)  # all workers, not only the first
        yield port


@contextlib.contextmanager
def worker(environment: dict[str, str]) -> Iterator[None]:
    """Run the Celery worker and the scheduler."""
    options = ["--pool", "threads", "--concurrency", "2", "--without-gossip", "--without-mingle"]
    celery = ["celery", "-A", "config.celery"]
    with (
        process([*celery, "worker", "--loglevel", "warning", *options], environment),
        process(
            [*celery, "beat", "--loglevel", "warning", "--scheduler", "celery.beat:Scheduler"], environment
        ),
    ):
        yield
