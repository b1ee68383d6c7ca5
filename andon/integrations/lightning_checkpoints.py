"""Lightning's checkpoints on disk: a file is no directory that a manifest could lie in, so it gets one.

`epoch=0-step=10.ckpt` is hard-linked into `epoch=0-step=10.ckpt.attempt-1-step-00000010.andon/`, beside its
manifest, the digests of its parts and each rank's random numbers. The bytes are there once; rotation frees
them when both names are gone. A sharded checkpoint is a directory, and is its own.
"""

import contextlib
import glob
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from andon.saving import files_of

_SUFFIX = ".andon"
_PLACE = re.compile(r"(?P<file>.+)\.attempt-\d+-step-\d{8,}\.andon")
# One file holds weights, moments, schedule and loops together; a sharded one keeps the tensors apart.
_SHARDS = (("*.distcp", "weights"), (".metadata", "weights"), ("meta.pt", "trainer"))


def place(file: Path, attempt: int, step: int) -> Path:
    """Return where the manifest of a checkpoint lies."""
    if file.is_dir():
        return file
    return file.with_name(f"{file.name}.attempt-{attempt}-step-{step:08d}{_SUFFIX}")


def part(file: Path) -> None:
    """Take a file's name away before it is written anew: Lightning writes into what is there, and that may
    be held under another name."""
    if file.is_file() and file.stat().st_nlink > 1:
        file.unlink()


def link(file: Path, directory: Path) -> None:
    """Give a file its directory; a copy where the file system has no hard links."""
    if directory == file:
        return
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / _name_in(directory)
    target.unlink(missing_ok=True)
    try:
        os.link(file, target)
    except OSError:
        shutil.copy2(file, target)


def _name_in(directory: Path) -> str:
    found = _PLACE.fullmatch(directory.name)
    return found["file"] if found is not None else directory.name


def parts(directory: Path) -> dict[str, list[str]]:
    """Return the files of a checkpoint by part: of one file, every part is that file."""
    if _PLACE.fullmatch(directory.name) is None:
        return files_of(directory, _SHARDS, rest="trainer")
    name = [_name_in(directory)]
    return {"weights": name, "optimizer": name, "schedule": name, "trainer": name}


def versions(file: Path) -> list[Path]:
    """Return the directories of a file, oldest first; a sharded checkpoint itself."""
    if file.is_dir():
        return [file]
    found = file.parent.glob(f"{glob.escape(file.name)}.attempt-*-step-*{_SUFFIX}")
    return sorted(one for one in found if _name_in(one) == file.name)


def found(root: Path) -> Iterable[Path]:
    """Return every directory under `root` that may hold a manifest."""
    return [manifest.parent for manifest in root.rglob("commit.json") if "quarantine" not in manifest.parts]


def file_of(directory: Path) -> Path:
    """Return what Lightning loads of a checkpoint."""
    return directory / _name_in(directory) if _PLACE.fullmatch(directory.name) else directory


def directory_of(path: Path) -> Path | None:
    """Return where the manifest of what Lightning loaded lies, None where it has none."""
    if _PLACE.fullmatch(path.parent.name):
        return path.parent
    if path.is_dir():
        return path
    known = versions(path)
    return max(known, key=lambda one: one.stat().st_mtime_ns) if known else None


def forget(path: Path) -> None:
    """Delete a checkpoint, or one of its names, that nobody holds."""
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
