"""Real servers for the tests: PostgreSQL and Valkey for every session, others when first asked for.

The session directory holds everything; its path travels to xdist workers and subprocesses in
TEST_SESSION_DIR, so that they share what the first one started.
"""

import atexit
import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import boto3
import psycopg
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials

from config.embedded import processes
from config.embedded.files import private_directory
from config.embedded.postgres import Postgres
from config.embedded.valkey import Valkey, free_port

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_ROOT = Path(__file__).resolve().parent.parent


def session_dir() -> Path:
    """Return the directory of this test session, made on first use and removed by its maker."""
    known = os.environ.get("TEST_SESSION_DIR")
    if known is None:
        known = tempfile.mkdtemp(prefix="andon-test-")
        os.environ["TEST_SESSION_DIR"] = known
        os.environ["TEST_SESSION_PID"] = str(os.getpid())
        atexit.register(shutil.rmtree, known, ignore_errors=True)
    return Path(known)


def start_what_is_missing() -> None:
    """Start PostgreSQL where ANDON_DATABASE_URL is not set, Valkey where ANDON_BROKER_URL is not.

    They are children of this process and end with it, also when it is killed.
    """
    if not _is_set("ANDON_DATABASE_URL"):
        postgres = start_postgres(session_dir())
        os.environ["ANDON_DATABASE_URL"] = postgres.url("andon_owner")
    if not _is_set("ANDON_BROKER_URL"):
        os.environ["ANDON_BROKER_URL"] = start_valkey(session_dir()).url()


def _is_set(name: str) -> bool:
    return bool(os.environ.get(name) or os.environ.get(f"{name}_FILE"))


def start_postgres(directory: Path) -> Postgres:
    """Start a PostgreSQL for tests: both roles, the owner may create databases, nothing is synced."""
    logs = private_directory(directory / "log")
    postgres = Postgres(
        home=directory / "postgres",
        run_dir=private_directory(directory / "run"),
        secrets_dir=directory / "secrets",
        log_file=logs / "postgres.log",
        settings={"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off"},
    )
    postgres.initialise()
    postgres.start()
    atexit.register(postgres.stop)
    postgres.prepare()
    with psycopg.connect(postgres.url("postgres", "postgres"), autocommit=True) as connection:
        connection.execute("ALTER ROLE andon_owner CREATEDB")
        # Tests act as the application by SET ROLE, to prove what it may not do.
        connection.execute("GRANT andon_app TO andon_owner")
    return postgres


def start_valkey(directory: Path) -> Valkey:
    """Start a Valkey for tests."""
    logs = private_directory(directory / "log")
    valkey = Valkey(
        home=directory / "valkey", secrets_dir=directory / "secrets", log_file=logs / "valkey.log"
    )
    valkey.start()
    atexit.register(valkey.stop)
    return valkey


@dataclass(frozen=True)
class S3:
    """An S3 endpoint with Object Lock and the account that owns its buckets."""

    url: str
    access_key: str
    secret_key: str
    region: str = "us-east-1"

    def client(self) -> "S3Client":
        """Return a boto3 client for this endpoint (path-style addressing)."""
        client: S3Client = boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name=self.region,
            config=Config(s3={"addressing_style": "path"}, retries={"max_attempts": 2}),
        )
        return client

    def new_user(self, name: str, *policies: str) -> "S3":
        """Make a user who owns nothing and may do what these policy documents allow; returns their door.

        Source: Ceph, "Admin Operations" (PUT /admin/user) and "IAM API" (PutUserPolicy), for radosgw.
        """
        user = S3(self.url, secrets.token_hex(10).upper(), secrets.token_hex(20), self.region)
        query = {
            "uid": name,
            "display-name": name,
            "access-key": user.access_key,
            "secret-key": user.secret_key,
        }
        request = AWSRequest("PUT", f"{self.url}/admin/user?{urlencode(query)}")
        S3SigV4Auth(Credentials(self.access_key, self.secret_key), "s3", self.region).add_auth(request)
        send = urllib.request.Request(request.url, headers=dict(request.headers), method="PUT")
        urllib.request.urlopen(send, timeout=30).close()
        iam = boto3.client(
            "iam",
            endpoint_url=self.url,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name=self.region,
        )
        for number, document in enumerate(policies):
            iam.put_user_policy(UserName=name, PolicyName=f"policy-{number}", PolicyDocument=document)
        return user

    def new_bucket(self, *, locked: bool = True) -> str:
        """Make a bucket of a fresh name, with Object Lock (and so versions) unless told otherwise."""
        name = f"t-{uuid.uuid4().hex[:20]}"
        self.client().create_bucket(Bucket=name, ObjectLockEnabledForBucket=locked)
        return name


def s3() -> S3:
    """Return the session's radosgw, started by whoever asks first (about half a minute)."""
    directory = session_dir() / "ceph"
    with (session_dir() / "ceph.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / "ready.json").exists():
            _start_ceph(directory)
    return S3(**json.loads((directory / "ready.json").read_text(encoding="utf-8")))


def _start_ceph(directory: Path) -> None:
    owner = os.environ["TEST_SESSION_PID"]
    log_file = private_directory(session_dir() / "log") / "ceph.log"
    with log_file.open("ab") as log:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "tests.ceph", str(directory), owner],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=_ROOT,
            start_new_session=True,
        )
    atexit.register(_end_if_own, keeper, int(owner))
    deadline = time.monotonic() + 180
    while not (directory / "ready.json").exists():
        if keeper.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"radosgw did not start:\n{log_file.read_text(errors='replace')[-3000:]}")
        time.sleep(0.1)


def _end_if_own(keeper: "subprocess.Popen[bytes]", owner: int) -> None:
    if os.getpid() == owner:
        processes.stop(keeper, signal.SIGTERM, 15)


@dataclass(frozen=True)
class PgBouncer:
    """A pgbouncer in transaction mode in front of the session's PostgreSQL."""

    host: str
    port: int


def start_pgbouncer(
    directory: Path, settings: Mapping[str, Any]
) -> tuple[PgBouncer, "subprocess.Popen[bytes]"]:
    """Start pgbouncer in transaction mode for a Django database entry; any database name passes."""
    private_directory(directory)
    port = free_port()
    users = directory / "users.txt"
    users.touch(mode=0o600)
    users.write_text(f'"{settings["USER"]}" "{settings["PASSWORD"]}"\n', encoding="utf-8")
    server = f"host={settings['HOST']}" + (f" port={settings['PORT']}" if settings["PORT"] else "")
    (directory / "pgbouncer.ini").write_text(
        f"[databases]\n* = {server}\n[pgbouncer]\npool_mode = transaction\nlisten_addr = 127.0.0.1\n"
        f"listen_port = {port}\nunix_socket_dir =\nauth_type = scram-sha-256\nauth_file = {users}\n"
        "max_client_conn = 500\ndefault_pool_size = 20\nserver_idle_timeout = 5\n",
        encoding="utf-8",
    )
    with (directory / "pgbouncer.log").open("ab") as log:
        process = processes.spawn(
            ["pgbouncer", str(directory / "pgbouncer.ini")],
            identity=processes.unprivileged_identity(directory),
            output=log,
        )
    deadline = time.monotonic() + 10
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return PgBouncer("127.0.0.1", port), process
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(
                f"pgbouncer did not start:\n{(directory / 'pgbouncer.log').read_text()[-2000:]}"
            )
        time.sleep(0.03)
