"""The embedded servers' parts that a whole `up` does not reach on every machine."""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psycopg
import pytest

from config.embedded import files, processes, servers
from config.embedded.postgres import OWNER, Postgres
from config.embedded.processes import EmbeddedError
from tests.config.up import ROOT, Up, clean_environment, prepare


class TestSecret:
    def test_all_who_race_get_the_same_and_it_is_private(self, tmp_path):
        path, seen = tmp_path / "secrets" / "one", []
        start = threading.Barrier(8)

        def ask():
            start.wait()
            seen.append(files.secret(path))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(seen) == 8
        assert len(set(seen)) == 1
        assert len(seen[0]) >= 43
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert [entry.name for entry in path.parent.iterdir()] == ["one"]


class TestSocketDirectory:
    def test_a_short_path_is_used_as_it_is(self):
        with tempfile.TemporaryDirectory(dir="/tmp") as directory:
            run_dir = Path(directory) / "run"
            assert files.socket_directory(run_dir) == run_dir
            assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700

    @pytest.mark.parametrize("length", [101, 300])
    def test_a_long_one_is_replaced_by_a_private_short_one(self, tmp_path, monkeypatch, length):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("t" * 90)))
        run_dir = tmp_path / ("x" * (length - len(str(tmp_path))))
        directory = files.socket_directory(run_dir)
        try:
            assert len(os.fsencode(directory / ".s.PGSQL.5432")) <= 100
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        finally:
            directory.rmdir()


class TestHold:
    def test_a_lock_goes_with_its_holder_however_that_ends(self, tmp_path):
        script = (
            "import sys, time; from pathlib import Path; from config.embedded import servers;"
            "held = servers.hold(Path(sys.argv[1])); servers.announce(Path(sys.argv[1]), {'A': 'b'});"
            "print('held', flush=True); time.sleep(60)"
        )
        holder = subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE
        )
        assert holder.stdout is not None
        holder.stdout.readline()
        try:
            assert servers.running(tmp_path) == {"A": "b"}
            with pytest.raises(EmbeddedError, match=rf"another `manage.py up` \(pid {holder.pid}\)"):
                servers.hold(tmp_path)
        finally:
            holder.kill()
            holder.wait()
        assert servers.running(tmp_path) == {}
        servers.hold(tmp_path).close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, which is who has to become somebody else")
class TestWithoutUserNamespaces:
    @pytest.fixture(autouse=True)
    def _forbidden(self, monkeypatch):
        monkeypatch.setattr(processes, "_can_run", lambda identity: False)
        processes.unprivileged_identity.cache_clear()
        yield
        processes.unprivileged_identity.cache_clear()

    def test_root_becomes_the_owner_of_the_directory_above(self, tmp_path):
        os.chown(tmp_path, 1234, 4321)
        assert processes.unprivileged_identity(tmp_path / "var" / "postgres") == "user:1234:4321"

    def test_postgresql_runs_as_nobody_where_all_is_roots(self):
        base = Path(tempfile.mkdtemp(dir="/tmp"))
        cluster = Postgres(
            home=base / "var" / "postgres",
            run_dir=files.private_directory(base / "var" / "run"),
            secrets_dir=base / "var" / "secrets",
            log_file=base / "log",
            settings={"fsync": "off"},
        )
        base.chmod(0o711)
        try:
            cluster.initialise()
            cluster.start()
            cluster.prepare()
            assert cluster.process is not None
            assert Path(f"/proc/{cluster.process.pid}").stat().st_uid == 65534
            with psycopg.connect(cluster.url(OWNER)) as connection:
                assert connection.execute("SELECT 1").fetchone() == (1,)
        finally:
            if cluster.process is not None:
                cluster.stop()
            shutil.rmtree(base)

    def test_a_place_it_cannot_reach_is_named_with_the_way_out(self, tmp_path):
        tmp_path.chmod(0o700)
        cluster = Postgres(
            home=tmp_path / "var" / "postgres",
            run_dir=files.private_directory(tmp_path / "var" / "run"),
            secrets_dir=tmp_path / "secrets",
            log_file=tmp_path / "log",
            settings={},
        )
        with pytest.raises(EmbeddedError, match="Run as an ordinary user instead, or set ANDON_DATABASE_URL"):
            cluster.initialise()
        assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


def test_a_database_moves_to_another_major_by_the_commands_that_the_error_names(tmp_path):
    up = Up(tmp_path / "var")
    prepare(up.data_dir)
    up.start()
    dump = tmp_path / "andon.sql"
    command = [sys.executable, "-m", "config.embedded.dump", str(up.data_dir)]
    try:
        up.wait_ready()
        make = "from runs.models import Project; Project.objects.create(slug='kept', name='Kept')"
        assert up.manage("shell", "-c", make).returncode == 0
        assert up.end() == 0
        with dump.open("wb") as file:
            programs = ["--programs", sys.prefix]
            subprocess.run(
                [*command, *programs], cwd=ROOT, env=clean_environment(), stdout=file, check=True, timeout=60
            )
        (up.data_dir / "postgres").rename(up.data_dir / "postgres-old")
        up.start().wait_ready()
        restored = ["--restore", str(dump)]
        subprocess.run([*command, *restored], cwd=ROOT, env=clean_environment(), check=True, timeout=60)
        show = "from runs.models import Project; print(Project.objects.get(slug='kept').name)"
        assert up.manage("shell", "-v0", "-c", show).stdout.strip() == "Kept"
        assert up.manage("check", "--database", "default").returncode == 0
    finally:
        up.kill_whatever_is_left()
