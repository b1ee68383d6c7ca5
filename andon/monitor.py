"""The in-loop monitor for PyTorch: see every step, decide together, obey together.

Per step there is one fused SUM (Σ loss·tokens, Σ tokens, ranks with a nonfinite bit, rank 0's order;
beside them the ranks whose loss itself was nonfinite) and one transfer to the host. Nonfinite values
are replaced by 0 before the sum and travel in the count, because what a reduction does with a NaN
depends on backend and rank. So all ranks see the same verdict and the same order in the same step,
and act at its end: a rank that decides alone hangs the job.

Rank-local values go to the lowest rank of each node (the *leader*), which posts them: at once when
the step was bad, else every `interval_steps`. Only rank 0 reads directives. A server that is slow
or gone never slows a step; the trainer's own guard, where it is on, needs no server.
"""

import os
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from andon.local_norms import (
    BIT_FORWARD,
    BIT_OPTIMIZER,
    BIT_REDUCED_GRADIENT,
    BIT_SKIPPED,
    BIT_WEIGHT,
    LocalNorms,
    LocalReading,
)
from andon.monitor_posts import Place, StepFacts, batch_event, layer_frame, rank_frame
from andon.outbox import Outbox, Sender
from andon.policy import Policy
from andon.wire import Frame

Mode = Literal["off", "observe", "act"]
Guard = Literal["off", "skip"]

CONTINUE, HOLD = 0, 1  # the codes rank 0 puts into the fused sum


@dataclass(frozen=True)
class Agreement:
    """What all ranks agreed on in one step.

    Attributes:
        loss: token-weighted mean over the ranks whose loss was finite; NaN when none was.
        nonfinite_ranks: how many ranks had a nonfinite loss, output or own gradient.
        nonfinite_losses: how many had a nonfinite loss; the mean over all ranks is then NaN.
        hold: rank 0 had an order to hold; it takes effect at the end of this step.
        skip: the guard drops this update.
        halt: the guard's budget is spent: hold by the trainer's own decision.
    """

    loss: float
    nonfinite_ranks: int
    nonfinite_losses: int
    hold: bool
    skip: bool
    halt: bool
    reading: LocalReading
    local_loss: float
    tokens: int


def mode_from_environment(default: Mode = "act") -> Mode:
    """Return `ANDON_MODE`, which wins over everything else on a trainer.

    Raises:
        ValueError: it is set to something else than off, observe or act.
    """
    value = os.environ.get("ANDON_MODE", default)
    if value not in ("off", "observe", "act"):
        raise ValueError(f"ANDON_MODE: {value!r} is none of off, observe, act")
    return value  # type: ignore[return-value]


