"""`manage.py up`: what it starts, what it survives, what it leaves behind."""

import os
import signal
import socket
import stat
import time

import pytest

from tests.config.up import Up, manage, parent_of, prepare, wait_until

pytestmark = pytest.mark.xdist_group("up")


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    up = Up(tmp_path_factory.mktemp("up") / "var")
    prepare(up.data_dir)
    up.start().wait_ready()
    yield up
    up.kill_whatever_is_left()


@pytest.fixture
def up(tmp_path):
    up = Up(tmp_path / "var")
    yield up
    up.kill_whatever_is_left()


class TestRunning:
    def test_both_probes_answer(self, running):
        assert running.get("/healthz") == (200, "ok\n")
        assert running.get("/readyz") == (200, "database: ready\nbroker: ready\nvault: ready\n")

    def test_docs_and_their_assets_come_from_here(self, running):
        status, page = running.get("/api/v1/docs")
        assert status == 200
        assert "http://" not in page
        assert "https://" not in page
        script = next(part for part in page.split('"') if "swagger-ui-bundle" in part)
        assert running.get(script)[0] == 200
        assert running.get("/api/v1/openapi.json")[0] == 200

    def test_nothing_it_keeps_is_open_to_others(self, running):
        for path in (running.data_dir, *(child for child in running.data_dir.iterdir() if child.is_dir())):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
        for path in (running.data_dir / "secrets").iterdir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path

    def test_the_server_role_owns_nothing_and_is_no_superuser(self, running):
        script = (
            "from django.db import connection as c; k = c.cursor(); k.execute('SELECT current_user, rolsuper,"
            " rolcreatedb, rolcreaterole, (SELECT count(*) FROM pg_class WHERE relowner = r.oid)"
            " FROM pg_roles r WHERE rolname = current_user'); print(k.fetchone())"
        )
        assert "('andon_app', False, False, False, 0)" in running.manage("shell", "-v0", "-c", script).stdout

    def test_a_second_one_on_the_same_data_is_refused(self, running):
        result = manage("up", ANDON_DATA_DIR=str(running.data_dir), ANDON_PORT=str(running.port + 1))
        assert result.returncode == 1
        assert f"another `manage.py up` (pid {running.process.pid})" in result.stdout

    @pytest.mark.parametrize(
        "part", ["postgres", "valkey-server", "config.celery worker", "config.celery beat"]
    )
    def test_a_killed_child_is_started_again(self, running, part):
        killed = running.pid_of(part)
        os.kill(killed, signal.SIGKILL)
        assert wait_until(lambda: "signal SIGKILL); starting it again" in running.said(), 10)
        assert wait_until(lambda: any(part in c for p, c in running.processes().items() if p != killed), 20)
        assert running.pid_of(part) != killed
        # The whole chain works again: the schedule rings, the broker carries, the worker answers.
        seen = running.data_dir / "run" / "worker.alive"
        restarted = time.time()
        assert wait_until(lambda: seen.exists() and seen.stat().st_mtime > restarted, 60)
        # At most a second old, so look only after that.
        time.sleep(1.2)
        assert wait_until(lambda: running.get("/readyz")[0] == 200, 20), running.get("/readyz")

    def test_a_killed_web_server_is_started_again_and_its_workers_went_with_it(self, running):
        server = running.pid_of("granian")
        workers = [pid for pid in running.processes() if parent_of(pid) == server]
        assert workers
        os.kill(server, signal.SIGKILL)
        assert wait_until(lambda: not set(workers) & set(running.processes()), 5)
        assert wait_until(lambda: running.get("/healthz")[0] == 200, 20)
        assert running.pid_of("granian") != server

    def test_a_killed_web_worker_is_started_again(self, running):
        server = running.pid_of("granian")
        for pid in [pid for pid in running.processes() if parent_of(pid) == server]:
            os.kill(pid, signal.SIGKILL)
        assert wait_until(lambda: running.get("/healthz")[0] == 200, 20)
        assert running.pid_of("granian") == server


def test_sigterm_stops_all_in_order_and_leaves_no_process(up):
    prepare(up.data_dir)
    up.start().wait_ready()
    assert up.end(signal.SIGTERM) == 0
    assert up.processes() == {}
    assert up.said().rstrip().endswith("andon: stopped")
    assert not (up.data_dir / "run" / "servers.json").exists()


def test_kill_9_leaves_no_process_and_the_next_start_works(up):
    prepare(up.data_dir)
    up.start().wait_ready()
    up.end(signal.SIGKILL)
    assert wait_until(lambda: up.processes() == {}, 10), up.processes()
    up.start().wait_ready()
    assert up.end(signal.SIGINT) == 0
    assert up.processes() == {}


def test_kill_9_while_starting_leaves_no_process_and_the_next_start_works(up):
    for after_s in (0.5, 1.0, 2.0, 4.0):  # each finds what the one before left half made
        up.start()
        time.sleep(after_s)
        up.end(signal.SIGKILL)
        assert wait_until(lambda: up.processes() == {}, 10), up.processes()
    up.start().wait_ready()


def test_a_taken_port_is_named_and_nothing_is_started(up):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", up.port))
        taken.listen()
        result = up.manage("up")
    assert result.returncode == 1
    assert f"port {up.port} on 127.0.0.1 cannot be used" in result.stdout
    assert "ANDON_PORT" in result.stdout
    assert not (up.data_dir / "postgres").exists()


def test_data_of_another_postgresql_major_is_refused_with_the_way_out(up):
    data = up.data_dir / "postgres" / "data"
    data.mkdir(parents=True)
    (data / "PG_VERSION").write_text("17\n")
    result = up.manage("up")
    assert result.returncode == 1
    assert "written by PostgreSQL 17; this installation brings 18" in result.stdout
    assert "config.embedded.dump" in result.stdout


def test_a_data_directory_with_a_long_path_still_works(tmp_path):
    up = Up(tmp_path / ("long-" * 24) / "var")
    up.data_dir.parent.mkdir(mode=0o755)
    prepare(up.data_dir)
    try:
        up.start().wait_ready()
        assert up.end() == 0
        assert stat.S_IMODE(up.data_dir.parent.stat().st_mode) == 0o755
    finally:
        up.kill_whatever_is_left()


def test_a_command_without_servers_says_how_to_get_them(tmp_path):
    result = manage("showmigrations", ANDON_DATA_DIR=str(tmp_path / "var"))
    assert result.returncode == 1
    assert f"no `python manage.py up` runs with ANDON_DATA_DIR={tmp_path / 'var'}" in result.stdout
    assert "ANDON_DATABASE_URL" in result.stdout


def test_urls_take_the_place_of_the_embedded_servers(up):
    up.environment |= {
        "ANDON_DATABASE_URL": _fresh_database(),
        "ANDON_BROKER_URL": os.environ["ANDON_BROKER_URL"],
    }
    up.start().wait_ready()
    commands = " ".join(up.processes().values())
    assert "postgres -D" not in commands
    assert "valkey-server" not in commands
    assert up.end() == 0


def _fresh_database() -> str:
    """Make an empty database beside the tests' own and return its URL."""
    import psycopg

    url = os.environ["ANDON_DATABASE_URL"]
    name = f"up_{os.getpid()}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE IF EXISTS {name}")
        connection.execute(f"CREATE DATABASE {name}")
        path = connection.info.dbname
    head, _, tail = url.rpartition(f"/{path}")
    return f"{head}/{name}{tail}"
