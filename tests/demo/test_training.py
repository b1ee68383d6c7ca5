"""The demo's training, for real: four ranks, gloo, DDP. Needs torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from andon import checkpoints, hold
from tests.andon.listener import Listener

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).parents[2]


def train(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "demo.train", *map(str, arguments)],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)} | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


class TestRestore:
    def test_a_resumed_run_is_bit_equal_to_the_one_that_never_stopped(self, tmp_path):
        from demo.job import Job
        from demo.train import launch

        whole = Job(directory=str(tmp_path / "whole"), run="r", last_step=6, checkpoint_every=3)
        assert launch(whole) == 0
        middle = checkpoints.directory_of(whole.checkpoints, 3)
        second = Job(
            directory=str(tmp_path / "second"),
            run="r",
            attempt=2,
            last_step=6,
            checkpoint_every=3,
            restore=str(middle),
        )
        assert launch(second) == 0
        for name in ("weights.npz", "optimizer.npz", "rng-0.npz", "rng-3.npz"):
            ours = checkpoints.read_arrays(checkpoints.directory_of(whole.checkpoints, 6), name)
            theirs = checkpoints.read_arrays(checkpoints.directory_of(second.checkpoints, 6), name)
            assert ours.keys() == theirs.keys()
            assert all(np.array_equal(ours[key], theirs[key]) for key in ours), name


class TestHeldAndResumed:
    @pytest.fixture
    def listener(self, tmp_path):
        listener = Listener(tmp_path, hold_when=lambda e: e.type == "step" and bool(e.flags), hold_s=3.0)
        yield listener
        listener.close()

    def arguments(self, listener, root):
        return [
            *("--live", "--url", listener.url, "--run", listener.run, "--secret", listener.secret),
            *("--dir", root, "--key", listener.trusted[0], "--fault-step", 12, "--checkpoint-every", 5),
            *("--steps", 25),
        ]

    def test_the_run_fails_is_held_on_all_ranks_and_goes_on_by_permit_alone(self, listener, tmp_path):
        root = tmp_path / "run"
        arguments = self.arguments(listener, root)
        first = train(*arguments)
        assert first.returncode == hold.EXIT_HELD, first.stderr
        held = [e for e in listener.of("directive.ack") if e.data["state"] == "held"]
        assert sorted(rank for e in held for rank in e.ranks) == [0, 1, 2, 3]
        assert len({e.step for e in held}) == 1
        snapshot = listener.of("checkpoint.committed")[-1]
        assert (snapshot.data["quarantined"], snapshot.data["finite"]) == (True, False)
        local = {
            (int(f.step[row]), int(f.lane[row]))
            for f in listener.frames
            if f.stream == "rank"
            for row in range(f.rows)
            if f.metrics["nonfinite"][row] & 7
        }
        assert min(local) == (12, 3)
        assert len([cell for cell in local if cell[0] == 12]) == 1

        again = train(*arguments)
        assert again.returncode == hold.EXIT_HELD
        assert "permit" in again.stderr

        good = checkpoints.directory_of(root / "checkpoints" / "attempt-1", 10)
        manifest = checkpoints.verify(good)
        permit = tmp_path / "permit.json"
        permit.write_text(
            json.dumps(
                listener.permit(
                    checkpoint=(10, good.as_uri(), manifest.digest),
                    positions=msgspec.to_builtins(manifest.positions),
                    skip=(160, 192),
                )
            )
        )
        listener.go_on()
        resumed = train(*arguments, "--permit", permit)
        assert resumed.returncode == 0, resumed.stderr
        steps = [event for event in listener.of("step") if event.attempt == 2]
        assert [event.step for event in steps] == list(range(11, 26))
        assert steps[0].data["loader_position"] == 192 + 16
        assert not any(event.flags for event in steps)
        assert listener.of("attempt.launched")[-1].data["permit"] == "P-1"
        assert all(part["equal"] for part in listener.of("restore.report")[-1].data["parts"])

    def test_under_observe_it_posts_and_obeys_nothing(self, listener, tmp_path):
        done = train(*self.arguments(listener, tmp_path / "run"), ANDON_MODE="observe")
        assert done.returncode == 0, done.stderr
        assert max(event.step for event in listener.of("step")) == 25
        assert listener.of("step")[-1].data["mode"] == "observe"

    def test_the_guard_skips_the_bad_update_and_training_goes_on_healthy(self, tmp_path):
        quiet = Listener(tmp_path)
        try:
            done = train(*self.arguments(quiet, tmp_path / "run"), "--guard", "skip")
        finally:
            quiet.close()
        assert done.returncode == 0, done.stderr
        skipped = [event for event in quiet.of("step") if event.data["skipped"]]
        assert [event.step for event in skipped] == [12]
        assert skipped[0].data["nonfinite"] & 64
        assert not skipped[0].data["nonfinite"] & 48
        assert not quiet.of("step")[-1].flags


class TestRecordingAgain:
    def test_the_script_still_makes_a_recording_with_the_same_answer(self, tmp_path):
        from demo.record import plans, record

        plan = msgspec.structs.replace(
            plans()["nan-one-rank"],
            job=msgspec.structs.replace(
                plans()["nan-one-rank"].job, fault_step=12, last_step=15, checkpoint_every=5
            ),
            policy={"rollback": {"skip_batches_min": 2}},
            halt_step=12,
            resume_to=20,
        )
        description = record(plan, tmp_path / "small.zip")
        # `record` refuses a recording whose frames do not show the answer, so this one's do.
        assert description.answer["step"] == 12
        assert description.answer["ranks"] == [3]
        assert description.answer["layer"] == "layers.2.attn.wo"
