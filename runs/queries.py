"""Reads over what trainers posted: first-bad cell, series, grid, layers, events."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from andon.detect.cells import SOURCES, VALUES, BadCells, FirstBad, Phase, cells
from andon.detect.cells import first_bad as earliest
from runs import placement
from runs.cellmap import grid_states
from runs.curves import Point, series
from runs.lanes import folded, numbers
from runs.layers import layer_series
from runs.models import Event, Run
from runs.rows import raw_cursor

__all__ = [
    "BadGroup",
    "Point",
    "bad_cells",
    "events",
    "first_bad",
    "grid_states",
    "layer_series",
    "series",
]

# Only the cells of the earliest bad step decide, so only they leave the database: in a dead run of 16,384
# ranks as a few rows, one for all lanes that went bad in the same way.
_FIRST = f"""
SELECT f.step, f.skipped, andon_first_recorded_step(%(run)s, %(attempt)s), a.id, a.version
FROM (
    (SELECT step, skipped FROM runs_firstbad WHERE run_id = %(run)s AND attempt = %(attempt)s AND NOT skipped
     ORDER BY step LIMIT 1)
    UNION ALL
    (SELECT step, skipped FROM runs_firstbad WHERE run_id = %(run)s AND attempt = %(attempt)s AND skipped
     ORDER BY step LIMIT 1)
    LIMIT 1
) f LEFT JOIN (
    SELECT id, {placement.VERSION} AS version FROM runs_attempt
    WHERE run_id = %(run)s AND number = %(attempt)s
) a ON true
"""  # noqa: S608 (our own constant)
# Reduced values decide only where no rank has a local one: then they are left where they are, too.
_AT = """
SELECT stream, rank, micro_batch, phase, view = 'local', bits, series, value, array_agg(lane)
FROM runs_firstbad WHERE run_id = %(run)s AND attempt = %(attempt)s AND step = %(step)s AND {0}
      AND (view = 'local' OR stream <> 'rank' OR NOT EXISTS (
          SELECT FROM runs_firstbad WHERE run_id = %(run)s AND attempt = %(attempt)s AND step = %(step)s
                 AND {0} AND stream = 'rank' AND view = 'local'))
