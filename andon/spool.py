"""The client's disk spool: posts in order, kept until the server has them, whatever dies meanwhile.

Append-only segment files. A record is whole or ignored (length and CRC), so a torn write costs only
itself. Where reading stands is kept beside them and may lag: a post sent twice carries the same
webhook-id and the server knows it. One process per directory (`open_slot`), calls under one lock.
"""

import contextlib
import fcntl
import os
import time
import weakref
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from andon.spool_records import HEADER_BYTES, Gap, Post, encode_record, is_cut, read_record

__all__ = ["Gap", "Post", "Spool", "open_slot"]

_SUFFIX = ".seg"
SEGMENT_BYTES = 8 * 1024 * 1024
MEMORY_BYTES = 64 * 1024 * 1024  # what is kept in memory while the disk takes nothing
_MAX_SLOTS = 1024


class _Position(msgspec.Struct):
    segment: int = 0
    offset: int = 0
    gap: Gap = msgspec.field(default_factory=Gap)


_open_locks: "weakref.WeakSet[Spool]" = weakref.WeakSet()


def _drop_locks_in_child() -> None:
    # A data-loader worker forked from the trainer must not keep the slot locked after its parent.
    for spool in list(_open_locks):
        spool.forget_lock()


os.register_at_fork(after_in_child=_drop_locks_in_child)


