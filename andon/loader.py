"""A resumable data order: absolute sample positions, skip windows, exact restore.

A *position* counts samples in one endless, deterministic stream: position `p` of a data set of
`size` samples lies in epoch `p // size` and names the sample at place `p % size` of that epoch's
shuffle. Nothing in it depends on the number of ranks, so a window of positions means the same
data on any layout, and "skip 1440 to 1920" can be checked years later. The loader position (next
sample to be read) and the consumed samples (samples really trained on) part ways at the first
skip; both are kept, with the exact ranges that were read.
"""

import hashlib
from collections.abc import Iterable

import msgspec
import numpy as np

SCHEMA = "andon.loader/1"


class LoaderError(ValueError):
    """A loader was asked for an order it cannot give; the text says what differs and what to do."""


class Window(msgspec.Struct, frozen=True, order=True):
    """A half-open range of absolute sample positions: `start` is in it, `stop` is not."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise LoaderError(f"window [{self.start}, {self.stop}): needs 0 <= start <= stop")


class LoaderState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a checkpoint keeps of a loader. `size` and `seed` name the order, so a restore checks them."""

    schema: str = SCHEMA
    size: int
    seed: int
    position: int
    consumed_samples: int
    skips: tuple[Window, ...] = ()
    trained: tuple[Window, ...] = ()


def shuffled(size: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of one epoch: int64 of shape (size,), a permutation of 0 … size − 1.

    The generator is seeded by SHA-256 of (seed, epoch) so that neighbouring epochs are unrelated;
    PCG64 and `permutation` give the same order on every platform numpy supports.
    """
    digest = hashlib.sha256(f"{SCHEMA}:{seed}:{epoch}".encode()).digest()
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "big")))
    return generator.permutation(size).astype(np.int64)


def merged(windows: Iterable[Window]) -> tuple[Window, ...]:
    """Return `windows` sorted, with the empty ones dropped and the touching ones joined."""
    joined: list[Window] = []
    for window in sorted(w for w in windows if w.stop > w.start):
        if joined and window.start <= joined[-1].stop:
            joined[-1] = Window(joined[-1].start, max(joined[-1].stop, window.stop))
        else:
            joined.append(window)
    return tuple(joined)


class Loader:
    """Deals positions to ranks, batch after batch.

    Every rank holds an equal loader and asks it for the same global batches; only the slice
    differs. So positions agree on all ranks with no collective.

    Arguments:
        size: samples in the data set.
        seed: names the order.
        global_batch: samples per step over all ranks; a multiple of `world_size`.
        rank, world_size: whose slice `next_batch` returns.
        skips: windows never to be read.
    """

    def __init__(
        self,
        *,
        size: int,
        seed: int,
        global_batch: int,
        rank: int = 0,
        world_size: int = 1,
        position: int = 0,
        consumed_samples: int = 0,
        skips: Iterable[Window] = (),
        trained: Iterable[Window] = (),
    ) -> None:
        if size < 1:
            raise LoaderError(f"size: {size} samples; a loader needs at least one")
        if global_batch < 1 or global_batch % world_size:
            raise LoaderError(f"global_batch: {global_batch} is not a multiple of world_size {world_size}")
        if not 0 <= rank < world_size:
            raise LoaderError(f"rank: {rank} is outside 0 … {world_size - 1}")
        if position < 0 or consumed_samples < 0:
            raise LoaderError(
                f"position {position}, consumed_samples {consumed_samples}: must not be negative"
            )
        self.size = size
        self.seed = seed
        self.global_batch = global_batch
        self.rank = rank
        self.world_size = world_size
        self.consumed_samples = consumed_samples
        self.skips = merged(skips)
        self.trained = merged(trained)
        self._epochs: dict[int, np.ndarray] = {}
        self.position = self._past_skips(position)

    def _past_skips(self, position: int) -> int:
        for window in self.skips:
            if window.start <= position < window.stop:
                position = window.stop
        return position

    def sample(self, position: int) -> int:
        """Return the index in the data set (0 … size − 1) of the sample at an absolute position."""
        epoch, place = divmod(position, self.size)
        if epoch not in self._epochs:
            # Two epochs are enough: a batch touches at most this one and the next.
            self._epochs = {key: order for key, order in self._epochs.items() if key >= epoch - 1}
            self._epochs[epoch] = shuffled(self.size, self.seed, epoch)
        return int(self._epochs[epoch][place])

    def next_batch(self) -> list[int]:
        """Advance by one global batch and return this rank's positions, in order."""
        positions: list[int] = []
        position = self.position
        while len(positions) < self.global_batch:
            position = self._past_skips(position)
            positions.append(position)
            position += 1
        self.position = self._past_skips(position)
        self.consumed_samples += self.global_batch
        self.trained = merged((*self.trained, *_ranges(positions)))
        share = self.global_batch // self.world_size
        return positions[self.rank * share : (self.rank + 1) * share]

    def skip(self, window: Window) -> int:
        """Never read `window`; return how many samples at or after the position that drops."""
        before = sum(w.stop - max(w.start, self.position) for w in self.skips if w.stop > self.position)
        self.skips = merged((*self.skips, window))
        after = sum(w.stop - max(w.start, self.position) for w in self.skips if w.stop > self.position)
        self.position = self._past_skips(self.position)
        return after - before

    def state(self) -> LoaderState:
        """Return what a checkpoint must keep; equal on every rank."""
        return LoaderState(
            size=self.size,
            seed=self.seed,
            position=self.position,
            consumed_samples=self.consumed_samples,
            skips=self.skips,
            trained=self.trained,
        )

    def restore(self, state: LoaderState) -> None:
        """Go to a saved state.

        Raises:
            LoaderError: the state is of another data set size, seed or schema: the same position
                would name other samples, so a silent restore would change the data.
        """
        for field in ("schema", "size", "seed"):
            own = SCHEMA if field == "schema" else getattr(self, field)
            if getattr(state, field) != own:
                raise LoaderError(
                    f"{field}: the saved loader has {getattr(state, field)!r}, this one {own!r}; the order "
                    "of samples differs, so restore with the data set and seed of the checkpoint"
                )
        self.skips = merged(state.skips)
        self.trained = merged(state.trained)
        self.consumed_samples = state.consumed_samples
        self.position = self._past_skips(state.position)


def _ranges(positions: list[int]) -> list[Window]:
    """Return ascending positions as windows."""
    windows: list[Window] = []
    for position in positions:
        if windows and windows[-1].stop == position:
            windows[-1] = Window(windows[-1].start, position + 1)
        else:
            windows.append(Window(position, position + 1))
    return windows
