"""Which checkpoint to go back to: candidate → verified → bad, and what may be deleted.

    candidate   committed, not looked at since
    verified    read back whole and finite (`promote`)
    bad         found damaged, or of a step whose weights are known to be bad (`condemn`); for good

Each state is a file beside the manifest, bound to the checkpoint's digest, so that marks of a checkpoint
that was saved anew do not count. A mark is only ever added and *bad* wins, so no two processes can undo
each other's. A *bad* that cannot be read is a bad. Forced saves of a held run are in no list here.
"""

import math
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec

from andon.checkpoints import (
    CheckpointError,
    DeletionGate,
    Manifest,
    committed,
    delete,
    read_manifest,
    verify,
    write_document,
)

SCHEMA = "andon.checkpoint-state/1"
VERIFIED, BAD = "verified.json", "bad.json"

State = Literal["candidate", "verified", "bad"]


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """What a mark's file says."""

    schema: str = SCHEMA
    digest: str
    at: str
    reason: str = ""


def state_of(directory: Path) -> tuple[State, str]:
    """Return a committed checkpoint's state and the reason for a bad one.

    Raises:
        CheckpointError: it was never committed.
    """
    digest = read_manifest(directory).digest
    try:
        bad = _read(directory / BAD)
    except CheckpointError as error:
        return "bad", str(error)
    if bad is not None and bad.digest == digest:
        return "bad", bad.reason
    try:
        verified = _read(directory / VERIFIED)
    except CheckpointError:
        verified = None  # looked at again: nothing is lost
    return ("verified" if verified is not None and verified.digest == digest else "candidate"), ""


def promote(directory: Path) -> Manifest:
    """Read a checkpoint back; it is then verified, or bad.

    Raises:
        CheckpointError: it is bad, now or since before, or it was never committed.
    """
    state, reason = state_of(directory)
    if state == "bad":
        raise CheckpointError(f"{directory}: bad: {reason}")
    try:
        manifest = verify(directory)
    except CheckpointError as error:
        condemn(directory, str(error))
        raise
    _mark(directory, VERIFIED, manifest.digest)
    return manifest


def condemn(directory: Path, reason: str) -> None:
    """Call a checkpoint bad, for good; a reason given before stays.

    Raises:
        CheckpointError: it was never committed.
    """
    if state_of(directory)[0] != "bad":
        _mark(directory, BAD, read_manifest(directory).digest, reason)


def condemn_from(root: Path, step: int, reason: str) -> list[Path]:
    """Condemn every checkpoint of `step` and after: a bad update at step b is in W(b). Returns which."""
    found = [directory for at, directory in committed(root) if at >= step]
    for directory in found:
        condemn(directory, reason)
    return found


def newest_verified(root: Path, at_or_before: float = math.inf) -> Path | None:
    """Return the newest committed and verified checkpoint of at most this step, None when there is none.

    One with a file that is gone or of another size since is passed over; whoever restores from it reads
    it whole (`andon.checkpoints.verify`).
    """
    return next((d for step, d in reversed(committed(root)) if step <= at_or_before and _stands(d)), None)


def _stands(directory: Path) -> bool:
    if state_of(directory)[0] != "verified":
        return False
    sizes = {directory / file.path: file.bytes for file in read_manifest(directory).files}
    return all(path.is_file() and path.stat().st_size == size for path, size in sizes.items())


def prune(
    root: Path,
    *,
    keep: int,
    gate: DeletionGate | None,
    may_go: Callable[[Path], bool] = lambda _: True,
) -> list[tuple[Path, bool, str]]:
    """Delete what the deletion gate allows, but never the `keep` newest verified checkpoints, nor anything
    newer than the oldest of these.

    Args:
        gate: who is asked; None or no answer keeps everything.
        may_go: a rule of the run's own, as "keep every thousandth".

    Returns:
        (directory, whether it was deleted, why or why not) of each that was to go.

    Raises:
        ValueError: `keep` is below 1: a run without a checkpoint to go back to is lost.
    """
    if keep < 1:
        raise ValueError(f"keep: {keep}; at least one verified checkpoint stays")
    found = committed(root)
    standing = [step for step, directory in found if _stands(directory)]
    if len(standing) < keep:
        return []
    older = [directory for step, directory in found if step < standing[-keep] and may_go(directory)]
    return [(directory, *delete(directory, gate)) for directory in older]


def _read(path: Path) -> Mark | None:
    try:
        mark = msgspec.json.decode(path.read_bytes(), type=Mark)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    if mark.schema != SCHEMA:
        raise CheckpointError(f"{path}: schema {mark.schema!r}, this version reads {SCHEMA!r}")
    return mark


def _mark(directory: Path, name: str, digest: str, reason: str = "") -> None:
    at = datetime.now(UTC).isoformat(timespec="milliseconds")
    write_document(directory, name, msgspec.to_builtins(Mark(digest=digest, at=at, reason=reason)))
