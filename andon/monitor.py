"""The in-loop monitor for PyTorch: see every step, decide together, obey together.

Per step there is one fused SUM and one transfer to the host (andon/monitor_reduce.py), after which all
ranks know the same numbers and so reach the same verdict (andon/monitor_decide.py) and the same order of
the server in the same step: a rank that decides alone hangs the job. Where the optimizer takes
`found_inf` on the device (`deferred=True`) a bad update is dropped there and the step has no host sync
at all; the verdict is then read, on all ranks alike, one step later.

Rank-local values go to the lowest rank of each node (the *leader*), which posts them: at once when
the step was bad, else every `interval_steps`. Only rank 0 reads directives. A server that is slow
or gone never slows a step; the trainer's own guard, where it is on, needs no server.

`andon.watch.watch` makes one of these and runs the optimizer too: three lines in a training loop.
"""

import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from andon.batch_ring import BatchRing
from andon.local_norms import LocalNorms, reading
from andon.monitor_agreement import Agreement, Pending, first_bad, nothing_yet
from andon.monitor_decide import Agreed, Decider, Guard
from andon.monitor_posting import Posting
from andon.monitor_posts import Place, StepFacts
from andon.monitor_reduce import (
    Constants,
    Later,
    Pack,
    Sums,
    Unpacked,
    fuse,
    own_values,
    read_now,
    reduce,
    set_found_inf,
    takes_found_inf,
)
from andon.monitor_rerun import FirstNonfinite, RandomState, first_nonfinite
from andon.monitor_rows import Rows, StateAfter
from andon.outbox import Sender
from andon.policy import Policy
from andon.replicas import Report, compare, groups_of
from andon.step_times import StepTimes
from andon.twin import TwinReport, twin_step

__all__ = ["Agreement", "Monitor", "mode_from_environment"]

Mode = Literal["off", "observe", "act"]

CONTINUE, HOLD = 0, 1  # the codes rank 0 puts into the fused sum


def mode_from_environment(default: Mode = "act") -> Mode:
    """Return `ANDON_MODE`, which wins over everything else on a trainer.

    Raises:
        ValueError: it is set to something else than off, observe or act.
    """
    value = os.environ.get("ANDON_MODE", default)
    if value not in ("off", "observe", "act"):
        raise ValueError(f"ANDON_MODE: {value!r} is none of off, observe, act")
    return value  # type: ignore[return-value]


