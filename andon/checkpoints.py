"""Committed, verified, guarded checkpoints.

A checkpoint of step c is a directory `step-00000c` whose files were written to temporary names,
synced, renamed, and listed with size and SHA-256 in `commit.json`, written last: a directory
without it was never committed, whatever it holds. Our own arrays lie in `.npz` files without pickles, so
that anything with numpy can check them and nothing in a checkpoint can run code; trainers' `.safetensors`
are read as well. `parts` names
what each file is (weights, optimizer, schedule, rng, loader): evidence links to these views
instead of copying bytes.

A save that was forced while the run is held (a hold file lies beside or above it) says so in its
manifest and is no checkpoint to go back to, wherever it was written.

Deleting asks the deletion gate first. No answer means no. `andon.checkpoint_states` says which is verified.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import rfc8785

from andon import hold
from andon.readers import safetensors

SCHEMA = "andon.checkpoint/1"
MANIFEST = "commit.json"
QUARANTINE = "quarantine"
_CHUNK_BYTES = 1 << 20
_READ = (".npz", ".safetensors")
_LEVELS = 4  # run / attempt / quarantine / step: how far above a checkpoint the hold file may lie


class CheckpointError(Exception):
    """A checkpoint cannot be trusted or read; the text names the file and what is wrong with it."""


class Positions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The four numbers that are not the same: next sample to read, samples trained on, optimizer and
    schedule steps done."""

    loader_position: int
    consumed_samples: int
    optimizer_step: int
    schedule_position: int


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of a checkpoint, by its path relative to the checkpoint directory."""

    path: str
    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What `commit.json` says. `finite` covers weights and moments; `nonfinite` names those that are not."""

    schema: str = SCHEMA
    run: str
    attempt: int
    step: int
    files: tuple[FileEntry, ...]
    parts: dict[str, tuple[str, ...]]
    positions: Positions
    finite: bool
    nonfinite: tuple[str, ...] = ()
    norms: dict[str, float | None] = {}
    committed_at: str = ""
    quarantined: bool = False

    @property
    def digest(self) -> str:
        """SHA-256 over the RFC 8785 form of the sorted file list: the checkpoint's identity."""
        return files_digest(msgspec.to_builtins(self.files))

    def event(self, directory: Path) -> dict[str, Any]:
        """Return the `checkpoint.committed` event that announces it."""
        data = {
            "uri": directory.resolve().as_uri(),
            "step": self.step,
            "files": msgspec.to_builtins(self.files),
            "digest": self.digest,
            "parts": {part: list(paths) for part, paths in self.parts.items()},
            "positions": msgspec.to_builtins(self.positions),
            "finite": self.finite,
            "nonfinite": list(self.nonfinite),
            "norms": dict(self.norms),
            "manifest": MANIFEST,
            "quarantined": self.quarantined or directory.parent.name == QUARANTINE,
        }
        return {"type": "checkpoint.committed", "step": self.step, "attempt": self.attempt, "data": data}


class DeletionGate(Protocol):
    """What `delete` asks; `andon.client.Client` is one."""

    def deletions(self, uris: list[str], /) -> list[dict[str, Any]]:
        """Return one item per URI, `{"uri", "allow", "reason"}`; no answer is "allow": false."""
        ...


def files_digest(files: Iterable[Mapping[str, Any]]) -> str:
    """Return a checkpoint's identity, hex, from its file list (`path`, `bytes`, `sha256` of each)."""
    rows = sorted(
        ({key: row[key] for key in ("path", "bytes", "sha256")} for row in files), key=lambda r: r["path"]
    )
    return hashlib.sha256(rfc8785.dumps(rows)).hexdigest()


def directory_of(root: Path, step: int, *, quarantined: bool = False) -> Path:
    """Return where the checkpoint of `step` lies under `root`."""
    base = root / QUARANTINE if quarantined else root
    return base / f"step-{step:08d}"


