"""The one fused SUM of a step, and the one transfer to the host.

A rank's summands (`FIELDS`): Σ loss·tokens, Σ tokens and Σ squares of the reduced gradient; whether its
loss, its reduced gradient, or anything of its own was nonfinite; whether its weights or moments are;
rank 0's order; a suspicion.

Nonfinite values are replaced by 0 before the sum and travel in the counts, because what a reduction
does with a NaN depends on backend and rank. Whatever else this rank wants to know (its own layers'
norms, the layers of the step before) is packed behind the sum and moves to the host with it.

Where the optimizer takes `found_inf` on the device, nobody on the host needs the sum to drop an
update: `Later` reads it one step later, when it has long arrived, and the step costs no host sync.
"""

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

VALUES = ("loss_sum", "tokens", "grad_squares", "own")  # what one rank measured
FLAGS = ("nonfinite_losses", "untold", "reduced_ranks", "nonfinite_ranks")  # where a value was nonfinite
FIELDS = (*VALUES, *FLAGS, "state_ranks", "orders", "suspects")


class Sums(msgspec.Struct, frozen=True, kw_only=True):
    """The fused sum on the host; equal on every rank."""

    loss_sum: float
    tokens: float
    grad_squares: float
    nonfinite_ranks: int
    orders: int
    nonfinite_losses: int
    reduced_ranks: int
    state_ranks: int
    suspects: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Sums":
        """Return the sums in the order of `FIELDS`."""
        loss_sum, tokens, grad_squares, _, losses, _, reduced, nonfinite, state, orders, suspects = values
        return cls(
            loss_sum=loss_sum,
            tokens=tokens,
            grad_squares=grad_squares,
            nonfinite_ranks=round(nonfinite),
            orders=round(orders),
            nonfinite_losses=round(losses),
            reduced_ranks=round(reduced),
            state_ranks=round(state),
            suspects=round(suspects),
        )

    @property
    def loss(self) -> float:
        """Token-weighted mean over the ranks whose loss was finite; NaN when none had one."""
        return self.loss_sum / self.tokens if self.tokens else math.nan


class Constants:
    """Small numbers of the host as a tensor, put there again only when they change.

    By kernels that carry them in their arguments: a copy to a device would be waited for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._values: tuple[float, ...] | None = None
        self._tensor = torch.zeros(0)

    def of(self, *values: float) -> Tensor:
        """Return them as float64."""
        if values != self._values:
            parts = [torch.full((1,), value, dtype=torch.float64, device=self._device) for value in values]
            self._values, self._tensor = values, torch.cat(parts)
        return self._tensor


def own_values(loss_sum: Tensor | None, tokens: int, grad_squares: Tensor, own: Tensor | None) -> Tensor:
    """Return what this rank measured, float64 in the order of `VALUES`.

    `loss_sum` is None on a pipeline stage without loss, which then weighs nothing. `grad_squares` is
    this rank's share of the squared gradient norm after the reduce, so that shards and replicas alike
    add up to the whole. `own` is any number that is nonfinite where something of this rank alone is,
    a float64 as the others; so is the fourth value here, and it means nothing else.
    """
    if loss_sum is None:
        loss = weight = torch.zeros_like(grad_squares)
    else:
        loss = loss_sum.detach().double()
        nothing = loss * 0  # of a nonfinite loss, NaN
        weight = nothing + tokens
        if not tokens:
            loss = nothing
    return torch.stack((loss, weight, grad_squares, loss if own is None else loss + own))


def fuse(values: Tensor, state_bad: Tensor, constants: Tensor) -> Tensor:
    """Return this rank's summands in the order of `FIELDS`.

    Args:
        values: of `own_values`.
        state_bad: float64 (1,): 1 where weights or moments of an earlier step were nonfinite.
        constants: float64 (2,): rank 0's order; 1 where a replica check or twin step named a rank of
            this one's group.
    """
    finite = torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    return torch.cat((finite, (finite != values).double(), state_bad, constants))


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
            flat = tensor if tensor.dim() and tensor.dtype == torch.float64 else tensor.double().reshape(-1)
            self._names.append((name, flat.numel()))
            self._parts.append(flat)

    def tensor(self) -> Tensor:
        """Return everything as one float64 vector on the device."""
        return torch.cat(self._parts).detach()

    def unpack(self, values: list[float]) -> "Unpacked":
        """Split the vector on the host again."""
        found, at = {}, 0
        for name, count in self._names:
            found[name] = values[at : at + count]
            at += count
        return Unpacked(found)


class Unpacked:
    """What arrived on the host, by name."""

    def __init__(self, values: dict[str, list[float]]) -> None:
        self.values = values

    def array(self, name: str) -> np.ndarray | None:
        """Return a part, None when it was not measured."""
        part = self.values.get(name)
        return None if part is None else np.array(part, np.float64)

    def number(self, name: str, default: float) -> float:
        """Return a part of one value."""
        part = self.values.get(name)
        return default if part is None else part[0]

    @property
    def sums(self) -> Sums:
        """The fused sum."""
        return Sums.of(self.values["sums"])


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
        return self._pack.unpack(self._host.tolist())


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
