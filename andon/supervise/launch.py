"""One launch of the job: a process group, the ranks that it started, and their end."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable

from andon.agent.watch_ranks import Rank, alive

_POLL_S = 0.05


class Launch:
    """A started job. Its ranks are found by their environment: launchers give each a session of its own."""

    def __init__(self, command: list[str], environment: dict[str, str], run: str) -> None:
        self.run = run
        self.began = time.time()
        self.environment = {**os.environ, **environment}
        self.process = subprocess.Popen(command, env=self.environment, process_group=0)

    def code(self) -> int | None:
        """Return the exit code as a shell says it (128 + n for signal n), None while it runs."""
        found = self.process.poll()
        return found if found is None or found >= 0 else 128 - found

    def ranks(self) -> dict[int, Rank]:
        """Return the ranks of the job that live on this node."""
        try:
            return {rank: one for rank, one in alive(self.run).items() if one.pid != os.getpid()}
        except OSError:
            return {}

    def end(self, kill_after_s: float) -> int:
        """End it: SIGTERM to all, SIGKILL to who is left after `kill_after_s`; returns the exit code.

        A rank that outlives its launcher keeps its GPU's memory, so ranks are ended too.
        """
        self._signal(signal.SIGTERM)
        until = time.monotonic() + kill_after_s
        while time.monotonic() < until and (self.process.poll() is None or self.ranks()):
            time.sleep(_POLL_S)
        self._signal(signal.SIGKILL)
        self.process.wait()
        found = self.code()
        assert found is not None
        return found

    def _signal(self, number: signal.Signals) -> None:
        ranks = self.ranks()
        if self.process.poll() is None:
            _quietly(os.killpg, self.process.pid, number)
        for one in ranks.values():
            _quietly(os.kill, one.pid, number)


def _quietly(call: Callable[[int, int], None], pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        call(pid, number)
