"""Follows a growing file through rotation, truncation and replacement, and says where it stands.

A file is known by device, inode and its first bytes: an inode is used again, and a truncated file may
have grown past where reading stood. What is left in a file that was renamed away is read before the new
one; after a restart it is looked for in the same directory.
"""

import contextlib
import hashlib
import os
import time
from pathlib import Path
from typing import BinaryIO

import msgspec

CHUNK_BYTES = 1 << 20
HEAD_BYTES = 256
_MOVED_AFTER_S = 2.0  # a writer may still hold the file that was renamed away
_BREAKS = (b"\n", b"\r")  # progress bars end with a carriage return


class Position(msgspec.Struct, frozen=True):
    """Where reading stands: after `offset` bytes of the file that begins with the `head_bytes` of `head`."""

    device: int = 0
    inode: int = 0
    offset: int = 0
    head_bytes: int = 0
    head: str = ""


class Follower:
    """Reads lines of one path, wherever its file has gone meanwhile.

    Args:
        path: the log; it need not be there yet.
        position: where an earlier reading stood.
    """

    def __init__(self, path: Path, position: Position | None = None) -> None:
        self.path = path
        self.position = position or Position()
        self.truncations = 0
        self._file: BinaryIO | None = None
        self._rest = b""
        self._moved_since_s: float | None = None

    def read(self) -> list[bytes]:
        """Return the next whole lines (without their ends), at most about 1 MiB; [] when there are none now.

        A line whose end was never written is left out: a number cut short is another number.

        Raises:
            OSError: the file cannot be read, other than for not being there.
        """
        if self._file is None and not self._open():
            return []
        lines = self._lines()
        if not lines and self._has_moved():
            self._close()
            self.position = Position()
            if self._open():
                lines = self._lines()
        return lines

    @property
    def modified_ns(self) -> int:
        """When the file was last written, nanoseconds since 1970; now where that is not known."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                return os.fstat(self._file.fileno()).st_mtime_ns
        return time.time_ns()

    def skip_to_end(self) -> None:
        """Begin after what is there now."""
        if self._file is None and not self._open():
            return
        assert self._file is not None
        size = os.fstat(self._file.fileno()).st_size
        self._rest = b""
        self.position = msgspec.structs.replace(self.position, offset=size)
        self._take_head()

    def close(self) -> None:
        """Close the file; `position` stays."""
        self._close()

    # --- inside

    def _lines(self) -> list[bytes]:
        assert self._file is not None
        size = os.fstat(self._file.fileno()).st_size
        here = self.position.offset + len(self._rest)
        if size < here or (size > here and not self._is_same(self._file)):
            # Copied away and emptied: what was written since the last look went with the copy.
            self.truncations += 1
            self._rest = b""
            status = os.fstat(self._file.fileno())
            self.position, here = Position(status.st_dev, status.st_ino), 0
        data = os.pread(self._file.fileno(), CHUNK_BYTES, here)
        if not data:
            return []
        if self.position.head_bytes < HEAD_BYTES:
            self._take_head()
        data = self._rest + data
        end = max(data.rfind(mark) for mark in _BREAKS) + 1
        if end == 0 and len(data) >= CHUNK_BYTES:
            end = len(data)  # no line is that long
        whole, self._rest = data[:end], data[end:]
        self._advance(end)
        return [line for line in whole.replace(b"\r", b"\n").split(b"\n") if line]

    def _advance(self, count: int) -> None:
        self.position = msgspec.structs.replace(self.position, offset=self.position.offset + count)

    def _open(self) -> bool:
        wanted = self.position
        for path in self._candidates():
            try:
                file = path.open("rb")
            except FileNotFoundError:
                continue
            status = os.fstat(file.fileno())
            known = (status.st_dev, status.st_ino) == (wanted.device, wanted.inode)
            if wanted.inode and not (known and status.st_size >= wanted.offset and self._is_same(file)):
                file.close()
                continue
            self._file = file
            if not wanted.inode:
                self.position = Position(status.st_dev, status.st_ino)
            return True
        if wanted.inode:  # neither here nor beside it: rotated away for good, or truncated
            self.position = Position()
            return self._open()
        return False

    def _candidates(self) -> list[Path]:
        if not self.position.inode:
            return [self.path]
        beside: list[Path] = []
        with contextlib.suppress(OSError), os.scandir(self.path.parent) as entries:
            beside = [
                Path(entry.path)
                for entry in entries
                if entry.name.startswith(self.path.name)
                and entry.name != self.path.name
                # A name's inode costs no open; rotated logs may be many.
                and entry.inode() == self.position.inode
            ]
        return [self.path, *beside]

    def _has_moved(self) -> bool:
        """Whether the path names another file by now, and the old one has not grown for a while."""
        assert self._file is not None
        try:
            now = self.path.stat()
        except OSError:
            self._moved_since_s = None
            return False
        own = os.fstat(self._file.fileno())
        if (now.st_dev, now.st_ino) == (own.st_dev, own.st_ino):
            self._moved_since_s = None
            return False
        if self._moved_since_s is None:
            self._moved_since_s = time.monotonic()
        return now.st_size > 0 or time.monotonic() - self._moved_since_s >= _MOVED_AFTER_S

    def _is_same(self, file: BinaryIO) -> bool:
        head = os.pread(file.fileno(), self.position.head_bytes, 0)
        return _digest(head) == self.position.head if self.position.head_bytes else True

    def _take_head(self) -> None:
        assert self._file is not None
        head = os.pread(self._file.fileno(), HEAD_BYTES, 0)
        self.position = msgspec.structs.replace(self.position, head_bytes=len(head), head=_digest(head))

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._rest, self._moved_since_s = None, b"", None


def _digest(head: bytes) -> str:
    return hashlib.sha256(head).hexdigest()
