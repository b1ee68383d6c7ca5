"""The bad cells of an incident as text: what the grid shows, for who reads and for who cannot see it."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from incidents.models import Incident
from runs import formatting, queries
from runs.models import Run
from runs.placement import nodes_of
from runs.queries import BadGroup

FIRST = 20
NAMED_NODES = 2


@dataclass(frozen=True, slots=True)
class BadText:
    """The first twenty groups of bad cells, how many cells they are, and what came before them."""

    lines: list[tuple[BadGroup, str]]  # a group, and its nodes with the GPU of a single rank
    cells: int
    more: bool
    earlier: str

    @property
    def few(self) -> bool:
        """Whether the list is short enough to stand open."""
        return len(self.lines) < FIRST


def bad_text(incident: Incident, version: str) -> BadText:
    """Return the bad cells of an incident's attempt as text.

    Cells of earlier steps, or of skipped updates, are no part of the incident and stand in a sentence.

    Args:
        version: of the grid; while it stays, 16,384 ranks are grouped once and not for every look.
    """
    step = incident.first_bad.get("step")
    return _bad_text(incident.run_id, incident.attempt, step if isinstance(step, int) else 0, version)


@lru_cache(maxsize=16)
def _bad_text(run_id: int, attempt: int, since: int, version: str) -> BadText:
    run = Run.objects.get(pk=run_id)
    groups = queries.bad_cells(run, attempt, FIRST + 1)
    mine = [group for group in groups if not (group.skipped or group.step < since)] or groups
    before = [group for group in groups if group not in mine]
    places = _Places(run, attempt)
    return BadText(
        lines=[(group, places.words(group)) for group in mine[:FIRST]],
        cells=sum(group.cells for group in mine[:FIRST]),
        more=len(mine) > FIRST,
        earlier="; ".join(_earlier(group) for group in before[:3])
        + (f" and {len(before) - 3} more" if len(before) > 3 else ""),
    )


def _earlier(group: BadGroup) -> str:
    lanes = group.ranks if group.stream == "layer" else f"rank {formatting.inert(group.ranks)}"
    return f"{lanes} at step {formatting.count(group.step)}{', update skipped' if group.skipped else ''}"


class _Places:
    """Nodes of ranks, read once."""

    def __init__(self, run: Run, attempt: int) -> None:
        self.nodes = nodes_of(run, attempt)
        self.node_of = np.full(max((held[-1] for _, held, _ in self.nodes), default=-1) + 1, -1, np.int64)
        for index, (_, held, _) in enumerate(self.nodes):
            self.node_of[held] = index

    def words(self, group: BadGroup) -> str:
        """Return the nodes of a group, and of a single rank its GPU."""
        ranks = np.array(group.lanes, np.int64)
        ranks = ranks[(ranks >= 0) & (ranks < len(self.node_of))]
        found = np.unique(self.node_of[ranks])
        found = found[found >= 0]
        if not len(found):
            return ""
        names = [formatting.inert(self.nodes[index][0], 48) for index in found[:NAMED_NODES].tolist()]
        if len(ranks) == 1:
            return f"{names[0]}, GPU {self.nodes[found[0]][1].index(int(ranks[0]))}"
        rest = len(found) - len(names)
        return ", ".join(names) + (f" and {rest:,} more" if rest > 0 else "")
