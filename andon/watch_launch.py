"""Before the first step: may this directory train, where does this process stand, what is launched?"""

import socket
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from andon import hold
from andon.monitor_posts import Place
from andon.permit import Permit, PermitError, read_permit_file, verify

if TYPE_CHECKING:
    from andon.watch import Watch


def launched_event(
    made: "Watch",
    nodes: list[dict[str, Any]],
    permit: Permit | None,
    groups: Mapping[str, Any] | None,
    launch: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the `attempt.launched` event."""
    kind = made.norms.kind
    # DDP and FSDP2 over all ranks say it themselves; what a plain loop does only the loop knows.
    everyone = list(range(made.place.world_size))
    known = {"dp": everyone} if kind in ("ddp", "fsdp2") and groups is None else dict(groups or {})
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in made.norms.model.parameters()})
    scaler = made.scaler is not None and made.scaler.is_enabled()
    data: dict[str, Any] = {
        "world_size": made.place.world_size,
        "nodes": nodes,
        "precision": ", ".join(kinds) + (" with a loss scaler" if scaler else ""),
        "parallelism": kind,
        "layers": made.norms.layers,
    }
    if known:
        data["groups"] = known
    if permit is not None:
        data["permit"] = permit.permit
        if permit.skip is not None:
            data["skips"] = [[permit.skip.from_, permit.skip.to]]
    return {"type": "attempt.launched", "step": made.number, "data": {**data, **(launch or {})}}


def place_here(run: str, attempt: int) -> tuple[Place, list[dict[str, Any]]]:
    """Return where this process stands, and all nodes with their ranks; ranks of one host share a node.
    A collective."""
    name = socket.gethostname()
    if not dist.is_initialized():
        return Place(run, attempt, 0, 1, name, (0,)), [{"node": name, "ranks": [0]}]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    names: list[str] = [""] * world_size
    dist.all_gather_object(names, name)
    own: tuple[int, ...] = (rank,)
    group, nodes = None, []
    for host in dict.fromkeys(names):  # every rank makes every group, in the same order
        ranks = tuple(index for index, other in enumerate(names) if other == host)
        # gloo: rows are handed over from the host, and must not stand in line with the gradients.
        made = dist.new_group(list(ranks), backend="gloo") if len(ranks) > 1 else None
        nodes.append({"node": host, "ranks": list(ranks)})
        if rank in ranks:
            own, group = ranks, made
    return Place(run, attempt, rank, world_size, name, own, group), nodes


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that a trainer loaded: W(step), where it lies, and its digest where it was committed."""

    step: int
    uri: str | None = None
    digest: str | None = None


def refuse_if_held(
    folder: Path,
    run: str,
    attempt: int,
    permit: str | None,
    trusted: Collection[str],
    resumed: Resumed | None = None,
) -> tuple[int, Permit | None]:
    """Return the attempt that may begin here and its permit; rank 0 looks, all obey.

    Args:
        resumed: what was loaded, where that is known: a permit for another checkpoint ends no hold.
    """
    answer: list[Any] = [attempt, None, None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            if permit is not None:
                document = read_permit_file(permit)
                if resumed is not None:
                    _check_resumed(verify(document, trusted=trusted, at=time.time(), run=run), resumed)
                granted = hold.release(folder, document, trusted=trusted, at=time.time(), run=run)
                answer[0], answer[2] = granted.attempt, granted
            else:
                hold.check(folder)
        except (hold.Held, PermitError, OSError, ValueError) as error:
            answer[1] = str(error)
            print(f"andon: not started: {error}", flush=True)  # noqa: T201
    if dist.is_initialized():
        dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise SystemExit(hold.EXIT_HELD)
    return answer[0], answer[2]


def _check_resumed(permit: Permit, resumed: Resumed) -> None:
    wanted = permit.checkpoint
    if wanted is None:
        return
    if wanted.step != resumed.step:
        raise PermitError(
            f"checkpoint: the permit goes on from step {wanted.step}, this launch from step {resumed.step}"
        )
    if wanted.digest and resumed.digest and wanted.digest != resumed.digest:
        raise PermitError(f"checkpoint: what was loaded from {resumed.uri} is not what the permit names")


def store() -> Any:
    """Return the key-value store that all ranks share."""
    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    return dist.HashStore()
