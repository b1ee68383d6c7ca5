"""Holding a directory where it lies: a second, read-only tree of the same bytes in the same file system.

Each file is cloned (reflink) where the file system can: then not even its owner can change the held
bytes. Elsewhere it is hard-linked: deleting and replacing the original leave the held link, and what was
changed in place shows, because inode, size and time of change are recorded. Run as root, the tree and
its links belong to root, so that the trainer can no longer open them for writing.

Whoever holds a tree says what protects it by looking at what lies there, not by what this call did: an
earlier try, another worker or another node's agent may have made it.

The node agent and a server that reads the file system itself hold by this same code.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from andon.signing import fsync_directory

TREES = ".andon-holds"  # beside the checkpoints, in the same file system
# A file without a save-time digest is hashed while holding only up to this size: holds never wait. The commit
# manifest itself is such a file, and that of 16,384 files has about 2 MiB.
HASH_AT_ONCE_BYTES = 4 << 20
PART = r"\..+\.[0-9a-f]{16}\.part"  # names of clones that are not whole yet
_CHUNK_BYTES = 1 << 20
_FICLONE = 0x40049409  # linux/fs.h: _IOW(0x94, 9, int)
_CLONE_MARK = "user.andon.clone"  # an attribute of a clone; a hard link would have it of the trainer's file
_NO_CLONES = {errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EPERM}
# Another file system, a protected-hardlinks rule, a read-only mount: then the copy is the hold.
_NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EROFS, errno.EMLINK, errno.EOPNOTSUPP}


class HoldError(Exception):
    """A file is missing, has another size, or lies outside. `permanent`: asking again will not help."""

    def __init__(self, says: str, *, permanent: bool = False) -> None:
        super().__init__(says)
        self.says = says
        self.permanent = permanent


@dataclass(frozen=True)
class HeldTree:
    """What a hold achieved.

    `files` is `[{"path", "bytes", "sha256", "inode", "mtime_ns"}]`, `how` is `reflinks` (every file is a
    clone), `links` or `none` (then `tree` is empty and the copy is the hold), `says` is for people.
    """

    files: list[dict[str, Any]]
    how: str
    says: str
    tree: str = ""

    @property
    def is_safe(self) -> bool:
        """Return whether the bytes can no longer be lost."""
        return self.how != "none"


def hold_tree(base: Path, root: Path, name: str, files: Sequence[Mapping[str, Any]]) -> HeldTree:
    """Hold the files of `base`; safe to repeat, and to run twice at once.

    Args:
        base: the directory, or the one file when its entry's path is empty.
        root: the highest directory that may be written to.
        name: of the tree, a relative path that nothing else uses.
        files: `{"path", "bytes"?, "sha256"?}` as committed; what is there must have these sizes.

    Raises:
        HoldError: a file is missing or has another size (permanent), or the file system has trouble.
    """
    tree = tree_of(base, root, name)
    clones = _Clones()
    try:
        with _alone(tree):
            if not all(place(tree, base.name, str(entry["path"])).exists() for entry in files):
                _thaw(tree)
            held = [_hold(base, tree, entry, clones) for entry in files]
            _freeze(tree)
    except OSError as error:
        why = error.strerror or type(error).__name__
        if error.errno not in _NO_LINKS:
            raise HoldError(f"{tree}: {why}") from error
        # Looked at first: where an original is gone, its held link is not given up.
        seen = [look(base, entry) for entry in files]
        drop(tree)
        says = f"not safe until copied: no hard links could be made beside it ({why})"
        return HeldTree(seen, "none", says)
    linked = sum(not one.is_clone for one in held)
    kind = "hard links" if linked else "clones"
    some = f" ({len(held) - linked} of {len(held)} are clones)" if 0 < linked < len(held) else ""
    who = "root and their owner" if any(one.owner for one in held) else "root"
    says = f"held by read-only {kind}{some} in the same file system; {who} can still change them"
    return HeldTree([one.entry for one in held], "links" if linked else "reflinks", says, str(tree))


def tree_of(base: Path, root: Path, name: str) -> Path:
    """Return where the tree of that name for `base` lies or would lie."""
    return _top(base, root) / TREES / inside(name)


def inside(path: str) -> str:
    """Return a relative path as it is.

    Raises:
        HoldError: it is absolute, leaves its directory, or holds a NUL.
    """
    if path.startswith("/") or ".." in path.split("/") or "\0" in path:
        raise HoldError(f"{path!r}: a held file must lie inside its directory", permanent=True)
    return path


def place(directory: str | Path, base_name: str, path: str) -> Path:
    """Return where a held file lies in its tree; an empty path is the one file that `base` was."""
    return Path(directory) / inside(path or base_name)


def changed(tree: str, base_name: str, files: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the held files whose inode, size or time of change is no longer what was recorded."""
    found = []
    for entry in files:
        try:
            about = place(tree, base_name, str(entry["path"])).lstat()
        except OSError:
            found.append(f"{entry['path']}: its held link is gone")
            continue
        if (about.st_ino, about.st_size, about.st_mtime_ns) != (
            entry.get("inode"),
            entry["bytes"],
            entry.get("mtime_ns"),
        ):
            found.append(f"{entry['path']}: was changed in place after it was held")
    return found


