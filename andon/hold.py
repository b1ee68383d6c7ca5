"""The hold file: what keeps a held run held when no server answers.

Before a held run leaves, rank 0 writes the directive as `andon-hold.json` beside the checkpoints.
While the file is there nothing trains in that directory without a permit that verifies offline.
Everything fails closed: a hold file that cannot be read is a hold.
"""

import json
import os
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from andon import permit as permits
from andon.signing import fsync_directory
from andon.wire_times import format_time, parse_time

FILE_NAME = "andon-hold.json"
EXIT_HELD = 93  # NVRx's "do not restart" code, which launchers of the field already understand
_MAX_BYTES = 4 * 1024 * 1024


class Held(Exception):
    """This directory is held, and what was shown does not let it go on. The message says why."""


def _write_durably(path: Path, document: Mapping[str, Any]) -> None:
    """Replace `path` in one step: after a crash the old or the new content is there, never a part."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # the supervisor may be another user than the trainer
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def write(directory: str | os.PathLike[str], directive_document: Mapping[str, Any]) -> Path:
    """Hold `directory`. Returns the file's path.

    The document is the server's signed directive or, with the server out of reach, the trainer's
    own (unsigned; it holds all the same). A hold that is there already stays when it is of a later
    attempt: an old process that dies late must not weaken it.

    Raises:
        ValueError: the document is no hold directive of a run and attempt.
        OSError: it could not be written durably; the caller must not exit as if it were held.
    """
    run, attempt = directive_document.get("run"), directive_document.get("attempt")
    if directive_document.get("kind") != "hold":
        raise ValueError("only a directive of kind 'hold' is written as a hold file")
    if not isinstance(run, str) or not run or isinstance(attempt, bool) or not isinstance(attempt, int):
        raise ValueError("the directive must name its run and attempt")
    path = Path(directory) / FILE_NAME
    try:
        current = read(directory)
    except Held:
        current = None  # unreadable: a readable hold in its place loses nothing
    if current is not None and current["run"] == run and current["attempt"] > attempt:
        return path
    _write_durably(path, directive_document)
    return path


def read(directory: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the hold directive of `directory`, None when it is not held.

    Raises:
        Held: there is a hold file but it cannot be read, which counts as a hold.
    """
    path = Path(directory) / FILE_NAME
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Held(f"{path}: cannot be read ({error}); it counts as a hold") from error
    try:
        document = json.loads(raw) if len(raw) <= _MAX_BYTES else None
    except (ValueError, RecursionError) as error:
        raise Held(f"{path}: is not JSON ({error}); it counts as a hold") from error
    if not isinstance(document, dict):
        raise Held(f"{path}: is not a directive; it counts as a hold")
    run, attempt = document.get("run"), document.get("attempt")
    if not isinstance(run, str) or isinstance(attempt, bool) or not isinstance(attempt, int):
        raise Held(f"{path}: does not name its run and attempt; it counts as a hold")
    return document


def check(directory: str | os.PathLike[str]) -> None:
    """Return when `directory` is not held.

    Raises:
        Held: it is; only `release` with a permit ends that.
    """
    document = read(directory)
    if document is not None:
        raise Held(
            f"{Path(directory) / FILE_NAME}: run {document['run']} is held since attempt "
            f"{document['attempt']} (incident {document.get('incident') or 'not known'}); "
            "a permit is needed to train here"
        )


def _permit_for(
    held: Mapping[str, Any], permit_document: object, *, trusted: Collection[str], at: float
) -> permits.Permit:
    permit = permits.verify(permit_document, trusted=trusted, at=at, run=held["run"])
    # Not exactly attempt + 1: a launch without permit while held opens a number of its own, and the
    # server then grants the one after. A permit for the held attempt or before is an old one.
    if permit.attempt <= held["attempt"]:
        raise permits.PermitError(
            f"attempt: it is for attempt {permit.attempt}, the hold is of attempt {held['attempt']}"
        )
    incident = held.get("incident")
    if incident is not None and permit.incident != incident:
        raise permits.PermitError(f"incident: it is for {permit.incident}, the hold is of {incident}")
    try:
        since_ns = parse_time(held["since"])[0] if held.get("since") else None
    except ValueError:
        since_ns = None
    if since_ns is not None and parse_time(permit.issued_at)[0] < since_ns - 300 * 10**9:
        raise permits.PermitError(f"issued_at: {permit.issued_at} is before the hold of {held['since']}")
    return permit


def release(
    directory: str | os.PathLike[str],
    permit_document: object,
    *,
    trusted: Collection[str],
    at: float,
    run: str | None = None,
    attempt: int | None = None,
) -> permits.Permit:
    """End the hold of `directory` with a permit; returns the checked permit.

    The hold is not lost: it moves, with the permit that ended it, to
    `andon-hold-released-<time>-<permit>.json` in the same directory. Calling again after a crash is
    safe. Where no hold file is, the permit is checked all the same.

    Args:
        trusted: fingerprints of pinned keys; at least one, since anybody can sign with a key of
            their own.
        at: now, Unix seconds.
        run, attempt: what the caller is about to launch, when it knows.

    Raises:
        Held: it may not train; the hold file stays.
        OSError: the archive could not be written; the hold file stays.
    """
    if not trusted:
        raise Held("no key is pinned: a permit can only be checked against the server's fingerprint")
    held = read(directory)
    try:
        permit = permits.verify(permit_document, trusted=trusted, at=at, run=run, attempt=attempt)
        if held is not None:
            _permit_for(held, permit_document, trusted=trusted, at=at)
    except permits.PermitError as error:
        raise Held(f"the permit does not end this hold: {error}") from error
    if held is None:
        return permit
    folder = Path(directory)
    moment = format_time(int(at) * 10**9).replace("-", "").replace(":", "")
    name = "".join(c if c.isalnum() or c in "-_" else "_" for c in permit.permit)[:80]
    archive = folder / f"andon-hold-released-{moment}-{name}.json"
    _write_durably(archive, {"schema": "andon.hold-released/1", "hold": held, "permit": permit_document})
    (folder / FILE_NAME).unlink(missing_ok=True)
    fsync_directory(folder)
    return permit
