"""Which ranks are alive on a node, seen from outside the trainer: the processes whose environment says so.

A launcher gives every rank RANK, LOCAL_RANK and WORLD_SIZE; nothing else of an environment is kept. Where two
runs share a node, ANDON_RUN in their environment tells them apart. A process of another user needs root, or
CAP_SYS_PTRACE.
"""

from pathlib import Path
from typing import Any

import msgspec

PROC = Path("/proc")
_NAMES = (b"RANK", b"LOCAL_RANK", b"WORLD_SIZE")
_RUN = b"ANDON_RUN"
_MAX_BYTES = 1 << 20
_STUCK = "D"  # waits in the kernel, for a disk or a driver


class Rank(msgspec.Struct, frozen=True):
    """One rank's process. `started` tells it from a later one with the same pid; `state` is the kernel's."""

    rank: int
    local_rank: int
    world_size: int
    pid: int
    started: int
    state: str


def alive(run: str, proc: Path = PROC) -> dict[int, Rank]:
    """Return a run's ranks on this node by rank; of a process and its children the oldest is the rank."""
    found: dict[int, Rank] = {}
    for entry in sorted(proc.iterdir()):
        if not entry.name.isdigit():
            continue
        one = _rank(entry, run.encode())
        if one is not None and (one.rank not in found or one.started < found[one.rank].started):
            found[one.rank] = one
    return found


def _rank(entry: Path, run: bytes) -> Rank | None:
    try:
        with (entry / "environ").open("rb") as file:
            variables = file.read(_MAX_BYTES).split(b"\0")
        pairs = (one.partition(b"=")[::2] for one in variables)
        told = {name: value for name, value in pairs if name in (*_NAMES, _RUN)}
        if not all(name in told for name in _NAMES) or told.get(_RUN, run) != run:
            return None
        rank, local_rank, world_size = (int(told[name]) for name in _NAMES)
        # After the name, which may hold anything: state, then 18 fields to the start time (proc(5)).
        fields = (entry / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        if fields[0] in ("Z", "X") or not 0 <= rank < world_size <= 2**31:
            return None
        return Rank(rank, local_rank, world_size, int(entry.name), int(fields[19]), fields[0])
    except (OSError, ValueError, IndexError):
        return None  # it ended meanwhile, or is not ours to look at


class Ranks:
    """Tells who is alive, and once who is no longer."""

    def __init__(self, run: str, proc: Path = PROC) -> None:
        self._run, self._proc = run, proc
        self._before: dict[int, Rank] = {}

    def look(self) -> list[dict[str, Any]]:
        """Return one heartbeat of the node, none where no rank is or was here."""
        try:
            now = alive(self._run, self._proc)
        except OSError:
            return []
        gone = [one for rank, one in self._before.items() if rank not in now or now[rank].pid != one.pid]
        self._before = now
        if not now and not gone:
            return []
        data: dict[str, Any] = {"from": "agent", "state": "alive" if now else "no rank here"}
        data["processes"] = [{"rank": one.rank, "pid": one.pid, "state": one.state} for one in now.values()]
        if gone:
            data["gone"] = [{"rank": one.rank, "pid": one.pid} for one in gone]
        stuck = sorted(one.rank for one in now.values() if one.state == _STUCK)
        if stuck:
            data["uninterruptible"] = stuck
        event: dict[str, Any] = {"type": "heartbeat", "data": data}
        if now:
            event["ranks"] = sorted(now)
        return [event]
