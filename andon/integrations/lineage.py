"""Batch lineage in trainers that own their loop: facts taken where a batch is put together, on the host.

That is in the collate function, which data workers run: on the training thread, and behind the transfer to a
device, the same facts would cost a wait. They travel with the batch under one extra key.
"""

import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from andon.batch_ring import BatchFacts, describe, digest_of

KEY = "andon_batch"
IGNORED = -100  # a label that does not count in the loss (torch.nn.functional.cross_entropy)
_MOST_BYTES = 1 << 18  # of a sample that is fingerprinted: beyond it the digest would cost a noticeable time

Told = Callable[[Sequence[Any]], Mapping[str, Sequence[Any]]]


class Describing:
    """A collate function that also describes what it puts together.

    Arguments:
        collate: the trainer's own.
        vocabulary: number of valid token ids, where it is known.
        told: facts that only the samples tell, as `{"shards": […], "domains": […]}` (see `BatchFacts`), given
            the list of samples.
    """

    def __init__(self, collate: Callable[[Any], Any], vocabulary: int | None, told: Told | None) -> None:
        self.collate, self.vocabulary, self.told = collate, vocabulary, told

    def __call__(self, samples: Any) -> Any:
        batch, facts = self.pair(samples)
        if isinstance(batch, MutableMapping) and facts is not None:
            batch[KEY] = facts
        return batch

    def pair(self, samples: Any) -> tuple[Any, BatchFacts | None]:
        """Return the batch and its facts, where the reader can take both."""
        told = {name: tuple(values) for name, values in self.told(samples).items()} if self.told else {}
        batch = self.collate(samples)
        return batch, facts_of(batch, vocabulary=self.vocabulary, **told)


def take(batch: Any) -> BatchFacts | None:
    """Return the facts that a batch carries, and take them out of it."""
    facts = batch.pop(KEY, None) if isinstance(batch, MutableMapping) else None
    return facts if isinstance(facts, BatchFacts) else None


def facts_of(batch: Any, *, vocabulary: int | None = None, **told: Any) -> BatchFacts | None:
    """Return what can be read off a collated batch on the host; None where nothing can.

    Token ids are `input_ids`, or the first integers of two dimensions; what counts in the loss is `labels`
    other than −100, else `attention_mask`. Any other batch is fingerprinted sample by sample by its first
    tensor.
    """
    ids = _ids(batch)
    if ids is not None:
        return describe(ids.numpy(), _mask(batch, ids), vocabulary=vocabulary, **told)
    first = next(_tensors(batch), None)
    if first is None or first.ndim < 1 or not first.numel() or first.device.type != "cpu":
        return BatchFacts(**told) if told else None
    if first[0].nbytes <= _MOST_BYTES:
        rows = first.detach().reshape(len(first), -1).contiguous().view(torch.uint8).numpy()
        told.setdefault("fingerprints", tuple(digest_of(row.tobytes()) for row in rows))
    return BatchFacts(**told)


def joined(parts: Sequence[BatchFacts]) -> BatchFacts:
    """Return the facts of a step from those of its micro-batches.

    What one micro-batch does not tell is not told at all: a shorter list would name the wrong samples.
    """
    if len(parts) == 1:
        return parts[0]
    found: dict[str, Any] = {}
    for field in fields(BatchFacts):
        values = [getattr(part, field.name) for part in parts]
        if field.name != "loader" and parts and all(values):
            found[field.name] = tuple(one for value in values for one in value)
    return BatchFacts(**found)


def rows_of(batch: Any) -> int:
    """Return how many samples a batch of tensors holds: the first dimension of the first tensor."""
    return next((int(one.shape[0]) if one.ndim else 1 for one in _tensors(batch)), 0)


def _tensors(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from _tensors(part)
    elif isinstance(batch, list | tuple):
        for part in batch:
            yield from _tensors(part)


def _ids(batch: Any) -> Tensor | None:
    named = batch.get("input_ids") if isinstance(batch, Mapping) else None
    for one in [named] if named is not None else _tensors(batch):
        if isinstance(one, Tensor) and one.ndim == 2 and one.device.type == "cpu":
            if one.dtype in (torch.int64, torch.int32, torch.int16) and math.prod(one.shape):
                return one
            return None
    return None


def _mask(batch: Any, ids: Tensor) -> Any:
    if not isinstance(batch, Mapping):
        return None
    labels, attention = batch.get("labels"), batch.get("attention_mask")
    if isinstance(labels, Tensor) and labels.shape == ids.shape:
        return (labels != IGNORED).numpy()
    if isinstance(attention, Tensor) and attention.shape == ids.shape:
        return attention.bool().numpy()
    return None
