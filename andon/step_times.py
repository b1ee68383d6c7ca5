"""Compute and wait time of one rank: CUDA events on a GPU, the monotonic clock otherwise.

*Compute* runs from the begin of the step to the moment this rank's own backward is complete; *wait* from
there until all ranks have met in the fused reduce. A straggler computes long and waits short, its peers
the other way round. Where the ranks also meet inside forward and backward (FSDP2's all-gathers), each
one's compute contains its waits, so it is not said: only the wait of the fused reduce is.
"""

import time
from typing import Any

import torch

Mark = tuple[Any, Any, Any]  # when a step began, when its own gradients were complete, when all had met


class StepTimes:
    """Marks one step after the other."""

    def __init__(self, device: torch.device, *, compute: bool) -> None:
        self._cuda = device.type == "cuda"
        self._compute = compute
        self._begin = self._mark()
        self._local: Any = None
        self.last: Mark | None = None

    def _mark(self) -> Any:
        if not self._cuda:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self) -> None:
        """Begin a step: when its batch is there."""
        self._begin, self._local = self._mark(), None

    def local(self) -> None:
        """This rank's own gradients are complete. The last call of a step counts."""
        self._local = self._mark()

    def reduced(self) -> None:
        """All ranks have met."""
        self.last = (self._begin, self._local or self._begin, self._mark())

    def seconds(self, mark: Mark | None) -> tuple[float, float]:
        """Return (compute_s, wait_s) of a marked step; NaN is not measured. Never waits for the device: call
        when the step's transfer to the host is over."""
        if mark is None:
            return float("nan"), float("nan")
        begin, local, end = mark
        if self._cuda:
            compute_s, wait_s = begin.elapsed_time(local) / 1e3, local.elapsed_time(end) / 1e3
        else:
            compute_s, wait_s = local - begin, end - local
        return (compute_s if self._compute else float("nan")), wait_s
