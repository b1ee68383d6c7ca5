"""The client's disk spool: posts in order, kept until the server has them, whatever dies meanwhile.

Append-only segment files. A record is whole or ignored (length and CRC), so a torn write costs only
itself. Where reading stands is kept beside them and may lag: a post sent twice carries the same
webhook-id and the server knows it. One process per directory (andon/spool_slots.py), calls under one
lock.

Where room ends the oldest telemetry goes first, counted in a gap; a post marked `kept` (an action, a
finding, an artifact, …) never does. Giving up is written down before it is done and finished after a
crash, so that every post was sent or is counted, and none both.
"""

import contextlib
import os
import time
import weakref
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from andon.signing import fsync_directory
from andon.spool_records import HEADER_BYTES, Gap, Post, encode_record, is_cut, read_record

__all__ = ["Gap", "Post", "Spool"]

SUFFIX = ".seg"
POSITION = "position.json"
SEGMENT_BYTES = 8 * 1024 * 1024
MEMORY_BYTES = 64 * 1024 * 1024  # what is kept in memory while the disk takes nothing


class Position(msgspec.Struct):
    """Where reading stands, what was given up, and of which segment it is being given up just now (with
    the id of the post that was being sent, which stays)."""

    segment: int = 0
    offset: int = 0
    gap: Gap = msgspec.field(default_factory=Gap)
    leaving: tuple[int, str] | None = None


_open_locks: "weakref.WeakSet[Spool]" = weakref.WeakSet()


def _drop_locks_in_child() -> None:
    # A data-loader worker forked from the trainer must not keep the slot locked after its parent.
    for spool in list(_open_locks):
        spool.forget_lock()


os.register_at_fork(after_in_child=_drop_locks_in_child)


