"""What all trainers that step the optimizer themselves have in common.

A bad update is dropped by taking its gradients away: an optimizer leaves parameters without a gradient
alone, so weights, moments and step count stay as they were. An fp16 scaler decides by what it finds in
the gradients, so there a value that it finds is put in on every rank.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from andon.batch_ring import BatchFacts
from andon.integrations.lineage import joined
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
        self._batches: list[BatchFacts] = []

    def micro_batch(self, loss: Tensor | None, batch: BatchFacts | None = None) -> None:
        """Tell one micro-batch: its share of the step's loss (the shares add up to this rank's mean), and
        what was in it."""
        if loss is not None:
            self._shares.append(loss.detach())
        if batch is not None:
            self._batches.append(batch)

    def begin(self) -> None:
        """Say that a step begins, its batch being there: a bad one may then run again as it was."""
        if not self._shares and not self._batches:
            self.watch.begin()

    def gradients_ready(self, rerun: Callable[[int], Tensor] | None = None) -> None:
        """Agree on the step. Call on every rank.

        Args:
            rerun: forward of a micro-batch by index on the same batch, to name the first nonfinite tensor.

        Raises:
            SystemExit: 93; the step was not applied.
        """
        # The shares make up one mean per rank, and every rank's counts alike.
        for share in self._shares:
            self.watch.micro_batch(share * len(self._shares))
        self._shares = []
        agreed = self.watch.before_update(rerun=rerun)
        if agreed.skip:
            self._drop()
        else:
            self.watch.optimizer_step += 1
        if agreed.halt:
            # Returns when a permit lets the ranks go on in place.
            self.watch.after_update(agreed, batch=self._batch(None))
            self._agreed = None
        else:
            self._agreed = agreed

    def step_done(self, *, samples: int | None = None, **extra: Any) -> None:
        """Record the step after its update, and obey an order that came meanwhile. Call on every rank.

        Args:
            samples: consumed by all ranks up to here, where the batches do not tell.
            extra: more values to post with the step.
        """
        agreed, self._agreed = self._agreed, None
        if agreed is not None:
            self.watch.after_update(agreed, batch=self._batch(samples), **extra)

    def _batch(self, samples: int | None) -> BatchFacts:
        batch, self._batches = joined(self._batches), []
        if samples is not None:
            # The monitor counts what the batch tells on top.
            told = len(batch.positions or batch.lengths) * self.watch.place.world_size
            self.watch.samples = samples - told
        return batch

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
