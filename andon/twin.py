"""The twin step: do all ranks compute the same thing the same way?

A GPU that computes wrongly spoils the all-reduce for all alike, so replicas stay equal and no checksum
sees it. Here every rank runs *one identical* micro-batch with the same weights and random numbers on
deterministic kernels; the digests of each layer's output, of the loss and of each layer's gradient are
compared before any reduce, and the gradients are thrown away. The ranks wait for each other at the next
collective anyway, so all of them as twins cost no more time than a pair would, and the third rank that
decides is the majority.

A rank that differs computes once more. The same wrong answer means a persistent fault, software or data
of that rank; another one means a transient fault.
(Playbook: "Silent corruption"; Dixit et al., "Silent Data Corruptions at Scale", 2021.)
"""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from andon.local_norms import LocalNorms, float_tensors
from andon.replicas import judge
from andon.set_aside import set_aside
from andon.tensor_checksum import checksum

Again = Literal["persistent", "transient"]
Status = Literal["equal", "differs", "not available"]


@dataclass(frozen=True)
class TwinReport:
    """What a twin step said; equal on all ranks.

    Attributes:
        source: the rank whose micro-batch everyone ran.
        differing: rank → what differs from the majority, in the order of computation: outputs of layers, the
            loss, gradients of layers. The first is where to look.
        again: rank → whether it was wrong in the same way a second time.
        tie: no majority (two ranks): which of them is right is not known.
    """

    status: Status
    ranks: tuple[int, ...]
    source: int
    differing: dict[int, list[str]] = field(default_factory=dict)
    again: dict[int, Again] = field(default_factory=dict)
    tie: bool = False
    reason: str | None = None

    def event(self, step: int) -> dict[str, Any]:
        """Return the `twin.report` event."""
        data: dict[str, Any] = {
            "status": self.status,
            "group": list(self.ranks),
            "source": self.source,
            "tie": self.tie,
            "differing": [
                {"rank": rank, "first": what[0], "count": len(what), "again": self.again.get(rank)}
                for rank, what in sorted(self.differing.items())
            ],
        }
        if self.reason:
            data["reason"] = self.reason
        return {"type": "twin.report", "step": step, "data": data}


def twin_step(
    norms: LocalNorms,
    run: Callable[[Any], Tensor],
    batch: Any,
    *,
    step: int,
    group: Any = None,
) -> TwinReport:
    """Run the twin step. A collective: call it on every rank of `group` between two steps.

    The ranks of `group` must hold the same weights (all of DDP's or FSDP2's); gradients, buffers, random
    numbers and kernel settings are as before afterwards.

    Args:
        run: forward of the model on a batch; returns the loss. It is this rank's own, so that whatever is
            wrong with this rank happens in it.
        batch: this rank's micro-batch, tensors in any nesting; one rank's, in turn, is used by all.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) < 2:
        return TwinReport("not available", (0,), 0, reason="there is no second rank to compare with")
    ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    source = ranks[step % len(ranks)]
    shared = [batch if dist.get_rank() == source else None]
    dist.broadcast_object_list(shared, src=source, group=group)
    names = _names(norms)
    seed = step * 2_654_435_761 % 2**63
    own = _digests(norms, run, shared[0], seed)
    report = judge(ranks, names, _gather(own, group))
    if report.status == "equal":
        return TwinReport("equal", ranks, source)
    # Everyone again, since under FSDP2 no rank can run alone.
    second = _digests(norms, run, shared[0], seed)
    same = _gather(own.new_full((1,), int(torch.equal(own, second))), group)
    again: dict[int, Again] = {
        rank: "persistent" if same[ranks.index(rank)][0] else "transient" for rank in report.differing
    }
    differing = {rank: sorted(what, key=names.index) for rank, what in report.differing.items()}
    return TwinReport("differs", ranks, source, differing, again, report.tie)


def _gather(own: Tensor, group: Any) -> list[list[int]]:
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group=group)
    rows: list[list[int]] = torch.stack(gathered).cpu().tolist()
    return rows


def _names(norms: LocalNorms) -> list[str]:
    forward = [f"{layer} output" for layer in norms.layers]
    return [*forward, "loss", *(f"{layer} gradient" for layer in reversed(norms.layers))]


def _digests(norms: LocalNorms, run: Callable[[Any], Tensor], batch: Any, seed: int) -> Tensor:
    """Return int64 checksums in the order of `_names`."""
    count = len(norms.layers)
    total = torch.zeros(2 * count + 1, dtype=torch.int64, device=norms.device)

    def output(layer: int) -> Any:
        def hook(_module: Any, _inputs: Any, out: Any) -> None:
            for tensor in float_tensors(out):
                total[layer] += checksum(tensor)

        return hook

    def gradient(layer: int, _name: str, value: Tensor) -> None:
        total[2 * count - layer] += checksum(value)

    parts = norms.modules.values()
    handles = [part.register_forward_hook(output(index)) for index, part in enumerate(parts)]
    try:
        with set_aside(norms), _deterministic(), _seeded(seed):
            if norms.kind == "fsdp2":
                norms.gradients.observer = gradient  # type: ignore[attr-defined]
            loss = run(batch)
            loss.backward()
            total[count] = checksum(loss.detach())
            if norms.kind != "fsdp2":
                for index, own in enumerate(norms.parameters.values()):
                    for parameter in own:
                        if parameter.grad is not None:
                            gradient(index, "", parameter.grad)
    finally:
        for handle in handles:
            handle.remove()
        if norms.kind == "fsdp2":
            norms.gradients.observer = None  # type: ignore[attr-defined]
    return total


@contextmanager
def _deterministic() -> Any:
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)
        torch.backends.cudnn.benchmark = benchmark


@contextmanager
def _seeded(seed: int) -> Any:
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