class Spool:
    """See the module. `directory` None keeps everything in memory.

    Posts that the disk does not take (full, read-only, gone) wait in memory, up to MEMORY_BYTES. Above
    that, or above `cap_bytes` on disk, the oldest telemetry is given up, counted in `gap`.
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
        self._lean: set[int] = set()  # segments in which there is nothing to give up
        self._head: tuple[int, str, int] | None = (
            None  # segment (-1: memory), id and end of what is being sent
        )
        self._position = Position()
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

    def take_in_gap(self, gap: Gap) -> None:
        """Tell of what another gave up, too."""
        self.gap.take_in(gap)
        self._save()

    def _recover(self) -> None:
        assert self._directory is not None
        numbers = sorted(int(p.stem) for p in self._directory.glob(f"*{SUFFIX}") if p.stem.isdigit())
        with contextlib.suppress(OSError, msgspec.DecodeError, msgspec.ValidationError):
            raw = (self._directory / POSITION).read_bytes()
            self._position = msgspec.json.decode(raw, type=Position)
        for path in self._directory.glob("*.tmp"):
            path.unlink()
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
        if self._position.leaving is not None:
            number, spared = self._position.leaving
            if number in self._sizes:
                kept = [post for post, _ in self._scan(number, 0) if _stays(post, spared)]
                self._replace(number, kept, self._copy(number, kept))
            self._position.leaving = None
            self._save()
        for number in sorted(self._sizes):
            offset = self._position.offset if number == self._position.segment else 0
            self.pending += sum(1 for _ in self._scan(number, offset))

    def _path(self, number: int) -> Path:
        assert self._directory is not None
        return self._directory / f"{number:016d}{SUFFIX}"

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
        while self._memory_bytes > MEMORY_BYTES and (lost := self._oldest_telemetry()) is not None:
            self._memory.remove(lost)
            self._memory_bytes -= len(lost.body)
            self.pending -= 1
            self.gap.add(lost, "spool not writable" if self._directory else "memory full")
        return False

    def _oldest_telemetry(self) -> Post | None:
        """Return the oldest post in memory that may be given up: not the newest, nor one being sent."""
        sending = self._head[1] if self._head is not None else ""
        newest = self._memory[-1]
        return next((p for p in self._memory if not _stays(p, sending) and p is not newest), None)

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
            left = memoryview(record)
            while left:  # a disk that fills up takes a part, and only then says that it is full
                left = left[self._writing.write(left) :]
        except OSError as error:
            self.disk_error = str(error)
            self._cut_back()
            return False
        self.disk_error = None
        self._dirty = True
        self._sizes[self._write_segment] += len(record)
        self._enforce_cap()
        return True

    def _cut_back(self) -> None:
        """Take half a record off again: nothing may follow it. Where that fails, another segment begins."""
        try:
            if self._writing is not None:
                self._writing.truncate(self._sizes[self._write_segment])
        except OSError:
            self._close_writing()

    def _roll(self) -> None:
        self._close_writing()
        self._writing = self._path(self._write_segment).open("ab", buffering=0)
        self._sizes[self._write_segment] = 0
        assert self._directory is not None
        fsync_directory(self._directory)
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

    def to_sync(self) -> int | None:
        """Return a descriptor of what was appended since the last call, to be synced and closed by the
        caller: without the lock, since a disk may take its time. None: there is nothing to sync."""
        if not self._dirty or self._writing is None:
            return None
        self._dirty = False
        return os.dup(self._writing.fileno())

    def _enforce_cap(self) -> None:
        if sum(self._sizes.values()) <= self._cap_bytes:
            return
        for number in sorted(self._sizes.keys() - self._lean - {self._write_segment}):
            self._give_up_telemetry(number)
            if sum(self._sizes.values()) <= self._cap_bytes:
                return

    def _give_up_telemetry(self, number: int) -> None:
        """Leave of a segment only what is never given up."""
        is_read = number == self._position.segment
        waiting = [post for post, _ in self._scan(number, self._position.offset if is_read else 0)]
        sending = self._head[1] if self._head is not None else ""
        kept = [post for post in waiting if _stays(post, sending)]
        lost = [post for post in waiting if not _stays(post, sending)]
        if not lost and waiting:
            self._lean.add(number)
            return
        copy = self._copy(number, kept)
        if kept and copy is None:
            return  # no room even for that
        for post in lost:
            self.gap.add(post, "spool full")
        self.pending -= len(lost)
        self._position.leaving = (number, sending)
        if is_read:  # the copy is read from its start; until it is there, some are sent again
            self._position.offset = 0
        self._save()
        self._replace(number, kept, copy)
        self._position.leaving = None
        self._save()

    def _copy(self, number: int, kept: list[Post]) -> Path | None:
        """Write these posts beside a segment."""
        temporary = self._path(number).with_suffix(".tmp")
        try:
            with temporary.open("wb") as file:
                file.write(b"".join(encode_record(post) for post in kept))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            self.disk_error = str(error)
            with contextlib.suppress(OSError):
                temporary.unlink()
            return None
        return temporary

    def _replace(self, number: int, kept: list[Post], copy: Path | None) -> None:
        """Put the copy in the place of a segment, at once; of no posts, nothing."""
        if not kept or copy is None:
            self._forget(number)
            return
        self._sizes[number] = copy.stat().st_size
        os.replace(copy, self._path(number))
        self._lean.add(number)
        if number == self._position.segment:
            self._close_reading()
            if self._head is not None and self._head[:2] == (number, kept[0].id):
                self._head = (number, kept[0].id, len(encode_record(kept[0])))

    def _forget(self, number: int) -> None:
        if number == self._position.segment:
            self._close_reading()
        with contextlib.suppress(OSError):
            self._path(number).unlink(missing_ok=True)
        self._sizes.pop(number, None)
        self._lean.discard(number)
        self._position.segment = min(self._sizes, default=self._write_segment)
        self._position.offset = 0

    # --- reading ----------------------------------------------------------------------------------

    def peek(self) -> tuple[Post, str] | None:
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
                self._head = (number, found[0].id, self._position.offset + found[1])
                return found[0], found[0].id
            if number == self._write_segment and self._writing is not None:
                break  # all of the segment being written is done
            left = self._sizes.get(number, 0) - self._position.offset
            if left > 0 and not self._torn_tail_only(number):
                # Damage in the middle: what follows cannot be found again, so it is told.
                self.gap.add(Post(id="", path="", content_type="", created_s=time.time()), "spool damaged")
            self._forget(number)
            self._save()
        if self._memory:
            self._head = (-1, self._memory[0].id, 0)
            return self._memory[0], self._memory[0].id
        self._head = None
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

    def done(self, token: str) -> None:
        """Let go of the post that `peek` returned with this token."""
        if self._head is None or self._head[1] != token:
            return  # let go already
        (number, _, end), self._head = self._head, None
        if number == -1:
            # It may have moved to the disk meanwhile, and is then sent once more from there.
            if self._memory and self._memory[0].id == token:
                self._memory_bytes -= len(self._memory.popleft().body)
                self.pending -= 1
            return
        self.pending -= 1
        self._position.offset = end
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
            os.replace(temporary, self._directory / POSITION)

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


def _stays(post: Post, sending: str) -> bool:
    return post.kept or post.id == sending
