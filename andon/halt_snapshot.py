"""The halt snapshot: everything a step depends on, as it was when the line stopped.

Weights and moments go through torch.distributed.checkpoint, so each rank writes its own slices; beside
them, per rank: random numbers, batch ring, loader, and the digests of all parts. The commit manifest
comes last. The directory lies in quarantine: while a run is held nothing may become its newest checkpoint.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from andon import checkpoints, restore_check
from andon.batch_ring import BatchRing
from andon.checkpoints import Manifest, Positions
from andon.frozen_step import STATE
from andon.loader import LoaderState
from andon.monitor_rerun import RandomState
from andon.restore_check import Parts, is_shared, loader_state


def write(
    root: Path,
    parts: Parts,
    *,
    run: str,
    attempt: int,
    step: int,
    positions: Positions,
    ring: BatchRing | None = None,
    decider: dict[str, Any] | None = None,
    nonfinite: tuple[str, ...] = (),
) -> tuple[Path, Manifest | None]:
    """Write the snapshot of a held run. Call on every rank, no collective pending.

    Args:
        root: the attempt's checkpoint directory.
        step: the last step whose update was applied: the snapshot holds W(step).
        nonfinite: what is known to be nonfinite in weights and moments.

    Returns:
        The directory, and on rank 0 the committed manifest.
    """
    rank, world_size = restore_check._rank(), restore_check._world_size()
    directory = checkpoints.directory_of(root, step, quarantined=True)
    if rank == 0:
        # A snapshot of the same step, of a halt before this one, is replaced whole.
        (directory / checkpoints.MANIFEST).unlink(missing_ok=True)
    optimizers = [parts.optimizer] if parts.optimizer is not None else []
    model_state, optimizer_state = get_state_dict(parts.model, optimizers)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=str(directory / STATE))
    write_rng(directory, rank)
    if ring is not None:
        checkpoints.write_document(directory, f"batches-{rank:05d}.json", ring.document(rank))
    if parts.loader is not None:
        state = json.loads(json.dumps(loader_state(parts.loader), default=repr))
        checkpoints.write_document(directory, f"loader-{rank:05d}.json", state)
    restore_check.save(directory, parts)
    if rank == 0:
        shared = {
            "schedule": parts.schedule.state_dict() if parts.schedule is not None else None,
            "scaler": parts.scaler.state_dict() if parts.scaler is not None else None,
            "decider": decider,
        }
        for name, document in shared.items():
            if document is not None:
                plain = json.loads(json.dumps(document, default=repr))
                checkpoints.write_document(directory, f"{name}.json", plain)
    if world_size > 1:
        dist.barrier()
    if rank != 0:
        return directory, None
    manifest = checkpoints.commit(
        directory,
        run=run,
        attempt=attempt,
        step=step,
        positions=positions,
        parts=_files(directory),
        nonfinite=nonfinite,
    )
    return directory, manifest


def read(directory: Path, parts: Parts, *, rank: int | None = None) -> list[restore_check.Line]:
    """Load a snapshot into live objects and check it part by part. Call on every rank.

    Args:
        rank: whose random numbers and loader are taken; None: this process's own.

    Raises:
        andon.checkpoints.CheckpointError: it was not committed or a file differs.
    """
    checkpoints.verify(directory)
    optimizers = [parts.optimizer] if parts.optimizer is not None else []
    model_state, optimizer_state = get_state_dict(parts.model, optimizers)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=str(directory / STATE))
    set_state_dict(
        parts.model,
        optimizers,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    for name, part in (("schedule", parts.schedule), ("scaler", parts.scaler)):
        path = directory / f"{name}.json"
        if part is not None and path.exists():
            part.load_state_dict(json.loads(path.read_bytes()))
    rank = restore_check._rank() if rank is None else rank
    if parts.loader is not None:
        restore_loader(directory, parts.loader, rank)
    put_rng(directory, rank)
    return restore_check.check(directory, parts)


def write_rng(directory: Path, rank: int) -> None:
    """Write this rank's random numbers into a checkpoint."""
    checkpoints.write_arrays(directory, f"rng-{rank:05d}.npz", _rng_arrays(RandomState.take()))


def put_rng(directory: Path, rank: int) -> None:
    """Go back to a rank's random numbers, where the checkpoint has them."""
    if (directory / f"rng-{rank:05d}.npz").exists():
        _put_rng(checkpoints.read_arrays(directory, f"rng-{rank:05d}.npz"))


def restore_loader(directory: Path, loader: Any, rank: int) -> None:
    """Put a loader where its snapshot says; one that is equal on all ranks also on ranks that are new."""
    path = directory / f"loader-{rank:05d}.json"
    if is_shared(loader) and not path.exists():
        path = directory / "loader-00000.json"
    if not path.exists():
        return
    if hasattr(loader, "restore"):
        loader.restore(msgspec.json.decode(path.read_bytes(), type=LoaderState))
    else:
        loader.load_state_dict(json.loads(path.read_bytes()))


def _files(directory: Path) -> dict[str, list[str]]:
    """Return the snapshot's files by part. The state folder holds weights and moments together."""
    names = sorted(p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file())
    kinds = {"weights": f"{STATE}/", "optimizer": f"{STATE}/", "rng": "rng-", "batches": "batches-"}
    kinds |= {"loader": "loader-", "schedule": "schedule", "scaler": "scaler", "decider": "decider"}
    kinds |= {"digests": "andon-parts-"}
    found = {part: [name for name in names if name.startswith(start)] for part, start in kinds.items()}
    return {part: files for part, files in found.items() if files}


def _rng_arrays(state: RandomState) -> dict[str, np.ndarray]:
    name, keys, position, has_gauss, gauss = state.numpy
    version, internal, gauss_next = state.python
    assert name == "MT19937"
    return {
        "torch": state.torch_cpu.numpy().copy(),
        **{f"cuda{index}": one.numpy().copy() for index, one in enumerate(state.cuda)},
        "numpy_keys": np.asarray(keys),
        "numpy_rest": np.array([position, has_gauss, gauss], np.float64),
        "python": np.array(internal, np.int64),
        "python_rest": np.array([version, np.nan if gauss_next is None else gauss_next], np.float64),
    }


def _put_rng(arrays: dict[str, np.ndarray]) -> None:
    position, has_gauss, gauss = arrays["numpy_rest"].tolist()
    version, gauss_next = arrays["python_rest"].tolist()
    cuda = tuple(torch.from_numpy(arrays[name]) for name in sorted(arrays) if name.startswith("cuda"))
    RandomState(
        torch.from_numpy(arrays["torch"]),
        cuda,
        ("MT19937", arrays["numpy_keys"], int(position), int(has_gauss), gauss),
        (
            int(version),
            tuple(int(one) for one in arrays["python"]),
            None if np.isnan(gauss_next) else gauss_next,
        ),
    ).put()
