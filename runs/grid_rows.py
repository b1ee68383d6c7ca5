"""The rows of the grid: ranks in the order of a node, a parallel group or their first failure.

A row is always one rank. Rows by node, or by tensor, pipeline or data group, put the ranks of each together
under its name; "first failure on top" puts the group that failed first above the others.
"""

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from runs.blocks import MAX_RANKS
from runs.lanes import numbers
from runs.models import Run
from runs.placement import nodes_of, topology_of
from runs.rows import raw_cursor

WORDS = {"node": "node", "rank": "rank", "tp": "TP group", "pp": "PP group", "dp": "DP group"}
SORTS = ("rank", "failure")

# Grouped, not sorted one by one: in a dead run all ranks but one went bad in the same way.
_FAILED = """
SELECT string_agg(lane, ',') FROM runs_firstbad
WHERE run_id = %s AND attempt = %s AND stream = 'rank'
GROUP BY skipped, step, view, phase ORDER BY skipped, step, view <> 'local', phase
"""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a grid.

    Attributes:
        kind, sort: as asked for in the address.
        order: int32[rows], the rank of each row; None: row n is rank n.
        groups: name and first row of each group from the top; empty where every row is its own.
        count: how many rows there are.
    """

    kind: str
    sort: str
    count: int
    order: NDArray[np.int32] | None = None
    groups: list[tuple[str, int]] = field(default_factory=list)

    def rank(self, row: int) -> int:
        """Return the rank of a row."""
        return row if self.order is None or not 0 <= row < self.count else int(self.order[row])

    def row(self, rank: int) -> int | None:
        """Return the row of a rank, None where it has none."""
        if self.order is None:
            return rank
        found = np.flatnonzero(self.order == rank)
        return int(found[0]) if len(found) else None

    def pieces(self) -> list[list[int]] | None:
        """Return the order as [first rank, how many] of ascending stretches, None where row n is rank n."""
        if self.order is None:
            return None
        starts = np.flatnonzero(np.diff(self.order, prepend=self.order[:1] - 2) != 1)
        ends = np.append(starts[1:], self.count)
        return [
            [first, many]
            for first, many in zip(self.order[starts].tolist(), (ends - starts).tolist(), strict=True)
        ]


def kinds(run: Run, attempt: int) -> list[str]:
    """Return the ways in which the rows of an attempt can stand: only those its launch told the groups of."""
    topology = topology_of(run, attempt)
    groups = {} if topology is None else topology.groups
    by_node = ["node"] if nodes_of(run, attempt) else []
    return [*by_node, "rank", *(kind for kind in ("tp", "pp", "dp") if groups.get(kind))]


def rows_of(run: Run, attempt: int, ranks: int, kind: str, sort: str, version: str) -> Rows:
    """Return the rows of an attempt of `ranks` ranks; what is not known or too large stands by rank.

    Args:
        version: of the grid; rows are remembered for as long as it stays.
    """
    kind = kind if kind in WORDS else ""
    sort = sort if sort in SORTS else "rank"
    return _rows(run.pk, attempt, ranks, kind, sort, version)


@lru_cache(maxsize=64)
def _rows(run_id: int, attempt: int, ranks: int, kind: str, sort: str, version: str) -> Rows:
    run = Run.objects.only("pk").get(pk=run_id)
    groups = _groups(run, attempt, kind) if ranks <= MAX_RANKS else None
    if groups is None:
        known = ranks <= MAX_RANKS and sort == "failure"
        order = np.argsort(_places(run_id, attempt, ranks), kind="stable").astype(np.int32) if known else None
        return Rows("rank", sort, ranks, order)
    group = _group_of(groups, ranks)
    names = [name for name, _ in groups] + ["no group"]
    first = np.arange(len(names))
    if sort == "failure":
        first = np.full(len(names), ranks, np.int64)
        np.minimum.at(first, group, _places(run_id, attempt, ranks))
    order = np.lexsort((np.arange(ranks), group, first[group])).astype(np.int32)
    starts = np.flatnonzero(np.diff(group[order], prepend=-1))
    named = [(names[group[order[start]]], start) for start in starts.tolist()]
    plain = bool((order == np.arange(ranks)).all())
    return Rows(kind or "node", sort, ranks, None if plain else order, named)


_Groups = list[tuple[str, list[int]]]


def _groups(run: Run, attempt: int, kind: str) -> _Groups | None:
    """Return names and ranks, None where the rows stand by rank."""
    if kind in ("", "node"):
        known = nodes_of(run, attempt)
        return [(name, held) for name, held, _ in known] if known else None
    if kind == "rank":
        return None
    topology = topology_of(run, attempt)
    found = [] if topology is None else topology.groups.get(kind, [])
    return [(f"{kind.upper()} {index}", ranks) for index, ranks in enumerate(found)] or None


def _group_of(groups: _Groups, ranks: int) -> NDArray[np.int64]:
    """Return the group of each rank: the first that names it, or one more than there are."""
    members = np.fromiter((rank for _, held in groups for rank in held), np.int64)
    index = np.repeat(np.arange(len(groups)), [len(held) for _, held in groups])
    inside = (members >= 0) & (members < ranks)
    named, first = np.unique(members[inside], return_index=True)
    group = np.full(ranks, len(groups), np.int64)
    group[named] = index[inside][first]
    return group


def _places(run_id: int, attempt: int, ranks: int) -> NDArray[np.int64]:
    """Return which went bad first, second and so on, per rank; `ranks` for one that never did."""
    with raw_cursor() as cursor:
        cursor.execute(_FAILED, (run_id, attempt))
        failed = [numbers(row[0].split(","))[0] for row in cursor.fetchall()]
    found = np.concatenate([np.empty(0, np.int64), *failed])
    found = found[found < ranks]
    places = np.full(ranks, ranks, np.int64)
    np.minimum.at(places, found, np.arange(len(found)))
    return places