class Spool:
    """See the module. `directory` None keeps everything in memory.

    Posts that the disk does not take (full, read-only, gone) wait in memory, up to MEMORY_BYTES.
    Above `cap_bytes` on disk the oldest segment is given up, counted in `gap`.
    """

    def __init__(
        self,
        directory: Path | None,
        *,
        cap_bytes: int = 1024**3,
        segment_bytes: int = SEGMENT_BYTES,
        lock: int | None = None,
    ) -> None:
        self._directory = directory
        self._cap_bytes = cap_bytes
        self._segment_bytes = max(1, min(segment_bytes, cap_bytes // 4))
        self._lock = lock
        self._memory: deque[Post] = deque()
        self._memory_bytes = 0
        self._writing: Any = None
        self._write_segment = 0
        self._reading: Any = None
        self._sizes: dict[int, int] = {}
        self._position = _Position()
        self._saved_s = 0.0
        self._dirty = False
        self.pending = 0  # posts not yet done
        self.disk_error: str | None = None
        if directory is not None:
            _open_locks.add(self)
            self._recover()

    # --- opening ----------------------------------------------------------------------------------

    @property
    def gap(self) -> Gap:
        """What has been given up and not yet told."""
        return self._position.gap

    def take_gap(self) -> Gap:
        """Return the gap and start a new one: the caller has put it into a post."""
        gap, self._position.gap = self._position.gap, Gap()
        self._save()
        return gap

    def _recover(self) -> None:
        assert self._directory is not None
        numbers = sorted(int(p.stem) for p in self._directory.glob(f"*{_SUFFIX}") if p.stem.isdigit())
        with contextlib.suppress(OSError, msgspec.DecodeError, msgspec.ValidationError):
            raw = (self._directory / "position.json").read_bytes()
            self._position = msgspec.json.decode(raw, type=_Position)
        self._sizes = {number: self._path(number).stat().st_size for number in numbers}
        # A new segment, always: the last one may end in half a record. Its number is above any the
        # position ever named, so that a position written before a crash can't point into it.
        self._write_segment = max([*numbers, self._position.segment]) + 1
        # The position may lag or be lost. Where it fits no record, everything is sent again.
        first = min(numbers, default=self._write_segment)
        size = self._sizes.get(first, 0)
        fits = first == self._position.segment and 0 <= self._position.offset <= size
        if not fits or (
            self._position.offset < size and next(self._scan(first, self._position.offset), None) is None
        ):
            self._position.segment, self._position.offset = first, 0
        for number in sorted(self._sizes):
            offset = self._position.offset if number == self._position.segment else 0
            self.pending += sum(1 for _ in self._scan(number, offset))

    def _path(self, number: int) -> Path:
        assert self._directory is not None
        return self._directory / f"{number:016d}{_SUFFIX}"

    def _scan(self, number: int, offset: int) -> Any:
        """Yield the whole records of a segment."""
        with contextlib.suppress(OSError), self._path(number).open("rb") as file:
            file.seek(offset)
            while (found := read_record(file)) is not None:
                yield found

    # --- writing ----------------------------------------------------------------------------------

    def append(self, post: Post) -> bool:
        """Take a post; return whether it is on disk (else it waits in memory)."""
        self.pending += 1
        if self._directory is not None and self._memory_to_disk() and self._to_disk(post):
            return True
        self._memory.append(post)
        self._memory_bytes += len(post.body)
        while self._memory_bytes > MEMORY_BYTES and len(self._memory) > 1:
            lost = self._memory.popleft()
            self._memory_bytes -= len(lost.body)
            self.pending -= 1
            self.gap.add(lost, "spool not writable" if self._directory else "memory full")
        return False

    def _memory_to_disk(self) -> bool:
        while self._memory:
            if not self._to_disk(self._memory[0]):
                return False
            self._memory_bytes -= len(self._memory.popleft().body)
        return True

    def _to_disk(self, post: Post) -> bool:
        record = encode_record(post)
        try:
            if self._writing is None or self._sizes[self._write_segment] >= self._segment_bytes:
                self._roll()
            self._writing.write(record)
        except OSError as error:
            # The segment may end in half a record; nothing may follow it there.
            self.disk_error = str(error)
            self._close_writing()
            return False
        self.disk_error = None
        self._dirty = True
        self._sizes[self._write_segment] += len(record)
        self._enforce_cap()
        return True

    def _roll(self) -> None:
        self._close_writing()
        self._writing = self._path(self._write_segment).open("ab", buffering=0)
        self._sizes[self._write_segment] = 0
        if self._position.segment not in self._sizes:
            self._position.segment, self._position.offset = self._write_segment, 0

    def _close_writing(self) -> None:
        if self._writing is not None:
            with contextlib.suppress(OSError):
                os.fsync(self._writing.fileno())
            with contextlib.suppress(OSError):
                self._writing.close()
            self._writing = None
            self._write_segment += 1

    def sync(self) -> None:
        """Make what was appended survive a power cut. Called when a post could not be sent at once."""
        if self._dirty and self._writing is not None:
            self._dirty = False
            try:
                os.fsync(self._writing.fileno())
            except OSError as error:
                self.disk_error = str(error)

    def _enforce_cap(self) -> None:
        while sum(self._sizes.values()) > self._cap_bytes and len(self._sizes) > 1:
            oldest = min(self._sizes)
            if oldest == self._write_segment:
                return
            offset = self._position.offset if oldest == self._position.segment else 0
            for post, _ in self._scan(oldest, offset):
                self.gap.add(post, "spool full")
                self.pending -= 1
            self._forget(oldest)
            self._save()

    def _forget(self, number: int) -> None:
        if number == self._position.segment:
            self._close_reading()
        with contextlib.suppress(OSError):
            self._path(number).unlink(missing_ok=True)
        self._sizes.pop(number, None)
        self._position.segment = min(self._sizes, default=self._write_segment)
        self._position.offset = 0

    # --- reading ----------------------------------------------------------------------------------

    def peek(self) -> tuple[Post, tuple[int, int]] | None:
        """Return the oldest post and a token for `done`, or None when nothing waits."""
        while self._directory is not None and self._sizes:
            number = self._position.segment
            try:
                found = self._read_at(number, self._position.offset)
            except OSError as error:  # out of file handles, say: the bytes are still there
                self.disk_error = str(error)
                self._close_reading()
                break
            if found is not None:
                return found[0], (number, self._position.offset + found[1])
            if number == self._write_segment and self._writing is not None:
                break  # all of the segment being written is done
            left = self._sizes.get(number, 0) - self._position.offset
            if left > 0 and not self._torn_tail_only(number):
                # Damage in the middle: what follows cannot be found again, so it is told.
                self.gap.add(Post(id="", path="", content_type="", created_s=time.time()), "spool damaged")
            self._forget(number)
            self._save()
        if self._memory:
            return self._memory[0], (-1, 0)
        return None

    def _torn_tail_only(self, number: int) -> bool:
        """Whether the unread rest is one record that was cut while it was being written."""
        with contextlib.suppress(OSError), self._path(number).open("rb") as file:
            file.seek(self._position.offset)
            return is_cut(file.read(HEADER_BYTES), self._sizes[number] - self._position.offset)
        return False

    def _read_at(self, number: int, offset: int) -> tuple[Post, int] | None:
        if self._reading is None:
            self._reading = self._path(number).open("rb", buffering=0)
        self._reading.seek(offset)
        return read_record(self._reading)

    def _close_reading(self) -> None:
        if self._reading is not None:
            self._reading.close()
            self._reading = None

    def done(self, token: tuple[int, int]) -> None:
        """Let go of the post that `peek` returned with this token."""
        number, end = token
        if number == -1:
            if self._memory:
                self._memory_bytes -= len(self._memory.popleft().body)
                self.pending -= 1
            return
        if number != self._position.segment or end <= self._position.offset:
            return  # given up meanwhile, to stay below the cap
        self._position.offset = end
        self.pending -= 1
        if number != self._write_segment and end >= self._sizes.get(number, 0):
            self._forget(number)
            self._save()
        elif time.monotonic() - self._saved_s > 1.0:
            self._save()

    def _save(self) -> None:
        """Write down where reading stands. May lag: a repeat is recognised by its id."""
        self._saved_s = time.monotonic()
        if self._directory is None:
            return
        temporary = self._directory / "position.tmp"
        with contextlib.suppress(OSError):
            temporary.write_bytes(msgspec.json.encode(self._position))
            os.replace(temporary, self._directory / "position.json")

    def forget_lock(self) -> None:
        """Close this process's copy of the lock."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                os.close(self._lock)
            self._lock = None

    def close(self) -> None:
        """Write everything down and let another process have the directory."""
        self._close_writing()
        self._close_reading()
        if self._directory is not None:
            if not self.pending:
                for number in list(self._sizes):
                    self._forget(number)
            self._save()
        self.forget_lock()


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
            _adopt(folder, own)
    except BaseException:
        if own is not None:
            os.close(own_lock)
        raise
    finally:
        for lock in locks:
            os.close(lock)
    return Spool(own, cap_bytes=cap_bytes, segment_bytes=segment_bytes, lock=own_lock)


def _try_lock(path: Path) -> int | None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _adopt(folder: Path, own: Path) -> None:
    """Move a dead process's segments behind our own. What it had sent already is sent as a repeat."""
    left = sorted(path for path in folder.glob(f"*{_SUFFIX}") if path.stem.isdigit())
    if not left:
        return
    start = max((int(p.stem) for p in own.glob(f"*{_SUFFIX}") if p.stem.isdigit()), default=0) + 1
    position = own / "position.json"
    if position.exists():
        with contextlib.suppress(msgspec.DecodeError, msgspec.ValidationError):
            start = max(start, msgspec.json.decode(position.read_bytes(), type=_Position).segment + 1)
    for number, path in enumerate(left, start):
        path.rename(own / f"{number:016d}{_SUFFIX}")
    (folder / "position.json").unlink(missing_ok=True)
