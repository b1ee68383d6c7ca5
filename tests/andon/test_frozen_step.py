"""Finding a frozen step, and what `andon probe` says where there is none."""

import json
import shutil

import numpy as np
import pytest

from andon import checkpoints
from andon.cli import main
from andon.frozen_step import NoFrozenStep, find


@pytest.fixture
def bag(tmp_path):
    """An exported bag with the halt snapshot of step 119, one rank's batches in it."""
    inside = tmp_path / "incident-7" / "data" / "halt_snapshot" / "step-00000119"
    checkpoints.write_arrays(inside / "state", "weights.npz", {"w": np.ones(3, np.float32)})
    steps = [{"step": step, "positions": [step * 4]} for step in (118, 119, 120)]
    checkpoints.write_document(inside, "batches-00003.json", {"rank": 3, "steps": steps})
    positions = checkpoints.Positions(
        loader_position=476, consumed_samples=476, optimizer_step=119, schedule_position=119
    )
    parts = {"weights": ["state/weights.npz"], "batches": ["batches-00003.json"]}
    checkpoints.commit(inside, run="r", attempt=1, step=119, positions=positions, parts=parts)
    return tmp_path / "incident-7"


def test_a_bag_gives_its_only_snapshot(bag):
    found = find(bag)
    assert (found.step, found.ranks) == (120, [3])
    assert found.batch(3, found.step) == {"step": 120, "positions": [480]}
    assert found.batch(3, 7) is None
    assert found.batch(0, 120) is None
    assert found.other_steps(3) == [118, 119]


def test_two_snapshots_have_to_be_told_apart(bag):
    first = next(bag.rglob("commit.json")).parent
    shutil.copytree(first, bag / "data" / "other" / "step-00000119")
    with pytest.raises(NoFrozenStep, match="2 halt snapshots, name one"):
        find(bag)
    assert find(first).step == 120


def test_a_checkpoint_without_state_is_no_frozen_step(bag):
    shutil.rmtree(next(bag.rglob("state")))
    with pytest.raises(NoFrozenStep, match="last good checkpoint"):
        find(bag)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere", "--step", "a:b"], "no such directory"),
        (["BAG", "--step", "a"], "expected module:function"),
        (["BAG", "--step", "json:nothing"], "json has no function nothing"),
        (["BAG", "--step", "no_such_module_here:f"], "no_such_module_here"),
    ],
)
def test_what_cannot_be_run_is_2_and_says_why(bag, capsys, arguments, said):
    given = [str(bag) if word == "BAG" else word for word in arguments]
    assert main(["probe", *given]) == 2
    text = capsys.readouterr().err
    # Without torch nothing can be run at all, and that is said first.
    assert said in text or "needs torch" in text


def test_a_torn_manifest_is_named(bag):
    manifest = next(bag.rglob("commit.json"))
    manifest.write_text(json.dumps({"schema": "andon.checkpoint/1"}))
    with pytest.raises(NoFrozenStep, match=r"commit\.json"):
        find(bag)
