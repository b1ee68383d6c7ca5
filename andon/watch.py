"""Three lines in a PyTorch training loop: see every step, update together, stop together.

    monitor = watch(model, optimizer, directory="checkpoints")     # after DDP or fully_shard
    for batch in loader:
        loss = model(batch)
        loss.backward()
        monitor.step(loss, tokens=batch.tokens)     # instead of optimizer.step() and zero_grad()
    monitor.close()

Server, run and secret come from the arguments or from `ANDON_URL`, `ANDON_RUN` and `ANDON_RUN_SECRET`;
without a server the trainer's own decisions stand all the same. A held directory is refused (exit
code 93) unless `ANDON_PERMIT` names a permit that verifies against `ANDON_KEY`.
"""

import os
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from andon import halt_snapshot, restore_check, stacks
from andon.batch_ring import NOT_TOLD, BatchFacts
from andon.checkpoints import Positions
from andon.client import Client
from andon.holding import Holder
from andon.local_gradients import local_of
from andon.local_norms import LocalNorms
from andon.monitor import Monitor, mode_from_environment
from andon.monitor_agreement import Agreement
from andon.monitor_posts import Place, StepFacts
from andon.monitor_reduce import reduce
from andon.monitor_rerun import RandomState
from andon.monitor_rows import StateAfter
from andon.monitor_scaler import unscale
from andon.permit import Permit
from andon.policy import Policy
from andon.restore_check import Line, Parts
from andon.saving import PartsOf, Saver
from andon.watch_launch import Resumed, launched_event, place_here, refuse_if_held, store

__all__ = ["BatchFacts", "Watch", "watch"]

# A checksum reads weights and moments once, a twin step costs one micro-batch: both a thousandth.
CHECKSUM_STEPS = 1000
TWIN_STEPS = 1000

LEAVING_S = 45.0  # the other ranks wait as long for rank 0's word, and somewhat longer (andon/holding.py)

DECLARED_FIRST = "first_nonfinite"  # the policy mode that lets a bad step run again


