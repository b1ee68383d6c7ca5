"""Saving and restoring everything a step depends on: weights, moments, schedule, RNG of each rank, loader."""

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from andon import checkpoints
from andon.checkpoints import Manifest, Positions
from andon.loader import Loader, LoaderState
from demo.job import Job

Arrays = dict[str, np.ndarray]


class State:
    """The trained things of one rank."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: torch.optim.lr_scheduler.LRScheduler,
        loader: Loader,
        rank: int,
    ) -> None:
        self.model, self.optimizer, self.schedule, self.loader, self.rank = (
            model,
            optimizer,
            schedule,
            loader,
            rank,
        )
        self.optimizer_step = 0

    def positions(self) -> Positions:
        """Return the four numbers."""
        return Positions(
            loader_position=self.loader.position,
            consumed_samples=self.loader.consumed_samples,
            optimizer_step=self.optimizer_step,
            schedule_position=int(self.schedule.last_epoch),
        )

    def weights(self) -> Arrays:
        """Return every parameter by name."""
        return {name: p.detach().numpy().copy() for name, p in self.model.named_parameters()}

    def moments(self) -> Arrays:
        """Return AdamW's moments and step counts, named `parameter.moment`."""
        arrays: Arrays = {}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                arrays[f"{name}.{key}"] = value.detach().numpy().copy()
        return arrays

    def rng(self) -> Arrays:
        """Return this rank's generator state."""
        return {"torch": torch.get_rng_state().numpy().copy()}

    def schedule_document(self) -> dict[str, Any]:
        """Return where the learning rate is; the rate itself only for readers."""
        return {
            "last_epoch": int(self.schedule.last_epoch),
            "optimizer_step": self.optimizer_step,
            "lr": float(self.schedule.get_last_lr()[0]),
        }


def save(state: State, job: Job, step: int, *, quarantined: bool = False) -> Manifest | None:
    """Write a checkpoint; every rank calls it. Rank 0 commits and returns the manifest.

    The barrier lets no manifest be written before every rank's file is.
    """
    directory = checkpoints.directory_of(job.checkpoints, step, quarantined=quarantined)
    checkpoints.write_arrays(directory, f"rng-{state.rank}.npz", state.rng())
    if state.rank == 0:
        checkpoints.write_arrays(directory, "weights.npz", state.weights())
        checkpoints.write_arrays(directory, "optimizer.npz", state.moments())
        checkpoints.write_document(directory, "schedule.json", state.schedule_document())
        checkpoints.write_document(directory, "loader.json", msgspec.to_builtins(state.loader.state()))
    dist.barrier()
    if state.rank != 0:
        return None
    return checkpoints.commit(
        directory,
        run=job.run,
        attempt=job.attempt,
        step=step,
        positions=state.positions(),
        parts={
            "weights": ["weights.npz"],
            "optimizer": ["optimizer.npz"],
            "schedule": ["schedule.json"],
            "loader": ["loader.json"],
            "rng": [f"rng-{rank}.npz" for rank in range(job.world_size)],
        },
    )


def restore(state: State, directory: Path) -> tuple[int, list[dict[str, Any]]]:
    """Load a verified checkpoint; return its step and one report line per part.

    Each part is read out of the live objects again and compared with what was saved.

    Raises:
        andon.checkpoints.CheckpointError: it is not whole or not finite.
    """
    manifest = checkpoints.verify(directory)
    weights = checkpoints.read_arrays(directory, "weights.npz")
    moments = checkpoints.read_arrays(directory, "optimizer.npz")
    rng = checkpoints.read_arrays(directory, f"rng-{state.rank}.npz")
    schedule = msgspec.json.decode((directory / "schedule.json").read_bytes())
    loader = msgspec.json.decode((directory / "loader.json").read_bytes(), type=LoaderState)
    with torch.no_grad():
        for name, parameter in state.model.named_parameters():
            parameter.copy_(torch.from_numpy(weights[name]))
            state.optimizer.state[parameter] = {
                key.removeprefix(f"{name}."): torch.from_numpy(value.copy())
                for key, value in moments.items()
                if key.rpartition(".")[0] == name
            }
    state.schedule.last_epoch = schedule["last_epoch"]
    rates = [
        base * rule(schedule["last_epoch"])
        for base, rule in zip(state.schedule.base_lrs, state.schedule.lr_lambdas, strict=True)
    ]
    state.schedule._last_lr = rates
    for group, rate in zip(state.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    state.optimizer_step = schedule["optimizer_step"]
    state.loader.restore(loader)
    torch.set_rng_state(torch.from_numpy(rng["torch"]))
    report = [
        _compared("weights", weights, state.weights()),
        _compared("optimizer", moments, state.moments()),
        _compared("rng", rng, state.rng()),
        _line("schedule", schedule, state.schedule_document()),
        _line("loader", msgspec.to_builtins(loader), msgspec.to_builtins(state.loader.state())),
    ]
    return manifest.step, report


def _compared(part: str, saved: Arrays, restored: Arrays) -> dict[str, Any]:
    return _line(part, _digest(saved), _digest(restored))


def _line(part: str, saved: Any, restored: Any) -> dict[str, Any]:
    return {"part": part, "equal": saved == restored, "saved": saved, "restored": restored}


def _digest(arrays: Arrays) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(name.encode() + b"\0" + str(arrays[name].dtype).encode() + arrays[name].tobytes())
    return digest.hexdigest()
