"""Compute and wait time of one rank: CUDA events on a GPU, the monotonic clock otherwise.

*Compute* runs from the begin of the step to the moment this rank's own backward is complete; *wait* from
there until all ranks have met in the fused reduce. A straggler computes long and waits short, its peers
the other way round.

Under FSDP2 the ranks also meet at every all-gather, so that all of them would seem to compute as long as
the slowest. There *compute* is that of the forward without its waits for parameters, and *wait* is
those waits and the fused reduce; what backward waits is in neither.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

Span = tuple[Any, Any]  # two marks


class Mark(msgspec.Struct, frozen=True):
    """The spans of one step in which this rank computed, and in which it waited; what it waited within a
    computing span counts against that."""

    computed: tuple[Span, ...]
    waited: tuple[Span, ...]
    within: tuple[Span, ...] = ()


class StepTimes:
    """Marks one step after the other."""

    def __init__(self, device: torch.device, model: nn.Module, *, forward_only: bool) -> None:
        self._cuda = device.type == "cuda"
        self._forward_only = forward_only
        self._begin = self._mark()
        self._local: Any = None
        self._forward: list[Span] = []
        self._gathers: list[Span] = []
        self._waits: list[Span] = []
        self._forward_began: Any = None
        self.last: Mark | None = None
        if forward_only:
            self._hook(model)

    def _hook(self, model: nn.Module) -> None:
        """Around the hooks of FSDP2, which wait for parameters before each module's forward."""
        waiting: list[Any] = []

        def before(_module: nn.Module, _inputs: Any) -> None:
            waiting.append(self._mark())

        def after(_module: nn.Module, _inputs: Any) -> None:
            began = waiting.pop()
            if self._forward_began is not None:  # else a layer computed again in backward
                self._gathers.append((began, self._mark()))

        def root_before(_module: nn.Module, _inputs: Any) -> None:
            self._forward_began = self._mark()

        def root_after(_module: nn.Module, _inputs: Any, _output: Any) -> None:
            self._forward.append((self._forward_began, self._mark()))
            self._forward_began = None

        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.register_forward_pre_hook(before, prepend=True)
                part.register_forward_pre_hook(after)
        model.register_forward_pre_hook(root_before, prepend=True)
        model.register_forward_hook(root_after)

    def _mark(self) -> Any:
        if not self._cuda:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self) -> None:
        """Begin a step: when its batch is there."""
        self._begin, self._local = self._mark(), None
        self._forward, self._gathers, self._waits = [], [], []

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """What happens within is waiting for another rank, not this one's computing."""
        began = self._mark()
        try:
            yield
        finally:
            self._waits.append((began, self._mark()))

    def local(self) -> None:
        """This rank's own gradients are complete. The last call of a step counts."""
        self._local = self._mark()

    def meeting(self) -> None:
        """All ranks are about to meet in the fused reduce."""
        if self._forward_only:
            self._local = self._mark()

    def reduced(self) -> None:
        """All ranks have met."""
        local = self._local or self._begin
        met = (local, self._mark())
        if self._forward_only:
            gathers = tuple(self._gathers)
            self.last = Mark(tuple(self._forward), (*gathers, met), gathers)
        else:
            waits = tuple(self._waits)
            self.last = Mark(((self._begin, local),), (*waits, met), waits)

    def seconds(self, mark: Mark | None) -> tuple[float, float]:
        """Return (compute_s, wait_s) of a marked step; NaN is not measured. Never waits for the device: call
        when the step's transfer to the host is over."""
        if mark is None:
            return float("nan"), float("nan")
        compute_s = self._sum(mark.computed) - self._sum(mark.within) if mark.computed else float("nan")
        return compute_s, self._sum(mark.waited)

    def _sum(self, spans: tuple[Span, ...]) -> float:
        if self._cuda:
            return float(sum(begin.elapsed_time(end) / 1e3 for begin, end in spans))
        return float(sum(end - begin for begin, end in spans))
