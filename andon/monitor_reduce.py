"""The one fused SUM of a step, and the one transfer to the host.

    [Σ loss·tokens, Σ tokens, ranks with a nonfinite bit of their own, rank 0's order,
     ranks with a nonfinite loss, ranks with a nonfinite reduced gradient, Σ squares of the reduced
     gradient, ranks with nonfinite weights or moments, ranks in suspicion]

Nonfinite values are replaced by 0 before the sum and travel in the counts, because what a reduction
does with a NaN depends on backend and rank. Whatever else this rank wants to know (its own layers'
norms, the layers of the step before) is packed behind the sum and moves to the host with it.

Where the optimizer takes `found_inf` on the device, nobody on the host needs the sum to drop an
update: `Later` reads it one step later, when it has long arrived, and the step costs no host sync.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

FIELDS = (
    "loss_sum",
    "tokens",
    "nonfinite_ranks",
    "orders",
    "nonfinite_losses",
    "reduced_ranks",
    "grad_squares",
    "state_ranks",
    "suspects",
)


@dataclass(frozen=True)
class Sums:
    """The fused sum on the host; equal on every rank."""

    loss_sum: float
    tokens: float
    nonfinite_ranks: int
    orders: int
    nonfinite_losses: int
    reduced_ranks: int
    grad_squares: float
    state_ranks: int
    suspects: int

    @property
    def loss(self) -> float:
        """Token-weighted mean over the ranks whose loss was finite; NaN when none had one."""
        return self.loss_sum / self.tokens if self.tokens else float("nan")


def fuse(
    *,
    loss_sum: Tensor | None,
    tokens: int,
    bad: Tensor | None,
    order: int,
    grad_squares: Tensor,
    state_bad: Tensor | None,
    suspect: bool = False,
) -> Tensor:
    """Return this rank's summands, float64 of shape (9,) on the device.

    `loss_sum` is None on a pipeline stage without loss, which then weighs nothing. `grad_squares` is
    this rank's share of the squared gradient norm after the reduce, so that shards and replicas alike
    add up to the whole. `suspect`: a replica check or twin step named a rank of this one's group.
    """
    zero = torch.zeros((), dtype=torch.float64, device=grad_squares.device)
    total = zero if loss_sum is None else loss_sum.detach().double()
    loss_bad = ~torch.isfinite(total)
    counted = ~loss_bad & (loss_sum is not None and tokens > 0)
    gradient_bad = ~torch.isfinite(grad_squares)
    own_bad = loss_bad if bad is None else loss_bad | bad
    return torch.stack(
        (
            torch.where(counted, total, zero),
            torch.where(counted, zero + tokens, zero),
            own_bad.double(),
            zero + order,
            loss_bad.double(),
            gradient_bad.double(),
            torch.where(gradient_bad, zero, grad_squares.double()),
            zero if state_bad is None else state_bad.double(),
            zero + int(suspect),
        )
    )


def reduce(fused: Tensor, group: Any = None) -> Tensor:
    """Sum over all ranks: the only collective of a healthy step."""
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(fused, group=group)
    return fused


class Pack:
    """Named device tensors that move to the host together."""

    def __init__(self) -> None:
        self._names: list[tuple[str, int]] = []
        self._parts: list[Tensor] = []

    def add(self, name: str, tensor: Tensor | None) -> None:
        """Take a tensor of at most one dimension along; None is left out."""
        if tensor is not None:
            flat = tensor.detach().double().reshape(-1)
            self._names.append((name, flat.numel()))
            self._parts.append(flat)

    def tensor(self) -> Tensor:
        """Return everything as one float64 vector on the device."""
        return torch.cat(self._parts)

    def unpack(self, values: Sequence[float] | np.ndarray) -> "Unpacked":
        """Split the vector on the host again."""
        array, found, at = np.asarray(values, np.float64), {}, 0
        for name, count in self._names:
            found[name] = array[at : at + count]
            at += count
        return Unpacked(found)


@dataclass(frozen=True)
class Unpacked:
    """What arrived on the host, by name."""

    values: dict[str, np.ndarray]

    def array(self, name: str) -> np.ndarray | None:
        """Return a part, None when it was not measured."""
        return self.values.get(name)

    def number(self, name: str, default: float) -> float:
        """Return a part of one value."""
        part = self.values.get(name)
        return default if part is None else float(part[0])

    @property
    def sums(self) -> Sums:
        """The fused sum."""
        named = dict(zip(FIELDS, self.values["sums"].tolist(), strict=True))
        floats = {name: named.pop(name) for name in ("loss_sum", "tokens", "grad_squares")}
        return Sums(**floats, **{name: round(count) for name, count in named.items()})


def read_now(pack: Pack) -> Unpacked:
    """Move a pack to the host: the one host sync of a step."""
    return pack.unpack(pack.tensor().tolist())


class Later:
    """A pack on its way to the host; `read` it a step later.

    The copy goes into pinned memory behind an event, so nothing waits for the device here; by the next
    step the event has passed.
    """

    def __init__(self, pack: Pack) -> None:
        vector = pack.tensor()
        self._pack = pack
        self._event: Any = None
        if vector.device.type == "cuda":
            host = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
            host.copy_(vector, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
            self._host = host.numpy()
        else:
            self._host = np.empty(vector.shape, np.float64)
            torch.from_numpy(self._host).copy_(vector)

    def read(self) -> Unpacked:
        """Return the values of the step they were packed in."""
        if self._event is not None:
            self._event.synchronize()
        return self._pack.unpack(self._host)


def takes_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer drops an update by itself when a device flag says so (fused Adam, AdamW,
    SGD): it then leaves weights, moments and step counts untouched without asking the host."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def set_found_inf(optimizer: Any, fused: Tensor) -> None:
    """Let the optimizer drop its next update when any rank was nonfinite; all ranks alike.

    A halt needs no more than this: on the host it is known a step later, on the device in time.
    """
    counts = torch.stack(
        [fused[FIELDS.index(name)] for name in ("nonfinite_ranks", "reduced_ranks", "state_ranks")]
    )
    optimizer.grad_scale = None
    optimizer.found_inf = (counts.sum() > 0).to(torch.float32)
