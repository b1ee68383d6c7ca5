"""Hugging Face `Trainer`: every step agreed on by all ranks before its update, every checkpoint committed.

    from andon.integrations.huggingface import AndonCallback
    andon = AndonCallback(trainer)
    trainer.add_callback(andon)
    trainer.train(resume_from_checkpoint=andon.checkpoint())

The Trainer's own log replaces a NaN loss by the running mean (`logging_nan_inf_filter`) and names it only
every `logging_steps`; here each micro-batch's loss is taken where the Trainer computes it. Its data comes in
the order of `andon.loader`, so that samples have absolute positions and a permit's window is skipped exactly.
"""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints

from andon.batch_ring import BatchFacts
from andon.integrations import lineage, ordered, resuming
from andon.integrations.outside_loop import OutsideLoop
from andon.intervals import Window
from andon.loader import Loader, LoaderError
from andon.saving import files_of, loader_state
from andon.watch import Watch, watch

__all__ = ["AndonCallback"]

# What the Trainer writes into a checkpoint, by part (transformers/trainer.py,
# accelerate/utils/fsdp_utils.py).
_PARTS = (
    ("optimizer*", "optimizer"),
    ("optimizer*/*", "optimizer"),
    ("scheduler.pt", "schedule"),
    ("scaler.pt", "scaler"),
    ("rng_state*", "rng"),
    ("*.safetensors", "weights"),
    ("*.bin", "weights"),
    ("*.safetensors.index.json", "weights"),
    ("pytorch_model_fsdp*/*", "weights"),
)
_OTHER = "trainer"


