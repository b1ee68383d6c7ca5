"""One measurement of the vault in a process of its own, so that its memory is that work's alone.

`python -m benchmarks.vault_child upload DIRECTORY` or `copy BUCKET PREFIX`, in the environment of a server;
prints JSON: seconds, read-back seconds where there is one, and the peak of resident memory.
"""

import hashlib
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


def peak_mib() -> int:
    """Return the most memory this process ever held (its own: `ru_maxrss` begins with the parent's)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) >> 10
    raise RuntimeError("no VmHWM")


def digest(path: Path) -> str:
    """Return the save-time digest, as the trainer's commit manifest has it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def upload(directory: str) -> dict[str, Any]:
    """Store every file, as many at a time as the vault asks for."""
    from evidence.sources import FileSource
    from evidence.vault import key_for, vault

    store = vault()
    files = [(path, digest(path)) for path in sorted(Path(directory).iterdir())]

    def one(file: tuple[Path, str]) -> str:
        path, sha256 = file
        source = FileSource(path, path.stat().st_size)
        key = key_for("bench", 1, sha256)
        return store.store(
            key, source, sha256=sha256, lock="none", until=None, progress=lambda _: None, first=True
        ).sha256

    begun = time.perf_counter()
    with ThreadPoolExecutor(store.at_once) as pool:
        stored = list(pool.map(one, files))
    took_s = time.perf_counter() - begun
    assert stored == [sha256 for _, sha256 in files]
    return {"took_s": took_s}


def copy(bucket: str, prefix: str) -> dict[str, Any]:
    """Have the store copy every object below a prefix, then read all of it back and compare."""
    from evidence import sources
    from evidence.stores.s3 import S3Vault
    from evidence.stores.s3_parts import Job
    from evidence.vault import key_for, vault

    store = vault()
    assert isinstance(store, S3Vault)
    uri = f"s3://{bucket}/{prefix}"
    jobs = []
    for path in sources.list_files(uri):
        source = sources.open_uri(sources.child(uri, path))
        sha256 = path.rpartition("-")[2]
        jobs.append(Job(key_for("bench", 2, sha256), source, sha256, {}, lambda _: None))
    with ThreadPoolExecutor(store.at_once) as pool:
        begun = time.perf_counter()
        made = [one for one in pool.map(store.copies.copy, jobs) if one is not None]
        copied = time.perf_counter()
        verified = list(pool.map(store._verified, jobs, made))
        read_back = time.perf_counter()
    assert [one.sha256 for one in verified] == [job.sha256 for job in jobs]
    return {"took_s": copied - begun, "read_back_s": read_back - copied}


if __name__ == "__main__":
    import django

    django.setup()
    result = upload(sys.argv[2]) if sys.argv[1] == "upload" else copy(*sys.argv[2:])
    print(json.dumps(result | {"peak_mib": peak_mib()}))
