"""One log on its way to the server, each record exactly once whatever is killed in between.

Before a batch is handed over, its body and id are written down together with where reading stands after
it. After a kill the same body goes out under the same id: where it had arrived the server knows it.
The client's spool keeps what the server does not take now.
"""

import fcntl
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, Self

import msgspec

from andon.client import Client
from andon.client_http import new_id
from andon.masking import mask_value
from andon.signing import fsync_directory
from andon.spool_records import must_arrive
from andon.tail.following import Follower, Position
from andon.tail.moments import Moments
from andon.wire import encode_events

IDLE_S = 2.0  # a record of several lines that has not grown for so long is whole
_WRITTEN_S = 30.0  # a disk that takes nothing: the spool then keeps it in memory


class Batch(msgspec.Struct):
    """One post: the id under which the server knows it, and its bytes."""

    id: str
    body: bytes
    events: int
    kept: bool = False  # not given up where the spool has no room (andon/spool_records.py)


class Saved(msgspec.Struct):
    """What is kept of a log: where reading stands, what its reader needs to know, and the last post."""

    position: Position = Position()
    memory: bytes | None = None
    batch: Batch | None = None


class Reader(Protocol):
    """What makes events of lines (`TrainingLog`, `KernelLog`); `memory` is all it needs to go on."""

    memory: Any

    @property
    def is_open(self) -> bool:
        """Whether a record of several lines was begun and not ended."""
        ...

    def feed(self, raw: str, /) -> list[dict[str, Any]]:
        """Return the events that one line completes."""
        ...

    def flush(self) -> list[dict[str, Any]]:
        """End what is open."""
        ...


class Notes:
    """A log's file of notes, held by one process at a time.

    Raises:
        BlockingIOError: another process reads this log.
    """

    def __init__(self, directory: Path, log: Path, server: str) -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        name = "".join(c if c.isalnum() or c in "-_." else "_" for c in log.name)[:80]
        digest = hashlib.sha256(f"{server} {log.absolute()}".encode()).hexdigest()[:12]
        self.file = directory / f"{name}-{digest}.notes"
        self._lock = os.open(self.file.with_suffix(".lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise

    def load(self) -> Saved:
        """Return what was written down; the beginning where nothing was, or nothing that can be read."""
        try:
            return msgspec.msgpack.decode(self.file.read_bytes(), type=Saved)
        except (OSError, msgspec.DecodeError, msgspec.ValidationError):
            return Saved()

    def save(self, saved: Saved) -> None:
        """Write down: whole, or as it was before."""
        part = self.file.with_suffix(".part")
        with part.open("wb") as file:
            file.write(msgspec.msgpack.encode(saved))
            file.flush()
            os.fsync(file.fileno())
        part.rename(self.file)
        fsync_directory(self.file.parent)

    def close(self) -> None:
        """Let another process have it."""
        os.close(self._lock)


class LogTail:
    """Reads one log and hands what it says to the client.

    Args:
        reader: new, for the beginning of the log.
        notes: where to go on; None keeps nothing (a dry run).
        hand_over: takes the events of a dry run instead of a client.
        node: the node whose log it is, for events that name none.
        from_end: begin after what is there, when nothing was read before.
    """

    def __init__(
        self,
        path: Path,
        reader: Reader,
        *,
        client: Client | None,
        notes: Notes | None,
        hand_over: Callable[[list[dict[str, Any]]], None] | None = None,
        node: str | None = None,
        from_end: bool = False,
    ) -> None:
        self.path = path
        self.client, self.notes, self._hand_over = client, notes, hand_over
        self.node = node
        saved = notes.load() if notes is not None else Saved()
        self.follower = Follower(path, saved.position if saved.position.inode else None)
        if from_end and not saved.position.inode:
            self.follower.skip_to_end()
        self.log = reader
        if saved.memory is not None:
            self.log.memory = msgspec.msgpack.decode(saved.memory, type=type(reader.memory))
        self.moments = Moments()
        self.moments.learn(path)
        self.lines = 0
        self.events = 0
        self.last_line_s = time.monotonic()
        if saved.batch is not None:
            self._send(saved.batch)

    def turn(self, *, at_end: bool = False) -> bool:
        """Read what there is now, at most about 1 MiB, and hand over what it says.

        Args:
            at_end: nothing more is awaited: end what is open.

        Returns: whether anything was read.
        """
        lines = self.follower.read()
        now_s = time.monotonic()
        if lines and self.lines == 0:
            self.moments.learn(self.path)
        events: list[dict[str, Any]] = []
        for raw in lines:
            events += self.log.feed(raw.decode("utf-8", "replace"))
        self.lines += len(lines)
        if lines:
            self.last_line_s = now_s
        elif self.log.is_open and (at_end or now_s - self.last_line_s >= IDLE_S):
            events += self.log.flush()
        if events:
            self._tell(events)
        self.moments.catching_up &= bool(lines)
        return bool(lines)

    def close(self) -> None:
        """Write down where reading stands, and let go."""
        self.follower.close()
        if self.notes is not None:
            saved = self.notes.load()
            self.notes.save(self._now(saved.batch))
            self.notes.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- inside

    def _now(self, batch: Batch | None) -> Saved:
        return Saved(self.follower.position, msgspec.msgpack.encode(self.log.memory), batch)

    def _tell(self, events: list[dict[str, Any]]) -> None:
        written_ns = self.follower.modified_ns
        told = [self._ready(event, written_ns) for event in events]
        self.events += len(told)
        if self._hand_over is not None:
            self._hand_over(told)
            return
        # One post for all of them: where reading stands is after all of them.
        batch = Batch(new_id(), encode_events(told), len(told), must_arrive(told))
        if self.notes is not None:
            self.notes.save(self._now(batch))
        self._send(batch)

    def _ready(self, event: dict[str, Any], written_ns: int) -> dict[str, Any]:
        settled = self.moments.settle(event, written_ns)
        if self.node is not None:
            settled.setdefault("node", self.node)
        return {**settled, "data": mask_value(settled.get("data") or {})}

    def _send(self, batch: Batch) -> None:
        if self.client is None:
            return
        ticket = self.client.enqueue(
            "/events", batch.body, "application/json", events=batch.events, kept=batch.kept, id_=batch.id
        )
        ticket.written.wait(_WRITTEN_S)