GROUP BY stream, rank, micro_batch, phase, view, bits, series, value
"""
_AT_APPLIED, _AT_SKIPPED = _AT.format("NOT skipped"), _AT.format("skipped")


def first_bad(run: Run, attempt: int) -> FirstBad | None:
    """Return the first-bad cell of an attempt with its ties, None when nothing was bad."""
    with raw_cursor() as cursor:
        cursor.execute(_FIRST, {"run": run.pk, "attempt": attempt})
        first = cursor.fetchone()
        if first is None:
            return None
        step, skipped, recorded = int(first[0]), bool(first[1]), first[2]
        at = {"run": run.pk, "attempt": attempt, "step": step}
        cursor.execute(_AT_SKIPPED if skipped else _AT_APPLIED, at)
        found = _columns(cursor.fetchall())
    ranks, layers = _rank_cells(step, skipped, found), None
    if "layer" in found:
        names, of_rank = found["layer"][0], found["layer"][1]
        layers = _cells(step, skipped, [_layer(name) for name in names], found["layer"], rank=of_rank)
    topology = None if first[3] is None else placement.topology_at(first[3], first[4])
    return earliest(ranks, topology=topology, layers=layers, first_recorded_step=recorded)


def _columns(rows: list[tuple[Any, ...]]) -> dict[str, tuple[list[Any], ...]]:
    """Return lane, rank, micro_batch, phase, local, bits, source, value per stream, an entry per cell."""
    found: dict[str, tuple[list[Any], ...]] = {}
    for stream, rank, micro_batch, phase, local, bits, series_name, value, lanes in rows:
        source = SOURCES.index(series_name) if series_name in SOURCES else 0
        code = VALUES.index(value) if value in VALUES else 0
        columns = found.setdefault(stream, tuple([] for _ in range(8)))
        columns[0].extend(lanes)
        for column, of_all in zip(
            columns[1:], (rank, micro_batch, phase, local, bits, source, code), strict=True
        ):
            column.extend([of_all] * len(lanes))
    return found


def _rank_cells(step: int, skipped: bool, found: dict[str, tuple[Any, ...]]) -> BadCells:
    """Return the cells of rank lanes; where only layers were bad, those of the ranks that posted them."""
    if "rank" in found:
        return _cells(step, skipped, [int(lane) for lane in found["rank"][0]], found["rank"])
    columns = list(found.get("layer", ((),) * 8))
    lanes = [int(rank) for rank in columns[1]]
    # A layer's value without a rank names none, whatever its view says.
    columns[4] = [local and rank >= 0 for local, rank in zip(columns[4], lanes, strict=True)]
    return _cells(step, skipped, lanes, tuple(columns))


def _cells(
    step: int,
    skipped: bool,
    lanes: list[Any],
    columns: tuple[Any, ...],
    *,
    rank: list[int] | None = None,
) -> BadCells:
    _, _, micro_batch, phase, local, bits, source, value = columns
    return cells(
        step=[step] * len(lanes),
        lane=lanes,
        micro_batch=list(micro_batch),
        phase=list(phase),
        local=list(local),
        skipped=[skipped] * len(lanes),
        bits=list(bits),
        source=list(source),
        value=list(value),
        rank=rank,
    )


def _layer(name: str) -> int | str:
    return int(name) if name.isdecimal() else name


@dataclass(frozen=True, slots=True)
class BadGroup:
    """Bad cells that read as one line: one step, phase and column, folded ranks or layers."""

    step: int
    phase: str
    stream: str
    ranks: str  # or layers; "not known" for a reduced value without any
    series: str
    value: str
    view: str
    skipped: bool
    received_at: datetime
    lanes: tuple[int, ...] = ()  # ranks, where the lanes are ranks
    cells: int = 1


_GROUPS = """
SELECT step, phase, stream, series, value, view, skipped, min(received_at),
       CASE WHEN stream = 'rank' THEN string_agg(lane, ',') END,
       CASE WHEN stream <> 'rank' THEN array_agg(lane) END
FROM runs_firstbad WHERE run_id = %s AND attempt = %s
GROUP BY step, phase, stream, series, value, view, skipped
ORDER BY skipped, step, view = 'reduced', phase, stream = 'layer' LIMIT %s
"""


def bad_cells(run: Run, attempt: int, limit: int = 20) -> list[BadGroup]:
    """Return where lanes first went bad, as the first `limit` groups of equal cells, earliest first."""
    with raw_cursor() as cursor:
        cursor.execute(_GROUPS, (run.pk, attempt, limit))
        rows = cursor.fetchall()
    groups = []
    for step, phase, stream, source, value, view, skipped, received_at, ranks, names in rows:
        # In a dead run one group names 16,384 ranks: they are read and folded as an array.
        known, other = numbers(ranks.split(",") if ranks is not None else names)
        text = ", ".join([*([folded(known)] if len(known) else []), *other]) or "not known"
        groups.append(
            BadGroup(
                step,
                Phase(phase).name.lower(),
                stream,
                text,
                source,
                value,
                view,
                skipped,
                received_at,
                tuple(known.tolist()) if stream == "rank" else (),
                len(known) + len(other) or 1,
            )
        )
    return groups


def events(
    run: Run, *, attempt: int | None = None, types: list[str] | None = None, limit: int = 100
) -> list[dict[str, Any]]:
    """Return events as plain data, the newest received first."""
    found = Event.objects.filter(run_id=run.pk)
    if attempt is not None:
        found = found.filter(attempt=attempt)
    if types is not None:
        found = found.filter(type__in=types)
    return [
        {
            "id": event.pk,
            "type": event.type,
            "attempt": event.attempt,
            "step": event.step,
            "rank": event.rank,
            "ranks": event.ranks,
            "node": event.node,
            "occurred_at": event.occurred_at,
            "received_at": event.received_at,
            "backfill": event.backfill,
            "flags": event.flags,
            "data": event.data,
        }
        for event in found.order_by("-pk")[:limit]
    ]
