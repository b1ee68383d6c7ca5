"""`python -m demo.record`: make the recordings again, from real training.

Each recording is two launches of the demo's training with posts kept in files: attempt 1 with the
fault, without a guard and without a server, until it is stopped; attempt 2 from the last good
checkpoint with the plan's skip window. What is written is what the training wrote; the answer is
known because the fault was placed, and the recording is refused when the frames do not show it.
"""

import argparse
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from andon import checkpoints, recording
from andon.loader import Window
from andon.policy import Policy
from andon.policy import decode as decode_policy
from demo.data import Shard
from demo.job import VERSION, Job, environment, script_files
from demo.train import launch

HERE = Path(__file__).resolve().parent / "recordings"
NOTE = (
    "Four ranks on one host, 2 CPU cores, no GPU. node-00 and node-01 are logical nodes: names for two "
    "ranks each, not machines. file:// URIs below the run directory were rewritten to recording:///; "
    "nothing else was changed after the training wrote it."
)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One recording: its fault, its policy, how the second attempt goes on."""

    name: str
    title: str
    job: Job
    policy: dict[str, Any]
    halt_step: int
    resume_to: int

    @property
    def rules(self) -> Policy:
        """The policy with the overrides of this recording."""
        default = msgspec.to_builtins(Policy())
        for key, value in self.policy.items():
            default[key] = {**default[key], **value} if isinstance(value, dict) else value
        return decode_policy(default)


def plans() -> dict[str, Plan]:
    """Return what can be recorded, by name."""
    nan = Job(
        directory="", run="nan-one-rank", record=True, fault="hole", fault_step=120, fault_rank=3,
        last_step=140, checkpoint_every=30,
    )  # fmt: skip
    spike = Job(
        directory="", run="quiet-spike", record=True, fault="binary", fault_step=225, fault_steps=4,
        last_step=240, checkpoint_every=40, learning_rate=6e-3,
    )  # fmt: skip
    return {
        "nan-one-rank": Plan(
            name="nan-one-rank",
            title="A block of zeros in the shard gives one rank a sample without tokens: 0/0 in attention",
            job=nan,
            # The window of one bad sample needs no 200 batches; the watch is as long as the recording.
            policy={"rollback": {"skip_batches_min": 30, "watch_steps": 50}},
            halt_step=120,
            resume_to=180,
        ),
        "quiet-spike": Plan(
            name="quiet-spike",
            title="Four steps of binary bytes at twice the learning rate: a loss spike no NaN announces",
            job=spike,
            policy={"rollback": {"watch_steps": 50}},
            halt_step=227,
            # Past the watch window, which begins at the last bad step of the attempt that failed.
            resume_to=280,
        ),
    }


def record(plan: Plan, target: Path) -> recording.Description:
    """Train both attempts in a temporary directory and pack them into `target`."""
    with tempfile.TemporaryDirectory(prefix="andon-record-") as folder:
        first = replace(plan.job, directory=str(Path(folder).resolve()), began_ns=time.time_ns())
        code = launch(first)
        if code:
            raise SystemExit(f"attempt 1 ended with exit code {code}")
        second = _continuation_job(plan, first)
        code = launch(second)
        if code:
            raise SystemExit(f"attempt 2 ended with exit code {code}")
        description = _describe(plan, first, second)
        # `checkpoints/` holds what was committed; the packed data set is remade by the script.
        kept = [
            path
            for name in ("checkpoints", "logs", "artifacts")
            for path in (first.root / name).rglob("*")
            if path.is_file()
        ]
        posts = {job.attempt: _post_files(job) for job in (first, second)}
        recording.pack(target, description, run_directory=first.root, posts=posts, files=kept)
    check(target)
    return description


def _continuation_job(plan: Plan, first: Job) -> Job:
    """Return attempt 2 as the default plan has it: newest good checkpoint, skip past the bad samples."""
    rules = plan.rules.rollback
    margin = 1 if first.fault == "hole" else rules.spike_margin_steps
    good = [
        (step, directory)
        for step, directory in checkpoints.committed(first.checkpoints)
        if step <= first.fault_step - margin
    ]
    step, directory = good[-1]
    manifest = checkpoints.verify(directory)
    start = manifest.positions.loader_position
    # The window ends with the last bad step, or at the policy's least number of batches.
    last_bad = first.fault_step if first.fault == "hole" else plan.halt_step
    batches = max(last_bad - step, rules.skip_batches_min)
    window = Window(start, start + batches * first.global_batch)
    return replace(
        first,
        attempt=2,
        last_step=plan.resume_to,
        restore=str(directory),
        skips=(window,),
        began_ns=time.time_ns(),
    )


def _post_files(job: Job) -> list[Path]:
    return sorted((job.root / "posts").glob(f"attempt-{job.attempt}-*.jsonl"))


def _describe(plan: Plan, first: Job, second: Job) -> recording.Description:
    assert second.restore is not None
    manifest = checkpoints.read_manifest(Path(second.restore))
    window = second.skips[0]
    shard = Shard(first.root / "data")
    positions = first.faulty_positions()
    loader = first.loader(len(shard))
    names = [shard.name(loader.sample(position)) for position in positions]
    shard.close()
    answer: dict[str, Any] = {
        "step": first.fault_step,
        "halt_step": plan.halt_step,
        "samples": names,
        "positions": [positions[0], positions[-1] + 1],
        "last_good_step": manifest.step,
        "skip": {"from": window.start, "to": window.stop},
    }
    if first.fault == "hole":
        answer |= {
            "kind": "nonfinite",
            "rule": "nonfinite",
            "phase": "forward",
            "ranks": [first.fault_rank],
            "layer": "layers.2.attn.wo",
            "sample": names[0],
            "first_bad_checkpoint_step": first.fault_step,
            "cause": "data: the sample's bytes read back as zeros, so it has no token and no key",
        }
    else:
        answer |= {
            "kind": "loss_spike",
            "rule": "spike",
            "phase": None,
            "ranks": [],
            "layer": None,
            "cause": "data: binary bytes in a text mix, at twice the usual learning rate",
        }
    return recording.Description(
        name=plan.name,
        title=plan.title,
        recorded_at=datetime.now(UTC).isoformat(timespec="seconds"),
        script={"version": VERSION, **recording.script_digest(script_files())},
        command=f"python -m demo.record {plan.name}",
        versions={key: str(value) for key, value in environment().items()},
        world_size=first.world_size,
        nodes=tuple(
            recording.Node(node=node["node"], ranks=tuple(node["ranks"]), logical=True)
            for node in first.nodes()
        ),
        note=NOTE,
        policy=plan.policy,
        answer=answer,
        attempts=tuple(_attempt(job) for job in (first, second)),
        continuation=recording.Continuation(
            attempt=2,
            checkpoint_step=manifest.step,
            digest=manifest.digest,
            positions=msgspec.to_builtins(manifest.positions),
            skip=recording.Skip(start=window.start, stop=window.stop),
            first_position=window.stop,
        ),
    )


def _attempt(job: Job) -> recording.Attempt:
    posts = [
        msgspec.json.decode(line, type=recording.Post)
        for path in _post_files(job)
        for line in path.read_bytes().splitlines()
    ]
    steps = [
        event["step"]
        for post in posts
        if post.kind == "event"
        for event in post.events
        if event["type"] == "step"
    ]
    return recording.Attempt(
        attempt=job.attempt,
        first_step=min(steps),
        last_step=max(steps),
        seconds=max(post.t_s for post in posts),
        posts=len(posts),
    )


def check(path: Path) -> None:
    """Refuse a recording whose frames do not show its answer.

    Raises:
        SystemExit: what the training wrote is not what the fault was meant to cause.
    """
    from demo.answers import derive  # numpy and the detectors only

    with recording.Recording(path) as opened:
        answer = opened.description.answer
        derived = derive(opened)
        wrong = {key: (answer[key], value) for key, value in derived.items() if answer[key] != value}
    if wrong:
        path.unlink()
        raise SystemExit(f"the recording does not show its answer (expected, seen): {wrong}")


def main() -> int:
    """Record the named recordings, or all."""
    parser = argparse.ArgumentParser(prog="python -m demo.record", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*plans(), []], help="default: all")
    parser.add_argument("--to", type=Path, default=HERE)
    args = parser.parse_args()
    args.to.mkdir(parents=True, exist_ok=True)
    for name, plan in plans().items():
        if args.names and name not in args.names:
            continue
        began = time.monotonic()
        description = record(plan, args.to / f"{name}.zip")
        size = (args.to / f"{name}.zip").stat().st_size
        print(f"{name}: {size:,} bytes, {time.monotonic() - began:.0f} s, answer {description.answer}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
