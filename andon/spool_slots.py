"""Which process writes where: each has a slot of the spool directory, locked while it lives."""

import contextlib
import fcntl
import os
from pathlib import Path

import msgspec

from andon.spool import POSITION, SEGMENT_BYTES, SUFFIX, Gap, Position, Spool

_MAX_SLOTS = 1024


def open_slot(directory: Path, *, cap_bytes: int = 1024**3, segment_bytes: int = SEGMENT_BYTES) -> Spool:
    """Open the first slot of `directory` that no living process has, and adopt what dead ones left.

    Several ranks of one node share a spool directory; each has a slot of its own.

    Raises:
        OSError: the directory cannot be made or locked.
    """
    directory.mkdir(parents=True, exist_ok=True)
    own: Path | None = None
    own_lock = -1
    adopted: list[Path] = []
    locks: list[int] = []
    gap = Gap()
    try:
        for slot in range(_MAX_SLOTS):
            folder = directory / str(slot)
            if own is not None and not folder.exists():
                break
            folder.mkdir(exist_ok=True)
            lock = _try_lock(folder / "lock")
            if lock is None:
                continue
            if own is None:
                own, own_lock = folder, lock
            else:
                locks.append(lock)
                adopted.append(folder)
        if own is None:
            raise OSError(f"{directory}: all {_MAX_SLOTS} slots are taken")
        for folder in adopted:
            gap.take_in(_adopt(folder, own))
        spool = Spool(own, cap_bytes=cap_bytes, segment_bytes=segment_bytes, lock=own_lock)
        if gap.posts:
            spool.take_in_gap(gap)
        return spool
    except BaseException:
        if own is not None:
            os.close(own_lock)
        raise
    finally:
        for lock in locks:
            os.close(lock)


def _try_lock(path: Path) -> int | None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _adopt(folder: Path, own: Path) -> Gap:
    """Move a dead process's segments behind our own; returns what it had given up and not told.

    What it had sent already is sent as a repeat.
    """
    if not (folder / POSITION).exists() and not any(folder.glob(f"*{SUFFIX}")):
        return Gap()
    dead = Spool(folder)  # finishes what it was about
    gap = dead.gap
    dead.close()
    left = sorted(path for path in folder.glob(f"*{SUFFIX}") if path.stem.isdigit())
    start = max((int(p.stem) for p in own.glob(f"*{SUFFIX}") if p.stem.isdigit()), default=0) + 1
    with contextlib.suppress(OSError, msgspec.DecodeError):
        start = max(start, msgspec.json.decode((own / POSITION).read_bytes(), type=Position).segment + 1)
    for number, path in enumerate(left, start):
        path.rename(own / f"{number:016d}{SUFFIX}")
    (folder / POSITION).unlink(missing_ok=True)
    return gap
