"""Under torchrun, for real: a plain loop (DDP, FSDP2), Hugging Face's Trainer and Lightning.

One launch of four ranks plays the plain loops, one of two ranks the trainers, as each import of those costs
seconds.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from andon import hold
from andon.readers.training_log import read_lines
from tests.andon.listener import Listener

ROOT = Path(__file__).resolve().parents[3]
LAUNCH_S = 150


def missing(*packages):
    return [name for name in packages if importlib.util.find_spec(name) is None]


def launch(tmp_path, kinds, ranks, *, leave=False):
    """Run torchrun; returns ({kind: listener}, what each rank saw, its output)."""
    listeners, servers = {}, {}
    for kind in kinds:
        (tmp_path / f"key-{kind}").mkdir()
        one = listeners[kind] = Listener(tmp_path / f"key-{kind}", run=f"run-{kind}")
        positions = {"loader_position": 0, "consumed_samples": 0, "optimizer_step": 3, "schedule_position": 5}
        permit = tmp_path / f"permit-{kind}.json"
        back = {"checkpoint": (3, "file:///c", None), "positions": positions, "skip": None}
        permit.write_text(json.dumps(one.permit(**back, kind="rollback_and_replay")))
        servers[kind] = {"url": one.url, "run": one.run, "secret": one.secret}
        servers[kind] |= {"trusted": one.trusted, "permit": str(permit)}
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"folder": str(tmp_path), "kinds": kinds, "servers": servers, "leave": leave}))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ANDON_")}
    shown = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=0"),
            *(f"--nproc_per_node={ranks}", "-m", "tests.andon.integrations.loops"),
        ],
        cwd=ROOT,
        env=kept | {"LOOPS_PLAN": str(plan), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LAUNCH_S,
        check=False,
    )
    for one in listeners.values():
        one.close()
    files = [tmp_path / f"seen-{rank}.json" for rank in range(ranks)]
    assert all(file.exists() for file in files), shown.stderr[-6000:]
    return listeners, [json.loads(file.read_text()) for file in files], shown


class Launched:
    """What one launch left behind; the checks are the same for every kind of loop."""

    def __init__(self, folder, listeners, seen, shown):
        self.folder, self.listeners, self.seen, self.shown = folder, listeners, seen, shown

    def check(self, kind):
        for rank in self.seen:
            # Step 4 is dropped, step 5 halts before its update: on every rank, and nothing was applied.
            assert rank[kind]["first"] == [93, 5, True]
            assert rank[kind]["refused"] == [93, 0]
            assert rank[kind]["third"] == [None, 3]
        listener = self.listeners[kind]
        steps = [(event.attempt, event.step) for event in listener.of("step")]
        assert [step for attempt, step in steps if attempt == 1] == [1, 2, 3, 4, 5]
        assert [step for attempt, step in steps if attempt == 2] == [1, 2, 3]
        told = {event.step: event for event in listener.of("step") if event.attempt == 1}
        assert told[1].data["loss"] > 0
        assert told[4].data["skipped"] is True
        assert told[4].flags["data.loss"] == "nan"
        bad = {
            (int(frame.step[row]), int(frame.lane[row]))
            for frame in listener.frames
            if frame.stream == "rank" and frame.attempt == 1
            for row in range(frame.rows)
            if frame.metrics["nonfinite"][row] & 7
        }
        assert bad == {(4, 1), (5, 1)}  # rank 1 alone, before any reduce
        held = hold.read(self.folder / kind)
        assert held is None  # the permit ended it, and the hold lies beside it
        assert len(list((self.folder / kind).glob("andon-hold-released-*.json"))) == 1
        assert [event.attempt for event in listener.of("attempt.launched")] == [1, 2]
        assert listener.of("attempt.launched")[1].data["permit"] == "P-1"
        assert {rank for event in listener.of("directive.ack") for rank in event.data["ranks"]} == set(
            range(len(self.seen))
        )


@pytest.fixture(scope="module")
def loops(tmp_path_factory):
    if absent := missing("torch"):
        pytest.skip(f"not trained: needs {', '.join(absent)}")
    folder = tmp_path_factory.mktemp("loops")
    return Launched(folder, *launch(folder, ["ddp", "fsdp2"], 4, leave=True))


@pytest.fixture(scope="module")
def trainers(tmp_path_factory):
    if absent := missing("torch", "transformers", "accelerate", "lightning"):
        pytest.skip(f"not trained: needs {', '.join(absent)}")
    folder = tmp_path_factory.mktemp("trainers")
    return Launched(folder, *launch(folder, ["hf", "lightning"], 2))


pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_plain_loop_stops_on_all_ranks_before_the_update_and_goes_on_by_permit(loops, kind):
    loops.check(kind)


def test_torchruns_own_summary_of_an_exit_93_is_read(loops):
    events = read_lines(loops.shown.stderr.splitlines())
    (event,) = [one for one in events if one["data"].get("class") == "worker_failed"]
    assert event["data"]["exitcode"] == 93
    assert event["rank"] in range(4)
    assert event["data"]["pid"] > 0


@pytest.mark.parametrize("kind", ["hf", "lightning"])
def test_a_trainer_that_owns_its_loop_does_the_same(trainers, kind):
    trainers.check(kind)
