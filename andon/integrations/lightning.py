"""Lightning: every step agreed on by all ranks before its update, every checkpoint committed.

    from andon.integrations.lightning import AndonCallback
    andon = AndonCallback(directory="checkpoints")
    trainer = Trainer(callbacks=[andon], …)
    trainer.fit(model, loader, ckpt_path=andon.checkpoint())

Under DDP and FSDP2 (`ModelParallelStrategy`) a rank's own gradients are seen before the reduce. Data comes in
the order of `andon.loader`, so that samples have absolute positions and a permit's window is skipped exactly.
Random numbers, which Lightning does not keep, are kept and put back.
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from andon import halt_snapshot
from andon.batch_ring import BatchFacts
from andon.integrations import lightning_checkpoints, lineage, ordered, resuming
from andon.integrations.outside_loop import OutsideLoop
from andon.intervals import Window
from andon.loader import LoaderError
from andon.loader_batches import Batches, batches
from andon.watch import Watch, watch

__all__ = ["AndonCallback"]


class AndonCallback(Callback):  # type: ignore[misc]
    """Watches a `Trainer.fit`, its checkpoints and its batches.

    Arguments:
        directory: where the hold file and the halt snapshot go, and where `checkpoint` looks for the newest.
        positions: read the training data in an order of absolute positions, shuffled or not as its DataLoader
            would; False leaves it as it is. A stream, several loaders, and a sampler with an order of its
            own are left as they are, which is said.
        seed: names that order.
        vocabulary: number of valid token ids, to count those that are none.
        told: what only the samples tell of a batch (andon/integrations/lineage.py).
        options: those of `andon.watch.watch` (url, run, policy, …).

    Raises, in training:
        SystemExit: 93: the run is held, or its permit is for another checkpoint.
        ValueError: the module has several optimizers, or a loss scaler, whose gradients are unscaled
            before any hook sees them; bf16 needs none.
        andon.loader.LoaderError: a permit's window cannot be skipped in this order.
    """

    def __init__(
        self,
        *,
        directory: str | os.PathLike[str],
        positions: bool = True,
        seed: int = 0,
        vocabulary: int | None = None,
        told: lineage.Told | None = None,
        **options: Any,
    ) -> None:
        self._directory = Path(directory)
        self._positions, self._seed = positions, seed
        self._vocabulary, self._told = vocabulary, told
        self._options = options
        self._loop: OutsideLoop | None = None
        self._epochs: ordered.Epochs | None = None
        self._why_no_order = "positions=False"
        self._samples = 0
        self._undo: list[Callable[[], None]] = []

    @property
    def watch(self) -> Watch | None:
        """The monitor while training goes on."""
        return self._loop.watch if self._loop is not None else None

    def checkpoint(self) -> str | None:
        """Return what `fit(ckpt_path=…)` is to go on from: the checkpoint of the permit, else the newest
        verified one under `directory`, else None.

        Raises:
            ValueError, OSError: the permit cannot be read.
        """
        found = resuming.permitted(self._options.get("permit"))
        found = found or resuming.newest_verified(lightning_checkpoints.found(self._directory))
        return None if found is None else str(lightning_checkpoints.file_of(found))

    # --- data

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Put the training data in order, before anything is read."""
        source = getattr(trainer.fit_loop, "_data_source", None)
        if stage != "fit" or not self._positions or source is None or hasattr(source, "andon"):
            return
        inner = source.dataloader
        source.andon = True
        source.dataloader = lambda: self._in_order(trainer, inner())

    def _in_order(self, trainer: Trainer, loader: Any) -> Any:
        try:
            taken = self._taken(trainer, loader)
        except LoaderError as error:
            self._why_no_order = str(error)
            return loader
        describing = lineage.Describing(taken._collate, self._vocabulary, self._told)
        taken._collate = describing.pair
        self._epochs = ordered.Epochs(taken, trainer.accumulate_grad_batches)
        return self._epochs

    def _taken(self, trainer: Trainer, loader: Any) -> Batches:
        if isinstance(loader, Batches) and loader.order.size is not None:
            return loader
        if not isinstance(loader, DataLoader):
            raise LoaderError(f"the data comes from a {type(loader).__name__}, not from one DataLoader")
        if not trainer._accelerator_connector.use_distributed_sampler and trainer.world_size > 1:
            raise LoaderError("use_distributed_sampler=False: how ranks share the data is not known")
        share = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
        taken = batches(
            loader,
            seed=self._seed,
            rank=share.get("rank", 0),
            world_size=share.get("num_replicas", 1),
        )
        if taken.order.size is None:
            raise LoaderError("the data is a stream: no index names a sample")
        return taken

    # --- training

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to watch: models are wrapped and a checkpoint is loaded by now."""
        if len(trainer.optimizers) != 1:
            raise ValueError(f"AndonCallback: {len(trainer.optimizers)} optimizers; it watches one")
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            raise ValueError("AndonCallback: a loss scaler (16-mixed) is not watched here; use bf16-mixed")
        self._restore_methods()  # of a training that ended by an exception
        schedules = trainer.lr_scheduler_configs
        came = lightning_checkpoints.directory_of(Path(trainer.ckpt_path)) if trainer.ckpt_path else None
        options = {
            "first_step": trainer.global_step + 1,
            "resumed": resuming.resumed(came, trainer.global_step),
        }
        made = watch(
            trainer.strategy.model,
            trainer.optimizers[0],
            directory=self._directory,
            schedule=schedules[0].scheduler if len(schedules) == 1 else None,
            loader=self._epochs.batches if self._epochs is not None else None,
            **(options | self._options),
        )
        self._loop = OutsideLoop(made)
        self._go_on(made, came if trainer.global_step else None)
        if made.place.rank == 0:
            resuming.abandon(lightning_checkpoints.found(self._directory), made.permit)
        self._replace(trainer, "save_checkpoint", functools.partial(self._save, trainer))
        self._replace(trainer.strategy, "remove_checkpoint", self._remove)

    def _go_on(self, made: Watch, came: Path | None) -> None:
        """Put random numbers where the checkpoint has them, check it, leave out what the permit says."""
        skip = made.permit.skip if made.permit is not None else None
        if came is not None:
            halt_snapshot.put_rng(came, made.place.rank)
            made.restored(came)
        if self._epochs is None:
            if skip is not None:
                raise LoaderError(
                    f"the permit skips samples, and they have no positions: {self._why_no_order}"
                )
            made.say(f"samples have no positions: {self._why_no_order}")
        elif skip is not None:
            taken = self._epochs.batches
            ordered.check_window(taken.order, Window(skip.from_, skip.to))
            taken.skip(Window(skip.from_, skip.to))

    def _replace(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Call `around(inner, …)` instead of a method."""
        inner = getattr(owner, name)
        setattr(owner, name, functools.wraps(inner)(functools.partial(around, inner)))
        self._undo.append(functools.partial(setattr, owner, name, inner))

    def _restore_methods(self) -> None:
        while self._undo:
            self._undo.pop()()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Take the loss; Lightning has divided it by the number of micro-batches."""
        if self._loop is not None:
            self._loop.micro_batch(loss, self._epochs.facts if self._epochs is not None else None)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Describe a batch whose loader is not ours, where it is still on the host."""
        if self._epochs is None and self._loop is not None:
            facts = lineage.facts_of(batch, vocabulary=self._vocabulary)
            self._loop.micro_batch(None, facts or BatchFacts())

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
            self._samples += lineage.rows_of(batch) * trainer.world_size
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

    # --- checkpoints

    def _save(
        self, trainer: Trainer, inner: Callable[..., None], filepath: Any, *given: Any, **named: Any
    ) -> None:
        if self._loop is None:
            inner(filepath, *given, **named)
            return
        made = self._loop.watch
        if made.place.rank == 0:
            lightning_checkpoints.part(Path(filepath))
        inner(filepath, *given, **named)
        if "://" in str(filepath):
            made.say(f"{filepath}: not committed: only what lies in a file system is")
            return
        place = lightning_checkpoints.place(Path(filepath), made.place.attempt, made.number)
        if made.place.rank == 0:
            lightning_checkpoints.link(Path(filepath), place)
        made.save(place, lightning_checkpoints.parts)
        # A file that is written again and again under one name leaves its older versions.
        old = [one for one in lightning_checkpoints.versions(Path(filepath)) if one != place]
        if old and made.saver.gate is not None:
            made.saver.remove(lambda: old)

    def _remove(self, inner: Callable[[Any], None], filepath: Any) -> None:
        path = Path(filepath)
        saver = self._loop.watch.saver if self._loop is not None else None
        known = lightning_checkpoints.versions(path)
        if saver is not None and saver.gate is not None and known:
            saver.remove(lambda: known, then=lambda _: lightning_checkpoints.forget(path))
            return
        inner(filepath)  # not committed, or no server: nobody can hold it
        if saver is not None and self._loop is not None and self._loop.watch.place.rank == 0:
            for place in known:
                lightning_checkpoints.forget(place)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Post the rest."""
        if self._loop is None:
            return
        self._restore_methods()
        self._loop.watch.close()
        self._loop = None
