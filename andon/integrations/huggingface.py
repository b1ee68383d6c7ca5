"""Hugging Face `Trainer`: every step agreed on by all ranks before its update.

    from andon.integrations.huggingface import AndonCallback
    trainer.add_callback(AndonCallback(trainer, directory="checkpoints"))
    trainer.train()

The Trainer's own log replaces a NaN loss by the running mean (`logging_nan_inf_filter`) and names it only
every `logging_steps`; here each micro-batch's loss is taken where the Trainer computes it.
"""

import functools
import os
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from andon.integrations.outside_loop import OutsideLoop
from andon.watch import Watch, watch

__all__ = ["AndonCallback"]


class AndonCallback(TrainerCallback):  # type: ignore[misc]
    """Watches a `Trainer`. Options: those of `andon.watch.watch` (url, run, policy, …).

    Raises, in training:
        SystemExit: 93, the run is held.
    """

    def __init__(self, trainer: Trainer, *, directory: str | os.PathLike[str], **options: Any) -> None:
        self._trainer = trainer
        self._directory = directory
        self._options = options
        self._loop: OutsideLoop | None = None

    @property
    def watch(self) -> Watch | None:
        """The monitor while training goes on."""
        return self._loop.watch if self._loop is not None else None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Begin to watch: models are wrapped and a checkpoint is loaded by now."""
        trainer = self._trainer
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # accelerate wraps it
        made = watch(
            trainer.model_wrapped,
            optimizer,
            directory=self._directory,
            schedule=trainer.lr_scheduler,
            scaler=getattr(trainer.accelerator, "scaler", None),
            **({"first_step": state.global_step + 1} | self._options),
        )
        self._loop = OutsideLoop(made)
        inner = trainer.training_step

        @functools.wraps(inner)
        def training_step(*given: Any, **named: Any) -> torch.Tensor:
            loss = inner(*given, **named)
            if self._loop is not None:
                self._loop.micro_batch(loss)
                if trainer.accelerator.sync_gradients:
                    self._loop.gradients_ready()
            return loss

        trainer.training_step = training_step
        self._unwrap = functools.partial(setattr, trainer, "training_step", inner)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Record the step that was applied, or not."""
        if self._loop is not None:
            batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
            self._loop.step_done(samples=state.global_step * batch)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Post what an evaluation measured; it never holds a run."""
        if self._loop is None or not metrics or self._loop.watch.place.rank != 0:
            return
        numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        self._loop.watch.post([{"type": "step", "step": state.global_step, "data": numbers}])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Post the rest."""
        if self._loop is not None:
            self._unwrap()
            self._loop.watch.close()
            self._loop = None