class Watch(Monitor):
    """A monitor that also runs the optimizer, holds, and writes the halt snapshot. Made by `watch`."""

    def __init__(
        self,
        place: Place,
        norms: LocalNorms,
        parts: Parts,
        *,
        directory: Path,
        server: Client | None,
        trusted: Collection[str],
        first_step: int,
        checksum_steps: int = CHECKSUM_STEPS,
        twin_steps: int = TWIN_STEPS,
        replica_groups: Mapping[str, Any] | None = None,
        twin_group: Any = None,
        **options: Any,
    ) -> None:
        assert parts.optimizer is not None
        super().__init__(
            place, norms, optimizer=parts.optimizer, scaler=parts.scaler, first_step=first_step, **options
        )
        self.parts = parts
        self.directory = directory
        self.checksum_steps, self.twin_steps = checksum_steps, twin_steps
        self.replica_groups, self.twin_group = replica_groups, twin_group
        self._no_twin_before = 0
        self.holder = Holder(self, directory, store(), server=server, trusted=trusted, say=self.say)
        self.saver = Saver(self, server)
        self.permit: Permit | None = None  # what this attempt began with
        self.number = first_step - 1  # of the last step done
        self.optimizer_step = first_step - 1
        self.samples = 0
        self._held = self._closed = False
        self._micro: list[Tensor] = []
        self._tokens: list[int] = []
        self._told = 0  # micro-batches of this step, with a loss or without
        self._began = time.perf_counter()
        self._random = RandomState.take()

    def say(self, text: str) -> None:
        print(f"andon: rank {self.place.rank}: {text}", flush=True)  # noqa: T201

    # --- the step

    def begin(self) -> None:
        """Say that the batch is there and a step begins; else it begins when the last one ended."""
        super().begin()
        self._random = RandomState.take()

    def micro_batch(self, loss: Tensor | None, tokens: int = 1) -> None:
        """With gradient accumulation: tell each micro-batch after its `backward`, then call `step()`.

        `loss` is the mean over `tokens` as the loop computed it, before any division by the number of
        micro-batches and before a scaler; None on a pipeline stage without loss.
        """
        self._told += 1
        if loss is not None:
            self._micro.append(loss.detach().double() * tokens)
            self._tokens.append(tokens)

    def step(
        self,
        loss: Tensor | None = None,
        tokens: int = 1,
        *,
        batch: BatchFacts | None = None,
        clip: float | None = None,
        rerun: Callable[[int], Tensor] | None = None,
        twin: tuple[Callable[[Any], Tensor], Any] | None = None,
        **extra: Any,
    ) -> Agreement:
        """Agree on a step, update, record, obey. Call on every rank after `backward`.

        Args:
            loss, tokens: as for `micro_batch`; not given after calls of it.
            batch: what was trained on (andon/batch_ring.py).
            clip: largest global gradient norm.
            rerun: forward of a micro-batch by index on the same batch; a bad step then runs again to name
                its first nonfinite tensor.
            twin: (forward of the model on a batch, a micro-batch), for a twin step where one is due.
            extra: more values to post with the step.

        Raises:
            SystemExit: 93, the run is held.
        """
        agreed = self.before_update(loss, tokens, rerun=rerun)
        self._update(agreed, clip)
        self.optimizer.zero_grad(set_to_none=True)
        self.after_update(agreed, batch=batch, twin=twin, **extra)
        if rerun is not None:  # a tenth of a millisecond, for loops that may run a step again
            self._random = RandomState.take()
        return agreed

    def before_update(
        self,
        loss: Tensor | None = None,
        tokens: int = 1,
        *,
        rerun: Callable[[int], Tensor] | None = None,
    ) -> Agreement:
        """Agree on a step whose optimizer somebody else steps: where it says `skip`, nothing may be applied.

        Call on every rank after `backward`, before any clipping and unscaling; then `after_update`.
        """
        if loss is not None:
            self.micro_batch(loss, tokens)
        self.number += 1
        count = self._told
        losses = torch.stack(self._micro) if count > 1 and self._micro else None
        total = losses.sum() if losses is not None else self._micro[0] if self._micro else None
        agreed = self.agree(self.number, total, sum(self._tokens), micro_losses=losses)
        self._micro, self._tokens, self._told = [], [], 0
        if agreed.bad and rerun is not None and not self.deferred:
            self._find_first(agreed, rerun, max(1, count))
        return agreed

    def after_update(
        self,
        agreed: Agreement,
        *,
        batch: BatchFacts | None = None,
        twin: tuple[Callable[[Any], Tensor], Any] | None = None,
        **extra: Any,
    ) -> None:
        """Record a step, look for corruption, obey. Call on every rank.

        Raises:
            SystemExit: 93, the run is held.
        """
        self.finish(agreed, self._facts_of(batch, extra))
        self._look_for_corruption(agreed, twin)
        if agreed.hold or agreed.halt:
            self.hold(agreed.decision.reason if agreed.halt else None, undone=agreed.halt)
        self._began = time.perf_counter()

    def _find_first(self, agreed: Agreement, rerun: Callable[[int], Tensor], count: int) -> None:
        if self.policy.modes.get(DECLARED_FIRST, "act") == "off":
            return
        try:
            first = self.find_first(agreed, rerun, count, self._random)
        except RuntimeError as error:  # hooks that a model does not bear; the step itself is decided
            self.say(f"step {agreed.step}: could not be run again ({error})")
            return
        if first is not None:
            self.say(f"step {agreed.step}: first nonfinite: {first.document()}")

    def _look_for_corruption(
        self, agreed: Agreement, twin: tuple[Callable[[Any], Tensor], Any] | None
    ) -> None:
        """Compare replicas and twins where it is due; a difference is decided on in the next step."""
        if self.policy.mode("corruption") == "off" or agreed.halt:
            return
        if self.checksum_steps and self.number % self.checksum_steps == 0:
            self.check_replicas(self.number, self.replica_groups)
        if twin is None or not self.twin_steps:
            return
        # All ranks know of a suspicion, since it came with the sum; one that stays is not asked about again
        # in every step.
        suspicion = any(one.rule == "corruption" for one in agreed.decision.findings)
        suspicion &= self.number >= self._no_twin_before
        if suspicion or self.number % self.twin_steps == 0:
            self._no_twin_before = self.number + self.twin_steps
            self.twin(self.number, *twin, group=self.twin_group)

    def _update(self, agreed: Agreement, clip: float | None) -> None:
        """Apply the update, or leave weights, moments and step count untouched."""
        scaler = self.scaler if self.scaler is not None and self.scaler.is_enabled() else None
        if scaler is not None:
            unscale(scaler, self.optimizer, skip=agreed.skip)
        if self.deferred:
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(self.norms.model.parameters(), clip)
            self.optimizer.step()
        elif not agreed.skip:
            self._clip(agreed, clip)
            if scaler is None:
                self.optimizer.step()
            else:
                scaler.step(self.optimizer)
            self.optimizer_step += 1
        if scaler is not None:
            scaler.update()
        if self.parts.schedule is not None and not agreed.halt:
            self.parts.schedule.step()

    def _clip(self, agreed: Agreement, clip: float | None) -> None:
        if clip is None or not agreed.grad_norm > clip:
            return
        gradients = [local_of(p.grad) for p in self.norms.model.parameters() if p.grad is not None]
        torch._foreach_mul_(gradients, clip / agreed.grad_norm)

    def _facts_of(self, batch: BatchFacts | None, extra: dict[str, Any]) -> StepFacts:
        facts = batch or NOT_TOLD
        self.samples += len(facts.positions or facts.lengths) * self.place.world_size
        at = self.positions()
        return StepFacts(
            step=self.number,
            grad_norm=None,
            lr=float(self.optimizer.param_groups[0]["lr"]),
            step_time_s=time.perf_counter() - self._began,
            loader_position=at.loader_position,
            consumed_samples=at.consumed_samples,
            optimizer_step=at.optimizer_step,
            schedule_position=at.schedule_position,
            batch=facts,
            extra=extra,
        )

    def positions(self) -> Positions:
        """Return the four numbers that are not the same; samples are counted where the loader does not."""
        loader = self.parts.loader
        return Positions(
            loader_position=int(getattr(loader, "position", self.samples)),
            consumed_samples=int(getattr(loader, "consumed_samples", self.samples)),
            optimizer_step=self.optimizer_step,
            schedule_position=int(getattr(self.parts.schedule, "last_epoch", self.number)),
        )

    # --- stopping

    def hold(self, reason: str | None, *, undone: bool = False) -> None:
        """Write the halt snapshot, the hold file, and wait or leave. Call on every rank in the same step.

        Args:
            reason: of the trainer's own decision; None: the server's order.
            undone: the update of the last step was not applied, so the snapshot holds the weights before.

        Raises:
            SystemExit: 93. Returns when a permit lets the ranks go on in place.
        """
        step = self.number - 1 if undone and not self.deferred else self.number
        self.flush()
        # A collective again, but no step follows: what is called finite must be so on every rank.
        state_bad = reduce(StateAfter.measure(self.norms, self.optimizer, step, None).bad.double())
        directory, manifest = halt_snapshot.write(
            self.directory / f"attempt-{self.place.attempt}",
            self.parts,
            run=self.place.run,
            attempt=self.place.attempt,
            step=max(step, 0),
            positions=self.positions(),
            ring=self.ring,
            decider=self.decider.state(),
            nonfinite=("weights or moments",) if state_bad.item() else (),
        )
        if manifest is not None:
            self.post([manifest.event(directory)])
        self._held = True
        self.holder.hold(self.number, own_decision=reason)
        self._held = False

    def before_leaving(self) -> None:
        """Let the last checkpoint get its manifest: without it, it is none to go back to."""
        self.saver.drain(LEAVING_S)

    # --- restoring

    def save(self, directory: Path, parts_of: PartsOf, *, rng: bool = True) -> None:
        """Commit a checkpoint whose files are written: manifest, read back, told (andon/saving.py). Call on
        every rank; hashing goes on beside training."""
        self.saver.save(directory, parts_of, rng=rng)

    def saved(self, directory: Path) -> None:
        """Write the digests of all parts into a checkpoint. Call on every rank, at the save."""
        restore_check.save(directory, self.parts)

    def restored(self, directory: Path) -> list[Line]:
        """Check a restore part by part, before the first step. Call on every rank.

        A part that differs on any rank is a failed restore: reported, and with the guard on, held.

        Raises:
            SystemExit: 93, held.
        """
        lines = restore_check.check(directory, self.parts)
        report = [line.document() | {"rank": self.place.rank} for line in lines]
        everywhere = [report]
        if self.place.world_size > 1:
            everywhere = [[] for _ in range(self.place.world_size)]
            dist.all_gather_object(everywhere, report)
        wrong = [one for lines in everywhere for one in lines if one["equal"] is False]
        if self.place.rank == 0:
            # One line per part, and every rank's where it is not rank 0's.
            other = [one for lines in everywhere[1:] for one in lines if one["equal"] is not True]
            self.post(
                [{"type": "restore.report", "step": self.number, "data": {"parts": everywhere[0] + other}}]
            )
        if wrong and self.guard == "skip":
            first = wrong[0]
            self.hold(f"restore check failed: {first['part']} on rank {first['rank']} {first['detail']}")
        return lines

    def boundary(self, name: str, step: int | None = None, **data: Any) -> None:
        """Declare a discontinuity before the next step (see `Monitor.boundary`). Call on every rank."""
        super().boundary(name, self.number + 1 if step is None else step, **data)

    def close(self) -> None:
        """End: read what is still on its way, post the rest. Call on every rank; again does nothing."""
        if self._closed:
            return
        self._closed = True
        if not self._held:  # a held rank flushed before, and leaves without meeting the others again
            self.settle()
            self.flush()
            self.saver.drain()  # after all that the ranks do together: none waits for the other's hashing
            if self.place.rank == 0:
                self.post([{"type": "attempt.exited", "step": self.number, "data": {"exit_code": 0}}])
        super().close()


