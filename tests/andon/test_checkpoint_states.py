"""Candidate, verified, bad: which checkpoint to go back to, and what may be deleted."""

import contextlib
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from andon import checkpoint_states as states
from andon import checkpoints, hold
from andon.checkpoints import CheckpointError, Positions

POSITIONS = Positions(loader_position=8, consumed_samples=8, optimizer_step=1, schedule_position=1)
HOLD = {"kind": "hold", "run": "r", "attempt": 1}


def save(root, step, value=1.0, *, quarantined=False):
    directory = checkpoints.directory_of(root, step, quarantined=quarantined)
    checkpoints.write_arrays(directory, "w.npz", {"w": np.full(3, value, np.float32)})
    checkpoints.commit(
        directory, run="r", attempt=1, step=step, positions=POSITIONS, parts={"weights": ["w.npz"]}
    )
    return directory


def spoil(directory):
    raw = bytearray((directory / "w.npz").read_bytes())
    raw[-1] ^= 1
    (directory / "w.npz").write_bytes(raw)


class Gate:
    """A deletion gate that says what it was told to; an exception is no answer."""

    def __init__(self, allow):
        self.allow, self.asked = allow, []

    def deletions(self, uris, /):
        self.asked += uris
        if self.allow is None:
            raise ConnectionError("nobody there")
        return [{"uri": uri, "allow": self.allow} for uri in uris]


class TestStates:
    def test_a_committed_one_is_a_candidate_until_it_was_read_back(self, tmp_path):
        directory = save(tmp_path, 10)
        assert states.state_of(directory) == ("candidate", "")
        assert states.newest_verified(tmp_path) is None
        states.promote(directory)
        assert states.state_of(directory) == ("verified", "")
        assert states.newest_verified(tmp_path) == directory

    def test_one_that_reads_back_otherwise_is_bad_for_good(self, tmp_path):
        directory = save(tmp_path, 10)
        whole = (directory / "w.npz").read_bytes()
        spoil(directory)
        with pytest.raises(CheckpointError, match="SHA-256"):
            states.promote(directory)
        (directory / "w.npz").write_bytes(whole)
        with pytest.raises(CheckpointError, match=r"bad: .*SHA-256"):
            states.promote(directory)

    def test_nonfinite_weights_are_bad(self, tmp_path):
        directory = save(tmp_path, 10, np.nan)
        with pytest.raises(CheckpointError, match="nonfinite"):
            states.promote(directory)
        assert states.state_of(directory)[0] == "bad"

    def test_from_the_first_bad_step_on_all_are_condemned(self, tmp_path):
        made = [save(tmp_path, step) for step in (900, 950, 1000)]
        for directory in made:
            states.promote(directory)
        assert states.condemn_from(tmp_path, 950, "spike from step 950") == made[1:]
        assert states.newest_verified(tmp_path) == made[0]
        assert states.state_of(made[2]) == ("bad", "spike from step 950")

    def test_the_newest_at_or_before_a_step(self, tmp_path):
        made = {step: save(tmp_path, step) for step in (5, 900, 950, 100_000_000)}
        for directory in made.values():
            states.promote(directory)
        for step, expected in ((4, None), (5, 5), (899, 5), (949, 900), (950, 950), (10**9, 100_000_000)):
            assert states.newest_verified(tmp_path, step) == made.get(expected)

    def test_one_whose_file_is_gone_or_cut_is_passed_over(self, tmp_path):
        older, cut, gone = (save(tmp_path, step) for step in (1, 2, 3))
        for directory in (older, cut, gone):
            states.promote(directory)
        (cut / "w.npz").write_bytes(b"")
        (gone / "w.npz").unlink()
        assert states.newest_verified(tmp_path) == older

    def test_marks_of_what_was_saved_anew_do_not_count(self, tmp_path):
        states.promote(save(tmp_path, 10))
        assert states.state_of(save(tmp_path, 10, 2.0))[0] == "candidate"
        states.condemn(checkpoints.directory_of(tmp_path, 10), "no")
        assert states.state_of(save(tmp_path, 10, 3.0))[0] == "candidate"

    @pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"schema": "other", "digest": "", "at": ""}'])
    def test_a_bad_that_cannot_be_read_is_a_bad_and_a_verified_is_none(self, tmp_path, content):
        directory = save(tmp_path, 10)
        states.promote(directory)
        (directory / states.VERIFIED).write_bytes(content)
        assert states.state_of(directory)[0] == "candidate"
        (directory / states.BAD).write_bytes(content)
        assert states.state_of(directory)[0] == "bad"

    def test_what_was_never_committed_has_no_state(self, tmp_path):
        for ask in (states.state_of, states.promote, lambda d: states.condemn(d, "why")):
            with pytest.raises(CheckpointError, match="never committed"):
                ask(checkpoints.directory_of(tmp_path, 3))


