"""All-thread stacks of a rank, on a signal: what a process that hangs can still say.

The handler is C code of `faulthandler`: it needs no Python to run, so a rank that waits inside a collective
answers too. Whoever asks must first see that the signal is caught: the default is to end the process.
"""

import faulthandler
import os
import signal
from pathlib import Path

ENVIRONMENT = "ANDON_STACKS"  # the directory that a supervisor wants them in
SIGNAL = signal.SIGUSR2  # SIGUSR1 is what batch systems warn of an end with
_open: dict[str, object] = {}  # files that a handler writes to must not be closed


def listen(rank: int, directory: Path | None = None) -> Path | None:
    """Write this process's stacks when the signal comes; returns the file, None where nobody wants them.

    Args:
        directory: default: the one of `ANDON_STACKS`.
    """
    wanted = directory or (Path(os.environ[ENVIRONMENT]) if os.environ.get(ENVIRONMENT) else None)
    if wanted is None:
        return None
    path = file_of(wanted, rank)
    wanted.mkdir(parents=True, exist_ok=True)
    file = path.open("ab", buffering=0)
    faulthandler.register(SIGNAL, file=file, all_threads=True)
    _open[str(path)] = file
    return path


def file_of(directory: Path, rank: int) -> Path:
    """Return where a rank's stacks are written."""
    return directory / f"stacks-rank-{rank:05d}.txt"


def ask(pid: int, proc: Path = Path("/proc")) -> bool:
    """Have a process write its stacks; returns whether it will. One that does not catch it is left alone."""
    try:
        for line in (proc / str(pid) / "status").read_text("utf-8", "replace").splitlines():
            name, _, value = line.partition(":")
            if name == "SigCgt" and int(value, 16) >> (SIGNAL - 1) & 1:
                os.kill(pid, SIGNAL)
                return True
    except (OSError, ValueError):
        pass
    return False
