"""Lightning: every step agreed on by all ranks before its update.

    from andon.integrations.lightning import AndonCallback
    trainer = Trainer(callbacks=[AndonCallback(directory="checkpoints")], …)
    trainer.fit(model)

Under DDP and FSDP2 (`ModelParallelStrategy`) a rank's own gradients are seen before the reduce.
"""

import os
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from andon.integrations.outside_loop import OutsideLoop
from andon.watch import Watch, watch

__all__ = ["AndonCallback"]


class AndonCallback(Callback):  # type: ignore[misc]
    """Watches a `Trainer.fit`. Options: those of `andon.watch.watch` (url, run, policy, …).

    Raises, in training:
        SystemExit: 93, the run is held.
        ValueError: the module has several optimizers, or a loss scaler, whose gradients are unscaled
            before any hook sees them; bf16 needs none.
    """

    def __init__(self, *, directory: str | os.PathLike[str], **options: Any) -> None:
        self._directory = directory
        self._options = options
        self._loop: OutsideLoop | None = None
        self._samples = 0

    @property
    def watch(self) -> Watch | None:
        """The monitor while training goes on."""
        return self._loop.watch if self._loop is not None else None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to watch: models are wrapped and a checkpoint is loaded by now."""
        if len(trainer.optimizers) != 1:
            raise ValueError(f"AndonCallback: {len(trainer.optimizers)} optimizers; it watches one")
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            raise ValueError("AndonCallback: a loss scaler (16-mixed) is not watched here; use bf16-mixed")
        made = watch(
            trainer.strategy.model,
            trainer.optimizers[0],
            directory=self._directory,
            **({"first_step": trainer.global_step + 1} | self._options),
        )
        self._loop = OutsideLoop(made)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Take the loss; Lightning has divided it by the number of micro-batches."""
        if self._loop is not None:
            self._loop.micro_batch(loss)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Agree on the step, before its gradients are clipped."""
        if self._loop is not None:
            self._loop.gradients_ready()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the step that was applied, or not."""
        if self._loop is not None:
            self._samples += _rows(batch) * trainer.world_size
            self._loop.step_done(samples=self._samples)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Post what a validation measured; it never holds a run."""
        if self._loop is None or trainer.sanity_checking or self._loop.watch.place.rank != 0:
            return
        told = {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if not name.startswith("train") and name not in ("loss", "grad_norm", "lr")
        }
        if told:
            self._loop.watch.post([{"type": "step", "step": self._loop.watch.number, "data": told}])

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Post the rest."""
        if self._loop is not None:
            self._loop.watch.close()
            self._loop = None


def _rows(batch: Any) -> int:
    """Return how many samples a batch of tensors holds: the first dimension of the first tensor."""
    if isinstance(batch, torch.Tensor):
        return int(batch.shape[0]) if batch.ndim else 1
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ()
    return next((rows for part in parts if (rows := _rows(part))), 0)