class TestHeld:
    @pytest.mark.parametrize("above", [0, 1])
    def test_a_save_forced_while_held_is_no_checkpoint_to_go_back_to(self, tmp_path, above):
        root = tmp_path / "attempt-1"
        good = save(root, 10)
        states.promote(good)
        hold.write([root, tmp_path][above], HOLD)
        forced = save(root, 11)
        assert checkpoints.read_manifest(forced).event(forced)["data"]["quarantined"] is True
        assert checkpoints.committed(root) == [(10, good)]
        assert states.newest_verified(root) == good

    def test_nor_does_it_become_one_when_the_hold_ends(self, tmp_path):
        path = hold.write(tmp_path, HOLD)
        forced = save(tmp_path, 11)
        path.unlink()
        states.promote(forced)  # whole it is
        assert states.newest_verified(tmp_path) is None


class TestPrune:
    @pytest.fixture
    def made(self, tmp_path):
        made = [save(tmp_path, step) for step in range(1, 6)]
        for directory in (made[0], made[1], made[3]):
            states.promote(directory)
        return made

    def test_the_newest_verified_and_all_after_it_stay(self, tmp_path, made):
        gate = Gate(True)
        gone = states.prune(tmp_path, keep=1, gate=gate)
        assert [directory for directory, deleted, _ in gone if deleted] == made[:3]
        assert [directory for _, directory in checkpoints.committed(tmp_path)] == made[3:]
        assert gate.asked == [directory.as_uri() for directory in made[:3]]

    def test_two_verified_may_be_asked_for_and_a_rule_of_one_s_own(self, tmp_path, made):
        assert states.prune(tmp_path, keep=2, gate=Gate(True), may_go=lambda d: d != made[0]) == []
        assert len(states.prune(tmp_path, keep=2, gate=Gate(True))) == 1
        assert states.prune(tmp_path, keep=4, gate=Gate(True)) == []

    @pytest.mark.parametrize("gate", [None, Gate(False), Gate(None), Gate("yes")])
    def test_without_a_plain_yes_everything_stays(self, tmp_path, made, gate):
        assert [deleted for _, deleted, _ in states.prune(tmp_path, keep=1, gate=gate)] == [False] * 3
        assert len(checkpoints.committed(tmp_path)) == 5

    def test_none_may_not_stay(self, tmp_path):
        with pytest.raises(ValueError, match="at least one"):
            states.prune(tmp_path, keep=0, gate=Gate(True))


class StateMachine(RuleBasedStateMachine):
    """Against a plain table: any order of saves, damage, checks, verdicts, holds and prunings."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.mkdtemp()
        self.root = Path(self.folder)
        self.known: dict[int, dict] = {}
        self.value = 0.0

    @rule(step=st.integers(1, 6), quarantined=st.booleans())
    def save(self, step, quarantined):
        self.value += 1
        save(self.root, step, self.value, quarantined=quarantined)
        if not quarantined:
            self.known[step] = {
                "state": "candidate",
                "whole": True,
                "held": checkpoints.is_held(self.root / "step"),
            }

    @rule(step=st.integers(1, 6))
    def crash_in_a_save(self, step):
        """A directory whose manifest was not written yet, or of which it is gone."""
        directory = checkpoints.directory_of(self.root, step)
        checkpoints.write_arrays(directory, "w.npz", {"w": np.zeros(3, np.float32)})
        (directory / checkpoints.MANIFEST).unlink(missing_ok=True)
        self.known.pop(step, None)

    @rule(step=st.integers(1, 6))
    def damage(self, step):
        if step in self.known:
            spoil(checkpoints.directory_of(self.root, step))
            self.known[step]["whole"] = not self.known[step]["whole"]

    @rule(step=st.integers(1, 6))
    def promote(self, step):
        with contextlib.suppress(CheckpointError):
            states.promote(checkpoints.directory_of(self.root, step))
        if step in self.known and self.known[step]["state"] != "bad":
            self.known[step]["state"] = "verified" if self.known[step]["whole"] else "bad"

    @rule(step=st.integers(1, 7))
    def condemn(self, step):
        states.condemn_from(self.root, step, "bad update")
        for at, row in self.known.items():
            if at >= step and not row["held"]:
                row["state"] = "bad"

    @rule(held=st.booleans())
    def hold_or_let_go(self, held):
        (self.root / hold.FILE_NAME).unlink(missing_ok=True)
        if held:
            hold.write(self.root, HOLD)

    @rule(keep=st.integers(1, 2), allow=st.sampled_from([True, False, None]))
    def prune(self, keep, allow):
        usable = [step for step in sorted(self.known) if self.usable(step)]
        states.prune(self.root, keep=keep, gate=Gate(allow))
        if allow and len(usable) >= keep:
            for step in [s for s, row in self.known.items() if s < usable[-keep] and not row["held"]]:
                del self.known[step]

    def usable(self, step):
        return self.known[step]["state"] == "verified" and not self.known[step]["held"]

    @invariant()
    def what_is_said_is_so(self):
        for step, row in self.known.items():
            assert states.state_of(checkpoints.directory_of(self.root, step))[0] == row["state"]
        assert [s for s, _ in checkpoints.committed(self.root)] == sorted(
            s for s, row in self.known.items() if not row["held"]
        )
        for limit in range(7):
            best = max((s for s in self.known if s <= limit and self.usable(s)), default=None)
            found = states.newest_verified(self.root, limit)
            assert found == (None if best is None else checkpoints.directory_of(self.root, best))

    def teardown(self):
        shutil.rmtree(self.folder)


StateMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=14, deadline=None)
TestAgainstATable = StateMachine.TestCase
