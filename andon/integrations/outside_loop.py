"""What all trainers that step the optimizer themselves have in common.

A bad update is dropped by taking its gradients away: an optimizer leaves parameters without a gradient
alone, so weights, moments and step count stay as they were. An fp16 scaler decides by what it finds in
the gradients, so there a value that it finds is put in on every rank.
"""

from typing import Any

import torch
from torch import Tensor

from andon.local_gradients import local_of
from andon.monitor_agreement import Agreement
from andon.watch import Watch


class OutsideLoop:
    """Watches the steps of a loop from its hooks: `micro_batch`, `gradients_ready`, `step_done`.

    A step is decided when its gradients are complete and before anything is clipped, unscaled or applied.
    """

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self._agreed: Agreement | None = None
        self._shares: list[Tensor] = []

    def micro_batch(self, loss: Tensor | None) -> None:
        """Tell one micro-batch's share of the step's loss: the shares add up to this rank's mean."""
        if loss is not None:
            self._shares.append(loss.detach())

    def gradients_ready(self) -> None:
        """Agree on the step. Call on every rank.

        Raises:
            SystemExit: 93; the step was not applied.
        """
        # The shares make up one mean per rank, and every rank's counts alike.
        for share in self._shares:
            self.watch.micro_batch(share * len(self._shares))
        self._shares = []
        agreed = self.watch.before_update()
        if agreed.skip:
            self._drop()
        else:
            self.watch.optimizer_step += 1
        if agreed.halt:
            self.watch.after_update(agreed)  # returns when a permit lets the ranks go on in place
            self._agreed = None
        else:
            self._agreed = agreed

    def step_done(self, *, samples: int | None = None, **extra: Any) -> None:
        """Record the step after its update, and obey an order that came meanwhile. Call on every rank.

        Args:
            samples: consumed by all ranks up to here.
            extra: more values to post with the step.
        """
        agreed, self._agreed = self._agreed, None
        if samples is not None:
            self.watch.samples = samples
        if agreed is not None:
            self.watch.after_update(agreed, **extra)

    def _drop(self) -> None:
        scaler = self.watch.scaler
        parameters = [p for group in self.watch.optimizer.param_groups for p in group["params"]]
        if scaler is not None and scaler.is_enabled():
            for parameter in parameters:
                if parameter.grad is not None:
                    local_of(parameter.grad).fill_(torch.inf)
            return
        for parameter in parameters:
            parameter.grad = None
