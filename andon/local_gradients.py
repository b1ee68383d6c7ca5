"""Where a rank's own gradients are complete and not yet shared, for each kind of data parallelism.

- DDP on a device: in the communication hook, bucket by bucket, before the all-reduce
  (https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html): one kernel for a bucket.
- DDP on the host: in a hook of each parameter, which runs when its gradient is complete, before DDP's
  own puts it into a bucket. There a gradient is read while it still lies in the cache, and DDP divides
  by the world size while it copies; a communication hook has to do that in a pass of its own.
- FSDP2 (`fully_shard`): on the unsharded parameter, whose hook runs before the reduce-scatter. After
  it, an Inf of rank 3 would show only on the rank that owns the slice.
- A plain loop: by a call, `observe()`, between `backward` and the loop's own reduce; with one rank, or
  one rank per stage, there is no reduce and the call is not needed.

Anything else (FSDP1, DeepSpeed's engines) gives no local gradient: its cells are *reduced*.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

if TYPE_CHECKING:
    from andon.local_norms import LocalNorms

Kind = Literal["ddp", "fsdp2", "plain", "unknown"]


def kind_of(model: nn.Module) -> Kind:
    """Return how a model shares its gradients."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return "ddp"
    if any(isinstance(p, DTensor) for p in model.parameters()):
        return "fsdp2"
    names = {type(part).__name__ for part in model.modules()}
    # By name: importing either costs seconds, and DeepSpeed may not be there.
    return "unknown" if names & {"FullyShardedDataParallel", "DeepSpeedEngine"} else "plain"


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor: the tensor itself unless it is distributed."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def norms_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the L2 norm of each tensor, on its device."""
    if not tensors:
        return []
    kinds = {tensor.dtype for tensor in tensors}
    options = {}
    if kinds & {torch.float16, torch.bfloat16}:
        # In half precision the norm itself would lose digits or overflow.
        options["dtype"] = torch.float64 if torch.float64 in kinds else torch.float32
    norms: list[Tensor] = torch._foreach_norm(list(tensors), 2, **options)
    return norms


def norm_of(tensor: Tensor) -> Tensor:
    """Return the L2 norm of one tensor, on its device, in float32 or better."""
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
    return norm


def replicas_of(parameter: Tensor, default: int) -> int:
    """Return how many ranks hold the same part of a parameter."""
    if not isinstance(parameter, DTensor):
        return default
    count = 1
    for dimension, placement in enumerate(parameter.placements):
        if isinstance(placement, Replicate):
            count *= parameter.device_mesh.size(dimension)
    return count


class Gradients(Protocol):
    """Gives the sums of squares per layer of this rank's own gradients."""

    replicas: int

    def take(self) -> Tensor | None:
        """Return float64 (layers,) on the device and start anew; None where they were not seen."""
        ...


def attach(norms: "LocalNorms", *, replicas: int | None, then: tuple[Any, Any] | None) -> Gradients:
    """Hook into a model. Call once, before the first forward."""
    if replicas is None:
        # Taking shared gradients for a rank's own would name the wrong rank.
        replicas = dist.get_world_size() if dist.is_initialized() else 1
    if norms.kind == "ddp":
        return HostDdpGradients(norms) if norms.on_host and then is None else DdpGradients(norms, then)
    if norms.kind == "fsdp2":
        return UnshardedGradients(norms)
    if norms.kind == "plain":
        return CalledGradients(norms, replicas)
    return NoGradients(1)  # FSDP1 and ZeRO hold slices: all of them make the norm


