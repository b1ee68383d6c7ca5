"""Which ranks exchange values with which, and in which pipeline stage a rank stands."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from andon.wire_values import parse_ranks

EXCHANGE = {"tp": "tensor", "cp": "context", "ep": "expert"}  # these exchange values inside a phase


_Table = tuple[NDArray[np.int64], NDArray[np.int32]]


class Topology:
    """Groups of one attempt: `{"tp": [[0, 1], [2, 3]], "pp": ["0-3", …], …}`."""

    def __init__(self, groups: Mapping[str, list[list[int]]]) -> None:
        """Take groups whose ranks stand in group order (a pipeline group in stage order)."""
        self.groups = {kind: [list(group) for group in listed] for kind, listed in groups.items()}

    # Made when first asked for: who only shows the groups of 16,384 ranks needs no table.

    @cached_property
    def _stage(self) -> _Table:
        return self._table("pp", stage=True)

    @cached_property
    def _member(self) -> dict[str, _Table]:
        return {kind: self._table(kind, stage=False) for kind in EXCHANGE}

    @classmethod
    def from_groups(cls, document: Mapping[str, Any]) -> "Topology":
        """Read the `groups` of an `attempt.launched` event, as sent or as decoded.

        A group is a list of ranks or a rank set ("0-3,6"); one flat list of ranks is one group.

        Raises:
            ValueError: a group is neither, or names what is no rank.
        """
        groups: dict[str, list[list[int]]] = {}
        for kind, value in document.items():
            many = isinstance(value, list) and any(isinstance(item, list | str) for item in value)
            try:
                groups[kind] = [list(parse_ranks(group)) for group in (value if many else [value])]
            except ValueError as error:
                raise ValueError(f"groups.{kind}: {error}") from error
        return cls(groups)

    def _table(self, kind: str, *, stage: bool) -> _Table:
        """Sorted ranks with a value each: a rank number from outside must size no array."""
        value: dict[int, int] = {}
        for index, group in enumerate(self.groups.get(kind, [])):
            for position, rank in enumerate(group):
                value[rank] = position if stage else index
        ranks = np.array(sorted(value), dtype=np.int64)
        return ranks, np.array([value[rank] for rank in ranks.tolist()], dtype=np.int32)

    def stages(self, ranks: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the pipeline stage per rank, −1 where no pipeline group names it."""
        return _look_up(self._stage, ranks)

    def exchange_cells(self, ranks: NDArray[np.int64]) -> tuple[list[NDArray[np.int64]], list[str]]:
        """Split ranks into cells that exchange values inside a phase.

        Returns:
            The cells, and the kinds of group ("tensor", …) that joined any two of the ranks.
        """
        label = np.arange(len(ranks))
        kinds: list[str] = []
        changed = True
        while changed:
            changed = False
            for kind, word in EXCHANGE.items():
                group = _look_up(self._member[kind], ranks)
                known = np.flatnonzero(group >= 0)
                if not len(known):
                    continue
                lowest = np.full(int(group.max()) + 1, len(ranks))
                np.minimum.at(lowest, group[known], label[known])
                joined = label.copy()
                joined[known] = lowest[group[known]]
                if (joined != label).any():
                    changed = True
                    label = joined
                    if word not in kinds:
                        kinds.append(word)
        return [ranks[label == value] for value in np.unique(label)], kinds


def _look_up(table: _Table, ranks: NDArray[np.int64]) -> NDArray[np.int32]:
    known, value = table
    found = np.full(len(ranks), -1, dtype=np.int32)
    if len(known):
        at = np.minimum(np.searchsorted(known, ranks), len(known) - 1)
        inside = known[at] == ranks
        found[inside] = value[at[inside]]
    return found
