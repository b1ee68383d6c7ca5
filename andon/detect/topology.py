"""Which ranks exchange values with which, and in which pipeline stage a rank stands."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_RANKS = 1 << 20  # a range from a stranger must not allocate the machine away
EXCHANGE = {"tp": "tensor", "cp": "context", "ep": "expert"}  # these exchange values inside a phase

_RANGE = re.compile(r"^\s*(\d{1,7})\s*(?:-\s*(\d{1,7})\s*)?$")


def parse_ranks(text: str) -> list[int]:
    """Read a rank set such as "0-3,6".

    Raises:
        ValueError: a piece is no number or range, or names more than 2^20 ranks.
    """
    ranks: list[int] = []
    for piece in text.split(","):
        match = _RANGE.match(piece)
        if match is None:
            raise ValueError(f"rank set {text!r}: {piece!r} is neither a number nor a range")
        first = int(match[1])
        last = int(match[2]) if match[2] is not None else first
        if last < first or last - first >= MAX_RANKS or len(ranks) + last - first >= MAX_RANKS:
            raise ValueError(f"rank set {text!r}: {piece!r} runs backwards or names too many ranks")
        ranks.extend(range(first, last + 1))
    return ranks


def fold_ranks(ranks: Iterable[int]) -> str:
    """Write ranks as ranges: [0, 1, 2, 6] → "0-2, 6"."""
    ordered = sorted({int(rank) for rank in ranks})
    pieces: list[str] = []
    start = 0
    for end in range(len(ordered)):
        if end + 1 == len(ordered) or ordered[end + 1] != ordered[end] + 1:
            first, last = ordered[start], ordered[end]
            pieces.append(f"{first}" if first == last else f"{first}-{last}")
            start = end + 1
    return ", ".join(pieces)


class Topology:
    """Groups of one attempt: `{"tp": [[0, 1], [2, 3]], "pp": ["0-3", …], …}`."""

    def __init__(self, groups: Mapping[str, list[list[int]]]) -> None:
        """Take groups whose ranks stand in group order (a pipeline group in stage order)."""
        self.groups = {kind: [list(group) for group in listed] for kind, listed in groups.items()}
        self._stage = self._table("pp", stage=True)
        self._member = {kind: self._table(kind, stage=False) for kind in EXCHANGE}

    @classmethod
    def from_groups(cls, document: Mapping[str, Any]) -> "Topology":
        """Read the `groups` of an `attempt.launched` event.

        A group is a list of ranks or a rank set ("0-3,6"); one flat list of ranks is one group.

        Raises:
            ValueError: a group is neither, or names a rank outside 0 … 2^20 − 1.
        """
        groups: dict[str, list[list[int]]] = {}
        for kind, listed in document.items():
            if isinstance(listed, str):
                listed = [listed]  # noqa: PLW2901
            if not isinstance(listed, list | tuple):
                raise ValueError(f"groups.{kind}: expected a list of groups, got {type(listed).__name__}")
            if listed and all(isinstance(rank, int) for rank in listed):
                listed = [listed]  # noqa: PLW2901
            groups[kind] = [_group(kind, index, group) for index, group in enumerate(listed)]
        return cls(groups)

    def _table(self, kind: str, *, stage: bool) -> NDArray[np.int32]:
        listed = self.groups.get(kind, [])
        size = max((max(group) for group in listed if group), default=-1) + 1
        table = np.full(size, -1, dtype=np.int32)
        for index, group in enumerate(listed):
            table[group] = np.arange(len(group)) if stage else index
        return table

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


def _look_up(table: NDArray[np.int32], ranks: NDArray[np.int64]) -> NDArray[np.int32]:
    found = np.full(len(ranks), -1, dtype=np.int32)
    inside = (ranks >= 0) & (ranks < len(table))
    found[inside] = table[ranks[inside]]
    return found


def _group(kind: str, index: int, group: Any) -> list[int]:
    if isinstance(group, str):
        return parse_ranks(group)
    if not isinstance(group, list | tuple):
        raise ValueError(f"groups.{kind}[{index}]: expected ranks, got {type(group).__name__}")
    for rank in group:
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < MAX_RANKS:
            raise ValueError(f"groups.{kind}[{index}]: {rank!r} is no rank")
    return list(group)