def watch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    directory: str | os.PathLike[str],
    schedule: Any = None,
    scaler: Any = None,
    loader: Any = None,
    run: str | None = None,
    url: str | None = None,
    secret: str | None = None,
    attempt: int | None = None,
    trusted: Collection[str] = (),
    permit: str | None = None,
    policy: Policy | None = None,
    guard: str = "skip",
    first_step: int = 1,
    interval_steps: int = 100,
    forward: bool | None = None,
    deferred: bool = False,
    replicas: int | None = None,
    previous_scale: float | None = None,
    spool_dir: str | None = None,
    groups: Mapping[str, Any] | None = None,
    checksum_steps: int = CHECKSUM_STEPS,
    twin_steps: int = TWIN_STEPS,
    replica_groups: Mapping[str, Any] | None = None,
    twin_group: Any = None,
    launch: Mapping[str, Any] | None = None,
    resumed: Resumed | None = None,
) -> Watch:
    """Watch a model's training. Call on every rank, after DDP or `fully_shard`, before the first forward.

    Args:
        directory: where checkpoints lie; hold file and halt snapshot go there.
        schedule, scaler, loader: stepped (schedule, scaler), checked at restores, kept in the snapshot.
        run, url, secret, attempt, trusted, permit: default to `ANDON_RUN`, `ANDON_URL`,
            `ANDON_RUN_SECRET`, `ANDON_ATTEMPT`, `ANDON_KEY` (comma-separated fingerprints), `ANDON_PERMIT`.
        guard: "skip" or "off"; forward, replicas: see `andon.local_norms.LocalNorms`. Outputs are watched
            where `groups` name a pipeline: nothing else says that a stage without loss went bad in forward.
        deferred: see `andon.monitor.Monitor`; a bad step is then not run again.
        groups: `{"dp"|"tp"|"pp"|"cp"|"ep": [[ranks], …]}`, told to the server; DDP and FSDP2 over all ranks
            need none.
        checksum_steps, twin_steps: how often replicas and twins are compared; 0: never.
        replica_groups: parameter name or prefix → the process group that replicates it, where the wrapper
            does not say it right (experts, replicated norms); see `andon.replicas.groups_of`.
        launch: more for `attempt.launched`: `git`, `config`, `environment`, … (docs/trainer.md).
        resumed: the checkpoint that was loaded; a permit for another one is refused.

    Raises:
        SystemExit: 93, the directory is held and no permit lets it go on.
    """
    folder = Path(directory)
    run = run or os.environ.get("ANDON_RUN") or "run"
    keys = tuple(trusted) or tuple(k for k in os.environ.get("ANDON_KEY", "").split(",") if k)
    number = attempt or int(os.environ.get("ANDON_ATTEMPT", "0")) or 1
    permit = permit or os.environ.get("ANDON_PERMIT")
    number, granted = refuse_if_held(folder, run, number, permit, keys, resumed)
    place, nodes = place_here(run, number)
    stacks.listen(place.rank)
    url = url or os.environ.get("ANDON_URL")
    secret = secret or os.environ.get("ANDON_RUN_SECRET")
    mode = mode_from_environment()
    client = None
    if place.leads and url and secret and mode != "off":
        # Without an attempt: the client must go on hearing orders after a resume in place.
        client = Client(url, run, secret, node=place.node, trusted=keys or None, spool_dir=spool_dir)
    watches_outputs = "pp" in (groups or {}) if forward is None else forward
    made = Watch(
        place,
        LocalNorms(model, forward=watches_outputs, replicas=replicas),
        Parts(model, optimizer, schedule, scaler, loader),
        directory=folder,
        server=client if place.rank == 0 else None,
        trusted=keys,
        first_step=first_step,
        sender=client,
        policy=policy,
        mode=mode,
        guard=guard,
        interval_steps=interval_steps,
        deferred=deferred,
        previous_scale=previous_scale,
        checksum_steps=checksum_steps,
        twin_steps=twin_steps,
        replica_groups=replica_groups,
        twin_group=twin_group,
    )
    made.permit = granted
    if place.rank == 0:
        if resumed is not None:
            came = {"step": resumed.step, "uri": resumed.uri, "digest": resumed.digest}
            launch = {"began_from": {k: v for k, v in came.items() if v is not None}, **(launch or {})}
        made.post([launched_event(made, nodes, granted, groups, launch)])
    return made
