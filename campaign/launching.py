"""Starts four ranks and waits for them."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from campaign.cases import RANKS, Case

ROOT = Path(__file__).resolve().parent.parent


class LaunchError(RuntimeError):
    """The ranks did not play to the end; the message says where and why."""


def start(module: str, folder: Path, *arguments: str, environment: dict[str, str] | None = None) -> list[Any]:
    """Start `python -m MODULE RANK FOLDER …` four times; what a rank says goes to FOLDER/said-RANK.txt."""
    return [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(folder), *arguments],
            cwd=ROOT,
            stdout=(folder / f"said-{rank}.txt").open("w"),
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                **{name: value.format(rank=rank) for name, value in (environment or {}).items()},
            },
        )
        for rank in range(RANKS)
    ]


def end(processes: Sequence[Any]) -> int:
    """Kill those that still run; return how many did."""
    late = [process for process in processes if process.poll() is None]
    for process in late:
        process.kill()
        process.wait()
    return len(late)


def play(cases: Sequence[Case], folder: Path, limit_s: float) -> dict[str, list[dict[str, Any]]]:
    """Play cases in one launch; return by name what each of the four ranks saw.

    Raises:
        LaunchError: a rank failed or they did not end in time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases.json").write_text(json.dumps([case.name for case in cases]))
    processes = start("campaign.rank", folder)
    try:
        until = time.monotonic() + limit_s
        while any(process.poll() is None for process in processes) and time.monotonic() < until:
            if any(process.poll() not in (None, 0) for process in processes):
                until = min(until, time.monotonic() + 5.0)  # the others wait for one that is gone
            time.sleep(0.1)
    finally:
        late = end(processes)
    errors = [path.read_text() for path in sorted(folder.glob("error-*.txt"))]
    if errors or late or any(process.returncode for process in processes):
        where = "; ".join(path.read_text() for path in sorted(folder.glob("at-*.txt")))
        codes = [process.returncode for process in processes]
        raise LaunchError("\n".join([f"exit codes {codes}, {late} ended late; {where}", *errors]))
    return read(folder)


def read(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return what the ranks wrote, by case."""
    found: dict[str, list[dict[str, Any]]] = {}
    for rank in range(RANKS):
        for line in (folder / f"rank-{rank}.jsonl").read_text().splitlines():
            result = json.loads(line)
            found.setdefault(result["case"], []).append(result)
    return found
