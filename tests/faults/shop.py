"""A vault in a real store behind a proxy that fails, and Celery workers of their own process to kill."""

import contextlib
import hashlib
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import redis
from celery import Celery
from django.conf import settings as configured
from django.db import connection, transaction
from django.utils import timezone

from andon.policy import Policy
from config.embedded import processes
from config.embedded.valkey import Valkey
from config.management.commands import up
from evidence.custody import verify_custody
from evidence.models import CustodyRow, Dossier, Item, StoredObject, StoreProbe
from evidence.stores.probe import probe_and_record
from evidence.vault import vault
from runs.models import Run, Work
from tests.config.up import ROOT, clean_environment
from tests.evidence import world
from tests.faults.store_proxy import PATIENCE_S, Fault, How, StoreProxy
from tests.servers import S3, start_valkey

RING_EVERY_S = 0.2
WORKER = "vault-worker"  # what PostgreSQL calls a worker's connections


class Shop:
    """Everything a freeze needs, in parts that can break one by one."""

    def __init__(self, endpoint: S3, directory: Path) -> None:
        self.endpoint = endpoint
        self.directory = directory
        self.scratch = directory / "scratch"
        self.scratch.mkdir()
        self.bucket, self.trainer = endpoint.new_bucket(locked=True), endpoint.new_bucket(locked=True)
        self.proxy = StoreProxy(int(endpoint.url.rpartition(":")[2]))
        self.broker: Valkey = start_valkey(directory)
        self.workers: list[subprocess.Popen[bytes]] = []
        self.probed: dict[str, Any] = {}

    @property
    def vault_url(self) -> str:
        place = self.proxy.url.removeprefix("http://")
        return f"s3+http://{self.endpoint.access_key}:{self.endpoint.secret_key}@{place}/{self.bucket}"

    def open(self, settings: Any) -> None:
        """Point a test's own settings at the shop; the store was probed, as it is once a day."""
        self.pause()
        settings.VAULT_URL = self.vault_url
        settings.DATA_DIR = self.directory / "data"
        settings.SOURCE_ROOTS = [self.scratch]
        self.probed = self.probed or probe_and_record().result
        StoreProbe.objects.get_or_create(
            store=vault().name, defaults={"probed_at": timezone.now(), "result": self.probed}
        )

    def close(self) -> None:
        for worker in self.workers:
            processes.stop(worker, signal.SIGKILL, 5)
        self.proxy.close()
        assert self.broker.process is not None
        processes.stop(self.broker.process, signal.SIGKILL, 5)

    # --- workers

    def start_worker(self, **more: str) -> "subprocess.Popen[bytes]":
        """Start a worker by the command of `manage.py up`, on this test's database."""
        environment = {
            "ANDON_DATABASE_URL": database_url("andon_app"),
            "ANDON_DATABASE_OWNER_URL": database_url(""),
            "ANDON_BROKER_URL": self.broker.url(),
            "ANDON_VAULT_URL": self.vault_url,
            "ANDON_SOURCE_ROOTS": str(self.scratch),
            "ANDON_DATA_DIR": str(self.directory / "data"),
            "ANDON_SIGNING_KEY_FILE": str(configured.SIGNING_KEY_FILE),
            "ANDON_LOG_LEVEL": "WARNING",
            **more,
        }
        with (self.directory / "worker.log").open("ab") as log:
            made = processes.spawn(
                [sys.executable, "-m", "celery", "-A", "config.celery", "worker", *up.WORKER_OPTIONS],
                environment=clean_environment(**environment),
                output=log,
                directory=ROOT,
            )
        self.workers.append(made)
        self.pause()
        return made

    def worker(self) -> "subprocess.Popen[bytes]":
        """Return the worker that runs, started now when there is none."""
        return self.workers[0] if self.workers else self.start_worker()

    def pause(self) -> None:
        """Stop all workers until the test waits for something: what is to break must be broken by then."""
        for worker in self.workers:
            worker.send_signal(signal.SIGSTOP)

    def rest(self) -> None:
        """Leave one worker, stopped and with nothing in its hands, so that no other test meets it."""
        self.proxy.heal()
        redis.Redis.from_url(self.broker.url()).flushall()
        for spare in self.workers[1:]:
            self.kill(spare)
        deadline = time.monotonic() + 5
        while busy_workers() and time.monotonic() < deadline:
            time.sleep(0.05)
        self.pause()
        for worker in list(self.workers) if busy_workers() else ():
            self.kill(worker)

    def kill(self, worker: "subprocess.Popen[bytes]") -> None:
        """Kill a worker as the kernel would; whatever it had under way stays as it is."""
        worker.send_signal(signal.SIGKILL)
        worker.wait(10)
        self.workers.remove(worker)

    def restart_broker(self) -> None:
        """Kill the broker and start an empty one at the same address."""
        assert self.broker.process is not None
        processes.stop(self.broker.process, signal.SIGKILL, 5)
        self.broker.start()

    def attempts(self, item: Item) -> int:
        """Return how often an item's work was begun."""
        return Work.objects.get(kind="evidence.item", key=str(item.pk)).attempts

    def ring(self) -> None:
        """Ring for all that is due, as the scheduler does every five seconds."""
        with Celery("scheduler", broker=self.broker.url(), set_as_current=False) as app:
            app.conf.broker_transport_options = configured.CELERY_BROKER_TRANSPORT_OPTIONS
            with contextlib.suppress(Exception):  # a broker that is down: the next ring will do
                app.send_task(
                    "runs.tasks.sweep_work", queue=configured.CELERY_TASK_DEFAULT_QUEUE, retry=False
                )

    def until(self, what: str, holds: Callable[[], Any], *, waits_end: bool = True) -> None:
        """Ring until something holds. `waits_end`: back-offs end at once, as if their time had passed."""
        deadline = time.monotonic() + PATIENCE_S
        for worker in self.workers:
            worker.send_signal(signal.SIGCONT)
        while not holds():
            assert time.monotonic() < deadline, f"not within {PATIENCE_S:g} s: {what}; {trouble()}"
            if waits_end:
                Work.objects.filter(state="due").update(not_before=timezone.now())
            self.ring()
            time.sleep(RING_EVERY_S)

    def until_struck(self, fault: Fault) -> None:
        """Ring until a request was struck."""
        self.until(f"a request is struck by {fault.how.name} {fault.words}", fault.met.is_set)

    # --- stops at boundaries: each waits until a worker stands there, and holds it while the block runs

    @contextlib.contextmanager
    def at_request(self, how: How, *words: str, **more: int) -> Iterator[None]:
        """Hold a worker at a request to the store."""
        self.until_struck(self.proxy.fail(how, *words, **more))
        yield
        self.proxy.heal()

    @contextlib.contextmanager
    def at_table(self, table: str) -> Iterator[None]:
        """Hold a worker where it writes to a table."""
        with transaction.atomic():
            with connection.cursor() as cursor:
                cursor.execute(f"LOCK TABLE {table} IN EXCLUSIVE MODE")
            self.until(f"a worker waits for {table}", lambda: waiting_for(table), waits_end=False)
            yield

    @contextlib.contextmanager
    def before_the_seal(self, dossier: Dossier) -> Iterator[None]:
        """Hold a worker when all objects of the only item are stored and in rows."""
        last = self.proxy.fail(How.DELAY, "HEAD", f"/{self.bucket}/evidence/")
        self.until_struck(last)
        with transaction.atomic():
            Dossier.objects.select_for_update().get(pk=dossier.pk)
            self.proxy.heal()
            self.until(
                "all objects have rows and a worker waits for the dossier",
                lambda: (
                    all(item.stored_objects.count() == len(item.files) for item in dossier.items.all())
                    and waiting_for()
                ),
                waits_end=False,
            )
            yield

    # --- sources

    def new_run(self) -> Run:
        """Make a run whose files are nobody else's."""
        return world.make_run(f"run-{secrets.token_hex(4)}")

    def on_disk(self, run: Run, step: int, *, size: int = 3000, files: int = 3) -> Path:
        """Commit a checkpoint in a directory."""
        directory, table = world.write_checkpoint(self.scratch / run.slug, step, size=size, files=files)
        world.commit(run, step, directory.as_uri(), table)
        return directory

    def in_store(self, run: Run, step: int, *, bucket: str = "", size: int = 3000, files: int = 3) -> str:
        """Commit a checkpoint in the trainer's bucket; returns its prefix."""
        directory, table = world.write_checkpoint(
            self.directory / "made" / run.slug, step, size=size, files=files
        )
        bucket = bucket or self.trainer
        prefix = f"{run.slug}/step-{step}"
        for path in directory.iterdir():
            self.endpoint.client().put_object(
                Bucket=bucket, Key=f"{prefix}/{path.name}", Body=path.read_bytes()
            )
        world.commit(run, step, f"s3://{bucket}/{prefix}", table)
        return prefix

    def rotate(self, prefix: str, bucket: str = "") -> None:
        """Delete a prefix as a trainer's rotation does."""
        bucket, client = bucket or self.trainer, self.endpoint.client()
        for row in client.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", []):
            client.delete_object(Bucket=bucket, Key=row["Key"])

    # --- what lies in the vault

    def versions(self, dossier: Dossier) -> list[tuple[str, str]]:
        """Return key and version of everything in the vault for a dossier."""
        listed = self.endpoint.client().list_object_versions(
            Bucket=self.bucket, Prefix=f"evidence/{dossier.uid}/"
        )
        assert not listed["IsTruncated"]
        assert not listed.get("DeleteMarkers")
        return sorted((row["Key"], row["VersionId"]) for row in listed.get("Versions", []))

    def unfinished(self, dossier: Dossier) -> list[str]:
        """Return the keys of uploads that were begun and neither completed nor given up."""
        listed = self.endpoint.client().list_multipart_uploads(
            Bucket=self.bucket, Prefix=f"evidence/{dossier.uid}/"
        )
        return [row["Key"] for row in listed.get("Uploads", [])]


