"""Curves at rest: the columns of each series of an attempt in blocks of 256, level by level.

Written by compaction only, inside its transaction and under the lock of the attempt's row.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from runs import curve_columns
from runs.blocks import COLUMNS, FACTOR, TOP, number_of, steps_of
from runs.curve_columns import Columns
from runs.curve_values import Said, how
from runs.rows import raw_cursor

MAX_SERIES = 512  # of an attempt; metrics named by a counter must not fill a disk
MAX_STEP = COLUMNS * steps_of(TOP) * 2**31
MAX_SPREAD = 16_384  # blocks of a series that one look may touch: 4 million steps

Place = tuple[str, int, int]  # series, level, number

_READ = """
SELECT b.series, b.level, b.number, b.columns FROM unnest(%s::text[], %s::smallint[], %s::bigint[])
     AS w (series, level, number)
JOIN runs_curveblock b ON b.run_id = %s AND b.attempt = %s AND b.series = w.series AND b.level = w.level
     AND b.number = w.number
"""
_WRITE = """
INSERT INTO runs_curveblock (run_id, attempt, series, level, number, columns)
SELECT %s, %s, * FROM unnest(%s::text[], %s::smallint[], %s::bigint[], %s::bytea[])
ON CONFLICT (run_id, attempt, level, series, number) DO UPDATE SET columns = EXCLUDED.columns
"""
_NAMES = "SELECT DISTINCT series FROM runs_curveblock WHERE run_id = %s AND attempt = %s AND level = %s"
_BETWEEN = """
SELECT attempt, series, number, columns FROM runs_curveblock
WHERE run_id = %s AND attempt = ANY(%s) AND level = %s AND series = ANY(%s) AND number BETWEEN %s AND %s
ORDER BY attempt, series, number
"""
_WRITTEN_AT_ONCE = 2_000


def names(run_id: int, attempt: int) -> list[str]:
    """Return the names of all series of an attempt."""
    with raw_cursor() as cursor:
        cursor.execute(_NAMES, (run_id, attempt, TOP))
        return sorted(str(row[0]) for row in cursor)


def between(
    run_id: int, attempts: Sequence[int], series: Sequence[str], level: int, first: int, last: int
) -> dict[tuple[int, str], Columns]:
    """Return the columns of a level over all blocks that hold a step from `first` to `last`."""
    found: dict[tuple[int, str], list[Columns]] = defaultdict(list)
    span = number_of(max(0, first), level), number_of(max(0, last), level)
    with raw_cursor() as cursor:
        cursor.execute(_BETWEEN, (run_id, list(attempts), level, list(series), *span))
        for attempt, name, number, stored in cursor:
            found[int(attempt), str(name)].append(curve_columns.unpack(bytes(stored), level, int(number)))
    return {of: np.concatenate(parts) for of, parts in found.items()}


def take(run_id: int, attempt: int, said: Said) -> None:
    """Take what was said into the blocks of level 0 and of every level above them."""
    said = _known(run_id, attempt, said)
    fresh = {
        name: curve_columns.settled(reports.between(0, MAX_STEP - 1), how(name))
        for name, reports in said.items()
    }
    wanted = {
        (name, 0, number)
        for name, columns in fresh.items()
        for number in np.unique(columns["at"] // COLUMNS)[:MAX_SPREAD].tolist()
    }
    live = _read(run_id, attempt, _with_above(wanted))
    for name, columns in fresh.items():
        numbers = columns["at"] // COLUMNS
        for number in np.unique(numbers)[:MAX_SPREAD].tolist():
            place = (name, 0, number)
            part = columns[slice(*np.searchsorted(numbers, [number, number + 1]).tolist())]
            live[place] = curve_columns.merged(live.get(place, curve_columns.empty()), part, how(name))
    written = set(wanted)
    for level in range(TOP):
        above: dict[Place, list[int]] = defaultdict(list)
        for name, _, number in wanted:
            above[name, level + 1, number // FACTOR].append(number)
        for parent, numbers_below in above.items():
            live[parent] = _raised(live, parent, numbers_below)
        wanted = set(above)
        written |= wanted
    _write(run_id, attempt, {place: live[place] for place in sorted(written)})


def _raised(live: Mapping[Place, Columns], parent: Place, below: Iterable[int]) -> Columns:
    """Return the columns of a block with those over the blocks `below` made anew."""
    name, level, _ = parent
    known = live.get(parent, curve_columns.empty())
    wide = COLUMNS * steps_of(level - 1)
    parts = [known[~np.isin(known["at"] // wide, list(below))]] if len(known) else []
    parts += [
        curve_columns.grouped(live[name, level - 1, number], steps_of(level), how(name)) for number in below
    ]
    columns = np.concatenate(parts)
    return columns[np.argsort(columns["at"], kind="stable")]


def _with_above(wanted: Iterable[Place]) -> list[Place]:
    return sorted(
        {(name, level, number // FACTOR**level) for name, _, number in wanted for level in range(TOP + 1)}
    )


def _known(run_id: int, attempt: int, said: Said) -> Said:
    """Leave out what would be one series too many."""
    known = set(names(run_id, attempt))
    room = MAX_SERIES - len(known)
    new = [name for name in said if name not in known]
    return {name: said[name] for name in said if name in known or name in new[: max(0, room)]}


def _read(run_id: int, attempt: int, places: Sequence[Place]) -> dict[Place, Columns]:
    series, levels, numbers = (
        (list(column) for column in zip(*places, strict=True)) if places else ([], [], [])
    )
    with raw_cursor() as cursor:
        cursor.execute(_READ, (series, levels, numbers, run_id, attempt))
        return {
            (str(name), int(level), int(number)): curve_columns.unpack(bytes(stored), int(level), int(number))
            for name, level, number, stored in cursor
        }


def _write(run_id: int, attempt: int, blocks: Mapping[Place, Columns]) -> None:
    rows = [(*place, curve_columns.pack(columns, *place[1:])) for place, columns in blocks.items()]
    with raw_cursor() as cursor:
        for at in range(0, len(rows), _WRITTEN_AT_ONCE):
            columns = [list(column) for column in zip(*rows[at : at + _WRITTEN_AT_ONCE], strict=True)]
            cursor.execute(_WRITE, (run_id, attempt, *columns))
