"""Who may resume, raced: `python -m benchmarks.bench_race`.

200 rounds of 20 concurrent approvals, plan edits, evidence changes, late values and exchanges on
PostgreSQL, half of them through pgbouncer in transaction mode. The rounds are those of
`tests/incidents/test_races.py`, which look after each one: never two live permits, never one for a plan
nobody approved, no deadlock.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.serving import ROOT

ROUNDS = 100  # of each way


def run(environment: dict[str, str]) -> dict[str, Any]:
    """Run the rounds on servers of their own and return what came of them."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "race.jsonl"
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "tests/incidents/test_races.py"],
            cwd=ROOT,
            env=_clean() | {"RACE_ROUNDS": str(ROUNDS), "RACE_REPORT": str(report)},
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = round(time.monotonic() - began, 1)
        lines = report.read_text().splitlines() if report.exists() else []
    ways = [json.loads(line) for line in lines]
    rounds = sum(way["rounds"] for way in ways)
    return {
        "rounds": rounds,
        "calls": rounds * 20,
        "permits_issued": sum(way["permits"] for way in ways),
        "seconds": seconds,
        "said": "" if done.returncode == 0 else done.stdout[-2000:],
        "goals": {
            "never two live permits, none for an unapproved plan, no deadlock": done.returncode == 0,
            f"{2 * ROUNDS} rounds, half of them through pgbouncer": rounds == 2 * ROUNDS,
        },
    }


def _clean() -> dict[str, str]:
    """Return the environment without the benchmark's own servers: the tests start theirs."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("ANDON_") and name != "DJANGO_SETTINGS_MODULE"
    }


if __name__ == "__main__":
    found = run({})
    print(json.dumps(found, indent=2))
    sys.exit(0 if all(found["goals"].values()) else 1)
