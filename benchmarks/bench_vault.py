"""The evidence vault on its own radosgw, beside rclone and a boto3 loop: `python -m benchmarks vault`.

Uploads and server-side copies of 1 x 1 GiB and 1,024 x 1 MiB in a bucket without lock, in turn with rclone
three times, everything deleted between; memory also at 1 x 4 GiB alone. Legal holds on 1,024 versions in
turn with a bare thread loop. Then from the opening of a dossier to an open resume gate, by the worker, while
rotation deletes: 1,024 objects and 16,384 files, each checkpoint above 100 GB, so that the hold opens it.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from andon.held_tree import TREES
from benchmarks.bench_mlflow import Unavailable
from benchmarks.serving import ROOT, worker
from benchmarks.vault_child import digest
from benchmarks.vault_store import Store, store

ROUNDS = 3
SHAPES = {"1 x 1 GiB": (1, 1 << 30), "1,024 x 1 MiB": (1024, 1 << 20)}
LARGE_BYTES = 4 << 30
UPLOAD_GOAL, COPY_GOAL, HOLD_GOAL = 0.9, 1.5, 0.8
HOLD_THREADS = 32  # of the bare loop: more are no faster
MEMORY_GOAL_MIB = 190  # 200 MB
OBJECTS, OBJECT_BYTES, OBJECTS_GOAL_S = 1024, 96 << 20, 10.0  # 103 GB: above what must be sealed
FILES, FILE_BYTES, FILES_GOAL_S = 16_384, 6 << 20, 60.0  # 103 GB, sparse


def told(what: str, figures: dict[str, Any]) -> dict[str, Any]:
    """Say figures as soon as they are known: all of it takes a quarter of an hour."""
    print(f"vault: {what}: {json.dumps(figures)}", file=sys.stderr, flush=True)
    return figures


def timed_s(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


# --- throughput


class Throughput:
    """Andon and rclone in turn, each in a bucket of its own."""

    def __init__(self, store: Store, environment: dict[str, str]) -> None:
        self.store = store
        self.environment = environment | {"ANDON_VAULT_URL": store.vault_url("bench-andon")}
        self.peaks_mib: list[int] = []
        client = store.client()
        for bucket in ("bench-andon", "bench-rclone", "bench-source"):
            client.create_bucket(Bucket=bucket)
        self._child("upload", str(self._files("probe", 1, 1)))  # imports are cached, the gateway is warm
        self._probe()

    def _probe(self) -> None:
        """Probe the bucket as a server does when it starts: uploads go by what was seen."""
        from evidence.stores.probe import probe_and_record
        from evidence.stores.s3 import S3Vault

        probe_and_record(S3Vault(self.store.vault_url("bench-andon")))

    def _files(self, name: str, count: int, size: int) -> Path:
        """Write random files, each named by its digest, which the copies need as the save-time digest."""
        directory = self.store.files / name
        directory.mkdir()
        for _ in range(count):
            path = directory / "new"
            with path.open("wb") as file:
                for at in range(0, size, 1 << 20):
                    file.write(os.urandom(min(1 << 20, size - at)))
            path.rename(directory / f"file-{digest(path)}")
        return directory

    def _child(self, *arguments: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "benchmarks.vault_child", *arguments]
        done = subprocess.run(
            command, cwd=ROOT, env=self.environment, check=True, stdout=subprocess.PIPE, text=True
        )
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    def measure(self) -> dict[str, Any]:
        """Return seconds, ratios to rclone (above 1: faster) and the peak of memory."""
        result: dict[str, Any] = {}
        for shape, (count, size) in SHAPES.items():
            name = f"files-{count}"
            directory = self._files(name, count, size)
            self.store.run_rclone("copy", str(directory), f"store:bench-source/{name}")
            result[shape] = self._compare(
                {
                    "upload": (
                        lambda directory=directory: self._child("upload", str(directory)),  # type: ignore[misc]
                        ("copy", str(directory), "store:bench-rclone/up"),
                    ),
                    "server_side_copy": (
                        lambda name=name: self._child("copy", "bench-source", name),  # type: ignore[misc]
                        (
                            *("copy", "--disable", "copy"),
                            *(f"store:bench-source/{name}", "store:bench-rclone/copy"),
                        ),
                    ),
                }
            )
            shutil.rmtree(directory)
            self.store.empty("bench-source")
        result["peak_mib"] = max(self.peaks_mib)
        result["peak_mib_at_4_gib"] = self._large()
        return result

    def _compare(
        self, works: dict[str, tuple[Callable[[], dict[str, Any]], tuple[str, ...]]]
    ) -> dict[str, Any]:
        rounds: dict[str, list[dict[str, float]]] = {work: [] for work in works}
        for number in range(ROUNDS):
            for work, (andon, rclone) in works.items():
                one: dict[str, float] = {}
                for who in ("andon", "rclone") if number % 2 == 0 else ("rclone", "andon"):
                    if who == "andon":
                        done = andon()
                        self.peaks_mib.append(done.pop("peak_mib"))
                        one |= {"andon_s": done.pop("took_s")} | done
                    else:
                        one["rclone_s"] = timed_s(lambda rclone=rclone: self.store.run_rclone(*rclone))  # type: ignore[misc]
                    self.store.empty(f"bench-{who}")
                rounds[work].append({name: round(value, 2) for name, value in one.items()})
            told(f"round {number + 1} of {ROUNDS}", {work: made[-1] for work, made in rounds.items()})
        return {
            work: {
                "rounds": made,
                "times_rclone": round(median(one["rclone_s"] / one["andon_s"] for one in made), 2),
            }
            for work, made in rounds.items()
        }

    def _large(self) -> int:
        directory = self.store.files / "large"
        directory.mkdir()
        with (directory / "file").open("wb") as file:
            file.truncate(LARGE_BYTES)
        peak = int(self._child("upload", str(directory))["peak_mib"])
        shutil.rmtree(directory)
        self.store.empty("bench-andon")
        return peak


# --- legal holds


def checkpoint_of(client: Any, bucket: str, prefix: str, count: int) -> list[dict[str, Any]]:
    """Put small objects and return the commit manifest that names them, with their versions for the peer."""
    body = b"shard"

    def put(number: int) -> dict[str, Any]:
        path = f"shard-{number:05d}"
        made = client.put_object(Bucket=bucket, Key=f"{prefix}/{path}", Body=body)
        return {"path": path, "bytes": len(body), "sha256": "0" * 64, "version": made["VersionId"]}

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(put, range(count)))


def measure_holds(store: Store) -> dict[str, Any]:
    """Return how fast 1,024 versions are held, and how fast a bare thread loop holds them."""
    from evidence.holding.s3 import hold_versions

    client = store.client(HOLD_THREADS)
    client.create_bucket(Bucket="bench-holds", ObjectLockEnabledForBucket=True)
    # Fresh ones for each round: nobody has held them before.
    names = [f"{who}-{number}" for number in range(ROUNDS) for who in ("andon", "bare")]
    prefixes = {name: checkpoint_of(client, "bench-holds", name, OBJECTS) for name in names}

    def andon(prefix: str) -> None:
        files = [{name: one[name] for name in ("path", "bytes", "sha256")} for one in prefixes[prefix]]
        _, by = hold_versions(f"s3://bench-holds/{prefix}", files)
        assert by["how"] == "legal_hold", by

    def bare(prefix: str) -> None:
        def hold(one: dict[str, Any]) -> None:
            client.put_object_legal_hold(
                Bucket="bench-holds",
                Key=f"{prefix}/{one['path']}",
                VersionId=one["version"],
                LegalHold={"Status": "ON"},
            )

        with ThreadPoolExecutor(HOLD_THREADS) as pool:
            list(pool.map(hold, prefixes[prefix]))

    rounds = []
    for number in range(ROUNDS):
        mine, other = f"andon-{number}", f"bare-{number}"
        rounds.append(
            {
                "andon_s": round(timed_s(lambda mine=mine: andon(mine)), 2),  # type: ignore[misc]
                "bare_s": round(timed_s(lambda other=other: bare(other)), 2),  # type: ignore[misc]
            }
        )
    ratio = median(one["bare_s"] / one["andon_s"] for one in rounds)
    return {"objects": OBJECTS, "threads": HOLD_THREADS, "rounds": rounds, "times_bare_loop": round(ratio, 2)}


# --- from the opening to an open gate


def gate_open_s(slug: str, uri: str, files: list[dict[str, Any]], rotate: Callable[[], None]) -> float:
    """Open a dossier whose last good checkpoint is at `uri` and wait for its gate, rotation going on."""
    from evidence.gates import resume_gate
    from tests.evidence import world

    run = world.make_run(slug)
    world.commit(run, 900, uri, files)
    rotation = threading.Thread(target=rotate, daemon=True)
    rotation.start()
    begun = time.perf_counter()
    dossier = world.open_dossier(run, rules=world.policy("last_good_checkpoint"))
    while not (gate := resume_gate(dossier)).open:
        if gate.lacking[0].state == "missing" or time.perf_counter() - begun > 2 * FILES_GOAL_S:
            raise RuntimeError(f"the gate stays shut: {gate.lacking[0].says}")
        time.sleep(0.02)
    took_s = time.perf_counter() - begun
    rotation.join()
    return took_s


def objects_to_gate_s(store: Store) -> float:
    """1,024 objects in a bucket with lock. Rotation deletes an older checkpoint by version, and this one."""
    client = store.client(32)
    client.create_bucket(Bucket="bench-train", ObjectLockEnabledForBucket=True)
    # One object that the store copies by reference: 103 GB that take 96 MiB of disk.
    path = store.files / "shard"
    with path.open("wb") as file:
        file.truncate(OBJECT_BYTES)
    client.upload_file(str(path), "bench-train", "seed")
    sha256 = digest(path)
    source = {"Bucket": "bench-train", "Key": "seed"}

    def put(number: int) -> dict[str, Any]:
        name = f"shard-{number:05d}"
        client.copy_object(Bucket="bench-train", Key=f"step-900/{name}", CopySource=source)
        return {"path": name, "bytes": OBJECT_BYTES, "sha256": sha256}

    with ThreadPoolExecutor(32) as pool:
        files = list(pool.map(put, range(OBJECTS)))
    client.put_object(Bucket="bench-train", Key="step-900/commit.json", Body=json.dumps(files).encode())
    older = checkpoint_of(client, "bench-train", "step-800", OBJECTS)

    def rotate() -> None:
        for number, one in enumerate(older):
            client.delete_object(
                Bucket="bench-train", Key=f"step-800/{one['path']}", VersionId=one["version"]
            )
            if number % 4 == 0:  # versions outlive it, and must be held all the same
                client.delete_object(Bucket="bench-train", Key=f"step-900/{one['path']}")

    return gate_open_s("objects", "s3://bench-train/step-900", files, rotate)


def files_to_gate_s(store: Store) -> float:
    """16,384 files. Rotation removes an older checkpoint; afterwards this one: the held links must remain."""
    root = store.files / "train"
    for step in (800, 900):
        directory = root / f"step-{step}"
        directory.mkdir(parents=True)
        for number in range(FILES):
            with (directory / f"shard-{number:05d}").open("wb") as file:
                file.truncate(FILE_BYTES)
    sha256 = digest(root / "step-900" / "shard-00000")
    files = [
        {"path": f"shard-{number:05d}", "bytes": FILE_BYTES, "sha256": sha256} for number in range(FILES)
    ]
    (root / "step-900" / "commit.json").write_text(json.dumps(files))
    uri = (root / "step-900").as_uri()
    took_s = gate_open_s("files", uri, files, lambda: shutil.rmtree(root / "step-800"))
    shutil.rmtree(root / "step-900")
    held = sum(path.stat().st_size == FILE_BYTES for path in (store.files / TREES).rglob("shard-*"))
    if held != FILES:
        raise RuntimeError(f"{held} of {FILES} files outlived the rotation")
    return took_s


def measure_gates(store: Store, environment: dict[str, str]) -> dict[str, Any]:
    """Return the seconds from opening a dossier to its open gate, for objects and for files."""
    from django.conf import settings

    store.client().create_bucket(Bucket="bench-vault", ObjectLockEnabledForBucket=True)
    more = {
        "ANDON_VAULT_URL": store.vault_url("bench-vault"),
        "ANDON_SOURCE_ROOTS": str(store.files),
    }
    settings.VAULT_URL, settings.SOURCE_ROOTS = more["ANDON_VAULT_URL"], [store.files]
    result = {}
    for name, measure in (("objects_s", objects_to_gate_s), ("files_s", files_to_gate_s)):
        # A worker each: the one before is still copying the 100 GB.
        with worker(environment | more):
            time.sleep(4)
            result[name] = round(measure(store), 2)
    return result


def run(environment: dict[str, str]) -> dict[str, Any]:
    """Measure; returns figures with their goals, or why there are none."""
    try:
        with store() as running:
            from django.conf import settings

            settings.VAULT_URL = running.vault_url("bench-holds")  # the endpoint of sources in S3 too
            holds = told("legal holds", measure_holds(running))
            gates = told("gate open", measure_gates(running, environment))
            through = told("throughput", Throughput(running, environment).measure())
    except Unavailable as error:
        print(f"vault: skipped: {error}", file=sys.stderr)
        return {"bench": "vault", "skipped": str(error), "goals": {}}
    peak = max(through["peak_mib"], through["peak_mib_at_4_gib"])
    goals = {
        **{
            f"upload of {shape} {UPLOAD_GOAL} x rclone": through[shape]["upload"]["times_rclone"]
            >= UPLOAD_GOAL
            for shape in SHAPES
        },
        **{
            f"server-side copy of {shape} {COPY_GOAL} x rclone without it": (
                through[shape]["server_side_copy"]["times_rclone"] >= COPY_GOAL
            )
            for shape in SHAPES
        },
        "memory 200 MB, also at 4 GiB": peak <= MEMORY_GOAL_MIB,
        f"legal holds {HOLD_GOAL} x a bare loop": holds["times_bare_loop"] >= HOLD_GOAL,
        f"gate open for {OBJECTS:,} objects {OBJECTS_GOAL_S:g} s": gates["objects_s"] <= OBJECTS_GOAL_S,
        f"gate open for {FILES:,} files {FILES_GOAL_S:g} s": gates["files_s"] <= FILES_GOAL_S,
    }
    return {
        "bench": "vault",
        "throughput": through,
        "legal_holds": holds,
        "gate_open": gates,
        "goals": goals,
    }
