"""One file on its way to the vault: masked or encrypted here, cut into parts, sent, and sent again."""

import base64
import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from andon.agent.places import Declined, Roots
from andon.agent.putting import PutFailed, Putter
from andon.agent.server import Server
from andon.agent.state import State
from andon.client_http import AnswerError
from andon.hashing import CHUNK_BYTES, chunks, part_bytes_for
from andon.masking import mask_lines, read_lines
from andon.sample_cipher import encrypted

logger = logging.getLogger("andon.agent")

PARTS_AT_ONCE = 32  # announced in one post; their URLs are valid for an hour
ROUNDS = 6  # of sending what is not there yet, before the task waits for the next turn
_NOTE = "uploads"


@dataclass(frozen=True)
class _File:
    """What will be sent: the file as it is now, and its digests."""

    path: Path
    bytes_total: int
    sha256: str
    part_bytes: int
    parts: list[tuple[str, str]]  # SHA-256 and MD5 of each

    def part(self, n: int) -> dict[str, Any]:
        sha256, md5 = self.parts[n - 1]
        return {"n": n, "bytes": self.size(n), "sha256": sha256, "md5": md5}

    def size(self, n: int) -> int:
        return min(self.part_bytes, self.bytes_total - (n - 1) * self.part_bytes)

    def document(self) -> dict[str, Any]:
        return {"bytes": self.bytes_total, "sha256": self.sha256}


class Uploader:
    """Uploads what is wanted, one file per call. Safe to use from several threads for different tasks."""

    def __init__(self, server: Server, roots: Roots, state: State, putter: Putter) -> None:
        self.server = server
        self.roots = roots
        self.state = state
        self.putter = putter

    def upload(self, task: dict[str, Any]) -> None:
        """Bring one file to the vault, or go on with it after a restart.

        Raises:
            Declined: it is not here, or its bytes are not those that were committed.
            AnswerError, Unreachable, PutFailed, OSError: not now; the task stays wanted.
        """
        id_ = str(task["id"])
        if task["act"] == "encrypt":
            file = self._copied(task, lambda source, copy: _encrypt(source, copy, str(task["public_key"])))
        elif task.get("mask"):
            tail = (task.get("window") or {}).get("tail_bytes")
            file = self._copied(task, lambda source, copy: _mask(source, copy, tail))
        else:
            file = self._as_it_is(task)
        self._send(id_, file)
        parts = [file.part(n) for n in range(1, len(file.parts) + 1)]
        body = {**file.document(), "parts": parts}
        # Kept until the server has read the object back: a log may be gone from here by then.
        self.state.write("sent", id_, {"body": body})
        self._settle(id_, self.server.post(f"/uploads/{id_}/complete", body))
        logger.info("%s: %d bytes sent", task["paths"][0], file.bytes_total)

    def settle(self) -> None:
        """Ask about files that were sent and that the server was still checking."""
        for id_ in self.state.ids("sent")[:20]:
            note = self.state.read("sent", id_)
            try:
                if note is not None:
                    self._settle(id_, self.server.post(f"/uploads/{id_}/complete", note["body"]))
            except AnswerError as error:
                if error.status not in (404, 409):
                    raise
                # Not taken after all: the task is wanted again, and the copy is there for it.
                self.state.forget("sent", id_)
                if error.status == 404 or error.type == "not-wanted":
                    self._forget(id_)

    def _settle(self, id_: str, answer: dict[str, Any]) -> None:
        if answer.get("state") == "stored":
            self._forget(id_)

    def _forget(self, id_: str) -> None:
        self.state.drop_copy(id_)
        self.state.forget(_NOTE, id_)
        self.state.forget("sent", id_)

    # --- what to send

    def _copied(self, task: dict[str, Any], write: Callable[[Path, Path], None]) -> _File:
        """Return the copy that may leave the node, made once: a restart goes on with the same bytes."""
        id_ = str(task["id"])
        copy = self.state.copy_of(id_)
        if not copy.exists():
            source, _ = self.roots.path_of(str(task["paths"][0]))
            part = copy.with_name(f"{copy.name}.part")
            write(source, part)
            part.rename(copy)
        return self._digested(task, copy)

    def _as_it_is(self, task: dict[str, Any]) -> _File:
        path, _ = self.roots.path_of(str(task["paths"][0]))
        file = self._digested(task, path)
        known = (task.get("bytes"), task.get("sha256"))
        if known[1] and known != (file.bytes_total, file.sha256):
            self.state.forget(_NOTE, str(task["id"]))
            raise Declined(
                "bytes-differ",
                f"{path}: {file.bytes_total} bytes with SHA-256 {file.sha256}, "
                f"committed with {known[0]} bytes and {known[1]}",
            )
        return file

    def _digested(self, task: dict[str, Any], path: Path) -> _File:
        """Return the digests of a file; they are kept, so that a restart does not read terabytes again."""
        id_ = str(task["id"])
        try:
            about = path.stat()
        except OSError as error:
            raise Declined("not-here", f"{path}: {error.strerror}") from error
        stamp = [about.st_ino, about.st_size, about.st_mtime_ns]
        note = self.state.read(_NOTE, id_)
        part_bytes = part_bytes_for(about.st_size)
        if note is None or note["stamp"] != stamp or note["part_bytes"] != part_bytes:
            sha256, parts = _digests(path, about.st_size, part_bytes)
            note = {"stamp": stamp, "part_bytes": part_bytes, "sha256": sha256, "parts": parts}
            self.state.write(_NOTE, id_, note)
        return _File(path, about.st_size, note["sha256"], part_bytes, [tuple(one) for one in note["parts"]])

    # --- sending

    def _send(self, id_: str, file: _File) -> None:
        count = len(file.parts)
        for first in range(1, max(count, 1) + 1, PARTS_AT_ONCE):
            numbers = range(first, min(first + PARTS_AT_ONCE, count + 1))
            self._send_window(id_, file, list(numbers))

    def _send_window(self, id_: str, file: _File, numbers: list[int]) -> None:
        """Send some parts until the server itself finds all of them in the store."""
        trouble: PutFailed | None = None
        for turn in range(ROUNDS):
            if trouble is not None:
                time.sleep(min(30.0, 0.2 * 2**turn))
            asked = {"item": id_, **file.document(), "parts": [file.part(n) for n in numbers]}
            answer = self.server.post("/uploads", asked)
            if answer.get("part_bytes") != file.part_bytes:
                raise Declined("unreadable", "the server cuts files into other parts: use the same version")
            if not answer["parts"]:
                return
            trouble = None
            for one in answer["parts"]:
                try:
                    self._put(file, one)
                except PutFailed as error:
                    # A damaged part, an old URL, a store that is away: what is not there is asked for again.
                    logger.warning("part %s of %s: %s", one["n"], file.path, error)
                    trouble = error
        raise trouble or PutFailed(0, f"{file.path}: parts do not stay in the store")

    def _put(self, file: _File, one: dict[str, Any]) -> None:
        n, url = int(one["n"]), str(one["url"])
        if url.startswith("/"):
            url = self.server.url + url
        self.putter.put(url, dict(one["headers"]), file.path, (n - 1) * file.part_bytes, file.size(n))