class AndonCallback(TrainerCallback):  # type: ignore[misc]
    """Watches a `Trainer`, its checkpoints and its batches. Make it before `train()`.

    Arguments:
        directory: where the hold file and the halt snapshot go; default: the Trainer's `output_dir`.
        positions: read the data in an order of absolute positions, shuffled or not as the Trainer would;
            False leaves it as it is, and then no position and no skip window exists. A stream, and a
            sampler with an order of its own, are left as they are, which is said.
        told: what only the samples tell of a batch (andon/integrations/lineage.py).
        options: those of `andon.watch.watch` (url, run, policy, …).

    Raises, in training:
        SystemExit: 93: the run is held, or its permit is for another checkpoint.
        andon.loader.LoaderError: a permit's window cannot be skipped in this order.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        directory: str | os.PathLike[str] | None = None,
        positions: bool = True,
        told: lineage.Told | None = None,
        **options: Any,
    ) -> None:
        self._trainer = trainer
        self._directory = Path(directory or trainer.args.output_dir)
        self._told = told
        self._options = options
        self._loop: OutsideLoop | None = None
        self._order: Loader | None = None
        self._batches: ordered.OrderedBatches | None = None
        self._why_no_order = "positions=False"
        self._keep = trainer.args.save_total_limit
        self._resumed: Path | None = None
        self._inputs: list[Any] = []  # of the step's micro-batches, in case it must run again
        self._undo: list[Callable[[], None]] = []
        self._replace("get_train_dataloader", functools.partial(self._data, positions=positions), stays=True)
        # The callback is told the step, not the directory that it was loaded from.
        self._replace("_load_optimizer_and_scheduler", self._loading, stays=True)

    @property
    def watch(self) -> Watch | None:
        """The monitor while training goes on."""
        return self._loop.watch if self._loop is not None else None

    def checkpoint(self) -> str | None:
        """Return what `train(resume_from_checkpoint=…)` is to go on from: the checkpoint of the permit,
        else the newest verified one, else None.

        Raises:
            ValueError, OSError: the permit cannot be read.
        """
        found = resuming.permitted(self._options.get("permit"))
        found = found or resuming.newest_verified(self._found())
        return None if found is None else str(found)

    def _replace(self, name: str, around: Callable[..., Any], *, stays: bool = False) -> None:
        """Call `around(inner, …)` instead of one of the Trainer's methods."""
        inner = getattr(self._trainer, name)
        setattr(self._trainer, name, functools.wraps(inner)(functools.partial(around, inner)))
        if not stays:
            self._undo.append(functools.partial(setattr, self._trainer, name, inner))

    # --- data

    def _data(self, inner: Callable[[], DataLoader[Any]], *, positions: bool) -> DataLoader[Any]:
        trainer, args = self._trainer, self._trainer.args
        collate = trainer.data_collator
        vocabulary = getattr(getattr(trainer.model, "config", None), "vocab_size", None)
        trainer.data_collator = lineage.Describing(collate, vocabulary, self._told)
        try:
            made = inner()
        finally:
            trainer.data_collator = collate
        if not positions:
            return made
        whole = trainer._train_batch_size
        split = getattr(args.accelerator_config, "split_batches", False)
        try:
            if getattr(trainer.accelerator, "parallelism_config", None) is not None:
                raise LoaderError("ranks share samples in other ways than data parallelism")
            taken, self._batches = ordered.ordered(
                made,
                seed=args.data_seed if args.data_seed is not None else args.seed,
                batch_size=whole // args.world_size if split else whole,
                micro_batches=args.gradient_accumulation_steps,
                rank=args.process_index,
                world_size=args.world_size,
            )
        except LoaderError as error:
            self._why_no_order = str(error)
            return made
        self._order = self._batches.order
        return taken

    def _facts(self, inputs: Any) -> BatchFacts | None:
        facts = lineage.take(inputs)
        if self._order is None:
            return facts
        positions = tuple(self._order.next_batch())
        return BatchFacts(**{**(vars(facts) if facts is not None else {}), "positions": positions})

    # --- training

    def _loading(self, inner: Callable[[str | None], None], checkpoint: str | None) -> None:
        self._resumed = Path(checkpoint) if checkpoint is not None else None
        inner(checkpoint)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Begin to watch: models are wrapped and a checkpoint is loaded by now."""
        self._restore_methods()  # of a training that ended by an exception
        trainer = self._trainer
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # accelerate wraps it
        directory = self._resumed if state.global_step else None
        options = {
            "first_step": state.global_step + 1,
            "resumed": resuming.resumed(directory, state.global_step),
        }
        made = watch(
            trainer.model_wrapped,
            optimizer,
            directory=self._directory,
            schedule=trainer.lr_scheduler,
            scaler=getattr(trainer.accelerator, "scaler", None),
            loader=self._order,
            **(options | self._options),
        )
        self._loop = OutsideLoop(made)
        self._go_on(made, directory, state)
        if made.place.rank == 0:
            resuming.abandon(self._found(), made.permit)
        self._replace("training_step", self._training_step)
        self._replace("_save_checkpoint", self._save)
        if made.saver.gate is not None:  # only where there is a gate to ask is rotation Andon's
            args.save_total_limit = None

    def _go_on(self, made: Watch, directory: Path | None, state: TrainerState) -> None:
        """Put data and random numbers where the checkpoint has them, check all of it, leave out what the
        permit says."""
        skip = made.permit.skip if made.permit is not None else None
        window = Window(skip.from_, skip.to) if skip is not None else None
        order, args = self._order, self._trainer.args
        if order is None or self._batches is None:
            if window is not None:
                raise LoaderError(
                    f"the permit skips samples, and they have no positions: {self._why_no_order}"
                )
            made.say(f"samples have no positions: {self._why_no_order}")
        else:
            saved = loader_state(directory) if directory is not None else None
            consumed = state.global_step * order.global_batch * args.gradient_accumulation_steps
            ordered.take_up(order, saved, consumed)
            if not args.ignore_data_skip:
                # What the Trainer throws away of the epoch that it resumes.
                self._batches.dropped = (
                    state.global_step * args.gradient_accumulation_steps % len(self._batches)
                )
        if directory is not None:
            self._trainer._load_rng_state(str(directory))  # it does so again before the first step
            made.restored(directory)
        if order is not None and window is not None:
            ordered.check_window(order, window)
            order.skip(window)

    def _training_step(
        self, inner: Callable[..., torch.Tensor], model: Any, inputs: Any, *given: Any, **named: Any
    ) -> torch.Tensor:
        facts = self._facts(inputs)
        if self._loop is None:
            return inner(model, inputs, *given, **named)
        self._loop.begin()
        # A loss may take its labels out of what it is given.
        self._inputs.append(dict(inputs) if isinstance(inputs, Mapping) else inputs)
        loss = inner(model, inputs, *given, **named)
        self._loop.micro_batch(loss, facts)
        if self._trainer.accelerator.sync_gradients:
            kept, self._inputs = self._inputs, []
            self._loop.gradients_ready(functools.partial(self._again, model, kept))
        return loss

    def _again(self, model: Any, kept: list[Any], index: int) -> torch.Tensor:
        """Compute the loss of a micro-batch once more."""
        trainer = self._trainer
        inputs = dict(kept[index]) if isinstance(kept[index], Mapping) else kept[index]
        with trainer.compute_loss_context_manager():
            loss: torch.Tensor = trainer.compute_loss(model, trainer._prepare_inputs(inputs))
        return loss

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

    # --- checkpoints

    def _save(self, inner: Callable[..., None], model: Any, trial: Any) -> None:
        trainer = self._trainer
        if self._loop is None:
            inner(model, trial)
            return
        root = Path(trainer._get_output_dir(trial=trial))
        directory = root / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
        made = self._loop.watch
        if made.place.rank == 0 and (moved := resuming.set_aside(directory)) is not None:
            made.post([moved[1].event(moved[0])])
        if made.place.world_size > 1:
            dist.barrier()  # no rank writes into what is moved
        inner(model, trial)
        made.save(directory, lambda one: files_of(one, _PARTS, rest=_OTHER), rng=False)
        if made.saver.gate is not None and self._keep:
            made.saver.remove(lambda: self._due(root))

    def _due(self, root: Path) -> list[Path]:
        aside = sorted(root.glob(f"attempt-*-{PREFIX_CHECKPOINT_DIR}-*"))
        return [*aside, *resuming.due(self._found(root), self._keep, [self._best()])]

    def _found(self, root: Path | None = None) -> Sequence[Path]:
        """Return the checkpoints there are, oldest first."""
        return [Path(one) for one in sort_checkpoints(str(root or self._trainer.args.output_dir))]

    def _best(self) -> Path | None:
        best = self._trainer.state.best_model_checkpoint
        return None if best is None else Path(best)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Post the rest."""
        if self._loop is None:
            return
        self._restore_methods()
        args.save_total_limit = self._keep
        self._loop.watch.close()
        self._loop = None

    def _restore_methods(self) -> None:
        while self._undo:
            self._undo.pop()()
