"""The first nonfinite tensor of a bad step, named by running the step once more with hooks on.

Watching every output and gradient in every step would cost too much; a bad step is rare, and its batch is
still here. So the step runs again from the same random numbers, on all ranks (under FSDP2 no rank can run
alone), with a hook on every module and on every gradient, and the first nonfinite value in the order of
computation is named: by micro-batch, then forward, then backward. What does not show again was
transient, which is evidence too: data and code would fail again.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from andon.local_norms import BIT_FORWARD, BIT_INPUT, BIT_LOCAL_GRADIENT, LocalNorms, plain_name
from andon.set_aside import set_aside

What = Literal["input", "forward", "loss", "gradient", "parameter gradient"]
BIT_OF: dict[What, int] = {
    "input": BIT_INPUT,
    "forward": BIT_FORWARD,
    "loss": BIT_FORWARD,
    "gradient": BIT_LOCAL_GRADIENT,
    "parameter gradient": BIT_LOCAL_GRADIENT,
}


@dataclass(frozen=True)
class FirstNonfinite:
    """The first nonfinite tensor of one rank.

    Attributes:
        module: the module at which it was seen; for "loss", "loss".
        what: "input" (of the batch itself), "forward", "loss", "gradient" or "parameter gradient".
        name: "output" or "input" of the module (a forward *input* was computed between the modules before
            and this one, a gradient of its *output* behind it), or the parameter.
    """

    module: str
    what: What
    micro_batch: int
    name: str | None = None

    def document(self) -> dict[str, Any]:
        """Return it as JSON-ready data."""
        found: dict[str, Any] = {"module": self.module, "what": self.what, "micro_batch": self.micro_batch}
        return found if self.name is None else found | {"name": self.name}

    @property
    def bit(self) -> int:
        """The bit of the wire's bit set."""
        return BIT_OF[self.what]


@dataclass(frozen=True)
class RandomState:
    """Every random number generator a step may draw from."""

    torch_cpu: Tensor
    cuda: tuple[Tensor, ...]
    numpy: Any
    python: Any

    @classmethod
    def take(cls) -> "RandomState":
        """Return the state now. It lies on the host: nothing waits for a device."""
        cuda = (torch.cuda.get_rng_state(),) if torch.cuda.is_initialized() else ()
        return cls(torch.get_rng_state(), cuda, np.random.get_state(), random.getstate())

    def put(self) -> None:
        """Go back to it."""
        torch.set_rng_state(self.torch_cpu)
        for state in self.cuda:
            torch.cuda.set_rng_state(state)
        np.random.set_state(self.numpy)
        random.setstate(self.python)


class _Hooks:
    """Collects what is nonfinite, in the order of computation."""

    def __init__(self, module: nn.Module) -> None:
        self.first: FirstNonfinite | None = None
        self.micro_batch = 0
        self._backward = False
        self._handles: list[Any] = []
        # Gradient hooks make outputs views, which in-place activations may not change: then parameters only.
        changes_in_place = any(getattr(part, "inplace", False) for part in module.modules())
        for name, part in module.named_modules():
            layer = plain_name(name) or "model"
            leaf = not _has_parts(part)
            self._handles.append(part.register_forward_hook(self._forward(layer, leaf=leaf)))
            if leaf and not changes_in_place:
                self._handles.append(part.register_full_backward_pre_hook(self._gradient_in(layer)))
                self._handles.append(part.register_full_backward_hook(self._gradient_out(layer)))

    def _found(self, module: str, what: What, name: str | None = None) -> None:
        if self.first is None:
            self.first = FirstNonfinite(module, what, self.micro_batch, name)

    def _forward(self, layer: str, *, leaf: bool) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if self.first is not None:
                return
            if leaf and not _finite(inputs):
                # What needs a gradient was computed before, here or on the stage that sent it.
                if any(isinstance(one, Tensor) and one.requires_grad for one in inputs):
                    self._found(layer, "forward", "input")
                else:
                    self._found(layer, "input", "input")
            elif not _finite(output):
                self._found(layer, "forward", "output")
            elif not self._backward:
                self._watch(layer, module)

        return hook

    def _watch(self, layer: str, module: nn.Module) -> None:
        # Here, since FSDP2's parameters are whole only now; hooks on a parameter run when its gradient is.
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad:
                self._handles.append(parameter.register_hook(self._parameter(layer, name)))

    def _parameter(self, layer: str, name: str) -> Any:
        def hook(gradient: Tensor) -> None:
            if self.first is None and not _finite(gradient):
                self._found(layer, "parameter gradient", name)

        return hook

    def _gradient_in(self, layer: str) -> Any:
        def hook(_module: nn.Module, got: Any) -> None:
            if self.first is None and not _finite(got):
                self._found(layer, "gradient", "output")

        return hook

    def _gradient_out(self, layer: str) -> Any:
        def hook(_module: nn.Module, gave: Any, _got: Any) -> None:
            if self.first is None and not _finite(gave):
                self._found(layer, "gradient", "input")

        return hook

    def loss(self, loss: Tensor) -> None:
        """Look at the loss, between forward and backward."""
        if self.first is None and not _finite(loss):
            self._found("loss", "loss")
        self._backward = True

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def first_nonfinite(
    norms: LocalNorms,
    run: Callable[[int], Tensor],
    *,
    micro_batches: int = 1,
    random_state: RandomState | None = None,
) -> FirstNonfinite | None:
    """Run a step again and return this rank's first nonfinite tensor; None when all was finite this time.

    Call on every rank. Gradients, buffers and random numbers are as before afterwards; nothing is reduced
    that the loop sees.

    Args:
        run: forward of a micro-batch by its index, on the same batch as before; returns the loss as it is
            given to `backward` (scaled, if it was).
        random_state: taken when the step began.
    """
    now = RandomState.take()
    hooks = _Hooks(norms.module)
    try:
        with set_aside(norms):
            if random_state is not None:
                random_state.put()
            for index in range(micro_batches):
                hooks.micro_batch, hooks._backward = index, False
                loss = run(index)
                hooks.loss(loss)
                if loss.requires_grad:
                    loss.backward()
    finally:
        hooks.close()
        now.put()
    return hooks.first


def _has_parts(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _finite(values: Any) -> bool:
    if isinstance(values, Tensor):
        return not values.is_floating_point() or bool(torch.isfinite(values.detach()).all())
    if isinstance(values, tuple | list):
        return all(_finite(one) for one in values)
    return True
