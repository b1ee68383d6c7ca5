"""Restores are checked, not trusted: digests of every part at the save, compared after the load.

One line per part (weights, moments, schedule, scaler, random numbers of each rank, loader). The tensors'
checksums do not depend on how they are split (andon/tensor_checksum.py), so a restore on another number
of ranks is checked as well; what belongs to a rank that is no longer there is *not comparable*, and
said so.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from andon import loader as order
from andon.checkpoints import write_document
from andon.monitor_rerun import RandomState
from andon.tensor_checksum import checksum, place_of

SCHEMA = "andon.parts/1"

Verdict = Literal["equal", "differs", "not comparable", "not recorded"]


@dataclass(frozen=True)
class Parts:
    """What a step depends on. Only `model` must be there; `loader` has `state()` or `state_dict()`."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    schedule: Any = None
    scaler: Any = None
    loader: Any = None


@dataclass(frozen=True)
class Line:
    """The check of one part on one rank."""

    part: str
    verdict: Verdict
    detail: str = ""
    saved: Any = None
    restored: Any = None

    def document(self) -> dict[str, Any]:
        """Return it as JSON-ready data; `equal` is null where nothing could be compared."""
        equal = {"equal": True, "differs": False}.get(self.verdict)
        return {
            "part": self.part,
            "equal": equal,
            "verdict": self.verdict,
            "detail": self.detail,
            "saved": self.saved,
            "restored": self.restored,
        }


def file_name(rank: int) -> str:
    """Return the name of a rank's digests inside a checkpoint."""
    return f"andon-parts-{rank:05d}.json"


def digests(parts: Parts) -> dict[str, Any]:
    """Return the digests of every part of this rank. A collective where tensors are split over ranks."""
    found: dict[str, Any] = {"weights": _tensors(_weights(parts.model))}
    if parts.optimizer is not None:
        found["moments"] = _tensors(_moments(parts.model, parts.optimizer))
    if parts.schedule is not None:
        found["schedule"] = _sha256(parts.schedule.state_dict())
    if parts.scaler is not None and parts.scaler.is_enabled():
        found["scaler"] = _sha256(parts.scaler.state_dict())
    if parts.loader is not None:
        found["loader"] = _sha256(_order(loader_state(parts.loader)))
    state = RandomState.take()
    found["rng"] = _sha256(
        [
            state.torch_cpu.numpy().tobytes().hex(),
            [one.numpy().tobytes().hex() for one in state.cuda],
            [np.asarray(one).tolist() for one in state.numpy],
            state.python,
        ]
    )
    return found


def save(directory: Path, parts: Parts) -> Path:
    """Write this rank's digests into a checkpoint. Call on every rank, at the save."""
    document = {"schema": SCHEMA, "rank": _rank(), "world_size": _world_size(), "parts": digests(parts)}
    return write_document(directory, file_name(_rank()), document)


def check(directory: Path, parts: Parts) -> list[Line]:
    """Compare what was restored with what was saved. Call on every rank, before the first step.

    Returns one line per part, for this rank.
    """
    restored = digests(parts)
    own = _read(directory / file_name(_rank()))
    first = own or _read(directory / file_name(0))
    if first is None:
        return [Line(part, "not recorded", "the checkpoint holds no digests") for part in restored]
    moved = first["world_size"] != _world_size()
    lines = []
    for part, now in restored.items():
        # Tensors, schedule and scaler are the same for all ranks, so rank 0's record is as good.
        of_rank = part == "rng" or (part == "loader" and not is_shared(parts.loader))
        if of_rank and (own is None or moved):
            detail = f"saved by {first['world_size']} ranks, restored by {_world_size()}"
            lines.append(Line(part, "not comparable", detail))
            continue
        saved = (own or first)["parts"].get(part)
        lines.append(_line(part, saved, now))
    gone = (own or first)["parts"].keys() - restored.keys()
    lines += [Line(part, "differs", "saved, but this launch has none") for part in sorted(gone)]
    return lines


def _line(part: str, saved: Any, now: Any) -> Line:
    if saved is None:
        return Line(part, "not recorded", "the checkpoint holds no digest of it")
    if saved == now:
        return Line(part, "equal", saved=_short(saved), restored=_short(now))
    detail = ""
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        names = [n for n in saved.keys() | now.keys() if saved.get(n) != now.get(n)]
        detail = f"{len(names)} of {len(saved)} tensors: {', '.join(sorted(names)[:8])}"
    return Line(part, "differs", detail, _short(saved), _short(now))


def _short(value: Any) -> str:
    return value if isinstance(value, str) else _sha256(value)


def loader_state(loader: Any) -> Any:
    """Return a loader's state as JSON-ready data where it can be."""
    state = loader.state() if hasattr(loader, "state") else loader.state_dict()
    return msgspec.to_builtins(state) if isinstance(state, msgspec.Struct) else state


def _order(state: Any) -> Any:
    """Return a loader's state without where its stream stands: seen from another reader it is another."""
    if isinstance(state, dict) and state.get("schema") == order.SCHEMA:
        return {name: value for name, value in state.items() if name != "source"}
    return state


def is_shared(loader: Any) -> bool:
    """Whether a loader's state is the same on every rank: it is one of andon.loader."""
    return hasattr(loader, "state")


def _weights(model: nn.Module) -> dict[str, Tensor]:
    module = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    module = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    found = {}
    for name, parameter in module.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found[f"{name}.{key}"] = value
    return found


def _tensors(named: dict[str, Tensor]) -> dict[str, str]:
    """Return 16 hex digits per tensor, of the whole tensor. A sum over the ranks for what is split."""
    names = sorted(named)
    sums, split = [], []
    for name in names:
        local, start, whole = place_of(named[name])
        sums.append(checksum(local, start).cpu())
        split.append(not whole)
    if not names:
        return {}
    total = torch.stack(sums)
    if any(split) and dist.is_initialized():
        mask = torch.tensor(split)
        device = next(iter(named.values())).device
        # Only slices add up. A slice that lies on several ranks (HSDP) is counted by one of them.
        counted = torch.tensor([_counts(named[name]) for name in names])
        part = torch.where(mask & counted, total, torch.zeros_like(total)).to(device)
        dist.all_reduce(part)
        total = torch.where(mask, part.cpu(), total)
    return {name: f"{value % 2**64:016x}" for name, value in zip(names, total.tolist(), strict=True)}


def _counts(tensor: Tensor) -> bool:
    """Whether this rank is the first of those that hold its slice."""
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(tensor, DTensor):
        return True
    return all(
        tensor.device_mesh.get_local_rank(dimension) == 0
        for dimension, placement in enumerate(tensor.placements)
        if isinstance(placement, Replicate)
    )


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=repr).encode()).hexdigest()


def _read(path: Path) -> dict[str, Any] | None:
    try:
        document: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    if document.get("schema") != SCHEMA:
        raise ValueError(f"{path}: schema {document.get('schema')!r}, this version reads {SCHEMA!r}")
    return document


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
