"""A resumable data order: absolute sample positions, skip windows, exact restore.

A *position* counts samples in one endless, deterministic stream: position `p` of a data set of
`size` samples lies in epoch `p // size` and names the sample at place `p % size` of that epoch's
shuffle; of a stream whose size nobody knows, `p` is simply the sample's number. Nothing in it depends
on the number of ranks, so a window of positions means the same data on any layout, and "skip 1440 to
1920" can be checked years later. The loader position (next sample to be read) and the consumed samples
(samples really trained on) part ways at the first skip; both are kept, with the exact ranges that were
read.

`andon.loader_batches.batches` puts this order before any data set or stream of samples.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from andon.intervals import Window as Window  # noqa: PLC0414 - the training scripts take it from here
from andon.intervals import merged

SCHEMA = "andon.loader/1"


class LoaderError(ValueError):
    """A loader was asked for an order it cannot give; the text says what differs and what to do."""


class LoaderState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a checkpoint keeps of a loader. `size`, `seed`, `shuffle` name the order: a restore checks them.

    Attributes:
        size: samples in the data set; None for a stream of samples in an order of its own.
        shuffle: whether epochs are shuffled; else samples come as they lie.
        source: where the stream itself stands, if it says so in plain data.
    """

    schema: str = SCHEMA
    size: int | None
    seed: int
    position: int
    consumed_samples: int
    skips: tuple[Window, ...] = ()
    trained: tuple[Window, ...] = ()
    shuffle: bool = True
    source: Any = None


