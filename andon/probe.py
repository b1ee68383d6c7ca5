"""A frozen step run again: as it was, and with one condition changed.

Only this tells explanations apart: two conditions changed at once tell nothing about either, and a change
that makes a step clean tells nothing when the step is clean without it. So every probe runs the step twice
from the same weights, moments and random numbers, on one process and one device; nothing is reduced, and
no update is made.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from andon import halt_snapshot
from andon.frozen_step import FrozenStep
from andon.local_norms import LocalNorms
from andon.monitor_rerun import FirstNonfinite, RandomState, first_nonfinite
from andon.restore_check import Line, Parts
from andon.tensor_checksum import checksum

Condition = Literal["", "precision", "kernels", "batch", "device"]
Verdict = Literal["breaks", "clean", "same", "differ", "not reproduced"]


@dataclass(frozen=True)
class Frozen:
    """What the step is to be built for.

    Attributes:
        of: the snapshot.
        rank: whose step it is.
        batch: what that rank read (positions, samples, …), None where the snapshot keeps no batches.
        device: where the model has to lie.
        precision: "fp32" when nothing may be computed below it; "" as the trainer does.
    """

    of: FrozenStep
    rank: int
    batch: dict[str, Any] | None
    device: torch.device
    precision: Literal["", "fp32"] = ""


@dataclass(frozen=True)
class Step:
    """The trainer's step, fresh: what is restored, and the forward of a micro-batch that returns its loss."""

    parts: Parts
    run: Callable[[int], Tensor]
    micro_batches: int = 1


Build = Callable[[Frozen], Step]


@dataclass(frozen=True)
class Change:
    """The one condition that differs; an empty one runs the step once, as it was."""

    condition: Condition = ""
    value: str = ""

    def __str__(self) -> str:
        return f"{self.condition}={self.value}" if self.condition else "as it was"


@dataclass(frozen=True)
class Outcome:
    """What one run of the step gave.

    Attributes:
        loss: the last micro-batch's; `grad_norm`: L2 over all gradients of this process, before clipping.
        first: the first nonfinite tensor in the order of computation.
        digest: order-independent checksum of the loss and every gradient.
        restored: what the restore's check said of each part.
    """

    loss: float
    grad_norm: float
    first: FirstNonfinite | None
    digest: int
    restored: tuple[Line, ...]

    @property
    def breaks(self) -> bool:
        """Whether anything was nonfinite."""
        return self.first is not None or not (math.isfinite(self.loss) and math.isfinite(self.grad_norm))


@dataclass(frozen=True)
class Result:
    """What a probe found; `changed` is None where nothing was to be changed."""

    change: Change
    unchanged: Outcome
    changed: Outcome | None
    verdict: Verdict


def probe(build: Build, of: FrozenStep, *, rank: int, change: Change, device: str = "") -> Result:
    """Run a frozen step as it was, and again with one condition changed.

    Args:
        build: makes the trainer's step; called anew for each run.
        rank: whose batch and random numbers are taken.
        device: where the unchanged step runs; "" is the first GPU, or the CPU where there is none.

    Raises:
        ValueError: the change cannot be made (no such batch, no such device).
    """
    plain = _device(device)
    before = _once(build, Frozen(of, rank, of.batch(rank, of.step), plain), Change())
    if not change.condition:
        return Result(change, before, None, "breaks" if before.breaks else "clean")
    after = _once(build, _frozen(of, rank, change, plain), change)
    if change.condition == "device":
        verdict: Verdict = "same" if before.digest == after.digest else "differ"
    elif not before.breaks:
        verdict = "not reproduced"
    else:
        verdict = "breaks" if after.breaks else "clean"
    return Result(change, before, after, verdict)


def _frozen(of: FrozenStep, rank: int, change: Change, plain: torch.device) -> Frozen:
    batch, device = of.batch(rank, of.step), plain
    if change.condition == "batch":
        batch = of.batch(rank, int(change.value))
        if batch is None:
            kept = ", ".join(map(str, of.other_steps(rank)[-8:])) or "none"
            raise ValueError(
                f"batch={change.value}: the snapshot keeps no batch of that step; it keeps {kept}"
            )
    if change.condition == "device":
        device = _device(change.value)
    return Frozen(of, rank, batch, device, "fp32" if change.condition == "precision" else "")


def _device(name: str) -> torch.device:
    if not name:
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={name}: this machine has {torch.cuda.device_count()} of them")
    return device


def _once(build: Build, frozen: Frozen, change: Change) -> Outcome:
    with ExitStack() as stack:
        stack.enter_context(_deterministic())
        if frozen.precision == "fp32":
            stack.enter_context(_no_autocast())
        if change.condition == "kernels":
            stack.enter_context(_unfused())
        step = build(frozen)
        restored = halt_snapshot.read(frozen.of.directory, step.parts, rank=frozen.rank)
        model = step.parts.model
        if frozen.precision == "fp32":
            model.float()
        norms = LocalNorms(model)
        random_state = RandomState.take()
        loss = _backward(step)
        digest, squares = 0, 0.0
        for parameter in model.parameters():
            if parameter.grad is not None:
                digest += int(checksum(parameter.grad))
                squares += float(parameter.grad.detach().double().square().sum())
        outcome_loss = float(loss.detach())
        digest = (digest + int(checksum(loss.detach()))) % 2**63
        norm = math.sqrt(squares) if math.isfinite(squares) else squares
        first = None
        if not (math.isfinite(outcome_loss) and math.isfinite(norm)):
            model.zero_grad(set_to_none=True)
            first = first_nonfinite(
                norms, step.run, micro_batches=step.micro_batches, random_state=random_state
            )
        return Outcome(outcome_loss, norm, first, digest, tuple(restored))


def _backward(step: Step) -> Tensor:
    step.parts.model.zero_grad(set_to_none=True)
    for index in range(step.micro_batches):
        loss = step.run(index)
        if loss.requires_grad:
            loss.backward()
    return loss


@contextmanager
def _deterministic() -> Iterator[None]:
    """Same inputs, same bits, where the device has such kernels."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextmanager
def _no_autocast() -> Iterator[None]:
    """Nothing is computed below fp32, whatever `torch.autocast` the step enters; TF32 is off as well."""
    made = torch.autocast.__init__

    def off(self: Any, device_type: str, *given: Any, **named: Any) -> None:
        made(self, device_type, enabled=False)

    precision = torch.get_float32_matmul_precision()
    torch.autocast.__init__ = off
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.autocast.__init__ = made
        torch.set_float32_matmul_precision(precision)


@contextmanager
def _unfused() -> Iterator[None]:
    """Attention by plain products, no compiled graphs, no cuDNN."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    compiled = torch._dynamo.config.disable
    torch._dynamo.config.disable = True
    try:
        with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False):
            yield
    finally:
        torch._dynamo.config.disable = compiled
