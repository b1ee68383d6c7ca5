"""Files that appear once: flight-recorder dumps and torchelastic's error files, when something has failed,
and the reports of checks (dcgmi, nccl-tests, what `andon read` reads).

Posted under an id made of run, path, size and time, so that after a restart the server knows what it has.
"""

import glob
import hashlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from andon.readers import flight_recorder, foreign, torchelastic
from andon.wire import encode_events

logger = logging.getLogger("andon.agent")

Post = Callable[[str, list[dict[str, Any]]], None]  # (a name that stays the same, events)

SETTLED_S = 1.0  # a dump is being written until it has not grown for so long
MAX_EVENT_BYTES = 1 << 20
_MAX_FILES = 4_096
_PER_POST = 2_000

Read = Callable[[Path, bytes], list[dict[str, Any]]]


class Appearing:
    """Looks for files by pattern, reads each version of them once, and posts it."""

    def __init__(
        self,
        dumps: Sequence[str],
        errors: Sequence[str],
        run: str,
        node: str,
        post: Post,
        *,
        reports: Sequence[str] = (),
    ) -> None:
        self._patterns: list[tuple[str, Read]] = [(pattern, self._dump) for pattern in dumps]
        self._patterns += [(pattern, self._error) for pattern in errors]
        self._patterns += [(pattern, self._report) for pattern in reports]
        self._run, self._node, self._post = run, node, post
        self._seen: dict[str, tuple[int, int, int]] = {}

    def turn(self, *, at_end: bool = False) -> None:
        """Read what is new or changed. At the end also what may still be written."""
        for pattern, read in self._patterns:
            for name in sorted(glob.iglob(pattern, recursive=True)):
                try:
                    self._look(Path(name), read, at_end=at_end)
                except OSError as error:
                    logger.warning("%s: %s", name, error)

    def _look(self, path: Path, read: Read, *, at_end: bool) -> None:
        status = path.stat()
        version = (status.st_ino, status.st_size, status.st_mtime_ns)
        if not path.is_file() or self._seen.get(str(path)) == version or not status.st_size:
            return
        if time.time() - status.st_mtime < SETTLED_S and not at_end:
            return
        if len(self._seen) >= _MAX_FILES:
            return
        self._seen[str(path)] = version
        most = max(flight_recorder.MAX_BYTES, torchelastic.MAX_BYTES)
        with path.open("rb") as file:
            body = file.read(most + 1)
        try:
            events = read(path, body)
        except ValueError as error:
            logger.warning("%s: not read: %s", path, error)
            return
        name = f"{self._run} {self._node} {path.absolute()} {version}"
        for start in range(0, len(events), _PER_POST):
            part = [
                {"time": status.st_mtime_ns, "node": self._node, **one} for one in events[start:][:_PER_POST]
            ]
            self._post(f"{name} {start}" if start else name, part)

    def _report(self, path: Path, body: bytes) -> list[dict[str, Any]]:
        events = foreign.read(path.name, body).events
        for event in events:
            event.pop("zoned", None)
        return events

    def _dump(self, path: Path, body: bytes) -> list[dict[str, Any]]:
        event: dict[str, Any] = {"type": "flight_recorder.dump", "data": flight_recorder.read(body)}
        rank = flight_recorder.rank_of(path)
        if rank is not None:
            event["rank"] = rank
        event["data"] |= {"uri": path.absolute().as_uri()}
        entries = event["data"]["entries"]
        while len(entries) > 1 and len(encode_events([event])) > MAX_EVENT_BYTES:
            del entries[: len(entries) // 2]  # the newest stay
        return [event]

    def _error(self, path: Path, body: bytes) -> list[dict[str, Any]]:
        event = torchelastic.read(body)
        local_rank = torchelastic.local_rank_of(path)
        if local_rank is not None:
            event["data"]["local_rank"] = local_rank
        return [event]


def id_of(name: str) -> str:
    """Return the webhook-id of what has this name."""
    return f"msg_{hashlib.sha256(name.encode()).hexdigest()[:32]}"


def default_dumps() -> list[str]:
    """Return where PyTorch writes dumps on this node, as its environment says."""
    told = [os.environ.get(name) for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")]
    return [f"{glob.escape(prefix)}*" for prefix in told if prefix] or ["/tmp/nccl_trace_rank_*"]  # noqa: S108
