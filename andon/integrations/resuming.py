"""Which checkpoint a launch goes on from: the one its permit names, else the newest verified one."""

import os
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from andon.checkpoint_states import condemn, state_of
from andon.checkpoints import CheckpointError, Manifest, read_manifest
from andon.permit import Permit, read_permit_file
from andon.watch_launch import Resumed


def permitted(permit: str | None) -> Path | None:
    """Return where the checkpoint of a permit file lies (default: of `ANDON_PERMIT`), None without a permit.

    Nothing is checked here: whether the permit holds, and whether what was loaded is what it names, is looked
    at before the first step.

    Raises:
        ValueError: the file is no permit, or its checkpoint lies in no file system.
        OSError: it cannot be read.
    """
    name = permit or os.environ.get("ANDON_PERMIT")
    if not name:
        return None
    document = read_permit_file(name)
    named = document.get("checkpoint") if isinstance(document, dict) else None
    uri = named.get("uri") if isinstance(named, dict) else None
    if not isinstance(uri, str):
        return None  # a resume in place, or no permit at all: refused, if so, before the first step
    parts = urlsplit(uri)
    if parts.scheme not in ("", "file"):
        raise ValueError(f"{name}: its checkpoint is at {uri}: bring it into a directory first")
    return Path(unquote(parts.path) if parts.scheme else uri)


def newest_verified(directories: Iterable[Path]) -> Path | None:
    """Return the verified checkpoint of the highest step, of those given."""
    found = []
    for directory in directories:
        try:
            if state_of(directory)[0] == "verified":
                manifest = read_manifest(directory)
                if not manifest.quarantined:
                    found.append((manifest.step, directory))
        except CheckpointError:
            continue
    return max(found)[1] if found else None


def resumed(directory: Path | None, step: int) -> Resumed | None:
    """Return what a trainer says that it resumed, with the digest where the checkpoint was committed."""
    if not step:
        return None
    if directory is None:
        return Resumed(step)
    try:
        digest = read_manifest(directory).digest
    except CheckpointError:
        digest = None
    return Resumed(step, directory.resolve().as_uri(), digest)


def abandon(directories: Iterable[Path], permit: Permit | None) -> list[Path]:
    """Condemn what lies past the checkpoint that a permit goes back to; return which. Call on rank 0.

    A restart without a person must not go on from what a person went back before.
    """
    if permit is None or permit.checkpoint is None:
        return []
    left = []
    for directory in directories:
        try:
            if read_manifest(directory).step > permit.checkpoint.step:
                condemn(directory, f"rolled back to step {permit.checkpoint.step} by permit {permit.permit}")
                left.append(directory)
        except CheckpointError:
            continue
    return left


def set_aside(directory: Path) -> tuple[Path, Manifest] | None:
    """Move a committed checkpoint away before another of its name is written into it; return where, and
    what it is.

    Its files may be held under other names: they must not be written to. Call on rank 0.
    """
    try:
        manifest = read_manifest(directory)
    except CheckpointError:
        return None  # never committed, so nothing refers to it
    target = directory.with_name(f"attempt-{manifest.attempt}-{directory.name}")
    for number in range(2, 1000):
        if not target.exists():
            break
        target = directory.with_name(f"attempt-{manifest.attempt}-{directory.name}.{number}")
    directory.rename(target)
    return target, manifest


def due(found: Iterable[Path], keep: int | None, protected: Iterable[Path | None] = ()) -> list[Path]:
    """Return which checkpoints a rotation would delete: the oldest, never the newest verified one.

    Args:
        found: all of them, oldest first.
        keep: how many stay; None: all.
        protected: more that stay.
    """
    listed = list(found)
    if keep is None or keep <= 0 or len(listed) <= keep:
        return []
    stay = {one.resolve() for one in (listed[-1], newest_verified(listed), *protected) if one is not None}
    may_go = [one for one in listed if one.resolve() not in stay]
    return may_go[: len(listed) - max(keep, len(stay))]
