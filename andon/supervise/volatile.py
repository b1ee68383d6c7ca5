"""What vanishes with the processes, and the wait for it before they are killed.

Order of volatility: (1) in the processes: a halt snapshot under way, stacks of all threads of all ranks,
flight recorders; (2) on the nodes: logs, dumps, counters that agents are still bringing. A supervisor that
must kill asks for the first, waits for both for a minute at most, and writes down what it did not get. It
waits less where nothing is wanted, where no process is left, where the batch system would kill sooner, where
the server does not answer (then agents bring nothing either), and where a person says *now*.
"""

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from andon import checkpoints, stacks
from andon.agent.watch_ranks import Rank
from andon.client_http import AnswerError, Unreachable

POLL_S = 0.1
ASK_SERVER_S = 1.0
SETTLED_S = 0.3  # a file that is written by a dying process is whole once it has not grown for so long


class Server(Protocol):
    """What of `andon.client.Client` is used here."""

    def volatile(self, timeout_s: float) -> list[dict[str, Any]]:
        """Return what of the run's open evidence is volatile and not safe yet."""
        ...

    def send_events(self, events: list[dict[str, Any]]) -> dict[str, Any] | None:
        """Post events."""
        ...


@dataclass
class Report:
    """What a wait brought. `not_got` is (what, why)."""

    waited_s: float = 0.0
    got: list[str] = field(default_factory=list)
    not_got: list[tuple[str, str]] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """Return it as the data of an event."""
        return {
            "waited_s": round(self.waited_s, 1),
            "got": self.got,
            "not_got": [{"what": what, "why": why} for what, why in self.not_got],
        }


@dataclass
class _File:
    """A file that a process was asked to write."""

    what: str
    kind: str
    rank: int
    path: Path
    size: int
    before: int = 0  # its size when it was asked for
    grown_at: float = 0.0

    def is_whole(self, now: float) -> bool:
        size = _size(self.path)
        if size != self.size:
            self.size, self.grown_at = size, now
        return size > self.before and now - self.grown_at >= SETTLED_S


def collect(
    *,
    ranks: Mapping[int, Rank],
    held: bool,
    directory: Path,
    since: float,
    environment: Mapping[str, str],
    server: Server,
    node: str,
    limit_s: float,
    cut: Callable[[], bool] = lambda: False,
) -> Report:
    """Ask for what is volatile and wait for it.

    Args:
        ranks: those that live on this node.
        held: the run is held, so that its ranks may be at their halt snapshot.
        directory: of the run's checkpoints.
        since: when the job was started, Unix seconds: an older snapshot is nobody's any more.
        environment: of the job: where its stacks and flight recorders go.
        limit_s: the longest wait, in seconds.
        cut: says whether a person wants it now.
    """
    report, began = Report(), time.monotonic()
    try:
        wanted = server.volatile(max(1.0, min(5.0, limit_s)))
        trouble = ""
    except (Unreachable, AnswerError) as error:
        wanted, trouble = [], f"the server did not answer: {error}"
    if not (held or wanted or trouble):
        return report  # nothing failed: nothing is kept, and nobody waits
    files = _ask_processes(ranks, environment, report)
    asked_s = time.monotonic()
    offered_s = -ASK_SERVER_S
    while True:
        now = time.monotonic()
        for one in [one for one in files if one.is_whole(now)]:
            files.remove(one)
            report.got.append(one.what)
            _offer(one, server, node)
            offered_s = now
        snapshots = _being_written(directory, since)
        if not trouble and now - asked_s >= ASK_SERVER_S:
            asked_s = now
            try:
                wanted = server.volatile(max(1.0, min(5.0, began + limit_s - now)))
            except (Unreachable, AnswerError) as error:
                trouble = f"the server did not answer: {error}"
        # What was just offered is wanted from now on: the server is asked once more, a second later.
        unasked = asked_s < offered_s + ASK_SERVER_S
        waits = bool(files or snapshots or ((wanted or unasked) and not trouble))
        if not waits or now - began >= limit_s or cut():
            break
        time.sleep(POLL_S)
    report.waited_s = time.monotonic() - began
    after = "a person said now" if cut() else f"not in {report.waited_s:.0f} s"
    report.not_got += [(one.what, after) for one in files]
    report.not_got += [(f"halt snapshot {path.name}", f"{after}: it is not committed") for path in snapshots]
    report.not_got += [(str(one.get("name", "")), f"{after}: {one.get('says')}") for one in wanted]
    if trouble:
        report.not_got.append(("what nodes have still to bring", trouble))
    return report


def _ask_processes(ranks: Mapping[int, Rank], environment: Mapping[str, str], report: Report) -> list[_File]:
    files = []
    for rank, one in sorted(ranks.items()):
        what = f"stacks of rank {rank}"
        where = environment.get(stacks.ENVIRONMENT)
        path = stacks.file_of(Path(where), rank) if where else None
        before = _size(path) if path else 0
        if path is not None and stacks.ask(one.pid):
            files.append(_File(what, "stacks", rank, path, before, before))
        else:
            report.not_got.append((what, "its process does not listen for SIGUSR2 (andon.stacks.listen)"))
        files += _ask_flight_recorder(rank, environment)
    return files


def _ask_flight_recorder(rank: int, environment: Mapping[str, str]) -> list[_File]:
    """Write to the pipe by which PyTorch is told to dump; source: ProcessGroupNCCL, `DumpPipe`."""
    pipes = environment.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE")
    target = environment.get("TORCH_FR_DUMP_TEMP_FILE") or environment.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    if not pipes or not target:
        return []
    path = Path(f"{target}{rank}")
    before = _size(path)
    try:
        descriptor = os.open(f"{pipes}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return []  # nobody reads it: no NCCL in this process
    with contextlib.suppress(OSError), os.fdopen(descriptor, "wb", buffering=0) as pipe:
        pipe.write(b"1\n")
    return [_File(f"flight recorder of rank {rank}", "flight_recorder", rank, path, before, before)]


def _being_written(directory: Path, since: float) -> list[Path]:
    """Return the halt snapshots that this launch has begun and not committed."""
    found = []
    for pattern in (f"{checkpoints.QUARANTINE}/step-*", f"attempt-*/{checkpoints.QUARANTINE}/step-*"):
        for one in directory.glob(pattern):
            with contextlib.suppress(OSError):
                if one.stat().st_mtime >= since and not (one / checkpoints.MANIFEST).exists():
                    found.append(one)
    return sorted(found)


def _offer(one: _File, server: Server, node: str) -> None:
    data = {"kind": one.kind, "uri": one.path.absolute().as_uri(), "bytes": one.size}
    with contextlib.suppress(RuntimeError):
        server.send_events([{"type": "artifact.available", "rank": one.rank, "node": node, "data": data}])


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