def write_arrays(directory: Path, name: str, arrays: Mapping[str, np.ndarray]) -> Path:
    """Write arrays as `name` (an .npz) into `directory`, durable before its name appears."""

    def write(file: Any) -> None:
        np.savez(file, allow_pickle=False, **arrays)

    return _write(directory, name, write)


def write_document(directory: Path, name: str, document: Any) -> Path:
    """Write JSON as `name` into `directory`, durable before its name appears."""
    body = json.dumps(document, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"
    return _write(directory, name, lambda file: file.write(body))


def _write(directory: Path, name: str, write: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    temporary = directory / f".{name}.part"
    with temporary.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    target = directory / name
    temporary.rename(target)
    _sync_directory(directory)
    return target


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, lower-case hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def commit(
    directory: Path,
    *,
    run: str,
    attempt: int,
    step: int,
    positions: Positions,
    parts: Mapping[str, Sequence[str]],
    nonfinite: Sequence[str] = (),
    forced: bool | None = None,
) -> Manifest:
    """Hash every file of `parts`, check weights and moments, and write the manifest last.

    The check reads `.npz` and `.safetensors` files back, so what is called finite is what lies on disk. Of
    other formats `nonfinite` says what the trainer knows to be nonfinite. `forced`: whether the run was held
    when the files were written; None: whether it is now.

    Raises:
        CheckpointError: a listed file is absent, or one of these formats cannot be read.
    """
    entries: list[FileEntry] = []
    for path in sorted({path for paths in parts.values() for path in paths}):
        file = directory / path
        if not file.is_file():
            raise CheckpointError(f"{file}: listed in the checkpoint's parts but not written")
        entries.append(FileEntry(path, file.stat().st_size, sha256_of(file)))
    bad_names = list(nonfinite)
    norms: dict[str, float | None] = {}
    for part in ("weights", "optimizer"):
        if any(path.endswith(_READ) for path in parts.get(part, ())):
            bad, norm = _examine(directory, parts[part])
            bad_names += bad
            norms[part] = norm
    manifest = Manifest(
        run=run,
        attempt=attempt,
        step=step,
        files=tuple(entries),
        parts={part: tuple(paths) for part, paths in parts.items()},
        positions=positions,
        finite=not bad_names,
        nonfinite=tuple(bad_names),
        norms=norms,
        committed_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        quarantined=directory.parent.name == QUARANTINE or (is_held(directory) if forced is None else forced),
    )
    write_document(directory, MANIFEST, msgspec.to_builtins(manifest))
    return manifest


def is_held(directory: Path) -> bool:
    """Whether the run that a checkpoint belongs to is held: a hold file lies beside it or above."""
    return any(
        (above / hold.FILE_NAME).exists() for above in list(directory.absolute().parents)[: _LEVELS - 1]
    )


def _examine(directory: Path, paths: Sequence[str]) -> tuple[list[str], float | None]:
    """Return the names of arrays with a nonfinite value, and the L2 norm over all (None if nonfinite).

    Raises:
        CheckpointError: a file of a format that is read cannot be.
    """
    bad: dict[str, None] = {}
    total = 0.0
    for path in paths:
        try:
            for name, values in _floats(directory / path):
                if not np.isfinite(values).all():
                    bad[name] = None
                else:
                    total += float(np.square(values, dtype=np.float64).sum())
        except (ValueError, OSError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{directory / path}: cannot be read back ({error})") from error
    return list(bad), None if bad else total**0.5


def _floats(file: Path) -> Iterator[tuple[str, np.ndarray]]:
    if file.suffix == ".safetensors":
        yield from safetensors.chunks(file)
    elif file.suffix == ".npz":
        with np.load(file, allow_pickle=False) as arrays:
            for name in arrays.files:
                values = arrays[name]
                if np.issubdtype(values.dtype, np.floating):
                    yield name, values


def read_manifest(directory: Path) -> Manifest:
    """Read `commit.json`.

    Raises:
        CheckpointError: it is absent (never committed) or not a manifest of this schema.
    """
    path = directory / MANIFEST
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError as error:
        raise CheckpointError(f"{directory}: no {MANIFEST}, so it was never committed") from error
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path}: not a checkpoint manifest ({error})") from error
    if manifest.schema != SCHEMA:
        raise CheckpointError(f"{path}: schema {manifest.schema!r}, this version reads {SCHEMA!r}")
    return manifest


def verify(directory: Path) -> Manifest:
    """Check that a committed checkpoint is whole and finite: every file present with its size and
    SHA-256, weights and moments finite on a fresh look.

    Raises:
        CheckpointError: anything differs; all differences are named.
    """
    manifest = read_manifest(directory)
    wrong: list[str] = []
    for entry in manifest.files:
        file = directory / entry.path
        if not file.is_file():
            wrong.append(f"{entry.path}: missing")
        elif file.stat().st_size != entry.bytes:
            wrong.append(f"{entry.path}: {file.stat().st_size} bytes, committed with {entry.bytes}")
        elif sha256_of(file) != entry.sha256:
            wrong.append(f"{entry.path}: its SHA-256 differs from the committed one")
    if not wrong:
        for part in ("weights", "optimizer"):
            try:
                bad, _ = _examine(directory, manifest.parts.get(part, ()))
            except CheckpointError as error:
                wrong.append(str(error))
                continue
            wrong += [f"{part}: {name} has nonfinite values" for name in bad]
        wrong += [f"{name} was nonfinite when it was saved" for name in manifest.nonfinite if not wrong]
    if wrong:
        raise CheckpointError(f"{directory}: " + "; ".join(wrong))
    return manifest


def committed(root: Path) -> list[tuple[int, Path]]:
    """Return (step, directory) of every committed checkpoint under `root`, ascending, quarantine left out.

    A manifest that cannot be read is none: it commits to nothing.
    """
    found: list[tuple[int, Path]] = []
    for path in root.glob("step-*"):
        match = re.fullmatch(r"step-(\d+)", path.name)
        with contextlib.suppress(CheckpointError, OSError):
            if match and not read_manifest(path).quarantined:
                found.append((int(match[1]), path))
    return sorted(found)


def read_arrays(directory: Path, name: str) -> dict[str, np.ndarray]:
    """Return the arrays of one .npz of a checkpoint; pickles are refused."""
    with np.load(directory / name, allow_pickle=False) as arrays:
        return {key: arrays[key] for key in arrays.files}


# An allow holds for ten minutes on the server; a process that was stopped in between asks again.
ALLOW_S = 540.0


def delete(directory: Path, gate: DeletionGate | None) -> tuple[bool, str]:
    """Delete a checkpoint if the deletion gate allows it. Returns (deleted, why or why not).

    Keeps it when there is no gate to ask, when the gate cannot be reached, and when the answer is not a
    plain yes to this URI: a checkpoint too many costs disk, one too few costs the run.
    """
    uri = directory.resolve().as_uri()
    if gate is None:
        return False, "kept: nobody to ask"
    asked_s = time.monotonic()
    try:
        named = [item for item in gate.deletions([uri]) if item.get("uri") == uri]
    except Exception as error:  # whatever went wrong, nothing allowed it
        return False, f"kept: the deletion gate did not answer ({error})"
    if not named:
        return False, "kept: the answer does not name this checkpoint"
    no = next((item for item in named if item.get("allow") is not True), None)
    if no is not None:
        return False, f"kept: {no.get('reason') or 'the deletion gate said no'}"
    if time.monotonic() - asked_s > ALLOW_S:
        return False, "kept: the answer came too late to count"
    # The manifest goes first: a half-deleted directory is then not committed.
    (directory / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(directory)
    return True, "allowed by the deletion gate"
