"""People, doors to real servers, and the one place where append-only tables are emptied."""

import importlib.util
import os
import shutil
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from _pytest.terminal import TerminalReporter
from django.db import connection, connections, transaction
from django.test import Client, TransactionTestCase

from config.embedded import processes
from runs.models import Membership, Person, Project, Role
from tests import ceph, servers

# Debian keeps pgbouncer where the PATH of an ordinary user does not look.
os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])

_NOT_RUN = "not run: "  # begins the reason of every skip that a missing package causes
# The same for packages that only training needs: they are not in the lock file, so CI does not fail for them.
_NOT_TRAINED = "not trained: "


def needs(*programs: str) -> None:
    """Skip the test where a program of apt-packages.txt is missing; in CI that is a failure."""
    if missing := [program for program in programs if shutil.which(program) is None]:
        pytest.skip(f"{_NOT_RUN}needs {', '.join(missing)} (apt-packages.txt)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `torch` where torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        for item in items:
            if item.get_closest_marker("torch"):
                item.add_marker(pytest.mark.skip(reason=f"{_NOT_TRAINED}needs torch"))


def _not_run(terminal: TerminalReporter, *marks: str) -> list[tuple[str, str]]:
    skipped: list[pytest.TestReport] = terminal.stats.get("skipped", [])
    reasons = [
        (report.nodeid, report.longrepr[2]) for report in skipped if isinstance(report.longrepr, tuple)
    ]
    return [
        (test, why.removeprefix("Skipped: ")) for test, why in reasons if any(mark in why for mark in marks)
    ]


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """Name the tests that could not run: a skip in a long line of dots is easily missed."""
    if not_run := _not_run(terminalreporter, _NOT_RUN, _NOT_TRAINED):
        terminalreporter.section("not run", red=True)
        by_reason: dict[str, list[str]] = {}
        for test, why in not_run:
            by_reason.setdefault(why, []).append(test)
        for why, tests in by_reason.items():
            more = f" and {len(tests) - 1} more" if len(tests) > 1 else ""
            terminalreporter.line(f"{tests[0]}{more}: {why}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Under CI=true a test that could not run is a failure."""
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") != "true" or not isinstance(terminal, TerminalReporter):
        return
    if _not_run(terminal, _NOT_RUN):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session", autouse=True)
def _flush_past_append_only_triggers() -> Iterator[None]:
    """Let transactional tests empty the log, ledger and custody, which refuse everyone else.

    The triggers are off only inside the transaction that empties the tables, so no test can run
    without them, and a killed session leaves them on.
    """
    flush = TransactionTestCase._fixture_teardown  # type: ignore[attr-defined]

    def flush_as_owner(case: TransactionTestCase) -> None:
        with transaction.atomic(), connection.cursor() as cursor:
            # A thread that kept its connection would make this wait for ever.
            cursor.execute("SET LOCAL lock_timeout = '20s'")
            cursor.execute(
                "SELECT tgrelid::regclass::text, quote_ident(tgname), tgenabled FROM pg_trigger"
                " WHERE NOT tgisinternal AND tgparentid = 0 AND tgenabled <> 'D'"
            )
            triggers = cursor.fetchall()
            for table, name, _ in triggers:
                cursor.execute(f"ALTER TABLE {table} DISABLE TRIGGER {name}")
            flush(case)
            for table, name, enabled in triggers:
                how = {"A": "ALWAYS ", "R": "REPLICA "}.get(enabled, "")
                cursor.execute(f"ALTER TABLE {table} ENABLE {how}TRIGGER {name}")
        # The first migration makes this project; emptying the tables took it away.
        Project.objects.get_or_create(slug="default", defaults={"name": "Default"})

    patch = pytest.MonkeyPatch()
    patch.setattr(TransactionTestCase, "_fixture_teardown", flush_as_owner)
    yield
    patch.undo()


@pytest.fixture
def project(db: None) -> Project:
    """The project that exists from the first migration."""
    return Project.objects.get_or_create(slug="default", defaults={"name": "Default"})[0]


def _person(name: str) -> Person:
    return Person.objects.create_user(name, f"{name}@example.org", f"{name}-password")


@pytest.fixture
def alice(project: Project) -> Person:
    """Admin and approver of `default`; password `alice-password`."""
    person = _person("alice")
    Membership.objects.create(project=project, person=person, roles=[Role.ADMIN, Role.APPROVER])
    return person


@pytest.fixture
def bob(project: Project) -> Person:
    """Responder and approver of `default`; password `bob-password`."""
    person = _person("bob")
    Membership.objects.create(project=project, person=person, roles=[Role.RESPONDER, Role.APPROVER])
    return person


@pytest.fixture
def charlie(db: None) -> Person:
    """Belongs to nothing and must see nothing; password `charlie-password`."""
    return _person("charlie")


@pytest.fixture
def people(alice: Person, bob: Person, charlie: Person) -> SimpleNamespace:
    """All three."""
    return SimpleNamespace(alice=alice, bob=bob, charlie=charlie)


@pytest.fixture
def as_alice(alice: Person) -> Client:
    """A browser in which alice is signed in."""
    client = Client()
    client.force_login(alice)
    return client


@pytest.fixture
def as_bob(bob: Person) -> Client:
    """A browser in which bob is signed in."""
    client = Client()
    client.force_login(bob)
    return client


@pytest.fixture
def as_charlie(charlie: Person) -> Client:
    """A browser in which charlie is signed in."""
    client = Client()
    client.force_login(charlie)
    return client


@pytest.fixture(scope="session")
def s3_endpoint() -> servers.S3:
    """A real radosgw (`.url .access_key .secret_key .client() .new_bucket(locked=True)`)."""
    needs(*ceph.PROGRAMS)
    return servers.s3()


@pytest.fixture
def s3_bucket(s3_endpoint: servers.S3) -> str:
    """A fresh bucket with Object Lock."""
    return s3_endpoint.new_bucket(locked=True)


@pytest.fixture(scope="session")
def _pgbouncer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.PgBouncer]:
    needs("pgbouncer")
    settings: dict[str, Any] = connections.settings["default"]
    bouncer, process = servers.start_pgbouncer(tmp_path_factory.mktemp("pgbouncer"), settings)
    yield bouncer
    processes.stop(process, signal.SIGKILL, 5)


@pytest.fixture
def through_pgbouncer(transactional_db: None, _pgbouncer: servers.PgBouncer) -> Iterator[servers.PgBouncer]:
    """Every connection of this test, of any thread, goes through pgbouncer in transaction mode."""
    settings: dict[str, Any] = connections.settings["default"]
    direct = {name: settings[name] for name in ("HOST", "PORT")}
    connection.close()
    settings.update(HOST=_pgbouncer.host, PORT=str(_pgbouncer.port))
    yield _pgbouncer
    connection.close()
    settings.update(direct)
