"""Removing a held tree: its own files and nothing else, through no link, however often it is begun.

A held tree lies beside the trainer's files, where others may write. So it is entered directory by
directory without following a link, and of what lies in it only what was put there goes.
"""

import contextlib
import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from andon.held_tree import PART, HoldError

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_PART = re.compile(PART)
_NO_DIRECTORY = {errno.ENOTDIR, errno.ELOOP}


@dataclass(frozen=True)
class Removed:
    """What a removal achieved. `left` are the paths of what lies there and was not put there by a hold."""

    files: int
    left: list[str]


def remove(tree: Path, root: Path, ours: Mapping[str, int | None]) -> Removed:
    """Remove a held tree; the files keep every other name they have. Safe to repeat after being killed.

    Args:
        tree: a real path below `root`.
        root: a real path; the highest directory that may be touched.
        ours: the path of each held file inside the tree, and its inode where it is known: a file with
            another inode is not the held one.

    Raises:
        HoldError: a link lies in the way (permanent), or the file system refuses.
    """
    try:
        with _entered(root, tree) as (parent, directory):
            with contextlib.suppress(OSError):  # some shared file systems lock no directories
                fcntl.flock(directory, fcntl.LOCK_EX)  # nobody holds in it meanwhile
            inside = {"", *(str(up) for path in ours for up in Path(path).parents if str(up) != ".")}
            left = _empty(directory, "", ours, inside, os.fstat(directory).st_dev)
            if not left:
                os.rmdir(tree.name, dir_fd=parent)
        if not left:
            _remove_if_empty(root, tree.parent)
    except FileNotFoundError:
        return Removed(len(ours), [])  # an earlier try was killed after the last name
    except OSError as error:
        if error.errno in _NO_DIRECTORY:
            raise HoldError(f"{tree}: a link or a file lies in its way", permanent=True) from error
        raise HoldError(f"{tree}: {error.strerror or type(error).__name__}") from error
    return Removed(sum(path not in left for path in ours), left)


@contextlib.contextmanager
def _entered(root: Path, tree: Path) -> Iterator[tuple[int, int]]:
    """Open the directory above a tree and the tree itself, each step by name: no link is followed."""
    parts = tree.relative_to(root).parts
    above = os.open(root, _OPEN)
    directory = above
    try:
        for part in parts:
            if directory != above:
                os.close(above)
                above = directory
            directory = os.open(part, _OPEN, dir_fd=above)
        yield above, directory
    finally:
        for one in {above, directory}:
            os.close(one)


def _empty(
    directory: int, prefix: str, ours: Mapping[str, int | None], inside: set[str], device: int
) -> list[str]:
    """Remove what is ours from an open directory and below; returns the paths of what stays."""
    left: list[str] = []
    os.fchmod(directory, 0o700)
    for name in sorted(os.listdir(directory)):
        path = prefix + name
        about = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if about.st_dev != device:
            left.append(path)  # somebody mounted something there
        elif stat.S_ISDIR(about.st_mode) and path in inside:
            below = os.open(name, _OPEN, dir_fd=directory)
            try:
                stays = _empty(below, f"{path}/", ours, inside, device)
            finally:
                os.close(below)
            if not stays:
                os.rmdir(name, dir_fd=directory)
            left += stays
        elif stat.S_ISREG(about.st_mode) and _is_ours(path, name, about, ours):
            os.unlink(name, dir_fd=directory)
        else:
            left.append(path)
    if left:
        os.fchmod(directory, 0o555)
    return left


def _is_ours(path: str, name: str, about: os.stat_result, ours: Mapping[str, int | None]) -> bool:
    if path in ours:
        return ours[path] in (None, about.st_ino)
    return _PART.fullmatch(name) is not None  # a clone that was never whole


def _remove_if_empty(root: Path, directory: Path) -> None:
    """Remove the dossier's directory with its last tree."""
    with contextlib.suppress(OSError), _entered(root, directory) as (parent, _):
        os.rmdir(directory.name, dir_fd=parent)