def database_url(role: str) -> str:
    """Return this test's database as a URL; a role is taken on at once, as `andon_app` owns nothing."""
    base = connection.settings_dict
    query = [f"host={quote(str(base['HOST']), safe='')}", f"application_name={WORKER}"]
    query += [f"options={quote(f'-c role={role}')}"] if role else []
    port = f":{base['PORT']}" if base["PORT"] else ""
    who = f"{quote(str(base['USER']))}:{quote(str(base['PASSWORD']), safe='')}"
    return f"postgresql://{who}@localhost{port}/{base['NAME']}?{'&'.join(query)}"


def waiting_for(table: str = "") -> bool:
    """Return whether a connection waits for a lock of a table, or of a row of any."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_locks WHERE NOT granted"
            " AND CASE WHEN %s = '' THEN locktype = 'transactionid' ELSE relation = to_regclass(%s) END",
            [table, table],
        )
        return bool(cursor.fetchone()[0])


def busy_workers() -> int:
    """Return how many connections of workers are in a transaction, and works in their hands."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s AND state <> 'idle'", [WORKER]
        )
        return int(cursor.fetchone()[0]) + Work.objects.filter(state="claimed").count()


def trouble() -> list[tuple[str, str, str]]:
    """Return what items, their custody and work say, for the message of a test that failed."""
    says = [(item.name, str(item.state), item.why) for item in Item.objects.all()]
    says += [(row.what, row.item_name, str(row.data)[:300]) for row in CustodyRow.objects.all()]
    return says + [(work.kind, str(work.state), work.error[-300:]) for work in Work.objects.exclude(error="")]


