"""A run told to a server from its known facts: launch, steps, files, the failure, and ranks that obey.

Where a recording plays what a trainer posted, this tells what a public write-up or thread gives: the
numbers that count are its own, what must lie between them (ordinary steps, small files) is made here.
Everything travels as a trainer's posts do: signed, by the real client, held when the reply says so.
"""

import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from andon import checkpoints
from andon.client import Client
from andon.wire_frames import Frame, Stream
from andon.wire_values import fold_ranks

EVENTS_PER_POST = 500
CELLS_PER_FRAME = 100_000
FILE_BYTES = 20_000
AS_OF_S = 240.0  # what is told as older than this would be backfill


class Teller:
    """One run and what its trainer would send.

    Args:
        url, run, secret: where to tell it.
        directory: where its files lie; the server may read there.
        world_size, per_node: its ranks and how many a node has.
        attempt: of which launch is told.
        step_s: seconds a step takes; the newest step is now.
    """

    def __init__(
        self,
        url: str,
        run: str,
        secret: str,
        directory: Path,
        *,
        world_size: int,
        per_node: int = 8,
        first_node: int = 0,
        attempt: int = 1,
        step_s: float = 1.0,
        batch: int = 256,
        last_step: int,
    ) -> None:
        self.run, self.directory, self.attempt = run, directory, attempt
        self.world_size, self.step_s, self.batch = world_size, step_s, batch
        self.last_step, self.began_ns = last_step, time.time_ns()
        self.nodes = {
            f"node-{first_node + number:02d}": list(range(low, min(low + per_node, world_size)))
            for number, low in enumerate(range(0, world_size, per_node))
        }
        self.first_node = next(iter(self.nodes))
        self.client = Client(url, run, secret, spool_dir=directory / "spool", max_wait_s=20.0)

    def close(self) -> None:
        """Send what waits and stop."""
        self.client.close()

    def node_of(self, rank: int) -> str:
        """Return the node a rank is on."""
        return next(name for name, ranks in self.nodes.items() if rank in ranks)

    # --- posting

    def post(self, events: Iterable[dict[str, Any]]) -> None:
        """Post events in order, a few hundred at a time."""
        waiting = [{"attempt": self.attempt, **event} for event in events]
        for start in range(0, len(waiting), EVENTS_PER_POST):
            part = waiting[start : start + EVENTS_PER_POST]
            answer = self.client.send_events(part)
            if answer is not None and answer.get("refused"):
                raise ValueError(f"{self.run}: the server refused {answer['refused'][:2]}")

    def frame(
        self,
        stream: Stream,
        step: np.ndarray,
        lane: np.ndarray | list[str],
        metrics: dict[str, np.ndarray],
        *,
        node: str | None = None,
        rank: np.ndarray | None = None,
        views: dict[str, str] | None = None,
    ) -> None:
        """Post columns of equal length as frames."""
        for low in range(0, len(step), CELLS_PER_FRAME):
            part = slice(low, low + CELLS_PER_FRAME)
            self.client.send_frame(
                Frame(
                    stream=stream,
                    attempt=self.attempt,
                    node=node,
                    step=step[part].astype(np.int64),
                    lane=lane[part],
                    time_ns=np.array([self.time_ns(one) for one in step[part].tolist()], np.int64),
                    micro_batch=None,
                    rank=None if rank is None else rank[part],
                    metrics={name: values[part] for name, values in metrics.items()},
                    views=views or {},
                    groups={},
                )
            )

    def time_ns(self, step: int) -> int:
        """Return when a step ended, in Unix ns; never so long ago that it would be backfill."""
        back_s = min(AS_OF_S, max(0, self.last_step - step) * self.step_s)
        return self.began_ns - int(back_s * 1e9)

    # --- what a trainer tells

    def launch(self, *, first_step: int, groups: Mapping[str, Any] | None = None, **told: Any) -> None:
        """Tell the launch and the files that describe it."""
        config = {"global_batch": self.batch, "world_size": self.world_size, **told.pop("config", {})}
        nodes = [{"node": name, "ranks": fold_ranks(ranks)} for name, ranks in self.nodes.items()]
        told.setdefault("precision", "bf16")
        data = {
            "world_size": self.world_size,
            "nodes": nodes,
            "groups": dict(groups or {"dp": [list(range(self.world_size))]}),
            "config_sha256": _sha256(json.dumps(config, sort_keys=True).encode()),
            **told,
        }
        position = self.positions(first_step - 1)
        self.post(
            [
                {"type": "attempt.launched", "step": first_step - 1, "data": data},
                {"type": "loader.position", "step": first_step - 1, "data": position},
            ]
        )
        self.offer("config", "config.json", json.dumps(config, indent=1))
        self.offer("topology", "topology.json", json.dumps({"nodes": nodes, "groups": data["groups"]}))
        revision = {"revision": told.get("revision", "not told")}
        self.offer("code", "code.json", json.dumps(revision))
        if "environment" in told:
            self.offer("environment", "environment.json", json.dumps(told["environment"]))

    def positions(self, step: int) -> dict[str, int]:
        """Return the four positions after a step."""
        samples = step * self.batch
        return {
            "loader_position": samples,
            "consumed_samples": samples,
            "optimizer_step": step,
            "schedule_position": step,
        }

    def offer(self, kind: str, name: str, text: str, *, rank: int | None = None) -> None:
        """Write a file of the run and announce it."""
        path = self.directory / f"attempt-{self.attempt}" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        data: dict[str, Any] = {"kind": kind, "uri": path.resolve().as_uri()}
        if rank is None:
            data |= {"bytes": path.stat().st_size, "sha256": _sha256(path.read_bytes())}
        else:
            data["rank"] = rank
        self.post([{"type": "artifact.available", "data": data}])

    def logs(self, lines: Mapping[int, Sequence[str]], ordinary: Sequence[str] = ()) -> None:
        """Write a log for every rank, with the lines of those that said something, and announce all."""
        events = []
        for rank in range(self.world_size):
            path = self.directory / f"attempt-{self.attempt}" / "logs" / f"rank-{rank}.log"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join([*ordinary, *lines.get(rank, ())]) + "\n", "utf-8")
            data = {"kind": "rank_logs", "uri": path.resolve().as_uri(), "rank": rank}
            events.append({"type": "artifact.available", "node": self.node_of(rank), "data": data})
        self.post(events)

    def checkpoint(self, step: int, *, attempt: int | None = None, finite: bool = True) -> None:
        """Write a small checkpoint as a trainer does, and announce its commit."""
        written_by = attempt or self.attempt
        directory = checkpoints.directory_of(self.directory / f"checkpoints-{written_by}", step)
        values = np.random.default_rng(step).normal(size=FILE_BYTES // 4).astype(np.float32)
        if not finite:
            values[7] = np.nan
        checkpoints.write_arrays(directory, "weights.npz", {"weights": values})
        checkpoints.write_arrays(directory, "optimizer.npz", {"exp_avg": np.abs(values)})
        for name in ("schedule", "loader", "rng"):
            checkpoints.write_document(directory, f"{name}.json", {"step": step})
        positions = self.positions(step)
        parts = {name: [f"{name}.npz"] for name in ("weights", "optimizer")}
        parts |= {name: [f"{name}.json"] for name in ("schedule", "loader", "rng")}
        manifest = checkpoints.commit(
            directory,
            run=self.run,
            attempt=written_by,
            step=step,
            positions=checkpoints.Positions(**positions),
            parts=parts,
        )
        self.post([manifest.event(directory) | {"attempt": written_by}])

    def steps(self, rows: Iterable[tuple[int, dict[str, Any]]], *, rank: int | None = None) -> None:
        """Post what each step gave, reduced unless of one rank."""
        whose = {} if rank is None else {"rank": rank, "node": self.node_of(rank)}
        self.post(
            {
                "type": "step",
                "step": step,
                "time": self.time_ns(step),
                **whose,
                "data": {"step_time_s": self.step_s, "consumed_samples": step * self.batch, **data},
            }
            for step, data in rows
        )

    def batches(self, steps: Iterable[int], ranks: Sequence[int], *, length: int = 2048) -> None:
        """Tell which samples each step read."""
        events = []
        for step in steps:
            for place, rank in enumerate(ranks):
                first = step * self.batch + place * 4
                data = {
                    "positions": [first + n for n in range(4)],
                    "samples": [f"shard-{(first + n) // 5000:04d}@{(first + n) % 5000}" for n in range(4)],
                    "lengths": [length] * 4,
                    "mask_density": [1.0] * 4,
                    "fingerprints": [_sha256(f"{self.run}{first + n}".encode())[:16] for n in range(4)],
                }
                events.append({"type": "batch.seen", "step": step, "rank": rank, "data": data})
        self.post(events)

    # --- being held

    def obey(self, step: int, *, but: Sequence[int] = (), wait_s: float = 20.0) -> bool:
        """Stop every rank `but` those that answer nobody, when the run is told to; returns whether it was."""
        until = time.monotonic() + wait_s
        while (directive := self.client.directive) is None or directive.get("kind") != "hold":
            if time.monotonic() > until:
                return False
            self.client.wait_directive(wait_s=1.0)
        for node, ranks in self.nodes.items():
            there = [rank for rank in ranks if rank not in but]
            data = {"seq": directive["seq"], "step": step, "state": "held", "ranks": fold_ranks(there)}
            self.post([{"type": "directive.ack", "step": step, "node": node, "data": data}])
        self.heartbeat(step)
        return True

    def heartbeat(self, step: int, state: str = "held") -> None:
        """Say that every node is alive."""
        self.post(
            {
                "type": "heartbeat",
                "step": step,
                "node": node,
                "ranks": fold_ranks(ranks),
                "data": {"state": state},
            }
            for node, ranks in self.nodes.items()
        )


def _sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()
