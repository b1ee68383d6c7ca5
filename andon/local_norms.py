"""What one rank computed by itself: per-layer gradient norms and nonfinite bits, seen before any reduce.

After an all-reduce every rank holds the same numbers and nothing names the rank that broke. DDP's
communication hook is the one place where a rank's own gradients are complete and not yet summed
(https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html). Forward outputs are watched by module
hooks. All flags and norms stay tensors until `read`, so that a step costs one transfer to the host.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

BIT_INPUT, BIT_FORWARD, BIT_LOCAL_GRADIENT, BIT_REDUCED_GRADIENT = 1, 2, 4, 8
BIT_OPTIMIZER, BIT_WEIGHT, BIT_SKIPPED = 16, 32, 64


@dataclass(frozen=True)
class LocalReading:
    """One step of one rank. `layers` gives the order of the arrays, which is the order of registration.

    Attributes:
        grad_norm: L2 over all parameters of this rank's own gradient (before clipping); NaN or inf if it is.
        layer_grad_norm: float64, one per layer.
        layer_bits: int64, one per layer: BIT_FORWARD (its output), BIT_LOCAL_GRADIENT.
        bits: the layers' bits joined.
    """

    grad_norm: float
    layer_grad_norm: np.ndarray
    layer_bits: np.ndarray
    bits: int


class LocalNorms:
    """Watches a DistributedDataParallel module. A *layer* is a module that owns parameters itself.

    Gradients must be reduced once a step (the last micro-batch under `no_sync`); forward flags
    gather over all micro-batches of the step.
    """

    def __init__(self, ddp: nn.parallel.DistributedDataParallel) -> None:
        module = ddp.module
        self.parameters: dict[str, list[Tensor]] = {}
        self._layer_of: dict[int, int] = {}
        for name, part in module.named_modules():
            own = [p for p in part.parameters(recurse=False) if p.requires_grad]
            if not own:
                continue
            index = len(self.parameters)
            self.parameters[name or "model"] = own
            for parameter in own:
                # A tied parameter counts for the layer that registered it first.
                self._layer_of.setdefault(id(parameter), index)
            part.register_forward_hook(self._forward_hook(index))
        self.layers = list(self.parameters)
        self._squares: list[list[Tensor]] = [[] for _ in self.layers]
        self._gradient_bad: list[list[Tensor]] = [[] for _ in self.layers]
        self._forward_bad: list[list[Tensor]] = [[] for _ in self.layers]
        ddp.register_comm_hook(state=None, hook=self._reduce)

    def _forward_hook(self, index: int) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point():
                self._forward_bad[index].append(~torch.isfinite(output.detach()).all())

        return hook

    def _reduce(self, _state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            layer = self._layer_of[id(parameter)]
            # float64: the square of a finite fp32 gradient above 1.8e19 would read as inf.
            self._squares[layer].append(gradient.detach().double().square().sum())
            self._gradient_bad[layer].append(~torch.isfinite(gradient.detach()).all())
        buffer = bucket.buffer()
        buffer.div_(dist.get_world_size())
        reduced = dist.all_reduce(buffer, async_op=True).get_future()
        return reduced.then(lambda done: done.value()[0])

    def read(self) -> LocalReading:
        """Return what this step saw and start anew. Call after `backward`."""
        zero = torch.zeros((), dtype=torch.float64)
        false = torch.zeros((), dtype=torch.bool)
        squares = torch.stack([torch.stack(s).sum() if s else zero for s in self._squares])
        forward = torch.stack([torch.stack(f).any() if f else false for f in self._forward_bad])
        gradient = torch.stack([torch.stack(g).any() if g else false for g in self._gradient_bad])
        table = torch.stack((squares, forward.double(), gradient.double())).cpu().numpy()
        for kept in (self._squares, self._forward_bad, self._gradient_bad):
            for values in kept:
                values.clear()
        with np.errstate(invalid="ignore"):
            norms = np.sqrt(table[0])
            total = float(np.sqrt(table[0].sum()))
        bits = table[1].astype(np.int64) * BIT_FORWARD | table[2].astype(np.int64) * BIT_LOCAL_GRADIENT
        return LocalReading(total, norms, bits, int(np.bitwise_or.reduce(bits)) if len(bits) else 0)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def weights(self) -> list[list[Tensor]]:
        """Return a copy of every layer's parameters, to measure an update by."""
        return [[p.detach().clone() for p in own] for own in self.parameters.values()]

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def weight_norms(self) -> np.ndarray:
        """Return float64 of shape (layers,): the L2 norm of each layer's parameters."""
        rows = [
            torch.stack([p.detach().double().square().sum() for p in own]) for own in self.parameters.values()
        ]
        return np.asarray(torch.stack([row.sum() for row in rows]).sqrt().cpu().numpy())

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def update_ratios(self, before: list[list[Tensor]]) -> np.ndarray:
        """Return float64 of shape (layers,): ‖W − before‖ / ‖before‖, 0 for an untouched layer."""
        moved, size = [], []
        for own, old in zip(self.parameters.values(), before, strict=True):
            pairs = list(zip(own, old, strict=True))
            moved.append(torch.stack([(p.detach() - o).double().square().sum() for p, o in pairs]).sum())
            size.append(torch.stack([o.double().square().sum() for _, o in pairs]).sum())
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(np.sqrt(torch.stack(moved).cpu().numpy() / torch.stack(size).cpu().numpy()))
