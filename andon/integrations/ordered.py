"""A trainer's own DataLoader in the order of `andon.loader`: what an epoch is stays, which samples are in
it is known by absolute position.

An epoch is as many whole steps as fit into the data set; what is left over comes first in the next one, so no
sample is padded, repeated or dropped at an end. Windows that are skipped make an epoch no shorter: it
reads on.
"""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from andon.batch_ring import BatchFacts
from andon.intervals import Window
from andon.loader import Loader, LoaderError, LoaderState
from andon.loader_batches import Batches, is_map_style, shuffles

_KEPT = (
    "num_workers",
    "pin_memory",
    "worker_init_fn",
    "prefetch_factor",
    "persistent_workers",
    "timeout",
    "multiprocessing_context",
)


class OrderedBatches:
    """A batch sampler: this rank's indexes, batch after batch, an epoch at a time.

    Arguments:
        order: whose `next_batch` the trainer's loop calls as it trains each batch; reading ahead begins
            where it stands.
        steps_of: micro-batches per optimizer step.
    """

    def __init__(self, order: Loader, micro_batches: int) -> None:
        self.order = order
        size = order.size or 0
        step = order.global_batch * micro_batches
        self._length = max(1, size // step) * micro_batches
        self.dropped = 0  # batches at the start of the next epoch that the trainer throws away, as it resumes

    def __len__(self) -> int:
        """Return the batches of an epoch."""
        return self._length

    def __iter__(self) -> Iterator[list[int]]:
        ahead, dropped, self.dropped = self.order.copy(), self.dropped, 0
        each = ahead.global_batch // ahead.world_size
        for _ in range(dropped):  # they are not read, so which they were does not matter
            yield [0] * each
        for _ in range(self._length - dropped):
            yield [ahead.sample(position) for position in ahead.next_batch()]


def ordered(
    loader: DataLoader[Any], *, seed: int, batch_size: int, micro_batches: int, rank: int, world_size: int
) -> tuple[DataLoader[Any], OrderedBatches]:
    """Return a DataLoader over the same data set, with the same workers, in an order of positions.

    Args:
        loader: as the trainer made it, sharded over the ranks or not.
        batch_size: samples per rank and micro-batch.

    Raises:
        LoaderError: its data is a stream, or its sampler has an order of its own.
    """
    if not is_map_style(loader.dataset):
        raise LoaderError("the data is a stream: no index names a sample")
    order = Loader(
        size=len(loader.dataset),  # type: ignore[arg-type, unused-ignore]
        seed=seed,
        global_batch=batch_size * world_size,
        rank=rank,
        world_size=world_size,
        shuffle=shuffles(_sampler(loader)),
    )
    batches = OrderedBatches(order, micro_batches)
    options = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
    made = DataLoader(
        loader.dataset,
        batch_sampler=batches,  # type: ignore[arg-type, unused-ignore]
        collate_fn=loader.collate_fn,
        **options,
    )
    return made, batches


def _sampler(loader: Any) -> Any:
    """Return what names the samples, under whatever divides them among ranks."""
    one = loader.batch_sampler
    while hasattr(one, "batch_sampler"):  # accelerate's shard of a batch sampler
        one = one.batch_sampler
    return getattr(one, "sampler", one)


class Epochs:
    """Resumable batches as a loop that counts epochs reads them: with a length, and the facts of the last
    one.

    Arguments:
        batches: endless, and with a collate function that returns (batch, facts).
        micro_batches: per optimizer step.
    """

    def __init__(self, batches: Batches, micro_batches: int) -> None:
        self.batches = batches
        self.facts: BatchFacts | None = None
        step = batches.order.global_batch * micro_batches
        self._length = max(1, (batches.order.size or 0) // step) * micro_batches

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> "Epochs":
        return self

    def __next__(self) -> Any:
        batch, facts = next(self.batches)
        told = vars(facts) if facts is not None else {}
        self.facts = BatchFacts(**{**told, "positions": self.batches.positions})
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return where reading stands, for the trainer's own checkpoint."""
        return self.batches.state_dict()

    def load_state_dict(self, document: dict[str, Any]) -> None:
        """Go there."""
        self.batches.load_state_dict(document)


def take_up(order: Loader, saved: LoaderState | None, consumed: int) -> None:
    """Put an order where a checkpoint stands.

    Args:
        saved: the order's own state; None: the checkpoint was written without, by a trainer that had read
            `consumed` samples in its order from the start.

    Raises:
        LoaderError: it is of other data.
    """
    if saved is None:
        start = order.state()
        saved = LoaderState(
            size=start.size,
            seed=start.seed,
            shuffle=start.shuffle,
            position=consumed,
            consumed_samples=consumed,
            trained=(Window(0, consumed),) if consumed else (),
        )
    order.restore(saved)


def check_window(order: Loader, skip: Window) -> None:
    """Refuse a window of samples that were trained already: the permit is of another checkpoint.

    Raises:
        LoaderError: it begins before where the order stands.
    """
    if skip.start < order.position:
        raise LoaderError(f"skip: it begins at {skip.start}, before the checkpoint's {order.position}")
