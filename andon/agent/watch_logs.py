"""Logs that grow on a node: of ranks, by pattern, and of the kernel."""

import glob
import logging
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from andon.agent.watch_files import Post
from andon.client import Client
from andon.readers.kernel_log import KernelLog, KernelMemory
from andon.readers.training_log import TrainingLog
from andon.tail.posting import LogTail, Notes, Reader

logger = logging.getLogger("andon.agent")

MAX_LOGS = 64  # of one node: a pattern that matches a whole file system must not open all of it
_LOOK_EVERY_S = 5.0
_RANK = re.compile(r"rank[_\-.]?(\d{1,7})(?!\d)", re.I | re.A)
_KMSG_BYTES = 16_384  # larger than any record of the kernel


class Logs:
    """Tails every file that a pattern names, also those that come later.

    A rank's log is also offered as evidence (`artifact.available`), once.
    """

    def __init__(
        self,
        patterns: Sequence[str],
        client: Client,
        post: Post,
        *,
        directory: Path,
        server: str,
        node: str,
    ) -> None:
        self._patterns, self._client, self._post = patterns, client, post
        self._directory, self._server, self._node = directory, server, node
        self._tails: dict[str, LogTail] = {}
        self._left_out: set[str] = set()
        self._looked_s = -_LOOK_EVERY_S

    def turn(self, *, at_end: bool = False) -> bool:
        """Read every log once; return whether any had something."""
        if time.monotonic() - self._looked_s >= _LOOK_EVERY_S or at_end:
            self._looked_s = time.monotonic()
            for pattern in self._patterns:
                for name in sorted(glob.iglob(pattern, recursive=True)):
                    self._follow(name)
        read = False
        for name, tail in self._tails.items():
            try:
                read |= tail.turn(at_end=at_end)
            except OSError as error:
                logger.warning("%s: %s", name, error)
        return read

    def _follow(self, name: str) -> None:
        if name in self._tails or name in self._left_out or not os.path.isfile(name):
            return
        if len(self._tails) >= MAX_LOGS:
            self._left_out.add(name)
            logger.warning("%s: not read: this node has more than %d logs", name, MAX_LOGS)
            return
        path = Path(name)
        rank = rank_of(path)
        try:
            notes = Notes(self._directory, path, self._server)
        except OSError as error:
            self._left_out.add(name)
            logger.warning("%s: not read: %s", name, error or "another process reads it")
            return
        self._tails[name] = _tail(path, TrainingLog(rank=rank), self._client, notes, self._node)
        data: dict[str, Any] = {"kind": "rank_log", "uri": path.absolute().as_uri(), "node": self._node}
        event: dict[str, Any] = {"type": "artifact.available", "data": data}
        if rank is not None:
            event["rank"] = data["rank"] = rank
        self._post(f"{self._server} {self._node} offered {data['uri']}", [event])

    def close(self) -> None:
        """Write down where reading stands."""
        for tail in self._tails.values():
            tail.close()


def rank_of(path: Path) -> int | None:
    """Return the rank in a log's name ("rank-00003.log", "rank3/stdout.log"), None where there is none."""
    for part in reversed(path.parts[-3:]):
        found = _RANK.search(part)
        if found is not None:
            return int(found[1])
    return None


def kernel_file(path: Path, client: Client, directory: Path, server: str, node: str) -> LogTail:
    """Tail a kernel log that syslog writes (/var/log/kern.log). Raises OSError."""
    return _tail(path, KernelLog(), client, Notes(directory, path, server), node)


def _tail(path: Path, reader: Reader, client: Client, notes: Notes, node: str) -> LogTail:
    return LogTail(path, reader, client=client, notes=notes, node=node)


class Kmsg:
    """The kernel's own buffer, one record a read.

    After a restart all of it is read again: a record has the same number and the same bytes, so what was
    posted is known to the server.

    Raises:
        OSError: it cannot be read; root, or CAP_SYSLOG, is needed.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._log = KernelLog(KernelMemory(boot_ns=_boot_ns()))
        self.boot = _boot_id()

    def read(self) -> list[tuple[str, dict[str, Any]]]:
        """Return (a name that a record keeps, event) of what is there now."""
        found = []
        for _ in range(10_000):
            try:
                raw = os.read(self._file, _KMSG_BYTES)
            except BlockingIOError:
                break
            except BrokenPipeError:  # records were overwritten before they were read; the next read goes on
                continue
            if not raw:
                break
            text = raw.decode("utf-8", "replace").partition("\n")[0]
            number = text.split(",", 2)[1] if text.count(",") >= 2 else ""
            found += [(f"kmsg {self.boot} {number}", event) for event in self._log.feed(text)]
        return found

    def close(self) -> None:
        """Close it."""
        os.close(self._file)


def _boot_ns() -> int | None:
    """Return when the kernel's clock began, whole seconds: the same at every start of the agent."""
    try:
        text = Path("/proc/stat").read_text("ascii")
    except OSError:
        return None
    found = re.search(r"^btime (\d+)$", text, re.M)
    return None if found is None else int(found[1]) * 10**9


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return "unknown"