def list_files(base: Path) -> list[str]:
    """Return the paths of the regular files below a directory, sorted; [""] when it is one file."""
    if base.is_dir():
        return sorted(
            str(file.relative_to(base))
            for file in base.rglob("*")
            if file.is_file() and not file.is_symlink()
        )
    if not base.exists():
        raise HoldError(f"{base}: is not there", permanent=True)
    return [""]


def drop(tree: Path) -> None:
    """Remove a tree; the originals stay."""
    for directory, _, _ in os.walk(tree):
        os.chmod(directory, 0o700)
    shutil.rmtree(tree, ignore_errors=True)


def look(base: Path, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a file is, without holding it.

    Raises:
        HoldError: it is missing or has another size.
    """
    path = str(entry["path"])
    source = base / inside(path) if path else base
    try:
        size = source.stat().st_size
    except OSError as error:
        raise HoldError(f"{source}: {error.strerror}", permanent=_is_gone(error)) from error
    _compare(source, size, entry)
    return {"path": path, "bytes": size, "sha256": _digest(entry, source, size)}


class _Clones:
    """Whether this file system can clone; asked with the first file of a tree, not with each."""

    work = True

    def make(self, source: Path, target: Path, source_about: os.stat_result) -> bool:
        """Clone a file; False where the file system cannot, FileExistsError when the target is there."""
        if not self.work:
            return False
        with source.open("rb") as original:
            # Under another name until it is whole: a clone that was cut must not pass for a held file.
            # The name is this call's own: threads of one process hold the same tree at the same time.
            part = target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")
            with part.open("xb") as clone:
                try:
                    fcntl.ioctl(clone.fileno(), _FICLONE, original.fileno())
                except OSError as error:
                    part.unlink()
                    if error.errno not in _NO_CLONES:
                        raise
                    self.work = False
                    return False
                with contextlib.suppress(OSError):  # not every file system has attributes
                    os.setxattr(clone.fileno(), _CLONE_MARK, b"1")
                with contextlib.suppress(PermissionError):
                    os.fchown(clone.fileno(), -1, source_about.st_gid)
                os.fchmod(clone.fileno(), stat.S_IMODE(source_about.st_mode) & 0o555)
                os.utime(clone.fileno(), ns=(source_about.st_atime_ns, source_about.st_mtime_ns))
                os.fsync(clone.fileno())
        try:
            os.link(part, target)
        finally:
            part.unlink()
        return True


@dataclass(frozen=True)
class _Held:
    """One held file: its line in the table, whether it is a clone, and its owner."""

    entry: dict[str, Any]
    is_clone: bool
    owner: int


def _hold(base: Path, tree: Path, entry: Mapping[str, Any], clones: _Clones) -> _Held:
    path = str(entry["path"])
    source = base / inside(path) if path else base
    target = place(tree, base.name, path)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        about = source.lstat()
        if not stat.S_ISREG(about.st_mode):
            raise HoldError(f"{source}: is not a regular file", permanent=True)
        if target.exists() or not clones.make(source, target, about):
            os.link(source, target, follow_symlinks=False)
    except FileExistsError:
        pass  # an earlier try, or another worker, linked it; what it is, is checked below
    except FileNotFoundError as error:
        if source.exists():
            raise  # the tree was taken away beside us: no word about the source
        if not target.exists():
            raise HoldError(f"{source}: missing", permanent=True) from error
    about = target.lstat()
    _compare(source, about.st_size, entry)
    _take_away_writing(target, about)
    line = {
        "path": path,
        "bytes": about.st_size,
        "sha256": _digest(entry, target, about.st_size),
        "inode": about.st_ino,
        "mtime_ns": about.st_mtime_ns,
    }
    return _Held(line, _is_clone(source, target, about), target.lstat().st_uid)


def _is_clone(source: Path, target: Path, about: os.stat_result) -> bool:
    """Return whether a held file shares its inode with nobody: a clone, whoever made it."""
    if about.st_nlink > 1:
        return False
    with contextlib.suppress(OSError):
        os.getxattr(target, _CLONE_MARK, follow_symlinks=False)
        return True
    # Without attributes: beside the original, another inode with its size and time is a clone of it. A
    # link whose original is gone has one name too, so without the original nothing is claimed.
    try:
        original = source.lstat()
    except OSError:
        return False
    stamps = [(one.st_size, one.st_mtime_ns) for one in (original, about)]
    return original.st_ino != about.st_ino and stamps[0] == stamps[1]


def _take_away_writing(target: Path, about: os.stat_result) -> None:
    """Make a held file read-only, and root's where we are root.

    Whoever could read it still can, its owner through the group: a checkpoint must stay loadable.
    """
    mode = stat.S_IMODE(about.st_mode) & 0o555
    # Where the file is not ours to change, the link still outlives a deletion.
    with contextlib.suppress(PermissionError):
        if os.geteuid() == 0 and about.st_uid != 0:
            os.chown(target, 0, -1, follow_symlinks=False)
            mode |= 0o440
        target.chmod(mode)


def _compare(source: Path, size: int, entry: Mapping[str, Any]) -> None:
    if entry.get("bytes") is not None and size != entry["bytes"]:
        raise HoldError(f"{source}: {size} bytes, committed with {entry['bytes']}", permanent=True)


def _digest(entry: Mapping[str, Any], file: Path, size: int) -> str:
    known = str(entry.get("sha256") or "")
    if known or size > HASH_AT_ONCE_BYTES:
        return known
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while data := stream.read(_CHUNK_BYTES):
            digest.update(data)
    return digest.hexdigest()


def _top(base: Path, root: Path) -> Path:
    """Return the highest directory between `base` and `root` in the file system that base lies in.

    A root may hold several mounts, and links do not cross them.
    """
    top = base.parent if base != root else base
    while not top.exists() and top != root:  # rotated away; what an earlier try linked may still be there
        top = top.parent
    device = top.stat().st_dev
    while top not in (root, top.parent) and top.parent.stat().st_dev == device:
        top = top.parent
    return top


@contextlib.contextmanager
def _alone(tree: Path) -> Iterator[None]:
    """Keep others from holding the same tree meanwhile: who finishes first makes it read-only.

    To an ordinary user that looked as if no links could be made, and the whole tree was given up.
    """
    tree.mkdir(parents=True, exist_ok=True)
    directory = os.open(tree, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # some shared file systems lock no directories
            fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def _thaw(tree: Path) -> None:
    """Let files be added to a tree that an earlier call made read-only."""
    for directory, _, _ in os.walk(tree):
        with contextlib.suppress(PermissionError):
            os.chmod(directory, 0o755)  # noqa: S103  (until the end of the call)


def _freeze(tree: Path) -> None:
    for directory, _, _ in os.walk(tree, topdown=False):
        fsync_directory(Path(directory))
        os.chmod(directory, 0o555)  # noqa: S103  (readable by the trainer's own people, writable by none)


def _is_gone(error: OSError) -> bool:
    return isinstance(error, FileNotFoundError | NotADirectoryError)
