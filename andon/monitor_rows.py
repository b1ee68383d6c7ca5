"""The rows a rank collects between two posts, and the events of a step."""

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from andon.batch_ring import NOT_TOLD, BatchFacts
from andon.local_gradients import local_of, norms_of
from andon.local_norms import (
    BIT_FORWARD,
    BIT_OPTIMIZER,
    BIT_REDUCED_GRADIENT,
    BIT_SKIPPED,
    BIT_WEIGHT,
    LocalNorms,
)
from andon.monitor_posts import (
    Place,
    StepFacts,
    batch_event,
    layer_frames,
    rank_frames,
    verdict_event,
)
from andon.monitor_reduce import Pack, Unpacked
from andon.monitor_rerun import FirstNonfinite

if TYPE_CHECKING:
    from andon.monitor_agreement import Agreement


@dataclass(frozen=True)
class StateAfter:
    """Weights and moments after a step, per layer, still on the device.

    `bad` is whether any of them is nonfinite; it joins the next fused sum, so that all ranks learn it.
    """

    step: int
    weight: Tensor
    moved: Tensor | None
    size: Tensor | None
    moments_bad: Tensor
    bad: Tensor

    @classmethod
    @torch.no_grad()  # type: ignore[untyped-decorator]
    def measure(
        cls, norms: LocalNorms, optimizer: torch.optim.Optimizer, step: int, before: list[Tensor] | None
    ) -> "StateAfter":
        """Measure with foreach kernels; nothing is read."""
        weight = norms.weight_squares()
        moved, size = norms.update_squares(before) if before is not None else (None, None)
        moments = [
            local_of(value.detach())
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0
        ]
        moments_bad = torch.zeros((), dtype=torch.bool, device=norms.device)
        if moments:
            # Second moments of large gradients may have a norm, or a sum, that overflows: a nonfinite value
            # has neither.
            lengths = torch.stack([norm.double() for norm in norms_of(moments)])
            sums = torch.stack([moment.sum().double() for moment in moments])
            moments_bad = ~(torch.isfinite(lengths) | torch.isfinite(sums)).all()
        return cls(step, weight, moved, size, moments_bad, moments_bad | ~torch.isfinite(weight).all())

    def pack(self, pack: Pack) -> None:
        """Let it travel with a transfer."""
        pack.add("after_weight", self.weight)
        pack.add("after_moved", self.moved)
        pack.add("after_size", self.size)
        pack.add("after_moments", self.moments_bad)


