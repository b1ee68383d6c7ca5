"""What one rank computed by itself: per-layer gradient norms and nonfinite flags, before any reduce.

After a reduce every rank holds the same numbers, or a slice of them, and nothing names the rank that
broke; andon/local_gradients.py says where each kind of parallelism still has a rank's own gradients.
All flags and norms stay tensors on the device; whoever reads a step moves them to the host at once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from andon.local_gradients import attach, kind_of, local_of, norms_of

BIT_INPUT, BIT_FORWARD, BIT_LOCAL_GRADIENT, BIT_REDUCED_GRADIENT = 1, 2, 4, 8
BIT_OPTIMIZER, BIT_WEIGHT, BIT_SKIPPED = 16, 32, 64

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # of torch.compile and activation checkpointing

View = Literal["local", "reduced"]


class LocalReading(msgspec.Struct, frozen=True):
    """One step of one rank. `layers` gives the order of the arrays, which is the order of registration.

    Attributes:
        grad_norm: L2 over all parameters of this rank's own gradient (unscaled, before clipping); NaN or
            inf if it is. Under view "reduced" it is NaN and was not measured.
        layer_squares: of each layer's gradient, as it was scaled by `scale`; None: not measured.
        layer_bits: int64, one per layer: BIT_FORWARD (its output), BIT_LOCAL_GRADIENT.
        bits: the layers' bits joined.
        view: "reduced" where this rank's own gradients could not be seen: nothing here names a rank.
        activations: RMS of each layer's outputs where asked for, else None.
    """

    grad_norm: float
    layer_squares: Sequence[float] | None
    scale: float
    layer_bits: np.ndarray
    bits: int
    view: View = "local"
    activations: np.ndarray | None = None

    @property
    def layer_grad_norm(self) -> np.ndarray:
        """float64, one per layer."""
        if self.layer_squares is None:
            return np.full(len(self.layer_bits), math.nan)
        return np.sqrt(self.layer_squares) / self.scale


class LocalNorms:
    """Watches a model. A *layer* is a module that owns parameters itself.

    Arguments:
        model: a DistributedDataParallel module, a model after `fully_shard`, or a plain one.
        forward: flag nonfinite outputs of every layer in every step. It reads all activations once more;
            without it a rank is named by its loss, and the layer by running the step again.
        replicas: how many ranks hold the same parameters where the wrapper does not say: a plain loop's
            data-parallel size. None: all ranks. With 1 nobody shares gradients: they are local at any time.
        then: DDP only: a communication hook of your own `(state, hook)` that does the reduce. On the host it
            may as well be registered with DDP itself.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        forward: bool = True,
        replicas: int | None = None,
        then: tuple[Any, Any] | None = None,
    ) -> None:
        self.model = model
        self.kind = kind_of(model)
        module = model.module if self.kind == "ddp" else model
        self.module = module
        self.parameters: dict[str, list[Tensor]] = {}
        self.modules: dict[str, nn.Module] = {}
        self.layer_of: dict[int, int] = {}
        for name, part in module.named_modules(remove_duplicate=True):
            # A tied parameter counts once, for the layer that registered it first.
            every = part.parameters(recurse=False)
            own = [p for p in every if p.requires_grad and id(p) not in self.layer_of]
            if not own:
                continue
            index = len(self.parameters)
            layer = plain_name(name) or "model"
            self.parameters[layer] = own
            self.modules[layer] = part
            self.layer_of.update((id(parameter), index) for parameter in own)
            if forward:
                part.register_forward_hook(self._forward_hook(index))
        self.layers = list(self.parameters)
        if forward and self.layers and "model" not in self.parameters:
            # What is computed behind the last layer is this rank's too, before the next stage has it.
            module.register_forward_hook(self._forward_hook(len(self.layers) - 1))
        self.flat = [p for own in self.parameters.values() for p in own]
        self.owner = [i for i, own in enumerate(self.parameters.values()) for _ in own]
        self.device = self.flat[0].device if self.flat else torch.device("cpu")
        self.on_host = self.device.type == "cpu"
        self._indexes: dict[tuple[int, ...], Tensor] = {}
        self._empty = torch.zeros(len(self.layers), dtype=torch.float64, device=self.device)
        self._forward_bad: list[list[Tensor]] = [[] for _ in self.layers]
        self._activation: list[list[Tensor]] = [[] for _ in self.layers]
        self._handles: list[Any] = []
        self.paused = False
        self.gradients = attach(self, replicas=replicas, then=then)

    # --- forward

    def _forward_hook(self, index: int) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            if not self.paused:
                for tensor in float_tensors(output):
                    self._forward_bad[index].append(~torch.isfinite(tensor).all())

        return hook

    def request_activations(self) -> None:
        """Measure each layer's output norm until the next `take`: hooks that stay for one step only."""

        def hook_of(index: int) -> Any:
            def hook(_module: Any, _inputs: Any, output: Any) -> None:
                if not self.paused:
                    for tensor in float_tensors(output):
                        mean = tensor.square().mean(dtype=torch.float64)
                        self._activation[index].append(mean)

            return hook

        if not self._handles:
            self._handles = [
                part.register_forward_hook(hook_of(index)) for index, part in enumerate(self.modules.values())
            ]

    # --- gradients

    def layer_squares(self, gradients: Sequence[Tensor | None], layers: Sequence[int]) -> Tensor:
        """Return the sum of squares per layer, float64 on the device, of gradients in these layers.

        Foreach kernels in the tensors' own precision (float32 for half precision), which is many times
        faster than in float64. A norm that float32 cannot hold (above 3.4e38, or an element above 1.8e19)
        counts as nonfinite, as every framework's gradient norm has it.
        """
        kept = [(local_of(g), layer) for g, layer in zip(gradients, layers, strict=True) if g is not None]
        return self.per_layer(norms_of([g for g, _ in kept]), [layer for _, layer in kept])

    def per_layer(self, norms: Sequence[Tensor], layers: Sequence[int]) -> Tensor:
        """Return the sum of squares per layer, float64 on the device, of norms in these layers."""
        if not norms:
            return self._empty
        return self._empty.index_add(0, self.index_of(layers), torch.stack(tuple(norms)).double().square())

    def index_of(self, layers: Sequence[int]) -> Tensor:
        """Return layer numbers on the device. Kept, since copying them there would wait for the device."""
        key = tuple(layers)
        if key not in self._indexes:
            self._indexes[key] = torch.tensor(key, dtype=torch.long, device=self.device)
        return self._indexes[key]

    def own_squares(self) -> Tensor:
        """Return the sum of squares per layer of the gradients as they lie in `.grad` now."""
        return self.layer_squares([p.grad for p in self.flat], self.owner)

    def own_square(self) -> Tensor:
        """Return the sum of squares of all gradients as they lie in `.grad` now: one number on the device."""
        norms = norms_of([local_of(p.grad) for p in self.flat if p.grad is not None])
        if not norms:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        return torch.stack(norms).double().square().sum()

    def take(self) -> "Taken":
        """Return what this step saw, on the device, and start anew. Call after `backward`."""
        squares = self.gradients.take()
        forward = None
        if any(self._forward_bad):
            false = torch.zeros((), dtype=torch.bool, device=self.device)
            forward = torch.stack([torch.stack(f).any() if f else false for f in self._forward_bad])
        activations = None
        if any(self._activation):
            nothing = torch.full((), float("nan"), dtype=torch.float64, device=self.device)
            rows = [torch.stack(a).mean() if a else nothing for a in self._activation]
            activations = torch.stack(rows).sqrt()
        for kept in (*self._forward_bad, *self._activation):
            kept.clear()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        return Taken(squares, forward, activations)

    # --- weights

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def weights(self) -> list[Tensor]:
        """Return a copy of this rank's part of every parameter, to measure an update by."""
        return [local_of(p.detach()).clone() for p in self.flat]

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def weight_squares(self) -> Tensor:
        """Return float64 of shape (layers,): the sum of squares of this rank's part of each layer."""
        return self.layer_squares([p.detach() for p in self.flat], self.owner)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def update_squares(self, before: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return, per layer, the sums of squares of W − before and of `before`."""
        size = self.layer_squares(before, self.owner)
        now = [local_of(p.detach()) for p in self.flat]
        moved = torch._foreach_sub(now, before)
        return self.layer_squares(moved, self.owner), size

    @property
    def sharded(self) -> bool:
        """Whether weights are slices of a layer, so that their norms are a shard's."""
        return self.kind in ("fsdp2", "unknown")


@dataclass(frozen=True)
class Taken:
    """One step of one rank, still on the device. None: not measured."""

    squares: Tensor | None
    forward: Tensor | None
    activations: Tensor | None

    @property
    def own(self) -> Tensor | None:
        """A float64 on the device, nonfinite where anything here is; None when nothing was measured."""
        # Squares of what float32 can hold do not overflow a sum in float64.
        found = None if self.squares is None else self.squares.sum()
        if self.forward is not None:
            nothing = torch.zeros((), dtype=torch.float64, device=self.forward.device)
            flag = torch.where(self.forward.any(), nothing + math.nan, nothing)
            found = flag if found is None else found + flag
        return found


def reading(
    squares: Sequence[float] | None,
    forward: Sequence[float] | None,
    activations: np.ndarray | None,
    *,
    layers: int,
    scale: float = 1.0,
) -> LocalReading:
    """Return the reading of what arrived on the host, a value per layer; `scale` is an fp16 loss scale."""
    if squares is None:
        norm, bits = math.nan, _no_bits(layers)
    else:
        total = sum(squares)
        norm = math.sqrt(total) / scale
        bits = _no_bits(layers)
        if not math.isfinite(total):
            bits = (~np.isfinite(squares)).astype(np.int64) * BIT_LOCAL_GRADIENT
    if forward is not None:
        bits = bits | np.array(forward, np.int64) * BIT_FORWARD
    joined = 0 if bits is _no_bits(layers) else int(np.bitwise_or.reduce(bits))
    view: View = "reduced" if squares is None else "local"
    return LocalReading(norm, squares, scale, bits, joined, view, activations)


@cache
def _no_bits(layers: int) -> np.ndarray:
    bits = np.zeros(layers, np.int64)
    bits.flags.writeable = False
    return bits


def float_tensors(output: Any) -> list[Tensor]:
    """Return the floating-point tensors of a module's output, detached."""
    parts = output if isinstance(output, tuple | list) else (output,)
    return [p.detach() for p in parts if isinstance(p, Tensor) and p.is_floating_point()]


def plain_name(name: str) -> str:
    """Return a module's name without what torch.compile and activation checkpointing put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "").removesuffix(wrapper.rstrip("."))
    return name.rstrip(".")
