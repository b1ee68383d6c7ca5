"""Replica checksums: ranks that hold the same tensor must hold the same bits.

Compared over the group that really replicates each tensor: DDP's process group, the replicate dimensions
of an HSDP mesh, or a group the loop names (expert-dp for experts, tp for replicated norms). Where nothing
is replicated the answer is *not available*, never *pass*. It finds damage that came after the reduce; a
GPU that computes wrongly spreads its error to all alike and is found by the twin step (andon/twin.py).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from andon.local_gradients import kind_of
from andon.tensor_checksum import checksum

Status = Literal["equal", "differs", "not available"]


@dataclass(frozen=True)
class Report:
    """What the comparison of one group said; equal on all ranks of the group.

    Attributes:
        ranks: the ranks compared.
        tensors: how many were compared.
        differing: rank → names of its tensors that differ from the majority.
        tie: no majority: which of the ranks is right is not known.
        reason: why it is not available.
    """

    status: Status
    ranks: tuple[int, ...] = ()
    tensors: int = 0
    differing: dict[int, list[str]] = field(default_factory=dict)
    tie: bool = False
    reason: str | None = None

    def event(self, step: int) -> dict[str, Any]:
        """Return the `checksum.report` event."""
        data: dict[str, Any] = {"status": self.status, "tensors": self.tensors}
        if self.reason:
            data["reason"] = self.reason
        if self.ranks:
            data["group"] = list(self.ranks)
        if self.differing:
            data["tie"] = self.tie
            data["differing"] = [
                {"rank": rank, "tensors": names[:64], "count": len(names)}
                for rank, names in sorted(self.differing.items())
            ]
        return {"type": "checksum.report", "step": step, "data": data}


Groups = list[tuple[Any, dict[str, Tensor]]]


def groups_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    named: Mapping[str, Any] | None = None,
) -> Groups:
    """Return (process group, tensors by name) for every group that replicates something of the model.

    Args:
        named: parameter name or prefix → the process group that replicates it; None: nobody does.
            What it names is taken as said; everything else is read off the wrapper.
    """
    kind = kind_of(model)
    module = model.module if kind == "ddp" else model
    found: dict[Any, dict[str, Tensor]] = {}
    for name, parameter in module.named_parameters():
        for group in _groups_of_parameter(model, kind, name, parameter, named or {}):
            tensors = found.setdefault(group, {})
            tensors[f"weights.{name}"] = _local(parameter.detach())
            if optimizer is None:
                continue
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    tensors[f"moments.{name}.{key}"] = _local(value)
    return list(found.items())


def _groups_of_parameter(
    model: nn.Module, kind: str, name: str, parameter: Tensor, named: Mapping[str, Any]
) -> list[Any]:
    prefix = max((p for p in named if name == p or name.startswith(f"{p}.")), key=len, default=None)
    if prefix is not None:
        return [] if named[prefix] is None else [named[prefix]]
    if kind == "ddp":
        return [model.process_group]
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        return [
            mesh.get_group(dimension)
            for dimension, placement in enumerate(parameter.placements)
            if isinstance(placement, Replicate) and mesh.size(dimension) > 1
        ]
    return []


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def compare(groups: Groups) -> list[Report]:
    """Compare every group; a collective on each, so call it on all its ranks in the same order.

    One gather of one number per tensor, read once.
    """
    if not groups:
        return [Report("not available", reason="no tensor of this model has a replica on another rank")]
    reports = []
    for group, tensors in groups:
        ranks = tuple(dist.get_process_group_ranks(group))
        if len(ranks) < 2:
            reports.append(Report("not available", ranks, reason="the group has one rank"))
            continue
        names = sorted(tensors)
        own = torch.stack([checksum(tensors[name]) for name in names])
        gathered = [torch.empty_like(own) for _ in ranks]
        dist.all_gather(gathered, own, group=group)
        reports.append(judge(ranks, names, torch.stack(gathered).cpu().tolist()))
    return reports


def judge(ranks: Sequence[int], names: Sequence[str], rows: Sequence[Sequence[int]]) -> Report:
    """Return who differs from the majority, tensor by tensor.

    Args:
        rows: one checksum per tensor, for each rank.
    """
    differing: dict[int, list[str]] = {}
    tie = False
    for index, name in enumerate(names):
        column = [row[index] for row in rows]
        counts = Counter(column).most_common()
        if len(counts) == 1:
            continue
        # More than half must agree, else nobody knows who is right and all are named.
        value = counts[0][0] if 2 * counts[0][1] > len(column) else None
        tie |= value is None
        for rank, one in zip(ranks, column, strict=True):
            if value is None or one != value:
                differing.setdefault(rank, []).append(name)
    status: Status = "differs" if differing else "equal"
    return Report(status, tuple(ranks), len(names), differing, tie)
