"""A Ceph of one monitor, one OSD and one S3 gateway on free loopback ports, and its keeper.

`python -m tests.ceph DIRECTORY OWNER_PID` sets it up in DIRECTORY, writes `ready.json` there when the
gateway takes requests, and takes everything down when the process OWNER_PID is gone or SIGTERM comes.
A keeper of its own is needed because any xdist worker may be the first to want the gateway, and all
of them use it: it must end with the session, not with that worker.
"""

import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from pathlib import Path

from config.embedded import processes
from config.embedded.valkey import free_port

PROGRAMS = ("radosgw", "radosgw-admin", "ceph-mon", "ceph-osd", "ceph", "ceph-authtool", "monmaptool")
_STEP_TIMEOUT_S = 60.0
# Capabilities of each daemon's key; cephx stays on, the gateway hangs without it.
_KEYS = {
    "mon.": {"mon": "allow *"},
    "client.admin": {"mon": "allow *", "osd": "allow *", "mgr": "allow *"},
    "osd.0": {"mon": "allow profile osd", "osd": "allow *", "mgr": "allow profile osd"},
    "client.rgw.t": {"mon": "allow rw", "osd": "allow rwx", "mgr": "allow rw"},
}


class Ceph:
    """One throw-away cluster; `start()` raises RuntimeError with the log's end if a step fails."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.fsid = str(uuid.uuid4())
        self.mon_v2, self.mon_v1, self.gateway_port = free_port(), free_port(), free_port()
        self.access_key, self.secret_key = "ANDON" + secrets.token_hex(8).upper(), secrets.token_hex(20)
        self.daemons: list[subprocess.Popen[bytes]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gateway_port}"

    def start(self) -> None:
        for name in ("mon", "osd", "rgw", "run", "log", "crash"):
            (self.directory / name).mkdir(parents=True)
        (self.directory / "ceph.conf").write_text(self._configuration(), encoding="utf-8")
        self._make_keys()
        map_file = str(self.directory / "monmap")
        address = f"[v2:127.0.0.1:{self.mon_v2},v1:127.0.0.1:{self.mon_v1}]"
        self._run("monmaptool", "--create", "--fsid", self.fsid, "--addv", "t", address, map_file)
        self._run("ceph-mon", "--mkfs", "-i", "t", "--monmap", map_file, "--keyring", self._keyring)
        self._daemon("ceph-mon", "-i", "t", "-f")
        self._until("the monitor answers", lambda: self._ask("-s") is not None)
        self._run("ceph", "auth", "import", "-i", self._keyring)
        osd_uuid = str(uuid.uuid4())
        self._run("ceph", "osd", "new", osd_uuid, "0")
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd_uuid)
        self._daemon("ceph-osd", "-i", "0", "-f")
        self._until("the OSD is up", lambda: "1 up" in (self._ask("osd", "stat") or ""))
        self._daemon("radosgw", "-n", "client.rgw.t", "-f")
        self._until("the gateway answers", self._gateway_answers)
        self._run(
            *("radosgw-admin", "-n", "client.rgw.t", "user", "create", "--uid=vault"),
            *("--display-name=vault", f"--access-key={self.access_key}", f"--secret-key={self.secret_key}"),
            "--caps=users=*;user-policy=*",  # so that a test can make users with policies of their own
        )

    def stop(self) -> None:
        for daemon in reversed(self.daemons):
            processes.stop(daemon, signal.SIGKILL, 5)

    def collect_garbage(self) -> None:
        """Free the space of deleted objects now; by itself the gateway waits two hours."""
        self._run("radosgw-admin", "-n", "client.rgw.t", "gc", "process", "--include-all")

    @property
    def _keyring(self) -> str:
        return str(self.directory / "keyring")

    def _make_keys(self) -> None:
        for index, (name, capabilities) in enumerate(_KEYS.items()):
            words = [word for daemon, grant in capabilities.items() for word in ("--cap", daemon, grant)]
            create = ["--create-keyring"] if index == 0 else []
            subprocess.run(
                ["ceph-authtool", *create, self._keyring, "--gen-key", "-n", name, *words],
                check=True,
                capture_output=True,
            )

    def _configured(self, program: str, *arguments: str) -> list[str]:
        if program in {"monmaptool", "ceph-authtool"}:
            return [program, *arguments]
        return [program, "-c", str(self.directory / "ceph.conf"), *arguments]

    def _run(self, program: str, *arguments: str) -> None:
        command = self._configured(program, *arguments)
        result = subprocess.run(command, capture_output=True, text=True, timeout=_STEP_TIMEOUT_S, check=False)
        if result.returncode != 0:
            raise RuntimeError(f"{program} {' '.join(arguments)}: {result.stderr[-1500:]}")

    def _ask(self, *arguments: str) -> str | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            command = self._configured("ceph", *arguments)
            result = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
            return result.stdout if result.returncode == 0 else None
        return None

    def _daemon(self, program: str, *arguments: str) -> None:
        with (self.directory / "log" / f"{program}.out").open("ab") as log:
            self.daemons.append(processes.spawn(self._configured(program, *arguments), output=log))

    def _until(self, what: str, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _STEP_TIMEOUT_S
        while not holds():
            if time.monotonic() > deadline or any(daemon.poll() is not None for daemon in self.daemons):
                logs = sorted((self.directory / "log").glob("*.out"))
                ends = "\n".join(log.read_text(errors="replace")[-1000:] for log in logs)
                raise RuntimeError(f"waited in vain until {what}:\n{ends}")
            time.sleep(0.1)

    def _gateway_answers(self) -> bool:
        try:
            urllib.request.urlopen(self.url, timeout=2).close()
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True

    def _configuration(self) -> str:
        d = self.directory
        common = {
            "fsid": self.fsid,
            "mon_initial_members": "t",
            "mon_host": f"[v2:127.0.0.1:{self.mon_v2}/0,v1:127.0.0.1:{self.mon_v1}/0]",
            "public_addr": "127.0.0.1",
            "cluster_addr": "127.0.0.1",
            "keyring": self._keyring,
            "auth_allow_insecure_global_id_reclaim": "false",
            # One copy of everything on one device: these are tests.
            "osd_pool_default_size": "1",
            "osd_pool_default_min_size": "1",
            "mon_allow_pool_size_one": "true",
            "osd_crush_chooseleaf_type": "0",
            "osd_pool_default_pg_num": "8",
            "osd_pool_default_pgp_num": "8",
            "osd_pool_default_pg_autoscale_mode": "off",
            "mon_max_pg_per_osd": "1000",
            "mon_data_avail_crit": "1",
            "mon_data_avail_warn": "1",
            "osd_objectstore": "bluestore",
            "bluestore_block_create": "true",
            "bluestore_block_size": str(16 << 30),  # a sparse file
            "osd_memory_target": str(1 << 30),
            "mon_data": f"{d}/mon",
            "osd_data": f"{d}/osd",
            "run_dir": f"{d}/run",
            "admin_socket": f"{d}/run/$name.asok",
            "pid_file": f"{d}/run/$name.pid",
            "log_file": f"{d}/log/$name.log",
            "mon_cluster_log_file": f"{d}/log/cluster.log",
            "crash_dir": f"{d}/crash",
            "heartbeat_file": f"{d}/run/$name.beat",
        }
        gateway = {
            "rgw_frontends": f"beast endpoint=127.0.0.1:{self.gateway_port}",
            "rgw_data": f"{d}/rgw",
            "keyring": self._keyring,
            "rgw_thread_pool_size": "32",
            "rgw_enable_usage_log": "false",
        }
        lines = ["[global]", *(f"{name} = {value}" for name, value in common.items())]
        lines += ["[client.rgw.t]", *(f"{name} = {value}" for name, value in gateway.items())]
        return "\n".join(lines) + "\n"


def _wait_for_end(owner: int) -> None:
    """Return when the process `owner` is gone; a signal ends the wait by its handler."""
    try:
        descriptor = os.pidfd_open(owner)
    except ProcessLookupError:
        return
    select.select([descriptor], [], [])


def main() -> None:
    directory, owner = Path(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    ceph = Ceph(directory)
    try:
        ceph.start()
        text = json.dumps({"url": ceph.url, "access_key": ceph.access_key, "secret_key": ceph.secret_key})
        (directory / "ready.tmp").write_text(text, encoding="utf-8")
        (directory / "ready.tmp").rename(directory / "ready.json")
        _wait_for_end(owner)
    finally:
        ceph.stop()
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