def shuffled(size: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of one epoch: int64 of shape (size,), a permutation of 0 … size − 1.

    The generator is seeded by SHA-256 of (seed, epoch) so that neighbouring epochs are unrelated;
    PCG64 and `permutation` give the same order on every platform numpy supports.
    """
    digest = hashlib.sha256(f"{SCHEMA}:{seed}:{epoch}".encode()).digest()
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "big")))
    return generator.permutation(size).astype(np.int64)


class Loader:
    """Deals positions to ranks, batch after batch.

    Every rank holds an equal loader and asks it for the same global batches; only the slice
    differs. So positions agree on all ranks with no collective. Dealing costs by the number of skip
    windows a batch meets, not by its samples.

    Arguments:
        size: samples in the data set; None for a stream.
        seed: names the order.
        global_batch: samples per step over all ranks; a multiple of `world_size`.
        rank, world_size: whose slice `next_batch` returns.
        skips: windows never to be read.
        shuffle: False takes the samples as they lie, in every epoch.
    """

    def __init__(
        self,
        *,
        size: int | None,
        seed: int,
        global_batch: int,
        rank: int = 0,
        world_size: int = 1,
        position: int = 0,
        consumed_samples: int = 0,
        skips: Iterable[Window] = (),
        trained: Iterable[Window] = (),
        shuffle: bool = True,
    ) -> None:
        if size is not None and size < 1:
            raise LoaderError(f"size: {size} samples; a loader needs at least one")
        if global_batch < 1 or world_size < 1 or global_batch % world_size:
            raise LoaderError(f"global_batch: {global_batch} is not a multiple of world_size {world_size}")
        if not 0 <= rank < world_size:
            raise LoaderError(f"rank: {rank} is outside 0 … {world_size - 1}")
        if position < 0 or consumed_samples < 0:
            raise LoaderError(
                f"position {position}, consumed_samples {consumed_samples}: must not be negative"
            )
        self.size = size
        self.seed = seed
        self.shuffle = shuffle
        self.global_batch = global_batch
        self.rank = rank
        self.world_size = world_size
        self.consumed_samples = consumed_samples
        self.skips = merged(skips)
        self._trained = list(merged(trained))
        self._epochs: dict[int, np.ndarray] = {}
        self.position = self._past_skips(position)

    @property
    def trained(self) -> tuple[Window, ...]:
        """The ranges that were dealt, over all ranks."""
        return tuple(self._trained)

    def _skip_at(self, position: int) -> int:
        """Return the index of the first skip that ends after a position."""
        return bisect_right(self.skips, position, key=lambda window: window.stop)

    def _past_skips(self, position: int) -> int:
        index = self._skip_at(position)
        if index < len(self.skips) and self.skips[index].start <= position:
            return self.skips[index].stop
        return position

    def sample(self, position: int) -> int:
        """Return the index in the data set (0 … size − 1) of the sample at an absolute position."""
        if self.size is None:
            return position
        epoch, place = divmod(position, self.size)
        if not self.shuffle:
            return place
        if epoch not in self._epochs:
            # Two epochs are enough: a batch touches at most this one and the next.
            self._epochs = {key: order for key, order in self._epochs.items() if key >= epoch - 1}
            self._epochs[epoch] = shuffled(self.size, self.seed, epoch)
        return int(self._epochs[epoch][place])

    def next_batch(self) -> list[int]:
        """Advance by one global batch and return this rank's positions, in order."""
        return self.share(self.deal())

    def deal(self) -> list[Window]:
        """Advance by one global batch and return the ranges that all ranks read, ascending."""
        ranges, wanted = [], self.global_batch
        position, index = self.position, self._skip_at(self.position)
        while wanted:
            end = position + wanted
            if index < len(self.skips):
                end = min(end, self.skips[index].start)
            ranges.append(Window(position, end))
            wanted -= end - position
            position = end
            if index < len(self.skips) and position == self.skips[index].start:
                position, index = self.skips[index].stop, index + 1
        self.position = position
        self.consumed_samples += self.global_batch
        self._note_trained(ranges)
        return ranges

    def share(self, ranges: list[Window]) -> list[int]:
        """Return this rank's positions of a global batch: the ranks take equal parts, one after the other."""
        each = self.global_batch // self.world_size
        return _part(ranges, self.rank * each, (self.rank + 1) * each)

    def _note_trained(self, ranges: list[Window]) -> None:
        for window in ranges:
            if self._trained and self._trained[-1].stop == window.start:
                self._trained[-1] = Window(self._trained[-1].start, window.stop)
            elif not self._trained or self._trained[-1].stop < window.start:
                self._trained.append(window)
            else:  # a rollback without its state: what is read again is not new
                self._trained = list(merged((*self._trained, window)))

    def skip(self, window: Window) -> int:
        """Never read `window`; return how many samples at or after the position that drops."""
        before = sum(w.stop - max(w.start, self.position) for w in self.skips if w.stop > self.position)
        self.skips = merged((*self.skips, window))
        after = sum(w.stop - max(w.start, self.position) for w in self.skips if w.stop > self.position)
        self.position = self._past_skips(self.position)
        return after - before

    def copy(self) -> "Loader":
        """Return an equal loader that goes its own way: one that reads ahead."""
        made = Loader(
            size=self.size,
            seed=self.seed,
            global_batch=self.global_batch,
            rank=self.rank,
            world_size=self.world_size,
            shuffle=self.shuffle,
        )
        made.restore(self.state())
        return made

    def state(self) -> LoaderState:
        """Return what a checkpoint must keep; equal on every rank."""
        return LoaderState(
            size=self.size,
            seed=self.seed,
            position=self.position,
            consumed_samples=self.consumed_samples,
            skips=self.skips,
            trained=self.trained,
            shuffle=self.shuffle,
        )

    def restore(self, state: LoaderState) -> None:
        """Go to a saved state.

        Raises:
            LoaderError: the state is of another data set size, seed, shuffle or schema: the same position
                would name other samples, so a silent restore would change the data.
        """
        for field in ("schema", "size", "seed", "shuffle"):
            own = SCHEMA if field == "schema" else getattr(self, field)
            if getattr(state, field) != own:
                raise LoaderError(
                    f"{field}: the saved loader has {getattr(state, field)!r}, this one {own!r}; the order "
                    "of samples differs, so restore with the data set and seed of the checkpoint"
                )
        self.skips = merged(state.skips)
        self._trained = list(merged(state.trained))
        self.consumed_samples = state.consumed_samples
        self.position = self._past_skips(state.position)


def _part(ranges: list[Window], start: int, stop: int) -> list[int]:
    """Return the positions from the `start`-th to before the `stop`-th of ascending ranges."""
    found: list[int] = []
    before = 0
    for window in ranges:
        low, high = max(start - before, 0), min(stop - before, window.stop - window.start)
        if low < high:
            found.extend(range(window.start + low, window.start + high))
        before += window.stop - window.start
    return found
