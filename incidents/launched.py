"""What a launch told of a few ranks, without reading the whole fleet.

The nodes and groups of 16,384 ranks are hundreds of kilobytes of JSON. A page that shows one rank lets the
database look.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from django.db import connection

from runs.attempts import launch, named_nodes
from runs.reading import kept

MOST_RANKS = 16  # a tie of more ranks names no single machine
_FLEET = ["nodes", "groups", "ranks", "gpu_uuids"]


@dataclass(frozen=True, slots=True)
class Place:
    """One node of an attempt, with those of its ranks that were asked for."""

    node: str
    ranks: tuple[int, ...]
    gpus: tuple[int, ...]  # index of each rank on the node: its GPU, as launchers number them
    gpu_uuids: tuple[str, ...]  # of the ranks asked for, where the launch told them
    switch: str  # the leaf switch, where the launch told it


_PLACES = """
SELECT n ->> 'node', n -> 'ranks', n -> 'gpu_uuids', coalesce(n ->> 'switch', n ->> 'leaf_switch', '')
FROM runs_attempt a CROSS JOIN LATERAL jsonb_array_elements(a.nodes) n
WHERE a.run_id = %s AND a.number = %s AND n -> 'ranks' @> ANY(%s::jsonb[])
ORDER BY 1
"""


def places(run_id: int, attempt: int, ranks: Iterable[int]) -> list[Place]:
    """Return the nodes on which `ranks` ran, by name; none when the launch did not say or they are many."""
    wanted = sorted(set(ranks))
    if not wanted or len(wanted) > MOST_RANKS:
        return []
    return kept(("places", run_id, attempt, tuple(wanted)), lambda: _places(run_id, attempt, wanted))


def _places(run_id: int, attempt: int, wanted: list[int]) -> list[Place]:
    with connection.cursor() as cursor:
        cursor.execute(_PLACES, [run_id, attempt, [str(rank) for rank in wanted]])
        rows = cursor.fetchall()
    return [
        _place(str(name), json.loads(on_it), json.loads(uuids or "null"), switch, wanted)
        for name, on_it, uuids, switch in rows
    ]


def _place(name: str, on_it: list[int], uuids: object, switch: str, wanted: list[int]) -> Place:
    mine = [(index, rank) for index, rank in enumerate(on_it) if rank in wanted]
    known = uuids if isinstance(uuids, list) else []
    return Place(
        node=name,
        ranks=tuple(rank for _, rank in mine),
        gpus=tuple(index for index, _ in mine),
        gpu_uuids=tuple(str(known[index]) for index, _ in mine if index < len(known)),
        switch=switch,
    )


def node_count(run_id: int, attempt: int) -> int | None:
    """Return how many nodes the launch named, None when it named none."""

    return named_nodes(launch(run_id, attempt)) or None


def facts(run_id: int, attempts: Iterable[int]) -> dict[int, dict[str, Any]]:
    """Return what each launch told beside nodes and groups, by the attempt's number."""
    wanted = sorted(set(attempts))
    return kept(("told by launches", run_id, *wanted), lambda: _facts(run_id, wanted))


def _facts(run_id: int, wanted: list[int]) -> dict[int, dict[str, Any]]:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT number, data - %s::text[] FROM runs_attempt WHERE run_id = %s AND number = ANY(%s)",
            [_FLEET, run_id, wanted],
        )
        return {int(number): json.loads(data) for number, data in cursor.fetchall()}
