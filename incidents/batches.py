"""One batch against the run's distribution: what it told, and where its numbers lie among the others'."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from runs import formatting as words

_MOST_VALUES = 200_000
_SHOWN = 8
# What identifies a batch rather than measuring it.
_NAMES = (
    *(
        "batch_ids",
        "samples",
        "positions",
        "sample_ids",
        "shard",
        "shards",
        "file",
        "offset",
        "dataset_version",
    ),
    *("domain", "domains", "fingerprints", "fingerprint"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One number of the batch: its value, the others' median and 99th percentile, and its own place."""

    name: str
    value: str
    median: str
    p99: str
    place: str  # "above 99.9 % of 12,288"
    stands_out: bool


@dataclass(slots=True)
class Batch:
    """What is known of a batch."""

    rows: list[Row] = field(default_factory=list)
    told: list[tuple[str, str]] = field(default_factory=list)
    whole: bool = True  # False: no number of it was told


def of_step(documents: Iterable[dict[str, Any]], step: int, rank: int | None) -> Batch:
    """Return the batch of one step (and rank, where it is known) against all the batches that are kept.

    Args:
        documents: lines of `batch_statistics.ndjson` or `batches.ndjson`: step, rank, and what was told.
    """
    others: dict[str, list[float]] = {}
    mine: dict[str, list[float]] = {}
    told: dict[str, str] = {}
    for one in documents:
        data = one.get("told") or one.get("data")
        if not isinstance(data, dict):
            continue
        is_mine = one.get("step") == step and (rank is None or one.get("rank") == rank)
        for name, value in data.items():
            if name in _NAMES:
                if is_mine:
                    told.setdefault(name, _shown(value))
                continue
            values = _numbers(value)
            into = mine if is_mine else others
            kept = into.setdefault(name, [])
            if len(kept) < _MOST_VALUES:
                kept.extend(values)
    rows = [_row(name, values, others.get(name, [])) for name, values in sorted(mine.items()) if values]
    return Batch(rows, sorted((words.inert(name, 40), text) for name, text in told.items()), bool(rows))


def _numbers(value: Any) -> list[float]:
    values = value if isinstance(value, list) else [value]
    return [
        float(one)
        for one in values[:_MOST_VALUES]
        if isinstance(one, int | float) and not isinstance(one, bool) and math.isfinite(one)
    ]


def _shown(value: Any) -> str:
    values = value if isinstance(value, list) else [value]
    text = ", ".join(words.inert(one, 60) for one in values[:_SHOWN])
    more = len(values) - _SHOWN
    return f"{text} and {words.count(more)} more" if more > 0 else text


def _row(name: str, mine: list[float], others: list[float]) -> Row:
    value = max(mine)
    shown = f"{words.significant(value, 4)}" + (
        f", the largest of {words.count(len(mine))}" if len(mine) > 1 else ""
    )
    if not others:
        return Row(words.inert(name, 40), shown, "", "", "no other batch told it", False)
    ordered = sorted(others)
    below = sum(other < value for other in ordered)
    above = sum(other > value for other in ordered)
    p99 = ordered[min(len(ordered) - 1, math.ceil(0.99 * len(ordered)) - 1)]
    if below >= above:
        place = f"above {words.percent(below, len(ordered))} of {words.count(len(ordered))}"
    else:
        place = f"below {words.percent(above, len(ordered))} of {words.count(len(ordered))}"
    # Beyond what 99 of 100 others told, on either side.
    out = max(below, above) >= 0.99 * len(ordered) and below + above > 0
    return Row(
        words.inert(name, 40),
        shown,
        words.significant(ordered[len(ordered) // 2], 4),
        words.significant(p99, 4),
        place,
        out,
    )
