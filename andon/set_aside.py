"""Running a model's forward and backward beside the training step, without leaving a trace in it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from andon.local_norms import LocalNorms


@contextmanager
def set_aside(norms: LocalNorms) -> Iterator[None]:
    """Lay gradients and buffers aside, look away with the step's own hooks, and reduce nothing under DDP;
    everything is as before afterwards. Under FSDP2 the ranks still meet, so all must run."""
    parameters = [p for p in norms.model.parameters() if p.requires_grad]
    gradients = [p.grad for p in parameters]
    buffers = [(buffer, buffer.detach().clone()) for buffer in norms.model.buffers()]
    for parameter in parameters:
        parameter.grad = None
    looked_away, norms.paused = norms.paused, True
    try:
        with ExitStack() as stack:
            if norms.kind == "ddp":
                stack.enter_context(norms.model.no_sync())
            yield
    finally:
        norms.paused = looked_away
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, kept in buffers:
                buffer.copy_(kept)