class Monitor:
    """Watches one DDP model on one rank.

    Arguments:
        norms: hooks on the model, made before the first backward.
        optimizer: read for nonfinite moments when a step was bad.
        sender: carries this node's posts; only the leader has one, others pass None.
        background: False sends within the call (a recorder that must keep the order).
        guard: "skip" drops updates of bad steps within the policy's budget; "off" applies them.
        interval_steps: how often healthy values are posted and layers are measured.
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
    ) -> None:
        self.place = place
        self.norms = norms
        self.optimizer = optimizer
        self.sender = sender if mode != "off" else None
        self.policy = policy or Policy()
        self.mode = mode
        self.guard = guard if mode == "act" else "off"
        self.interval_steps = interval_steps
        self.heartbeat_s = heartbeat_s
        self.outbox = Outbox(self.sender) if self.sender is not None and background else None
        self._heartbeat_at = 0.0
        self._before: list[list[torch.Tensor]] | None = None
        self._rank_rows: list[dict[str, Any]] = []
        self._layer_rows: list[dict[str, Any]] = []
        self._batches: list[dict[str, Any]] = []
        self._skips: deque[int] = deque()
        self._skips_in_a_row = 0

    # --- posting

    def post(self, events: list[dict[str, Any]]) -> None:
        """Post events of this attempt; nothing on ranks that lead no node."""
        if self.sender is None:
            return
        now_ns = time.time_ns()
        stamped = [
            {"attempt": self.place.attempt, "time": now_ns, "node": self.place.node, **e} for e in events
        ]
        if self.outbox is not None:
            self.outbox.events(stamped)
        else:
            self.sender.send_events(stamped)

    def _post_frame(self, frame: Frame) -> None:
        if self.outbox is not None:
            self.outbox.frame(frame)
        elif self.sender is not None:
            self.sender.send_frame(frame)

    # --- the step

    def agree(self, step: int, loss_sum: torch.Tensor, tokens: int) -> Agreement:
        """Join all ranks' verdicts on a step. Call on every rank after `backward`, before the update.

        `loss_sum` is this rank's summed token loss of the whole step, a scalar; `tokens` its count.
        """
        reading = self.norms.read()
        total = loss_sum.detach().double()
        finite = torch.isfinite(total) & (tokens > 0)
        bad = ~finite | bool(reading.bits)
        order = HOLD if self.place.rank == 0 and self._told_to_hold() else CONTINUE
        zero = torch.zeros_like(total)
        fused = torch.stack(
            (
                torch.where(finite, total, zero),
                torch.where(finite, zero + tokens, zero),
                bad.double(),
                zero + order,
                (~torch.isfinite(total)).double(),
            )
        )
        dist.all_reduce(fused)
        loss_total, token_total, nonfinite_ranks, orders, nonfinite_losses, own = torch.cat(
            (fused, total.reshape(1))
        ).tolist()
        skip = self.guard == "skip" and nonfinite_ranks > 0
        if step % self.interval_steps == 0 or nonfinite_ranks > 0:
            self._before = self.norms.weights()
        return Agreement(
            loss=loss_total / token_total if token_total else float("nan"),
            nonfinite_ranks=int(nonfinite_ranks),
            nonfinite_losses=int(nonfinite_losses),
            hold=orders > 0,
            skip=skip,
            halt=self._budget_spent(step, skip),
            reading=reading,
            local_loss=own / tokens if tokens else float("nan"),
            tokens=tokens,
        )

    def _told_to_hold(self) -> bool:
        if self.mode != "act" or self.sender is None:
            return False
        directive = self.sender.directive
        if not directive or directive.get("attempt") not in (None, self.place.attempt):
            return False
        return directive.get("kind") == "hold"

    def _budget_spent(self, step: int, skip: bool) -> bool:
        """Count skips as the hold table does: so many in a row, or so many within a window."""
        self._skips_in_a_row = self._skips_in_a_row + 1 if skip else 0
        if skip:
            self._skips.append(step)
        rules = self.policy.nonfinite
        while self._skips and self._skips[0] <= step - rules.skipped_window_steps:
            self._skips.popleft()
        return skip and (
            self._skips_in_a_row >= rules.skipped_in_a_row or len(self._skips) >= rules.skipped_in_window
        )

    def finish(self, agreed: Agreement, facts: StepFacts) -> None:
        """Record a step after its update, and post what is due. Call on every rank."""
        report = self._before is not None
        reduced_bits = self._reduced_bits(agreed, facts)
        bits = agreed.reading.bits | reduced_bits
        if not np.isfinite(agreed.local_loss) and agreed.tokens:
            bits |= BIT_FORWARD
        now_ns = time.time_ns()
        self._rank_rows.append(
            {
                "step": facts.step,
                "lane": self.place.rank,
                "time_ns": now_ns,
                "loss": agreed.local_loss,
                "grad_norm": agreed.reading.grad_norm,
                "nonfinite": bits,
                "step_time_s": facts.step_time_s,
                "seq_len_max": max(facts.batch.lengths, default=0),
                "tokens": agreed.tokens,
            }
        )
        self._batches.append(batch_event(self.place.rank, facts.step, facts.batch, now_ns))
        if report:
            self._measure_layers(agreed, facts, reduced_bits, now_ns)
        if self.place.rank == 0:
            self._post_step(agreed, facts, reduced_bits)
        if report:
            self.flush()
        if self.place.leads and time.monotonic() - self._heartbeat_at >= self.heartbeat_s:
            self.heartbeat("training", facts.step)

    def heartbeat(self, state: str, step: int) -> None:
        """Say that this node's ranks are alive, and whether they train or are held."""
        self._heartbeat_at = time.monotonic()
        self.post(
            [
                {
                    "type": "heartbeat",
                    "step": step,
                    "ranks": list(self.place.node_ranks),
                    "data": {"state": state},
                }
            ]
        )

    def _reduced_bits(self, agreed: Agreement, facts: StepFacts) -> int:
        """Return what is nonfinite after the reduce: the same on every rank, so it names none."""
        bits = BIT_SKIPPED if agreed.skip else 0
        if not np.isfinite(facts.grad_norm):
            bits |= BIT_REDUCED_GRADIENT
        if self._before is None and not bits:
            return bits
        moments = [
            value
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.is_floating_point()
        ]
        if moments and not bool(torch.stack([torch.isfinite(value).all() for value in moments]).all()):
            bits |= BIT_OPTIMIZER
        if not np.isfinite(self.norms.weight_norms()).all():
            bits |= BIT_WEIGHT
        return bits

    def _measure_layers(self, agreed: Agreement, facts: StepFacts, reduced_bits: int, now_ns: int) -> None:
        assert self._before is not None
        ratios, norms = self.norms.update_ratios(self._before), self.norms.weight_norms()
        self._before = None
        for index, layer in enumerate(self.norms.layers):
            bits = int(agreed.reading.layer_bits[index])
            if not np.isfinite(norms[index]):
                bits |= BIT_WEIGHT
            if reduced_bits & BIT_SKIPPED:
                bits |= BIT_SKIPPED
            self._layer_rows.append(
                {
                    "step": facts.step,
                    "lane": layer,
                    "time_ns": now_ns,
                    "rank": self.place.rank,
                    "grad_norm": float(agreed.reading.layer_grad_norm[index]),
                    "weight_norm": float(norms[index]),
                    "update_ratio": float(ratios[index]),
                    "nonfinite": bits,
                }
            )

    def _post_step(self, agreed: Agreement, facts: StepFacts, reduced_bits: int) -> None:
        data = {
            # The mean over all ranks: one NaN makes it NaN. The mean over the others is kept beside it.
            "loss": float("nan") if agreed.nonfinite_losses else agreed.loss,
            "grad_norm": facts.grad_norm,
            "lr": facts.lr,
            "tokens": agreed.tokens * self.place.world_size,
            "consumed_samples": facts.consumed_samples,
            "step_time_s": facts.step_time_s,
            "nonfinite": reduced_bits,
            "skipped": agreed.skip,
            "nonfinite_ranks": agreed.nonfinite_ranks,
            "loader_position": facts.loader_position,
            "optimizer_step": facts.optimizer_step,
            "schedule_position": facts.schedule_position,
            **facts.extra,
        }
        if agreed.nonfinite_losses:
            data["loss_of_finite_ranks"] = agreed.loss
        if self.sender is not None and self.sender.directive:
            data["directive_seq"] = self.sender.directive.get("seq")
        if self.mode != "act":
            data["mode"] = self.mode
        self.post([{"type": "step", "step": facts.step, "data": data}])

    def flush(self) -> None:
        """Bring this node's rows to its leader and post them: a collective, so call it on all its ranks."""
        own = (self._rank_rows, self._layer_rows, self._batches)
        gathered: list[Any] = [own]
        if self.place.node_group is not None:
            gathered = [None] * len(self.place.node_ranks)
            target = gathered if self.place.leads else None
            dist.gather_object(own, target, dst=min(self.place.node_ranks), group=self.place.node_group)
        self._rank_rows, self._layer_rows, self._batches = [], [], []
        if not self.place.leads or self.sender is None:
            return
        rank_rows = sorted(
            (row for rows, _, _ in gathered for row in rows), key=lambda r: (r["step"], r["lane"])
        )
        layer_rows = [row for _, rows, _ in gathered for row in rows]
        batches = sorted((b for _, _, rows in gathered for b in rows), key=lambda b: (b["step"], b["rank"]))
        # The bad value travels first; what explains it follows.
        if rank_rows:
            self._post_frame(rank_frame(self.place, rank_rows))
        if layer_rows:
            self._post_frame(layer_frame(self.place, layer_rows))
        if batches:
            self.post(batches)

    def begin_attempt(self, attempt: int) -> None:
        """Go on as another attempt of the run, after a resume in place."""
        self.place = replace(self.place, attempt=attempt)
        self._skips.clear()
        self._skips_in_a_row = 0

    def close(self) -> None:
        """Send what is queued. Rows not yet flushed need `flush` first, on all ranks of the node."""
        if self.outbox is not None:
            self.outbox.close()