def leases_end() -> None:
    """Let every lease run out, as time does for a worker that is gone."""
    Work.objects.filter(state="claimed").update(lease_until=timezone.now())


def last_good() -> Policy:
    """Return a policy that wants the last good checkpoint only."""
    return world.policy("last_good_checkpoint")


def digests_of(directory: Path) -> dict[str, str]:
    """Return path and SHA-256 of each file of a checkpoint."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.rglob("*")
        if path.is_file()
    }


def nothing_is_claimed_too_early(dossier: Dossier) -> None:
    """What has a row lies in the vault with its bytes; what is not sealed keeps the gate shut."""
    for one in StoredObject.objects.filter(item__dossier=dossier):
        assert hashlib.sha256(vault().open(one.key, one.version_id).read()).hexdigest() == one.sha256
    assert not dossier.custody.filter(what="sealed").exists()
    assert verify_custody(dossier) == []


def is_whole(shop: Shop, dossier: Dossier, expected: dict[str, str]) -> None:
    """One item is sealed, once: its bytes are the source's, under locks, and nothing else lies there."""
    item = dossier.items.get()
    assert (item.state, item.why) == ("sealed", "")
    stored = {one.path: one for one in item.stored_objects.all()}
    assert {path: one.sha256 for path, one in stored.items()} == expected
    for one in stored.values():
        assert hashlib.sha256(vault().open(one.key, one.version_id).read()).hexdigest() == one.sha256
        assert one.protected_by["legal_hold"] is True
        assert one.protected_by["until"]
    assert shop.versions(dossier) == sorted((one.key, one.version_id) for one in stored.values())
    assert shop.unfinished(dossier) == []
    for what in ("held", "sealed"):
        assert dossier.custody.filter(what=what).count() == 1
    assert dossier.seals.count() == 1
    assert verify_custody(dossier) == []
