"""The files of a bag, in a directory or an archive. Standard library only."""

import io
import os
import stat
from pathlib import Path
from typing import IO, Any, Protocol

from andon import bag_format as form
from andon import bag_zip


class Unreadable(Exception):
    """The path is no bag at all, or cannot be read."""


class Tree(Protocol):
    """The files of a bag."""

    def names(self) -> list[str]:
        """Return the relative names of all files. Raises Unreadable or ValueError."""
        ...

    def open(self, name: str) -> IO[bytes]:
        """Return a file's bytes."""
        ...


class DirectoryTree:
    """A bag as a directory; anything but plain files and directories with files fails."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def names(self) -> list[str]:
        """See `Tree.names`."""
        found: list[str] = []
        for directory, folders, files in os.walk(self.root):
            for name in [*folders, *files]:
                path = Path(directory) / name
                mode = path.lstat().st_mode
                relative = path.relative_to(self.root).as_posix()
                if stat.S_ISREG(mode):
                    found.append(relative)
                elif not stat.S_ISDIR(mode):
                    raise ValueError(f"{relative}: is neither a file nor a directory")
            if not folders and not files and Path(directory) != self.root:
                raise ValueError(f"{Path(directory).relative_to(self.root)}: is an empty directory")
        return found

    def open(self, name: str) -> IO[bytes]:
        """See `Tree.open`."""
        return (self.root / name).open("rb")


class ZipTree:
    """A bag as an archive with one directory in it."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file = file
        entries = bag_zip.read(file, size)
        tops = {entry.name.partition("/")[0] for entry in entries}
        if len(tops) != 1:
            raise ValueError("the archive must hold one directory")
        top = f"{tops.pop()}/"
        self._at: dict[str, tuple[int, int]] = {}
        for entry in entries:
            name = entry.name.removeprefix(top)
            if name in self._at:
                raise ValueError(f"{name}: is in the archive twice")
            self._at[name] = (entry.offset + len(bag_zip.local_header(entry)), entry.bytes_total)

    def names(self) -> list[str]:
        """See `Tree.names`."""
        return list(self._at)

    def open(self, name: str) -> IO[bytes]:
        """See `Tree.open`."""
        offset, size = self._at[name]
        return io.BufferedReader(_Slice(self._file, offset, size))


class _Slice(io.RawIOBase):
    """A part of a seekable stream."""

    def __init__(self, file: IO[bytes], offset: int, size: int) -> None:
        self._file, self._at, self._left = file, offset, size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._at)
        data = self._file.read(min(len(buffer), self._left))
        buffer[: len(data)] = data
        self._at += len(data)
        self._left -= len(data)
        return len(data)


def open_tree(path: Path) -> Tree:
    """Return the files of a bag: a directory or a .zip.

    Raises:
        Unreadable: there is no bag.
        ValueError: an archive that was changed.
    """
    try:
        if path.is_dir():
            if not (path / "bagit.txt").exists() and not (path / form.TAG_MANIFEST).exists():
                raise Unreadable(f"{path}: is no bag (bagit.txt is missing)")
            return DirectoryTree(path)
        file = path.open("rb")
        head = file.read(4)
        if head[:2] != b"PK":
            file.close()
            raise Unreadable(f"{path}: is neither a directory nor a zip archive")
        return ZipTree(file, path.stat().st_size)
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror}") from error
