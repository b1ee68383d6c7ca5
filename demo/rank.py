"""One rank of the demo's training: an ordinary DDP loop with an Andon monitor in it."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from andon import checkpoints, recording
from andon.checkpoints import sha256_of
from andon.client import Client
from andon.holding import Holder
from andon.local_norms import LocalNorms
from andon.monitor import Monitor, mode_from_environment
from andon.monitor_posts import BatchFacts, Place, StepFacts
from andon.policy import HoldRules, Policy
from demo import data
from demo.job import Job, digest_of, environment, script_files
from demo.model import Gpt, Shape, loss_of
from demo.state import State, restore, save


def run_rank(job: Job, rank: int, store_path: Path) -> None:
    """Train one rank to `job.last_step`, or until held (SystemExit 93)."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(store_path), job.world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world_size)
    Trainer(job, rank, store).train()
    dist.barrier()  # nobody closes its connections while another still waits on them


class Trainer:
    """The state of one rank's loop."""

    def __init__(self, job: Job, rank: int, store: dist.Store) -> None:
        self.job, self.rank = job, rank
        torch.manual_seed(job.seed * 1000 + rank)
        self.shard = data.Shard(job.root / "data")
        # Without looking for unused parameters DDP lays its buckets out anew after the first step of a
        # launch, so that step sums in another order and a resumed run is equal only to the last bit but one.
        self.model = DistributedDataParallel(
            Gpt(Shape(), job.seed), broadcast_buffers=False, find_unused_parameters=True
        )
        norms = LocalNorms(self.model)
        optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=job.learning_rate, betas=(0.9, 0.95), weight_decay=job.weight_decay
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._rate)
        self.state = State(self.model.module, optimizer, schedule, job.loader(len(self.shard), rank), rank)
        self.place = self._place()
        sender = self._sender()
        self.monitor = Monitor(
            self.place,
            norms,
            optimizer=optimizer,
            sender=sender,
            policy=Policy(hold=HoldRules(deadline_s=job.hold_deadline_s)),
            mode=mode_from_environment(),
            guard=job.guard,
            interval_steps=job.interval_steps,
            background=not job.record,
        )
        self.holder = Holder(
            self.monitor,
            job.root / "checkpoints",
            store,
            server=sender if isinstance(sender, Client) and rank == 0 else None,
            trusted=job.trusted,
            say=lambda text: print(f"rank {rank}: {text}", flush=True),
        )
        job.logs.mkdir(parents=True, exist_ok=True)
        self.log_path = job.logs / f"rank-{rank}.log"
        self._log = self.log_path.open("w", buffering=1)

    def _rate(self, done: int) -> float:
        """Linear warm-up, then cosine to a tenth (Loshchilov and Hutter 2017)."""
        job = self.job
        if done < job.warm_up_steps:
            return (done + 1) / job.warm_up_steps
        share = min(1.0, (done - job.warm_up_steps) / (job.horizon_steps - job.warm_up_steps))
        return 0.55 + 0.45 * math.cos(math.pi * share)

    def _place(self) -> Place:
        job = self.job
        groups = [(node["node"], tuple(node["ranks"]), dist.new_group(node["ranks"])) for node in job.nodes()]
        name, ranks, group = next(entry for entry in groups if self.rank in entry[1])
        return Place(
            run=job.run,
            attempt=job.attempt,
            rank=self.rank,
            world_size=job.world_size,
            node=name,
            node_ranks=ranks,
            node_group=group if len(ranks) > 1 else None,
        )

    def _sender(self) -> Any:
        job, place = self.job, self.place
        if not place.leads:
            return None
        if job.record:
            path = job.root / "posts" / f"attempt-{job.attempt}-{place.node}.jsonl"
            return recording.Recorder(
                path, node=place.node, attempt=job.attempt, clock=time.time_ns, began_ns=job.began_ns
            )
        if job.url is None or job.secret is None:
            return None
        return Client(
            job.url,
            job.run,
            job.secret,
            node=place.node,
            spool_dir=job.root / "spool" / place.node,
            trusted=job.trusted or None,
        )

    def log(self, text: str) -> None:
        """Write a line to this rank's log, with seconds since the attempt began."""
        self._log.write(f"{(time.time_ns() - self.job.began_ns) / 1e9:10.3f} {text}\n")

    def train(self) -> None:
        """Run the steps of this launch."""
        job = self.job
        first = 1
        report: list[dict[str, Any]] = []
        if job.restore:
            done, report = restore(self.state, Path(job.restore))
            first = done + 1
        for window in job.skips:
            self.state.loader.skip(window)
        self._announce(first, report)
        self.log(
            f"attempt {job.attempt}, steps {first} to {job.last_step}, loader at {self.state.loader.position}"
        )
        for step in range(first, job.last_step + 1):
            self._step(step)
        self.monitor.flush()
        if self.rank == 0:
            self.monitor.post([{"type": "attempt.exited", "step": job.last_step, "data": {"exit_code": 0}}])
        self.monitor.close()

    def _step(self, step: int) -> None:
        job, state = self.job, self.state
        began = time.perf_counter()
        batch = state.loader.next_batch()
        samples = [self.shard.read(state.loader.sample(position)) for position in batch]
        inputs, targets, mask = (torch.from_numpy(array) for array in data.collate(samples))
        # Padding is 0, and so is nothing else: cleaned text holds no NUL.
        loss_sum, tokens = loss_of(self.model(inputs, inputs != data.PADDING), targets, mask)
        state.optimizer.zero_grad()
        (loss_sum / tokens).backward()
        agreed = self.monitor.agree(step, loss_sum, tokens)
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), job.clip_norm))
        lr = float(state.schedule.get_last_lr()[0])
        if not agreed.skip:
            state.optimizer.step()
            state.optimizer_step += 1
        state.schedule.step()
        positions = state.positions()
        facts = StepFacts(
            step=step,
            grad_norm=norm,
            lr=lr,
            step_time_s=time.perf_counter() - began,
            loader_position=positions.loader_position,
            consumed_samples=positions.consumed_samples,
            optimizer_step=positions.optimizer_step,
            schedule_position=positions.schedule_position,
            batch=BatchFacts(
                positions=tuple(batch),
                names=tuple(sample.name for sample in samples),
                lengths=tuple(len(sample.tokens) for sample in samples),
                mask_density=tuple(sample.mask_density for sample in samples),
                fingerprints=tuple(sample.fingerprint for sample in samples),
            ),
        )
        self.log(
            f"step {step} loss {agreed.local_loss:.4f} local_grad_norm {agreed.reading.grad_norm:.4f} "
            f"grad_norm {norm:.4f} samples {' '.join(sample.name for sample in samples)}"
        )
        self.monitor.finish(agreed, facts)
        holding = agreed.hold or agreed.halt
        due = step % job.checkpoint_every == 0
        if due or holding:
            # While a run is held nothing becomes the newest checkpoint: a forced save is set apart.
            manifest = save(state, job, step, quarantined=not due)
            if manifest is not None:
                directory = checkpoints.directory_of(job.checkpoints, step, quarantined=not due)
                self.monitor.post([manifest.event(directory)])
        if holding:
            self._log.flush()
            reason = "the budget of skipped updates is spent" if agreed.halt else None
            self.log(f"held at the end of step {step}" + (f": {reason}" if reason else ""))
            self.holder.hold(step, own_decision=reason)

    def _announce(self, first: int, report: list[dict[str, Any]]) -> None:
        """Tell the server what was launched, and where its evidence will lie."""
        job, place = self.job, self.place
        events: list[dict[str, Any]] = []
        if self.rank == 0:
            events += self._launch_events(first, report)
        if place.leads:
            for rank in place.node_ranks:
                path = job.logs / f"rank-{rank}.log"
                events.append(_artifact("rank_logs", path, rank=rank, growing=True))
        if events:
            self.monitor.post(events)

    def _launch_events(self, first: int, report: list[dict[str, Any]]) -> list[dict[str, Any]]:
        job, state = self.job, self.state
        documents = {
            "config": job.config() | {"model": Shape().document(), "shard_sha256": self.shard.digest},
            "code": {"files": recording.script_digest(script_files())},
            "environment": environment(),
            "topology": {
                "world_size": job.world_size,
                "nodes": job.nodes(),
                "groups": {"dp": list(range(job.world_size))},
            },
        }
        for name, document in documents.items():
            checkpoints.write_document(job.artifacts, f"{name}.json", json.loads(json.dumps(document)))
        launched: dict[str, Any] = {
            "world_size": job.world_size,
            "nodes": job.nodes(),
            "groups": {"dp": list(range(job.world_size))},
            "precision": "fp32",
            "config_sha256": digest_of(documents["config"]),
            "environment_sha256": digest_of(documents["environment"]),
            "environment": documents["environment"],
            "code_sha256": documents["code"]["files"]["digest"],
            "layers": self.monitor.norms.layers,
            "skips": [[window.start, window.stop] for window in state.loader.skips],
            "steps_planned": job.last_step,
        }
        events: list[dict[str, Any]] = []
        if job.restore:
            manifest = checkpoints.read_manifest(Path(job.restore))
            launched["began_from"] = {
                "uri": Path(job.restore).resolve().as_uri(),
                "step": manifest.step,
                "digest": manifest.digest,
            }
        else:
            events.append({"type": "run.started", "step": 0, "data": {"run": job.run}})
        if job.permit:
            launched["permit"] = job.permit
        events.append({"type": "attempt.launched", "step": first - 1, "data": launched})
        if report:
            events.append({"type": "restore.report", "step": first - 1, "rank": 0, "data": {"parts": report}})
        events.append(
            {
                "type": "loader.position",
                "step": first - 1,
                "data": {
                    "loader_position": state.loader.position,
                    "consumed_samples": state.loader.consumed_samples,
                    "optimizer_step": state.optimizer_step,
                    "schedule_position": int(state.schedule.last_epoch),
                },
            }
        )
        kinds = {"config": "config", "code": "code", "environment": "environment", "topology": "topology"}
        events += [_artifact(kinds[name], job.artifacts / f"{name}.json") for name in documents]
        return events


def _artifact(kind: str, path: Path, *, rank: int | None = None, growing: bool = False) -> dict[str, Any]:
    data: dict[str, Any] = {"kind": kind, "uri": path.resolve().as_uri()}
    if rank is not None:
        data["rank"] = rank
    if not growing:
        data |= {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    return {"type": "artifact.available", "data": data}
