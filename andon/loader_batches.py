"""Any data set or stream of samples as batches that resume exactly: `batches(data, batch_size=8, …)`.

    train = batches(data, batch_size=8, rank=rank, world_size=world_size)
    for batch in train:
        ...
        monitor.step(loss, batch=BatchFacts(positions=train.positions))
    checkpoint["loader"] = train.state_dict()      # and load_state_dict(…), also on other numbers of ranks

*Map-style* data (`len()` and `[index]`) is read in the shuffled, endless order of `andon.loader`. A *stream*
(anything iterable) is read in its own order, once: every rank reads all of it and keeps its share, so
that a position is the same sample for any number of ranks. A stream that keeps state (`state_dict` and
`load_state_dict`, as torchdata's StatefulDataLoader with `batch_size=None`) goes on where it was; any other
is read again up to the position. Its order must not depend on ranks or workers.

A torch DataLoader is taken apart: its data set, batch size, collate function and workers are used, and
its sampler only says whether to shuffle. torch is needed for workers alone.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import msgspec

from andon.intervals import Window
from andon.loader import Loader, LoaderError, LoaderState

Collate = Callable[[list[Any]], Any]

# torch's, torchdata's and accelerate's.
_RANDOM = frozenset({"RandomSampler", "StatefulRandomSampler", "SeedableRandomSampler"})


class Batches(ABC):
    """This rank's batches, one global batch after the other. Made by `batches`.

    Attributes:
        order: deals the positions; it stands behind the last batch returned, however far workers read
            ahead.
        positions: absolute positions of the last batch's samples.
    """

    def __init__(self, order: Loader, collate: Collate) -> None:
        self.order = order
        self.positions: tuple[int, ...] = ()
        self._collate = collate

    def __iter__(self) -> Self:
        return self

    @abstractmethod
    def __next__(self) -> Any:
        """Return the next batch of this rank."""

    @property
    def position(self) -> int:
        """The absolute position of the next sample to be read."""
        return self.order.position

    @property
    def consumed_samples(self) -> int:
        """Samples dealt so far, over all ranks."""
        return self.order.consumed_samples

    def skip(self, window: Window) -> int:
        """Never read `window`; return how many samples at or after the position that drops."""
        dropped = self.order.skip(window)
        self._begin()
        return dropped

    def state(self) -> LoaderState:
        """Return what a checkpoint must keep; one rank's is as good as another's."""
        return self.order.state()

    def restore(self, state: LoaderState) -> None:
        """Go to a saved state. Raises LoaderError when it is of another order."""
        self.order.restore(state)
        self.positions = ()
        self._begin()

    def state_dict(self) -> dict[str, Any]:
        """Return `state` as plain data."""
        plain: dict[str, Any] = msgspec.to_builtins(self.state())
        return plain

    def load_state_dict(self, document: dict[str, Any]) -> None:
        """Go to what `state_dict` returned. Raises LoaderError when it is of another order or no state."""
        try:
            state = msgspec.convert(document, LoaderState)
        except msgspec.ValidationError as error:
            raise LoaderError(f"no state of a loader: {error}") from error
        self.restore(state)

    def _begin(self) -> None:  # noqa: B027 - only what reads ahead has something to begin anew
        """Read on from the order's position: what was read ahead is not wanted any more."""


class MapBatches(Batches):
    """Batches of a data set with `len()` and `[index]`, without end."""

    def __init__(
        self, data: Any, order: Loader, collate: Collate, workers: int, options: dict[str, Any]
    ) -> None:
        super().__init__(order, collate)
        self._data, self._workers, self._options = data, workers, options
        self._ahead: Iterator[Any] | None = None

    def __next__(self) -> Any:
        if not self._workers:
            self.positions = tuple(self.order.next_batch())
            return self._collate([self._data[self.order.sample(one)] for one in self.positions])
        if self._ahead is None:
            self._ahead = iter(self._loader())
        batch = next(self._ahead)
        self.positions = tuple(self.order.next_batch())  # the same that the workers were asked for
        return batch

    def _loader(self) -> Any:
        from torch.utils.data import DataLoader

        ahead = self.order.copy()

        def indexes() -> Iterator[list[int]]:
            while True:
                yield [ahead.sample(one) for one in ahead.next_batch()]

        return DataLoader(
            self._data,
            batch_sampler=indexes(),  # type: ignore[arg-type, unused-ignore]
            collate_fn=self._collate,
            num_workers=self._workers,
            **self._options,
        )

    def _begin(self) -> None:
        self._ahead = None


