"""When a logged line happened, by this node's clock.

Most logs print a time without its zone, and a container's zone is often not the node's. An event that
looks hours old is backfill and holds nothing, so the zone is not guessed: the file's own modification
time says when its last line was written.
"""

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from andon.readers.logs.lines import clean

_STEP_NS = 30 * 60 * 10**9  # zones lie half hours apart (three of the world's do not)
_MOST_NS = 14 * 3600 * 10**9
_TAIL_BYTES = 64 << 10


class Moments:
    """Settles the times of one log's events.

    Attributes:
        catching_up: what is read was there before: a line without a time happened when the one before it
            did. Else it was written just now.
    """

    def __init__(self) -> None:
        self.catching_up = True
        self._shift_ns: int | None = None  # from what a line says, read as UTC, to UTC
        self._last_ns: int | None = None

    def learn(self, path: Path) -> None:
        """Compare the last time in the file with when it was written."""
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - _TAIL_BYTES))
                lines = file.read(_TAIL_BYTES).decode("utf-8", "replace").splitlines()
                written_ns = path.stat().st_mtime_ns
        except OSError:
            return
        for line in reversed(lines):
            said = clean(line[:400])
            if said.moment_ns is not None and not said.has_zone:
                steps = round((written_ns - said.moment_ns) / _STEP_NS)
                if abs(steps * _STEP_NS) <= _MOST_NS:
                    self._shift_ns = steps * _STEP_NS
                return

    def settle(self, event: dict[str, Any], written_ns: int) -> dict[str, Any]:
        """Return the event with `time` in nanoseconds since 1970; `written_ns` is when its log was written.

        A time that lies in the future is now: a wrong zone must not put an event there.
        """
        has_zone = event.pop("zoned", True)
        said: int | None = event.get("time")
        if said is None:
            said = self._last_ns if self.catching_up and self._last_ns is not None else written_ns
        elif not has_zone:
            said += self._shift_ns if self._shift_ns is not None else _local_shift_ns(said)
        self._last_ns = said
        return {**event, "time": min(said, time.time_ns())}


def _local_shift_ns(said_ns: int) -> int:
    local = datetime.fromtimestamp(said_ns / 1e9, UTC).replace(tzinfo=None).astimezone()
    offset = local.utcoffset()
    return 0 if offset is None else -round(offset.total_seconds() * 1e9)