class Monitor(Posting):
    """Watches one model on one rank.

    Arguments:
        norms: hooks on the model, made before the first backward.
        optimizer: read for nonfinite moments when a step was bad, and every `interval_steps`.
        sender: carries this node's posts; only the leader has one, others pass None.
        background: False sends within the call (a recorder that must keep the order).
        guard: "skip" drops updates of bad steps within the policy's budget and halts past it; "off" leaves
            every decision to the server.
        interval_steps: how often healthy values are posted and layers are measured.
        scaler: the fp16 GradScaler, if there is one; `agree` comes before its `unscale_`.
        deferred: let the optimizer drop bad updates on the device, and read verdicts a step later.
        first_step, previous_scale: where this attempt begins, and the loss scale of its checkpoint.

    Raises:
        ValueError: `deferred` with an optimizer that does not take `found_inf`, or with a scaler.
    """

    def __init__(
        self,
        place: Place,
        norms: LocalNorms,
        *,
        optimizer: torch.optim.Optimizer,
        sender: Sender | None,
        policy: Policy | None = None,
        mode: Mode = "act",
        guard: Guard = "off",
        interval_steps: int = 10,
        heartbeat_s: float = 5.0,
        background: bool = True,
        scaler: Any = None,
        deferred: bool = False,
        first_step: int | None = None,
        previous_scale: float | None = None,
    ) -> None:
        super().__init__(place, sender if mode != "off" else None, heartbeat_s, background)
        if deferred and (scaler is not None or not takes_found_inf(optimizer)):
            raise ValueError(
                "deferred: needs an optimizer that takes found_inf on the device (fused=True) and no scaler, "
                "which has its own"
            )
        self.norms = norms
        self.optimizer = optimizer
        self.scaler = scaler
        self.policy = policy or Policy()
        self.mode = mode
        self.guard: Guard = guard if mode == "act" else "off"
        self.deferred = deferred
        self.interval_steps = interval_steps
        self.decider = self._decider(guard, first_step, previous_scale)
        self._asked_guard = guard
        self.ring = BatchRing()
        self.rows = Rows(place, norms)
        self.times = StepTimes(norms.device, norms.model, forward_only=norms.kind == "fsdp2")
        if hasattr(norms.gradients, "last_bucket"):
            norms.gradients.last_bucket = self.times.local
        self._before: list[Tensor] | None = None  # weights before the update of this step
        self._after: StateAfter | None = None  # layers of an earlier step, to move with the next transfer
        self._later: tuple[Pending, Later] | None = None
        self._facts: dict[int, StepFacts] = {}
        self._flush_due = False
        self._suspect = False
        self._constants = Constants(norms.device)
        self._well = torch.zeros(1, dtype=torch.float64, device=norms.device)

    def _decider(self, guard: Guard, first_step: int | None, scale: float | None) -> Decider:
        return Decider(
            self.policy,
            acting=self.mode == "act",
            guard=guard,
            first_step=first_step,
            previous_scale=scale,
        )

    # --- the step

    def begin(self) -> None:
        """Say that a step begins now, its batch being there; else it begins when the last one ended."""
        self.times.begin()

    def waiting(self) -> AbstractContextManager[None]:
        """A pipeline stage waits within for another stage's values: `with monitor.waiting(): dist.recv(…)`.
        Else a rank that is slow would make every stage seem to compute long."""
        return self.times.waiting()

    def before_reduce(self) -> None:
        """A plain loop: this rank's gradients are complete and not yet shared. Under DDP and FSDP2 they were
        seen already."""
        observe = getattr(self.norms.gradients, "observe", None)
        if observe is not None:
            observe()
            self.times.local()

    def agree(
        self,
        step: int,
        loss_sum: Tensor | None,
        tokens: int,
        *,
        micro_losses: Tensor | None = None,
    ) -> Agreement:
        """Join all ranks' verdicts on a step. Call on every rank after `backward`, before the update.

        `loss_sum` is this rank's summed token loss of the whole step, a scalar; `tokens` its count; None and
        0 on a pipeline stage without loss. `micro_losses` has one value per micro-batch, in order.
        """
        if self.norms.kind == "plain" and self.norms.gradients.replicas == 1:
            self.times.local()
        taken = self.norms.take()
        scale = self._scale()
        if taken.squares is not None and self.norms.kind == "plain" and self.norms.gradients.replicas == 1:
            reduced = taken.squares.sum()
        else:
            reduced = self.norms.own_square()
        share = reduced / self.norms.gradients.replicas
        if scale is not None:
            share = share / scale.double().square()
        if self._before is None and step % self.interval_steps == 0:
            self._before = self.norms.weights()
        after, self._after = self._after, None
        ordered = self.place.rank == 0 and self._told_to_hold()
        values = own_values(loss_sum, tokens, share, taken.own)
        fused = fuse(
            values,
            self._well if after is None else after.bad.double().reshape(1),
            self._constants.of(HOLD if ordered else CONTINUE, int(self._suspect)),
        )
        self._suspect = False
        self.times.meeting()
        reduce(fused)
        self.times.reduced()
        pack = Pack()
        pack.add("sums", fused)
        pack.add("values", values)
        pack.add("scale", scale)
        pack.add("squares", taken.squares)
        pack.add("forward", taken.forward)
        pack.add("activations", taken.activations)
        pack.add("micro_losses", micro_losses)
        if after is not None:
            after.pack(pack)
        pending = Pending(step, tokens, loss_sum is not None, after, self.times.last)
        if not self.deferred:
            return self._settle(pending, read_now(pack))
        if self.decider.nonfinite_acts:
            set_found_inf(self.optimizer, fused)
        agreed = self._settle_later() or nothing_yet(self.norms)
        self._later = (pending, Later(pack))
        return agreed

    def _settle_later(self) -> Agreement | None:
        """Return the agreement of the deferred step, once."""
        if self._later is None:
            return None
        (pending, later), self._later = self._later, None
        return self._settle(pending, later.read())

    def _settle(self, pending: Pending, host: Unpacked) -> Agreement:
        """Decide a step from what arrived on the host."""
        sums = host.sums
        scale = host.number("scale", math.nan)
        loss_scale = None if math.isnan(scale) else scale
        if pending.after is not None:
            self._flush_due |= self.rows.add_layers(pending.after, host)
        decision = self.decider.decide(
            Agreed(
                step=pending.step,
                loss=sums.loss,
                nonfinite_ranks=sums.nonfinite_ranks,
                reduced_ranks=sums.reduced_ranks,
                nonfinite_losses=sums.nonfinite_losses,
                state_ranks=sums.state_ranks,
                suspects=sums.suspects,
                loss_scale=loss_scale,
            )
        )
        if self._before is None and (sums.nonfinite_ranks or sums.reduced_ranks) and not self.deferred:
            self._before = self.norms.weights()
        compute_s, wait_s = self.times.seconds(pending.times)
        own, _, share, _ = host.values["values"]
        return Agreement(
            step=pending.step,
            loss=sums.loss,
            nonfinite_ranks=sums.nonfinite_ranks,
            reduced_ranks=sums.reduced_ranks,
            nonfinite_losses=sums.nonfinite_losses,
            hold=sums.orders > 0,
            skip=decision.skip,
            halt=decision.halt,
            decision=decision,
            reading=reading(
                host.values.get("squares"),
                host.values.get("forward"),
                host.array("activations"),
                layers=len(self.norms.layers),
                scale=loss_scale or 1.0,
            ),
            grad_norm=self._grad_norm(sums, share),
            loss_scale=loss_scale,
            local_loss=own / pending.tokens if pending.tokens else math.nan,
            tokens=pending.tokens,
            total_tokens=round(sums.tokens),
            # A rank whose samples hold no token has no mean; a nonfinite sum is told all the same.
            measured=pending.measured and (pending.tokens > 0 or not math.isfinite(own)),
            compute_s=compute_s,
            wait_s=wait_s,
            micro_batch=first_bad(host.array("micro_losses")),
        )

    def _grad_norm(self, sums: Sums, share: float) -> float:
        # Nonfinite slices were left out of the sum, and another rank's are not known here.
        if not math.isfinite(share) or (self.norms.sharded and sums.reduced_ranks):
            return math.nan
        return math.sqrt(sums.grad_squares)

    def _scale(self) -> Tensor | None:
        """Return the loss scale on the device; `get_scale` would wait for it."""
        if self.scaler is None or not self.scaler.is_enabled():
            return None
        scale = getattr(self.scaler, "_scale", None)
        if scale is None:
            scale = torch.tensor(self.scaler.get_scale())
        return scale.to(self.norms.device)

    def _told_to_hold(self) -> bool:
        if self.mode != "act" or self.sender is None:
            return False
        directive = self.sender.directive
        if not directive or directive.get("attempt") not in (None, self.place.attempt):
            return False
        return directive.get("kind") == "hold"

    # --- after the update

    def finish(self, agreed: Agreement, facts: StepFacts) -> None:
        """Record a step after its update, and post what is due. Call on every rank."""
        self._facts[facts.step] = facts
        read = self._measure(agreed, facts.step)
        if agreed.step >= 0:
            self._record(agreed, self._facts.pop(agreed.step, facts), read)
        self.times.begin()
        if self._flush_due:
            self._flush()
        if self.place.leads and time.monotonic() - self._heartbeat_at >= self.heartbeat_s:
            self.heartbeat("training", facts.step)

    def _measure(self, agreed: Agreement, step: int) -> Unpacked | None:
        """Measure the layers after an update where it is due: a bad step is read at once, a healthy one
        with the next step's transfer."""
        if self._before is None:
            return None
        after = StateAfter.measure(self.norms, self.optimizer, step, self._before)
        self._before = None
        if agreed.step == step and agreed.bad:
            pack = Pack()
            after.pack(pack)
            return read_now(pack)
        self._after = after
        return None

    def _record(self, agreed: Agreement, facts: StepFacts, read: Unpacked | None) -> None:
        later = read is None and facts.step % self.interval_steps == 0
        bits = self.rows.add_step(agreed, facts, read, layers_later=later)
        self.ring.append(facts.step, facts.batch)
        if self.place.rank == 0:
            directive = self.sender.directive if self.sender is not None else None
            self.post(
                self.rows.events(
                    agreed,
                    facts,
                    bits,
                    mode=self.mode,
                    policy_modes=dict(self.policy.modes),
                    directive_seq=directive.get("seq") if directive else None,
                ),
                urgent=agreed.bad or agreed.halt,
            )
        self._flush_due |= agreed.bad or agreed.halt

    def flush(self) -> None:
        """Bring this node's rows to its leader and post them: a collective, so call it on all its ranks."""
        if self._after is not None:
            pack = Pack()
            self._after.pack(pack)
            self.rows.add_layers(self._after, read_now(pack))
            self._after = None
        self._flush()

    def _flush(self) -> None:
        self._flush_due = False
        for what in self.rows.gather():
            if self.sender is None:
                continue
            if isinstance(what, list):
                self.post(what, urgent=True)
            else:
                self._post_frame(what)

    def settle(self) -> Agreement | None:
        """With `deferred`: read and record the last step, when no other follows. Call on every rank."""
        agreed = self._settle_later()
        if agreed is not None and agreed.step in self._facts:
            self._record(agreed, self._facts.pop(agreed.step), None)
        return agreed

    def close(self) -> None:
        """Send what is queued. Rows not yet flushed need `flush` first, on all ranks of the node."""
        if self.outbox is not None:
            self.outbox.close()

    # --- what the loop declares

    def boundary(self, name: str, step: int, **data: Any) -> None:
        """Declare a discontinuity (warm-up end, mixture change, context-length switch, lr phase): detectors
        begin a new baseline instead of calling it a spike. Call on every rank, between steps."""
        self.decider.boundary()
        if self.place.rank == 0:
            self.post([{"type": "schedule.boundary", "step": step, "data": {"name": name, **data}}])

    def check_replicas(self, step: int, named: Mapping[str, Any] | None = None) -> list[Report]:
        """Compare replicas after `step`; a difference joins the next fused sum, so that all ranks decide
        on it in the same step. Call on every rank. Arguments: see `andon.replicas.groups_of`."""
        reports = compare(groups_of(self.norms.model, self.optimizer, named))
        for report in reports:
            self._suspect |= report.status == "differs"
            if self.place.rank == min(report.ranks, default=0):
                self._report(report.event(step))
        return reports

    def twin(self, step: int, run: Callable[[Any], Tensor], batch: Any, group: Any = None) -> TwinReport:
        """Run a twin step after `step` (andon/twin.py); a difference is decided on as one of replicas."""
        report = twin_step(self.norms, run, batch, step=step, group=group)
        self._suspect |= report.status == "differs"
        self.times.begin()
        if self.place.rank == min(report.ranks):
            self._report(report.event(step))
        return report

    def _report(self, event: dict[str, Any]) -> None:
        """Post what a group found; where its lowest rank leads no node, by way of its leader."""
        if self.sender is not None:
            self.post([event])
        else:
            self.rows.add_event({**event, "rank": self.place.rank, "time": time.time_ns()})

    def find_first(
        self, agreed: Agreement, run: Callable[[int], Tensor], micro_batches: int, state: RandomState | None
    ) -> FirstNonfinite | None:
        """Name this rank's first nonfinite tensor of a bad step (andon/monitor_rerun.py). Call on every rank,
        before the update and before `finish`, which posts it."""
        first = first_nonfinite(self.norms, run, micro_batches=micro_batches, random_state=state)
        if first is not None:
            self.rows.add_first(agreed.step, first, one_of=micro_batches)
        return first

    def request_activations(self) -> None:
        """Measure each layer's output norm in the next step. Posted with its layer rows."""
        self.norms.request_activations()

    def before_leaving(self) -> None:
        """Finish what must not be left half done; called on rank 0 while the other ranks wait on the host."""

    def begin_attempt(self, attempt: int) -> None:
        """Go on as another attempt of the run, after a resume in place."""
        self.place = replace(self.place, attempt=attempt)
        self.rows.place = self.place
        self.decider = self._decider(self._asked_guard, None, None)
