"""A job as a supervisor starts it: a launcher and two ranks, which do what they are told to.

    python -m tests.andon.supervised MODE NOTES

Each process writes a line of what it saw into a file under NOTES; `rank-N` says that a rank is ready.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from andon import hold, stacks
from andon.permit import read_permit_file

RANKS = 2
TELLS = ("ANDON_ATTEMPT", "ANDON_CHECKPOINT", "ANDON_PERMIT", "ANDON_KEY")


def note(notes: Path, name: str, **told: object) -> None:
    part = notes / f".{name}.part"
    part.write_text(json.dumps(told))
    part.rename(notes / name)


def wait_in_a_collective() -> None:
    while True:
        time.sleep(0.02)


def rank(mode: str, notes: Path) -> None:
    number = int(os.environ["RANK"])
    if not (mode == "deaf" and number == 1):
        stacks.listen(number)
    if mode in {"hang", "deaf"}:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a rank inside a collective never comes to its handler
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    note(notes, f"rank-{number}", pid=os.getpid())
    wait_in_a_collective()


def launch(mode: str, notes: Path) -> int:
    attempt = os.environ["ANDON_ATTEMPT"]
    note(notes, f"attempt-{attempt}", **{name: os.environ.get(name) for name in TELLS})
    if mode == "crash":
        return 1
    if mode == "resume":  # the ranks are left out: what a trainer does before its first step
        directory = Path(os.environ["DIRECTORY"])
        if "ANDON_PERMIT" in os.environ:
            document = read_permit_file(os.environ["ANDON_PERMIT"])
            hold.release(directory, document, trusted=os.environ["ANDON_KEY"].split(","), at=time.time())
            return 0
        hold.write(directory, {"kind": "hold", "run": os.environ["ANDON_RUN"], "attempt": int(attempt)})
        return hold.EXIT_HELD
    ranks = []
    for number in range(RANKS):
        told = {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(RANKS)}
        command = [sys.executable, "-m", "tests.andon.supervised", mode, str(notes)]
        # As torchelastic does: each rank leads a session of its own.
        ranks.append(subprocess.Popen(command, env={**os.environ, **told}, start_new_session=True))
    if mode in {"hang", "deaf"}:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: None)
    return max(one.wait() for one in ranks)


if __name__ == "__main__":
    what, where = sys.argv[1], Path(sys.argv[2])
    if "RANK" in os.environ:
        rank(what, where)
    else:
        sys.exit(launch(what, where))