def _digests(path: Path, size: int, part_bytes: int) -> tuple[str, list[tuple[str, str]]]:
    """Read the first `size` bytes once: SHA-256 of the whole, SHA-256 and MD5 of each part."""
    whole, parts = hashlib.sha256(), []
    left = size
    with path.open("rb") as file:
        while left > 0:
            sha256, md5 = hashlib.sha256(), hashlib.md5(usedforsecurity=False)
            before = left
            for data in chunks(file, min(part_bytes, left), CHUNK_BYTES):
                for digest in (whole, sha256, md5):
                    digest.update(data)
                left -= len(data)
            if left == before:
                raise OSError(f"{path}: became shorter while it was read")
            parts.append((sha256.hexdigest(), md5.hexdigest()))
    return whole.hexdigest(), parts


def _mask(source: Path, target: Path, tail_bytes: int | None) -> None:
    """Write a log (or its end) without secrets; it is cut at the size it has now."""
    with _said(source), source.open("rb") as file, target.open("wb") as out:
        size = os.fstat(file.fileno()).st_size
        skip = 0 if tail_bytes is None else max(0, size - tail_bytes)
        if skip:
            file.seek(skip)
            out.write(b"[the last %d of %d bytes]\n" % (size - skip, size))
        for line in mask_lines(read_lines(file, size - skip, is_cut=skip > 0)):
            out.write(line)
        out.flush()
        os.fsync(out.fileno())


def _encrypt(source: Path, target: Path, public_key: str) -> None:
    """Write raw samples encrypted to their dossier's key; the plain bytes never leave the node."""
    with _said(source), source.open("rb") as file, target.open("wb") as out:
        size = os.fstat(file.fileno()).st_size
        for block in encrypted(file, size, base64.b64decode(public_key)):
            out.write(block)
        out.flush()
        os.fsync(out.fileno())


@contextlib.contextmanager
def _said(source: Path) -> Iterator[None]:
    """Turn what makes a file unreadable for good into the word that the wire has for it."""
    try:
        yield
    except FileNotFoundError as error:
        raise Declined("not-here", f"{source}: {error.strerror}") from error
    except (PermissionError, IsADirectoryError) as error:
        raise Declined("unreadable", f"{source}: {error.strerror}") from error
