"""What one launch of the demo's training is: a plain record that every rank receives."""

import hashlib
import json
import platform
import sys
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import rfc8785

from andon.loader import Loader, Window
from demo import data

VERSION = 1  # of the script; a recording made by another version is made again
SCRIPT_FILES = (
    "demo/data.py",
    "demo/job.py",
    "demo/model.py",
    "demo/rank.py",
    "demo/record.py",
    "demo/state.py",
    "demo/train.py",
)
REPOSITORY = Path(__file__).resolve().parent.parent

Fault = Literal["none", "hole", "binary"]


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One launch. Sizes are small enough for two CPU cores.

    Attributes:
        directory: the run directory: `data/`, `checkpoints/`, `logs/`, `artifacts/` lie below it.
        attempt: 1 for a first launch.
        last_step: train to this step.
        restore: checkpoint directory to begin from.
        skips: windows of absolute positions never to be read.
        fault: "hole": one sample of the shard reads back as zeros; "binary": all samples of a window
            of steps are random bytes. Placed where `fault_step` (and `fault_rank`) will read.
        record: keep posts in a file instead of sending them.
        permit: id of the permit this launch is made under.
        trusted: fingerprints of the server's keys.
    """

    directory: str
    run: str
    attempt: int = 1
    last_step: int = 140
    world_size: int = 4
    ranks_per_node: int = 2
    micro_batch: int = 4
    learning_rate: float = 3e-3
    warm_up_steps: int = 40
    horizon_steps: int = 2000
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    checkpoint_every: int = 30
    interval_steps: int = 10
    seed: int = 20260
    fault: Fault = "none"
    fault_step: int = 120
    fault_rank: int = 3
    fault_steps: int = 1
    restore: str | None = None
    skips: tuple[Window, ...] = ()
    record: bool = False
    url: str | None = None
    secret: str | None = None
    permit: str | None = None
    trusted: tuple[str, ...] = ()
    guard: Literal["off", "skip"] = "off"
    hold_deadline_s: float = 600.0
    began_ns: int = 0

    @property
    def root(self) -> Path:
        """The run directory."""
        return Path(self.directory)

    @property
    def checkpoints(self) -> Path:
        """Where this attempt's checkpoints lie; an attempt never overwrites another's."""
        return self.root / "checkpoints" / f"attempt-{self.attempt}"

    @property
    def logs(self) -> Path:
        """Where this attempt's rank logs lie."""
        return self.root / "logs" / f"attempt-{self.attempt}"

    @property
    def artifacts(self) -> Path:
        """Where this attempt's configuration records lie."""
        return self.root / "artifacts" / f"attempt-{self.attempt}"

    @property
    def global_batch(self) -> int:
        """Samples per step over all ranks."""
        return self.micro_batch * self.world_size

    def nodes(self) -> list[dict[str, Any]]:
        """Return the logical nodes: names for groups of ranks, all on this host."""
        return [
            {
                "node": f"node-{index:02d}",
                "ranks": list(range(first, first + self.ranks_per_node)),
                "logical": True,
            }
            for index, first in enumerate(range(0, self.world_size, self.ranks_per_node))
        ]

    def loader(self, size: int, rank: int = 0) -> Loader:
        """Return the loader at the beginning of the stream."""
        return Loader(
            size=size, seed=self.seed, global_batch=self.global_batch, rank=rank, world_size=self.world_size
        )

    def faulty_positions(self) -> list[int]:
        """Return the absolute positions of the damaged samples, ascending."""
        first = self.global_batch * (self.fault_step - 1)
        if self.fault == "hole":
            return [first + self.fault_rank * self.micro_batch + 1]
        if self.fault == "binary":
            return list(range(first, first + self.global_batch * self.fault_steps))
        return []

    def config(self) -> dict[str, Any]:
        """Return what decides the arithmetic: the resolved configuration, without secrets or places."""
        hidden = {
            "directory", "url", "secret", "permit", "trusted", "record", "began_ns", "restore", "run",
            "attempt", "last_step", "hold_deadline_s", "fault", "fault_step", "fault_rank", "fault_steps",
        }  # fmt: skip
        values = {key: value for key, value in msgspec.to_builtins(self).items() if key not in hidden}
        return {
            "script_version": VERSION,
            "optimizer": "AdamW betas 0.9, 0.95",
            "precision": "fp32",
            **values,
        }


def prepare(job: Job) -> data.Shard:
    """Pack the data set and place the fault, once per run directory; return the shard."""
    folder = job.root / "data"
    if not (folder / "shard-0000.json").exists():
        data.build(folder)
        shard = data.Shard(folder)
        indexes = [job.loader(len(shard)).sample(position) for position in job.faulty_positions()]
        if job.fault == "hole":
            data.punch_hole(shard, indexes[0])
        elif job.fault == "binary":
            data.overwrite_with_binary(shard, indexes, job.seed)
        return shard
    return data.Shard(folder)


def script_files() -> dict[str, bytes]:
    """Return the files whose content decides what a recording holds."""
    return {name: (REPOSITORY / name).read_bytes() for name in SCRIPT_FILES}


def environment() -> dict[str, Any]:
    """Return the software this runs on: no host name, no path, no variable."""
    import torch

    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "system": platform.system(),
        "machine": platform.machine(),
        "backend": "gloo",
        "byte_order": sys.byteorder,
    }


def digest_of(document: Any) -> str:
    """Return SHA-256 over the RFC 8785 form."""
    return hashlib.sha256(rfc8785.dumps(json.loads(msgspec.json.encode(document)))).hexdigest()
