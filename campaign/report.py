"""The table of a campaign, its goals, and the file they are kept in."""

import json
import os
import platform
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from campaign.judging import Verdict

FAULTS, CONTROLS = 350, 100
SLOW = "clean, and a rank was called slow: four ranks share the cores of this machine with whatever else runs"


def goals(verdicts: Sequence[Verdict], *, whole: bool) -> dict[str, bool]:
    """Return each goal and whether it was met; a part of the campaign is not counted against the numbers."""
    faults = [one for one in verdicts if not one.case.clean]
    clean = [one for one in verdicts if one.case.clean]
    found = {
        "every fault right in rank, step and phase, or its miss explained": not any(v.wrong for v in faults),
        "no clean control held or called bad": not any(v.wrong or v.held for v in clean),
        "all ranks act at the same step in every run": all(v.together for v in verdicts),
        "no bad update applied after the first bad step": not any(v.applied for v in verdicts),
        "a wrong matmul is missed by replica checksums and found by twins": not any(
            v.wrong for v in faults if v.case.kind == "wrong matmul"
        ),
    }
    if whole:
        found[f"at least {FAULTS} faults"] = len(faults) >= FAULTS
        found[f"at least {CONTROLS} clean controls"] = len(clean) >= CONTROLS
    return found


def rows(verdicts: Iterable[Verdict]) -> list[list[str]]:
    """Return the table: a row per kind of fault."""
    kinds: dict[str, list[Verdict]] = {}
    for one in verdicts:
        kinds.setdefault(one.case.kind, []).append(one)
    table = [["kind", "cases", "as it must be", "misses explained", "wrong"]]
    for kind, ones in kinds.items():
        wrong = sum(bool(v.wrong) for v in ones)
        misses = sum(bool(v.case.expect.miss) and not v.wrong and not v.found for v in ones)
        table.append([kind, str(len(ones)), str(len(ones) - wrong - misses), str(misses), str(wrong)])
    return table


def text(table: Sequence[Sequence[str]]) -> str:
    """Return a table for a terminal."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at == 0 else cell.rjust(width) for at, (cell, width) in enumerate(pairs)
        )
        for pairs in (list(zip(row, widths, strict=True)) for row in table)
    )


def misses(verdicts: Iterable[Verdict]) -> list[str]:
    """Return a line for every miss, and for every fault that was found although it was called unfindable."""
    lines = []
    for one in verdicts:
        expect = one.case.expect
        if one.wrong:
            lines.append(f"WRONG   {one.case.name}: {'; '.join(one.wrong)}")
        elif expect.miss and not one.found:
            lines.append(f"missed  {one.case.name}: {expect.miss}")
        elif expect.miss:
            lines.append(f"found   {one.case.name}, which was thought to be impossible: {expect.miss}")
    return lines


def notes(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """Return what a reader must know of cases that are as they must be, with how many they are."""
    counted: dict[str, int] = {}
    for one in verdicts:
        if one.case.expect.note and not one.wrong:
            counted[one.case.expect.note] = counted.get(one.case.expect.note, 0) + 1
        if one.slow:
            counted[SLOW] = counted.get(SLOW, 0) + 1
    return counted


def write(
    directory: Path, verdicts: Sequence[Verdict], met: dict[str, bool], seconds: dict[str, float]
) -> Path:
    """Write everything to `campaign.json`."""
    directory.mkdir(exist_ok=True)
    document: dict[str, Any] = {
        "schema": "andon.campaign/1",
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "goals": met,
        "table": rows(verdicts),
        "misses": misses(verdicts),
        "notes": notes(verdicts),
        "cases": [
            {
                "name": one.case.name,
                "kind": one.case.kind,
                "found": one.found,
                "wrong": one.wrong,
                "together": one.together,
                "bad_updates_applied": one.applied,
                "held": one.held,
            }
            for one in verdicts
        ],
    }
    file = directory / "campaign.json"
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return file
