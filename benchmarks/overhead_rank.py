"""One of the four ranks of `python -m benchmarks overhead`: trains the same model under each arm in turn.

    python -m benchmarks.overhead_rank RANK FOLDER PEERS ROUNDS STEPS WIDTH LAYERS ROWS

Blocks of STEPS steps per arm, the arms of a round in an order drawn anew, all ranks alike; the first step
of a block is left out, since what the arm before does on its threads may end in it. Rank 0 writes times.json.
A model of LAYERS layers of WIDTH × WIDTH weights sees ROWS rows a step.
"""

import importlib
import json
import os
import random
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WARM_UP = 2

Log = Callable[[int, dict[str, float]], None]


def model_of(width: int, layers: int) -> DistributedDataParallel:
    """Return the same small model, wrapped anew."""
    torch.manual_seed(7)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.GELU()]
    return DistributedDataParallel(nn.Sequential(*parts))


class Arm:
    """One way to train: the bare loop, with one more meeting of the ranks, with a peer's writer on rank 0, or
    watched."""

    def __init__(
        self,
        model: DistributedDataParallel,
        log: Log | None = None,
        *,
        logs: bool = False,
        meets: bool = False,
        watched: Path | None = None,
    ) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.log, self.logs = log, logs
        self.one = torch.zeros(1) if meets else None
        self.number = 0
        self.monitor: Any = None
        if watched is not None:
            from andon.watch import watch

            self.monitor = watch(self.model, self.optimizer, directory=watched)

    def step(self, batch: torch.Tensor) -> None:
        """Train one step."""
        began = time.perf_counter()
        self.number += 1
        loss = self.model(batch).square().mean()
        loss.backward()
        if self.monitor is not None:
            self.monitor.step(loss, tokens=len(batch))
            return
        if self.one is not None:
            dist.all_reduce(self.one)
        norm = None
        if self.logs:  # the values that Andon posts in every step
            norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters()])
            mean = loss.detach().clone()
            dist.all_reduce(mean)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.logs and self.log is not None and norm is not None:
            values = {
                "loss": mean.item() / dist.get_world_size(),
                "grad_norm": norm.item(),
                "lr": self.optimizer.param_groups[0]["lr"],
                "tokens": float(len(batch)),
                "consumed_samples": float(self.number * len(batch)),
                "step_time_s": time.perf_counter() - began,
            }
            self.log(self.number, values)


def peers(folder: Path, found: dict[str, str]) -> dict[str, tuple[Log, Callable[[], None]]]:
    """Return the writers that are installed, by name, with what ends them; says in `found` which are not."""
    writers: dict[str, tuple[Log, Callable[[], None]]] = {}
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
    os.environ |= {"DO_NOT_TRACK": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}
    try:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(folder / "tensorboard"))

        def tensorboard(step: int, values: dict[str, float]) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        writers["tensorboard"] = (tensorboard, writer.close)
    except Exception as error:
        found["tensorboard"] = f"not measured: {error}"
    try:
        mlflow: Any = importlib.import_module("mlflow")

        mlflow.set_tracking_uri((folder / "mlruns").as_uri())
        mlflow.set_experiment("overhead")
        mlflow.start_run()
        writers["mlflow"] = (lambda step, values: mlflow.log_metrics(values, step=step), mlflow.end_run)
    except Exception as error:
        found["mlflow"] = f"not measured: {error}"
    try:
        wandb: Any = importlib.import_module("wandb")

        run = wandb.init(project="overhead", dir=str(folder), mode="offline")
        writers["wandb"] = (lambda step, values: run.log(values, step=step), run.finish)
    except Exception as error:
        found["wandb"] = f"not measured: {error}"
    return writers


def main() -> None:
    """Train all rounds of one rank."""
    rank, folder, extra = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    rounds, steps, width, layers, rows = map(int, sys.argv[4:9])
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(folder / "store"), 4)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=timedelta(seconds=120))
    missing: dict[str, str] = {}
    writers: dict[str, tuple[Log, Callable[[], None]]] = {}
    if rank == 0:
        sys.path.append(extra)
        writers = peers(folder, missing)
    names = [[*writers]]
    dist.broadcast_object_list(names, src=0)

    def arm(log: Log | None = None, **options: Any) -> Arm:
        return Arm(model_of(width, layers), log, **options)

    arms = {"bare": arm(), "one_float": arm(meets=True), "andon": arm(watched=folder / "checkpoints")}
    arms |= {name: arm(writers[name][0] if rank == 0 else None, logs=True) for name in names[0]}
    batch = torch.randn(rows, width, generator=torch.Generator().manual_seed(rank))
    shuffle = random.Random(20260)
    times: dict[str, list[list[float]]] = {name: [] for name in arms}
    cpu: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(WARM_UP + rounds):
        order = list(arms)
        shuffle.shuffle(order)
        for name in order:
            block = []
            dist.barrier()
            for index in range(steps):
                began = time.perf_counter()
                if index == 1:
                    cpu_began = time.process_time()
                arms[name].step(batch)
                block.append(time.perf_counter() - began)
            if name == "andon" and arms[name].monitor.outbox is not None:
                arms[name].monitor.outbox.drain(10.0)  # so that no post of it falls on the next arm
            if number >= WARM_UP:
                times[name].append(block[1:])
                cpu[name].append((time.process_time() - cpu_began) / (steps - 1))
    every: list[Any] = [None] * 4
    dist.all_gather_object(every, cpu)
    arms["andon"].monitor.close()
    if rank == 0:
        for _, end in writers.values():
            end()
        posted = arms["andon"].monitor.sender.status()
        document = {"times": times, "cpu": every, "missing": missing, "client": posted}
        (folder / "times.json").write_text(json.dumps(document))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads outlive their group in the interpreter's shutdown


if __name__ == "__main__":
    main()