class DdpGradients:
    """Sees each bucket before it is reduced. Gradients must be reduced once a step: the micro-batches
    before the last run under `no_sync`, and the hook sees their sum."""

    def __init__(self, norms: "LocalNorms", then: tuple[Any, Any] | None) -> None:
        self._norms = norms
        self._seen: list[Tensor] = []
        self._layers: list[int] = []
        self._group = norms.model.process_group
        self._then = then or (None, self._average)
        self.replicas = dist.get_world_size(self._group)
        self.last_bucket: Any = None  # called when a rank's own backward is over
        norms.model.register_comm_hook(state=None, hook=self._hook)

    def _hook(self, _state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        norms = self._norms
        if not norms.paused:
            self._layers += [norms.layer_of[id(parameter)] for parameter in bucket.parameters()]
            self._seen += norms_of(bucket.gradients())
            if self.last_bucket is not None and bucket.is_last():
                self.last_bucket()
        state, reduce = self._then
        return reduce(state, bucket)

    def _average(self, _state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        buffer.div_(self.replicas)
        reduced = dist.all_reduce(buffer, group=self._group, async_op=True).get_future()
        return reduced.then(lambda done: done.value()[0])

    def take(self) -> Tensor | None:
        """Return what the buckets of this step held."""
        if not self._seen:
            return None
        total = self._norms.per_layer(self._seen, self._layers)
        self._seen, self._layers = [], []
        return total


class HostDdpGradients:
    """Sees each parameter's gradient, summed over the micro-batches of a step, before DDP does.

    Only in the backward whose gradients are reduced: those before it run under `no_sync`. A communication
    hook of the loop's own is not in the way.
    """

    def __init__(self, norms: "LocalNorms") -> None:
        self._norms = norms
        self._seen: dict[int, Tensor] = {}  # by the parameter's place in the order of layers
        self.replicas = dist.get_world_size(norms.model.process_group)
        self.last_bucket: Any = lambda: None  # called when a rank's own backward may be over
        for index, parameter in enumerate(norms.flat):
            parameter.register_post_accumulate_grad_hook(self._hook_of(index, parameter.dtype))

    def _hook_of(self, index: int, kind: torch.dtype) -> Any:
        norms, model, seen = self._norms, self._norms.model, self._seen
        wider = torch.promote_types(kind, torch.float32)
        options = {} if wider == kind else {"dtype": wider}
        norm = torch.linalg.vector_norm

        def hook(parameter: Tensor) -> None:
            if parameter.grad is not None and model.require_backward_grad_sync and not norms.paused:
                seen[index] = norm(parameter.grad, **options)
                self.last_bucket()

        return hook

    def take(self) -> Tensor | None:
        """Return what the hooks of this step saw."""
        if not self._seen:
            return None
        layers = [self._norms.owner[index] for index in self._seen]
        total = self._norms.per_layer(list(self._seen.values()), layers)
        self._seen.clear()
        return total


class UnshardedGradients:
    """Sees each parameter's whole gradient on this rank before FSDP2 scatters it.

    The hook runs after every backward, on the gradient summed over the micro-batches so far; the last
    one stands for the norm, and a nonfinite one stays nonfinite whatever is added. (With another reduce
    dtype FSDP2 keeps the sum itself, and the norm is that of the last micro-batch.)
    """

    def __init__(self, norms: "LocalNorms") -> None:
        self._norms = norms
        self._squares: dict[tuple[int, str], Tensor] = {}
        self._hooked: set[int] = set()
        self._kept: list[Tensor] = []  # keeps ids from being used again
        self.observer: Any = None  # sees (layer, name, gradient), for a twin step
        self.replicas = max((replicas_of(p, 1) for p in norms.model.parameters()), default=1)
        for index, part in enumerate(norms.modules.values()):
            part.register_forward_pre_hook(self._find(index))

    def _find(self, layer: int) -> Any:
        def hook(module: nn.Module, _inputs: Any) -> None:
            # FSDP2 has put the unsharded parameters in place by now; they are the same objects every step.
            for name, parameter in module._parameters.items():
                if parameter is None or id(parameter) in self._hooked or not parameter.requires_grad:
                    continue
                self._hooked.add(id(parameter))
                self._kept.append(parameter)
                parameter.register_post_accumulate_grad_hook(self._seen(layer, name))

        return hook

    def _seen(self, layer: int, name: str) -> Any:
        def hook(parameter: Tensor) -> None:
            if parameter.grad is None:
                return
            gradient = local_of(parameter.grad)
            if self.observer is not None:
                self.observer(layer, name, gradient)
            if self._norms.paused:
                return
            norm = norm_of(gradient)
            before = self._squares.get((layer, name))
            if before is not None:
                norm = torch.where(torch.isfinite(before), norm, before)
            self._squares[layer, name] = norm

        return hook

    def take(self) -> Tensor | None:
        """Return what the hooks of this step saw."""
        if not self._squares:
            return None
        norms = torch.stack(list(self._squares.values())).double().square()
        layers = self._norms.index_of([layer for layer, _ in self._squares])
        self._squares = {}
        total = torch.zeros(len(self._norms.layers), dtype=torch.float64, device=norms.device)
        return total.index_add_(0, layers, norms)


class CalledGradients:
    """A plain loop says when its gradients are its own: `observe()`.

    With one replica no reduce ever happens, so what lies in `.grad` is local at any time.
    """

    def __init__(self, norms: "LocalNorms", replicas: int) -> None:
        self._norms = norms
        self._seen: Tensor | None = None
        self.replicas = replicas

    def observe(self) -> None:
        """Look at the gradients now, before they are shared."""
        self._seen = self._norms.own_squares()

    def take(self) -> Tensor | None:
        """Return what `observe` saw; without it the gradients' own place when nobody shares them."""
        if self._seen is None and self.replicas == 1:
            self.observe()
        seen, self._seen = self._seen, None
        return seen


class NoGradients:
    """A wrapper that shows no rank's own gradients."""

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas

    def take(self) -> Tensor | None:
        """Return None: not measured."""
        return None
