"""Keep a set of child processes running, in order, until told to stop."""

import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

_BACK_OFF_S = (0.2, 1.0, 2.0, 5.0, 10.0, 30.0)
_STEADY_S = 60.0  # a child that lived this long has recovered; its next death starts the back-off afresh


@dataclass
class Child:
    """One process: how to start it (returns when it is usable), how to stop it."""

    name: str
    start: Callable[[], "subprocess.Popen[bytes]"]
    stop: Callable[["subprocess.Popen[bytes]"], None]
    process: "subprocess.Popen[bytes] | None" = None
    started: float = 0.0
    deaths: int = 0
    start_again_at: float | None = None


@dataclass
class Supervisor:
    """Starts children in order, restarts those that die, stops all in reverse order.

    `say` gets one line per turning point. Everything runs in the calling thread: the kernel ties a
    child's life to the thread that made it.
    """

    say: Callable[[str], None]
    children: list[Child] = field(default_factory=list)
    stopping: bool = False

    def add(self, child: Child) -> None:
        """Start `child` now and keep it running from now on."""
        child.process = child.start()
        child.started = time.monotonic()
        self.children.append(child)

    def look(self) -> None:
        """Restart what died and is due; call it a few times a second."""
        now = time.monotonic()
        for child in self.children:
            if self.stopping:
                return
            if child.start_again_at is None:
                self._notice_death(child, now)
            elif now >= child.start_again_at:
                self._start_again(child)

    def stop(self) -> None:
        """Stop all, last started first."""
        self.stopping = True
        for child in reversed(self.children):
            if child.process is not None and child.process.poll() is None:
                child.stop(child.process)
        self.children.clear()

    def _notice_death(self, child: Child, now: float) -> None:
        if child.process is None or (code := child.process.poll()) is None:
            return
        child.deaths = 1 if now - child.started > _STEADY_S else child.deaths + 1
        wait_s = _BACK_OFF_S[min(child.deaths, len(_BACK_OFF_S)) - 1]
        child.start_again_at = now + wait_s
        self.say(f"{child.name} ended ({_how(code)}); starting it again in {wait_s:g} s")

    def _start_again(self, child: Child) -> None:
        try:
            child.process = child.start()
        except Exception as error:
            # Whatever the reason (a full disk, a port taken meanwhile), trying later is all there is to do.
            child.deaths += 1
            wait_s = _BACK_OFF_S[min(child.deaths, len(_BACK_OFF_S)) - 1]
            child.start_again_at = time.monotonic() + wait_s
            self.say(f"{child.name} did not start: {error}; trying again in {wait_s:g} s")
            return
        child.started, child.start_again_at = time.monotonic(), None
        self.say(f"{child.name} runs again")


def _how(code: int) -> str:
    return f"exit status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


class Stopped(Exception):
    """A signal asked for the end while something was still starting."""


def raise_on(signals: Sequence[signal.Signals]) -> None:
    """Turn the first of `signals` into `Stopped`, wherever the main thread is; ignore repeats."""

    def once(number: int, _: object) -> None:
        for each in signals:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(signal.Signals(number).name)

    for each in signals:
        signal.signal(each, once)