class Rows:
    """Rows of one rank, gathered to its node's leader at a flush."""

    def __init__(self, place: Place, norms: LocalNorms) -> None:
        self.place = place
        self._norms = norms
        self._rank: list[dict[str, Any]] = []
        self._layer: list[dict[str, Any]] = []
        self._events: list[dict[str, Any]] = []
        self._batches: list[tuple[int, BatchFacts, int]] = []  # step, what was read, when
        self._waiting: dict[int, Agreement] = {}  # their layers' weights are still on the device
        # Bit and micro-batch of a bad step's first nonfinite tensor, until its row is written.
        self._first: dict[int, tuple[int, int | None]] = {}
        self._loader_before: int | None = None

    def add_step(
        self, agreed: "Agreement", facts: StepFacts, after: Unpacked | None, *, layers_later: bool
    ) -> int:
        """Take in a step; return its nonfinite bits after the reduce: equal on every rank, they name none.

        Args:
            after: weights and moments after this step, where they were read at once.
            layers_later: they follow by `add_layers`.
        """
        shared = BIT_SKIPPED if agreed.skip else 0
        norm = agreed.grad_norm if facts.grad_norm is None else facts.grad_norm
        if not math.isfinite(norm):
            shared |= BIT_REDUCED_GRADIENT
        if after is not None:
            if after.number("after_moments", 0.0):
                shared |= BIT_OPTIMIZER
            weight = after.array("after_weight")
            if weight is not None and not np.isfinite(weight).all():
                shared |= BIT_WEIGHT
        bits = agreed.reading.bits | shared
        first_bit, micro_batch = self._first.pop(facts.step, (0, agreed.micro_batch))
        bits |= first_bit
        if agreed.measured and not math.isfinite(agreed.local_loss):
            bits |= BIT_FORWARD
        now_ns = time.time_ns()
        local = agreed.reading.view == "local"
        self._rank.append(
            {
                "step": facts.step,
                "lane": self.place.rank,
                "time_ns": now_ns,
                "view": agreed.reading.view,
                "micro_batch": micro_batch,
                "loss": agreed.local_loss if agreed.measured else None,
                "grad_norm": agreed.reading.grad_norm if local else _known(agreed.grad_norm),
                "nonfinite": bits,
                "compute_s": _known(agreed.compute_s),
                "wait_s": _known(agreed.wait_s),
                "step_time_s": facts.step_time_s,
                "seq_len_max": max(facts.batch.lengths, default=0),
                "tokens": agreed.tokens,
            }
        )
        if facts.batch != NOT_TOLD:
            self._batches.append((facts.step, facts.batch, now_ns))
        if after is not None:
            self._layers(agreed, after)
        elif layers_later:
            self._waiting[facts.step] = agreed
        elif agreed.reading.activations is not None:
            self._layers(agreed, None)
        return shared

    def add_layers(self, after: StateAfter, host: Unpacked) -> bool:
        """Take in the layers of an earlier step; return whether that step was known."""
        agreed = self._waiting.pop(after.step, None)
        if agreed is None:
            return False
        self._layers(agreed, host)
        if host.number("after_moments", 0.0):
            # Weights show in their layer's norm; moments have no norm of their own.
            where = {"step": after.step, "lane": self.place.rank, "time_ns": time.time_ns()}
            self._rank.append({**where, "view": agreed.reading.view, "nonfinite": BIT_OPTIMIZER})
        return True

    def _layers(self, agreed: "Agreement", host: Unpacked | None) -> None:
        norms = ratios = None
        if host is not None and (weight := host.array("after_weight")) is not None:
            with np.errstate(invalid="ignore", divide="ignore"):
                norms = np.sqrt(weight)
                if (moved := host.array("after_moved")) is not None:
                    ratios = np.sqrt(moved / host.array("after_size"))
        now_ns, local = time.time_ns(), agreed.reading.view == "local"
        gradients = agreed.reading.layer_grad_norm
        for index, layer in enumerate(self._norms.layers):
            bits = int(agreed.reading.layer_bits[index]) | (BIT_SKIPPED if agreed.skip else 0)
            if norms is not None and not np.isfinite(norms[index]):
                bits |= BIT_WEIGHT
            activations = agreed.reading.activations
            self._layer.append(
                {
                    "step": agreed.step,
                    "lane": layer,
                    "time_ns": now_ns,
                    "rank": self.place.rank,
                    "view": agreed.reading.view,
                    "weights": "shard" if self._norms.sharded else "reduced",
                    "grad_norm": float(gradients[index]) if local else None,
                    "weight_norm": None if norms is None else float(norms[index]),
                    "update_ratio": None if ratios is None else float(ratios[index]),
                    "act_norm": None if activations is None else float(activations[index]),
                    "nonfinite": bits,
                }
            )

    def add_event(self, event: dict[str, Any]) -> None:
        """Take in an event that the leader posts for this rank."""
        self._events.append(event)

    def add_first(self, step: int, first: FirstNonfinite, *, one_of: int) -> None:
        """Take in what running a step of `one_of` micro-batches again named as its first nonfinite tensor."""
        now_ns = time.time_ns()
        self._first[step] = (first.bit, first.micro_batch if one_of > 1 else None)
        self._layer.append(
            {
                "step": step,
                "lane": first.module,
                "time_ns": now_ns,
                "rank": self.place.rank,
                "view": "local",
                "weights": "reduced",
                "micro_batch": first.micro_batch,
                "nonfinite": first.bit,
            }
        )
        data = {"kind": "first_nonfinite", "severity": "info", "rule": "nonfinite", **first.document()}
        event = {"type": "verdict", "step": step, "rank": self.place.rank, "time": now_ns, "data": data}
        self.add_event(event)

    def gather(self) -> list[Any]:
        """Return what this node's leader posts: frames and lists of events; nothing on other ranks."""
        batches = [batch_event(self.place.rank, *one) for one in self._batches]
        own = (self._rank, self._layer, batches + self._events)
        gathered: list[Any] = [own]
        place = self.place
        if place.node_group is not None:
            gathered = [None] * len(place.node_ranks)
            target = gathered if place.leads else None
            dist.gather_object(own, target, dst=min(place.node_ranks), group=place.node_group)
        self._rank, self._layer, self._events, self._batches = [], [], [], []
        if not place.leads:
            return []
        rank_rows = [row for rows, _, _ in gathered for row in rows]
        layer_rows = [row for _, rows, _ in gathered for row in rows]
        events = sorted((e for _, _, rows in gathered for e in rows), key=lambda e: (e["step"], e["rank"]))
        rank_rows.sort(key=lambda row: (row["step"], row["lane"]))
        # The bad value travels first; what explains it follows.
        posts: list[Any] = [*rank_frames(place, rank_rows), *layer_frames(place, layer_rows)]
        return [*posts, events] if events else posts

    def events(
        self,
        agreed: "Agreement",
        facts: StepFacts,
        bits: int,
        *,
        mode: str,
        policy_modes: dict[str, str],
        directive_seq: int | None,
    ) -> list[dict[str, Any]]:
        """Return rank 0's events of a step: its values, the verdicts on it, and what was done about it."""
        data: dict[str, Any] = {
            # The mean over all ranks: one NaN makes it NaN. The mean over the others is kept beside it.
            "loss": float("nan")
            if agreed.nonfinite_losses
            else (agreed.loss if agreed.total_tokens else None),
            "grad_norm": agreed.grad_norm if facts.grad_norm is None else facts.grad_norm,
            "lr": facts.lr,
            "tokens": agreed.total_tokens,
            "consumed_samples": facts.consumed_samples,
            "step_time_s": facts.step_time_s,
            "nonfinite": bits,
            "skipped": agreed.skip,
            "nonfinite_ranks": agreed.nonfinite_ranks,
            "loader_position": facts.loader_position,
            "optimizer_step": facts.optimizer_step,
            "schedule_position": facts.schedule_position,
            **facts.extra,
        }
        if agreed.nonfinite_losses:
            data["loss_of_finite_ranks"] = agreed.loss
        if agreed.loss_scale is not None:
            data["loss_scale"] = agreed.loss_scale
        if directive_seq is not None:
            data["directive_seq"] = directive_seq
        if mode != "act":
            data["mode"] = mode
        if agreed.reading.view == "reduced":
            data["gradients"] = "reduced: this parallelism shows no rank's own gradients"
        events: list[dict[str, Any]] = [{"type": "step", "step": facts.step, "data": data}]
        for finding in agreed.decision.findings:
            acting = mode if mode != "act" else policy_modes.get(finding.rule, "observe")
            events.append(verdict_event(finding, mode=acting, would=agreed.decision.would))
        if agreed.skip:
            events.append(self._action(agreed, facts))
        self._loader_before = facts.loader_position
        return events

    def _action(self, agreed: "Agreement", facts: StepFacts) -> dict[str, Any]:
        none = {"checkpoint": "the update was dropped before it was applied: no checkpoint is involved"}
        data: dict[str, Any] = {
            "action": "halt" if agreed.halt else "skip",
            "ranks": list(range(self.place.world_size)),
            "loader_after": facts.loader_position,
            "reason": agreed.decision.reason,
            "detector": next((one.detector for one in agreed.decision.findings), "monitor"),
            "numbers": {"nonfinite_ranks": agreed.nonfinite_ranks, "loss_scale": agreed.loss_scale},
        }
        if self._loader_before is None:
            none["loader_before"] = "this is the first step this monitor saw"
        else:
            data["loader_before"] = self._loader_before
        return {"type": "action", "step": facts.step, "data": data | {"reason_none": none}}


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