class StreamBatches(Batches):
    """Batches of a stream, until it ends. What does not fill a global batch at its end is left out, on all
    ranks alike."""

    def __init__(self, data: Iterable[Any], order: Loader, collate: Collate) -> None:
        super().__init__(order, collate)
        self._data = data
        self._samples: Iterator[Any] | None = None
        self._read = 0  # samples taken from the stream: the position of its next one

    def __next__(self) -> Any:
        if self._samples is None:
            self._samples = iter(self._data)
        before = self.order.state()
        ranges = self.order.deal()
        positions = tuple(self.order.share(ranges))
        mine, kept = set(positions), []
        while self._read < ranges[-1].stop:  # to the end of all ranks' share, so that all stand at one place
            try:
                sample = next(self._samples)
            except StopIteration:
                self.order.restore(before)
                raise
            if self._read in mine:
                kept.append(sample)
            self._read += 1
        self.positions = positions
        return self._collate(kept)

    def state(self) -> LoaderState:
        """Return what a checkpoint must keep, with where the stream itself stands if it says so."""
        state = self.order.state()
        own = self._own_state()
        source = None if own is None else {"read": self._read, "state": own}
        return msgspec.structs.replace(state, source=source)

    def _own_state(self) -> Any:
        if not hasattr(self._data, "state_dict") or not hasattr(self._data, "load_state_dict"):
            return None
        own = self._data.state_dict()
        with contextlib.suppress(TypeError, ValueError, msgspec.DecodeError):
            if msgspec.json.decode(msgspec.json.encode(own)) == own:
                return own
        return None  # not plain data: a checkpoint takes no pickles, so it will be read again

    def restore(self, state: LoaderState) -> None:
        """Go to a saved state. Raises LoaderError: of another order, or a stream that cannot go back."""
        own = state.source
        stateful = hasattr(self._data, "load_state_dict") and isinstance(own, dict)
        one_shot = isinstance(self._data, Iterator)
        if not stateful and one_shot and self._read > state.position:
            raise LoaderError(
                f"position: the stream was read to {self._read} and cannot go back to {state.position}; "
                "give what makes it anew, not an iterator"
            )
        self.order.restore(state)
        self.positions = ()
        if stateful:
            self._data.load_state_dict(own["state"])  # type: ignore[attr-defined]
            self._samples, self._read = None, int(own["read"])
        elif not one_shot:
            self._samples, self._read = None, 0


def batches(
    data: Any,
    *,
    batch_size: int | None = None,
    rank: int = 0,
    world_size: int = 1,
    seed: int = 0,
    shuffle: bool | None = None,
    skips: Iterable[Window] = (),
    collate: Collate | None = None,
    workers: int | None = None,
) -> Batches:
    """Return this rank's resumable batches of `data` (see the module).

    Args:
        batch_size: samples per rank and step; default: a DataLoader's.
        seed, shuffle: name the order of map-style data; shuffled unless a DataLoader says otherwise.
        skips: windows of absolute positions never to be read.
        collate: makes a batch of a list of samples; default: a DataLoader's, else the list itself.
        workers: processes that read map-style data ahead (torch); default: a DataLoader's, else none.

    Raises:
        LoaderError: no batch size, or a DataLoader whose sampler has an order of its own.
    """
    options: dict[str, Any] = {}
    if hasattr(data, "dataset") and hasattr(data, "collate_fn") and data.batch_size is not None:
        batch_size = data.batch_size if batch_size is None else batch_size
        collate = collate or data.collate_fn
        workers = data.num_workers if workers is None else workers
        options = {"pin_memory": data.pin_memory, "worker_init_fn": data.worker_init_fn}
        shuffle = shuffles(data.sampler) if shuffle is None and is_map_style(data.dataset) else shuffle
        data = data.dataset
    if batch_size is None or batch_size < 1:
        raise LoaderError(f"batch_size: {batch_size}; say how many samples a rank takes in a step")
    is_map = is_map_style(data)
    order = Loader(
        size=len(data) if is_map else None,
        seed=seed,
        global_batch=batch_size * world_size,
        rank=rank,
        world_size=world_size,
        skips=skips,
        shuffle=is_map and shuffle is not False,
    )
    if is_map:
        return MapBatches(data, order, collate or _as_list, workers or 0, options)
    return StreamBatches(data, order, collate or _as_list)


def is_map_style(data: Any) -> bool:
    """Return whether samples are read by index."""
    # torch's IterableDataset inherits a `[index]` that only raises, and may have a length.
    named = {one.__name__ for one in type(data).__mro__}
    return "IterableDataset" not in named and hasattr(data, "__getitem__") and hasattr(data, "__len__")


def shuffles(sampler: Any) -> bool:
    """Return whether a sampler shuffles evenly; its division among ranks is taken over.

    Raises:
        LoaderError: it has an order of its own.
    """
    kind = type(sampler).__name__
    if kind in ("SequentialSampler", "BatchSampler"):
        return False
    if kind in _RANDOM and not getattr(sampler, "replacement", False):
        return True
    if kind in ("DistributedSampler", "StatefulDistributedSampler"):
        return bool(sampler.shuffle)
    raise LoaderError(
        f"sampler: {kind} has an order of its own, which no position names; give the data set, or say "
        "shuffle="
    )


def _as_list(samples: list[Any]) -> list[Any]:
    return samples
