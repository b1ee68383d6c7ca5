"""What the agent watches on its node, and posts: no change to the trainer.

One thread, about two turns a second, each reading at most 1 MiB of each log. What is posted goes through
the client's spool, masked; a server that is gone costs neither the node nor the trainer anything.
"""

import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from andon.agent.watch_files import Appearing, id_of
from andon.agent.watch_gpus import Gpus, source_of
from andon.agent.watch_logs import Kmsg, Logs, kernel_file
from andon.agent.watch_ranks import Ranks
from andon.client import Client
from andon.masking import mask_value
from andon.spool_records import must_arrive
from andon.tail.posting import LogTail
from andon.wire import encode_events

logger = logging.getLogger("andon.agent")

EVERY_S = 0.5
RANKS_EVERY_S = 10.0
GPUS_EVERY_S = 10.0
SAMPLE_EVERY_S = 60.0
_FLUSH_S = 20.0


@dataclass(frozen=True)
class Watched:
    """What to watch: patterns of rank logs, dumps, error files and reports, the kernel's log, counters,
    processes."""

    logs: tuple[str, ...] = ()
    dumps: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    reports: tuple[str, ...] = ()
    kernel_log: Path | None = None
    gpus: str | None = None
    ranks: bool = False

    def __bool__(self) -> bool:
        files = self.logs or self.dumps or self.errors or self.reports
        return bool(files or self.kernel_log or self.gpus or self.ranks)


class Watcher:
    """Watches in a thread of its own, from `start` to `stop`.

    Raises:
        OSError: the kernel's log cannot be read.
    """

    def __init__(self, watched: Watched, client: Client, *, state: Path, server: str, node: str) -> None:
        self.client, self.node = client, node
        directory = state / "tail"
        self._logs = Logs(watched.logs, client, self._post, directory=directory, server=server, node=node)
        self._files = Appearing(
            watched.dumps, watched.errors, server, node, self._post, reports=watched.reports
        )
        self._ranks = Ranks(client.run) if watched.ranks else None
        source = source_of(watched.gpus) if watched.gpus else None
        self._gpus = Gpus(source) if source is not None else None
        self._kernel: LogTail | Kmsg | None = None
        if watched.kernel_log is not None:
            if watched.kernel_log.is_char_device():
                self._kernel = Kmsg(watched.kernel_log)
            else:
                self._kernel = kernel_file(watched.kernel_log, client, directory, server, node)
        self._due = dict.fromkeys(("ranks", "gpus", "sample"), 0.0)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="andon-watcher", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, *, at_end: bool = False) -> None:
        """Read once more what is there, write down where reading stands, and send what can be sent.

        Args:
            at_end: nothing more is awaited: also what is begun, or may still be written.
        """
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(30.0)
        self.turn(at_end=at_end)
        self._logs.close()
        if self._kernel is not None:
            self._kernel.close()
        self.client.flush(_FLUSH_S)
        self.client.close()

    def turn(self, *, at_end: bool = False) -> bool:
        """Look at everything once; return whether a log had more to read."""
        more = self._logs.turn(at_end=at_end)
        self._files.turn(at_end=at_end)
        if isinstance(self._kernel, LogTail):
            more |= self._kernel.turn(at_end=at_end)
        elif self._kernel is not None:
            for name, event in self._kernel.read():
                self._post(f"{self.node} {name}", [event])
        if self._ranks is not None and self._is_due("ranks", RANKS_EVERY_S):
            self._tell(self._ranks.look())
        if self._gpus is not None:
            if self._is_due("gpus", GPUS_EVERY_S):
                self._tell(self._gpus.look())
            if self._is_due("sample", SAMPLE_EVERY_S):
                self._tell(self._gpus.sample())
        return more

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                more = self.turn()
            except Exception:  # one source that goes wrong must not end the others
                logger.exception("watching failed unexpectedly; trying again")
                more = False
            if not more:
                self._stopped.wait(EVERY_S)

    def _is_due(self, what: str, every_s: float) -> bool:
        now_s = time.monotonic()
        if now_s < self._due[what]:
            return False
        self._due[what] = now_s + every_s
        return True

    def _tell(self, events: list[dict[str, Any]]) -> None:
        if events:
            self.client.send_events(events)

    def _post(self, name: str, events: list[dict[str, Any]]) -> None:
        """Post what has a name that stays the same over restarts: the server takes it once."""
        ready = [{**event, "node": self.node, "data": mask_value(event["data"])} for event in events]
        body = encode_events(ready)
        self.client.enqueue(
            "/events", body, "application/json", events=len(ready), kept=must_arrive(ready), id_=id_of(name)
        )
