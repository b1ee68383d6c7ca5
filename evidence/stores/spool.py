"""Directories for what is written before it is stored: private, and gone with the process that made them.

A process that is killed leaves its directory. The lock on a file in it tells: the kernel lets go of it with
the process, however that ended, and whoever can take it may remove the directory. Process ids would not do:
workers in containers share a volume and not their numbers.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from django.conf import settings

_LOCK = ".owner"
# A directory without a lock: made a moment ago, or by something else than this.
_UNKNOWN_FOR_S = 86_400.0


@contextlib.contextmanager
def directory(name: str) -> Iterator[Path]:
    """Make a private directory below the data directory's spool; it is removed at the end."""
    root = _root()
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    made = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=root))
    try:
        with _owned(made):
            yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextlib.contextmanager
def _owned(made: Path) -> Iterator[None]:
    part = made / f"{_LOCK}.part"
    with part.open("xb") as file:
        with contextlib.suppress(OSError):  # some shared file systems have no locks
            fcntl.flock(file.fileno(), fcntl.LOCK_EX)
            # Under its name only once it is locked: no sweep may find it free in between.
            part.rename(made / _LOCK)
        yield


def sweep() -> int:
    """Remove the directories whose process is gone; returns how many. Never one that is in use."""
    removed = 0
    with contextlib.suppress(OSError):
        for left in _root().iterdir():
            with contextlib.suppress(OSError):
                removed += _remove_if_left(left)
    return removed


def _remove_if_left(left: Path) -> bool:
    try:
        lock = os.open(left / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        if time.time() - left.stat().st_mtime < _UNKNOWN_FOR_S:
            return False
        shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink()
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its process lives
        shutil.rmtree(left, ignore_errors=True)
    finally:
        os.close(lock)
    return True


def _root() -> Path:
    return Path(settings.DATA_DIR) / "spool"
