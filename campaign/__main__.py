"""Play every case, print the table, write bench-results/campaign.json. Exit code 1: a goal was missed."""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from campaign import broken, launching, report
from campaign.cases import TOPOLOGIES
from campaign.judging import Verdict, judge
from campaign.table import controls, faults

LAUNCH_S = 900.0


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    """Run the campaign, or what was asked for of it."""
    parser = argparse.ArgumentParser(prog="python -m campaign", description=__doc__)
    choices = (*TOPOLOGIES, "stopped")
    parser.add_argument("part", nargs="*", help=f"any of {', '.join(choices)} (all)")
    parser.add_argument("--only", default="", help="only cases whose name has this in it")
    given = parser.parse_args()
    if unknown := [name for name in given.part if name not in choices]:
        parser.error(f"there is no part {unknown[0]!r}: expected any of {', '.join(choices)}")
    parts: list[str] = given.part or list(choices)
    whole = not given.part and not given.only
    verdicts: list[Verdict] = []
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="andon-campaign-") as name:
        folder = Path(name)
        for part in parts:
            began = time.monotonic()
            verdicts += _play(part, given.only, folder / part)
            seconds[part] = time.monotonic() - began
            say(f"{part}: {seconds[part]:.0f} s")
    met = report.goals(verdicts, whole=whole)
    say(report.text(report.rows(verdicts)))
    for line in report.misses(verdicts):
        say(line)
    for note, count in report.notes(verdicts).items():
        say(f"note    {count} cases: {note}")
    file = report.write(launching.ROOT / "bench-results", verdicts, met, seconds)
    for goal, reached in met.items():
        say(f"{'met   ' if reached else 'MISSED'}  {goal}")
    total = sum(seconds.values())
    say(f"{len(verdicts)} cases in {total:.0f} s; written to {file.relative_to(launching.ROOT)}")
    return 0 if all(met.values()) else 1


def _play(part: str, only: str, folder: Path) -> list[Verdict]:
    if part == "stopped":
        cases = [case for case in broken.stopped() if only in case.name]
        return [judge(case, broken.play(case, folder / str(n))) for n, case in enumerate(cases)]
    cases = [case for case in (*faults(), *controls()) if case.topology == part and only in case.name]
    if not cases:
        return []
    seen = launching.play(cases, folder, LAUNCH_S)
    return [judge(case, seen[case.name]) for case in cases]


if __name__ == "__main__":
    sys.exit(main())
