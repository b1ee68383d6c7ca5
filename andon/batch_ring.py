"""Batch lineage: what a rank trained on in its last steps, sample by sample.

When a step goes bad, "which samples?" must be answered from the trainer's memory: the loader has moved
on, and a log of every batch of every rank is large. The ring keeps the last steps whole; it is written
with the halt snapshot and posted with the bad step.
"""

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

SCHEMA = "andon.batches/1"
KEEP_STEPS = 64


@dataclass(frozen=True)
class BatchFacts:
    """What a rank trained on in one step, per sample and in order; an empty tuple was not told.

    Attributes:
        positions: absolute positions in the data order.
        names: sample ids.
        lengths: tokens of each sample, before truncation and without padding.
        mask_density: share of its tokens that count in the loss.
        fingerprints: short digests of the content, equal for equal samples.
        shards, offsets: the file each sample lies in and where.
        domains: its mixture component.
        tokens: how many of its tokens count in the loss.
        invalid_ids: how many of its token ids lie outside the vocabulary.
        loader: the loader's state after this batch.
    """

    positions: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    mask_density: tuple[float, ...] = ()
    fingerprints: tuple[str, ...] = ()
    shards: tuple[str, ...] = ()
    offsets: tuple[int, ...] = ()
    domains: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()
    invalid_ids: tuple[int, ...] = ()
    loader: dict[str, Any] = field(default_factory=dict)


NOT_TOLD = BatchFacts()
_FIELDS = tuple(one.name for one in fields(BatchFacts))


def describe(
    ids: NDArray[np.integer[Any]],
    mask: NDArray[np.bool_] | None = None,
    *,
    vocabulary: int | None = None,
    **told: Any,
) -> BatchFacts:
    """Return the facts that can be read off a batch itself.

    Args:
        ids: token ids, shape (samples, tokens).
        mask: which tokens count in the loss, the same shape; None: all.
        vocabulary: number of valid ids, 0 … vocabulary − 1; None: not checked.
        told: what only the loader knows (`positions`, `names`, `shards`, `offsets`, `domains`, `loader`).

    Raises:
        ValueError: shapes differ.
    """
    if ids.ndim != 2:
        raise ValueError(f"ids: shape {ids.shape}, needs (samples, tokens)")
    counted = np.ones(ids.shape, np.bool_) if mask is None else np.asarray(mask, np.bool_)
    if counted.shape != ids.shape:
        raise ValueError(f"mask: shape {counted.shape} differs from that of ids, {ids.shape}")
    tokens = counted.sum(axis=1)
    wrong = (
        (ids < 0) | (ids >= vocabulary) if vocabulary is not None else np.zeros(ids.shape, np.bool_)
    ).sum(axis=1)
    found: dict[str, Any] = {
        "lengths": tuple(tokens.tolist()),
        "mask_density": tuple((tokens / max(1, ids.shape[1])).tolist()),
        "fingerprints": tuple(
            fingerprint(row[kept]) for row, kept in zip(ids.astype(np.int64), counted, strict=True)
        ),
        "tokens": tuple(tokens.tolist()),
        "invalid_ids": tuple(wrong.tolist()) if vocabulary is not None else (),
    }
    return BatchFacts(**(found | told))


def fingerprint(tokens: NDArray[np.int64]) -> str:
    """Return 16 hex digits of SHA-256 over the token ids: equal samples are found, none can be read back."""
    return digest_of(np.ascontiguousarray(tokens, "<i8").tobytes())


def digest_of(content: bytes) -> str:
    """Return 16 hex digits of SHA-256 over a sample's bytes."""
    return hashlib.sha256(content).hexdigest()[:16]


class BatchRing:
    """The last steps of one rank."""

    def __init__(self, keep_steps: int = KEEP_STEPS) -> None:
        if keep_steps < 1:
            raise ValueError(f"keep_steps: {keep_steps}; a ring keeps at least one step")
        self._steps: deque[tuple[int, BatchFacts]] = deque(maxlen=keep_steps)

    def append(self, step: int, batch: BatchFacts) -> None:
        """Keep a step's batch; the oldest goes when the ring is full."""
        self._steps.append((step, batch))

    def of(self, step: int) -> BatchFacts | None:
        """Return the newest batch kept for a step."""
        return next((batch for kept, batch in reversed(self._steps) if kept == step), None)

    def duplicates(self) -> list[tuple[str, list[int]]]:
        """Return fingerprints seen in more than one place of the ring, with the steps they came in."""
        seen: dict[str, list[int]] = {}
        for step, batch in self._steps:
            for one in batch.fingerprints:
                seen.setdefault(one, []).append(step)
        return [(one, steps) for one, steps in seen.items() if len(steps) > 1]

    def document(self, rank: int) -> dict[str, Any]:
        """Return the ring as JSON-ready data, oldest step first."""
        steps = [{"step": step, **_told(batch)} for step, batch in self._steps]
        return {"schema": SCHEMA, "rank": rank, "steps": steps}


def event_data(batch: BatchFacts) -> dict[str, Any]:
    """Return the data of a `batch.seen` event."""
    data = _told(batch)
    if "mask_density" in data:
        data["mask_density"] = [round(value, 4) for value in data["mask_density"]]
    return data


def _told(batch: BatchFacts) -> dict[str, Any]:
    told = {}
    for field_name in _FIELDS:
        value = getattr(batch, field_name)
        name = "samples" if field_name == "names" else field_name  # as the wire has it
        if isinstance(value, Sequence):
            if value:
                told[name] = list(value)
        elif value:
            told[name] = value
    return told
