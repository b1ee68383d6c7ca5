"""Under torchrun, for real: a plain loop (DDP, FSDP2), Hugging Face's Trainer and Lightning.

One launch of four ranks plays the plain loops, one of two ranks the trainers, as each import of those costs
seconds.
"""

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from andon import hold
from andon.checkpoint_states import state_of
from andon.checkpoints import files_digest, verify
from andon.readers.training_log import read_lines
from tests.andon.integrations.shape import BACK_TO, BAD_STEPS, LAST, PER_STEP, WIDTH
from tests.andon.listener import Listener

ROOT = Path(__file__).resolve().parents[3]
LAUNCH_S = 150
SAVED = {
    "hf": "output/checkpoint-{step}",
    "lightning": "saved/step={step}.ckpt.attempt-{attempt}-step-{step:08d}.andon",
}


def missing(*packages):
    return [name for name in packages if importlib.util.find_spec(name) is None]


def goes_back(folder, kind):
    """Return what a permit says: a trainer goes back to its checkpoint of step 2 and skips the bad steps."""
    at = {"loader_position": 0, "consumed_samples": 0, "optimizer_step": 3, "schedule_position": 5}
    if kind not in SAVED:
        back = {"checkpoint": (3, "file:///c", None), "positions": at, "skip": None}
        return back | {"kind": "rollback_and_replay"}
    first, end = (BAD_STEPS[0] - 1) * PER_STEP, BAD_STEPS[-1] * PER_STEP
    at |= {"loader_position": BACK_TO * PER_STEP, "consumed_samples": BACK_TO * PER_STEP}
    return {
        "checkpoint": (BACK_TO, saved(folder / kind, kind, 1, BACK_TO).as_uri(), None),
        "positions": at,
        "skip": (first, end),
        "kind": "rollback_and_skip",
    }


def after_the_first(listener, _uri):
    return len(listener.of("attempt.launched")) > 1


def saved(folder, kind, attempt, step):
    """Return where a trainer's checkpoint lies."""
    name = SAVED[kind].format(attempt=attempt, step=step)
    return folder / name


def launch(tmp_path, kinds, ranks, *, leave=False):
    """Run torchrun; returns ({kind: listener}, what each rank saw, its output)."""
    listeners, servers = {}, {}
    for kind in kinds:
        (tmp_path / f"key-{kind}").mkdir()
        one = listeners[kind] = Listener(tmp_path / f"key-{kind}", run=f"run-{kind}")
        permit = tmp_path / f"permit-{kind}.json"
        permit.write_text(json.dumps(one.permit(**goes_back(tmp_path, kind))))
        # What the first attempt saved is asked for in vain, until a second one was launched.
        one.may_go = functools.partial(after_the_first, one)
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
        first, last = (BACK_TO + 1, LAST) if kind in SAVED else (1, 3)
        for rank in self.seen:
            # Step 4 is dropped, step 5 halts before its update: on every rank, and nothing was applied.
            assert rank[kind]["first"] == [93, 5, True]
            assert rank[kind]["refused"] == [93, 0]
            assert rank[kind]["third"] == [None, last]
        listener = self.listeners[kind]
        steps = [(event.attempt, event.step) for event in listener.of("step")]
        assert [step for attempt, step in steps if attempt == 1] == [1, 2, 3, 4, 5]
        assert [step for attempt, step in steps if attempt == 2] == list(range(first, last + 1))
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


@pytest.mark.parametrize("kind", SAVED)
class TestATrainerThatOwnsItsLoop:
    def test_it_does_the_same(self, trainers, kind):
        trainers.check(kind)

    def test_it_goes_on_from_the_checkpoint_and_skips_exactly_the_windows_samples(self, trainers, kind):
        bad = range((BAD_STEPS[0] - 1) * PER_STEP, BAD_STEPS[-1] * PER_STEP)
        intended = [at for at in range(BACK_TO * PER_STEP, 8 * PER_STEP) if at not in bad]
        trained = intended[: (LAST - BACK_TO) * PER_STEP]
        assert sorted(index for rank in trainers.seen for index in rank[kind]["read"][0]) == trained
        told = [event for event in trainers.listeners[kind].of("batch.seen") if event.attempt == 2]
        assert sorted(at for event in told for at in event.data["positions"]) == trained
        step = [event for event in trainers.listeners[kind].of("step") if event.attempt == 2][-1]
        assert (step.data["loader_position"], step.data["consumed_samples"]) == (32, LAST * PER_STEP)

    def test_a_restore_is_checked_part_by_part(self, trainers, kind):
        (report,) = [one for one in trainers.listeners[kind].of("restore.report") if one.attempt == 2]
        told = {line["part"]: line["equal"] for line in report.data["parts"]}
        assert {"weights", "moments", "loader", "rng"} <= told.keys()
        assert set(told.values()) == {True}

    def test_the_batch_of_a_bad_step_is_told_by_every_rank(self, trainers, kind):
        told = [event for event in trainers.listeners[kind].of("batch.seen") if event.attempt == 1]
        assert {(event.step, event.rank) for event in told} == {(s, r) for s in range(1, 6) for r in (0, 1)}
        of_step = [event.data for event in told if event.step == 5]
        assert sorted(at for data in of_step for at in data["positions"]) == [16, 17, 18, 19]
        assert all(data["lengths"] == [WIDTH, WIDTH] for data in of_step)
        assert len({one for data in of_step for one in data["fingerprints"]}) == 4

    def test_the_first_nonfinite_tensor_is_named_where_the_step_can_run_again(self, trainers, kind):
        told = [
            (event.step, event.rank, event.data["what"], event.data["module"])
            for event in trainers.listeners[kind].of("verdict")
            if event.data["kind"] == "first_nonfinite"
        ]
        named = [(step, 1, "input", "body.0") for step in BAD_STEPS]
        assert told == (named if kind == "hf" else [])

    def test_every_checkpoint_is_committed_read_back_and_told(self, trainers, kind):
        told = trainers.listeners[kind].of("checkpoint.committed")
        found = [(e.attempt, e.step) for e in told if not e.data["quarantined"] and not is_moved(e)]
        assert found == [(1, 2), (1, 4), (2, 4), (2, 6)]
        for event in told:
            assert event.data["digest"] == files_digest(event.data["files"])
            assert event.data["finite"] is True
            if not event.data["quarantined"]:
                assert is_moved(event) or event.data["verified"] is True
                assert {"weights", "optimizer", "rng", "loader", "digests"} <= event.data["parts"].keys()
                assert event.data["positions"]["optimizer_step"] > 0
        newest = saved(trainers.folder / kind, kind, 2, 6)
        assert state_of(newest) == ("verified", "")
        assert verify(newest).positions.consumed_samples == LAST * PER_STEP

    def test_rotation_asks_and_keeps_what_it_may_not_delete(self, trainers, kind):
        listener, folder = trainers.listeners[kind], trainers.folder / kind
        assert saved(folder, kind, 1, 2).as_uri() in listener.asked
        # It was kept, or the third act had nothing to begin from; later it was allowed to go.
        assert not saved(folder, kind, 1, 2).exists()
        gone = {event.data["uri"] for event in listener.of("checkpoint.deleted")}
        assert gone == set(listener.asked) - {u for u in listener.asked if exists(u)}


def is_moved(event):
    """Whether it tells where an older checkpoint was moved to."""
    return "attempt-1-checkpoint" in event.data["uri"]


def exists(uri):
    return Path(unquote(urlsplit(uri).path)).exists()
