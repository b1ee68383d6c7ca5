"""A growing file: whatever rotates it, every line is read once."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from andon.tail import following
from andon.tail.following import Follower


@pytest.fixture
def log(tmp_path):
    return tmp_path / "train.log"


def write(path, text, mode="a"):
    with path.open(mode) as file:
        file.write(text)


def everything(follower):
    found = []
    while lines := follower.read():
        found += lines
    return found


def test_lines_are_read_as_they_come_and_half_a_line_waits(log):
    follower = Follower(log)
    assert follower.read() == []
    write(log, "one\ntw")
    assert follower.read() == [b"one"]
    assert follower.read() == []
    write(log, "o\r\nthree\rfour\n")
    assert follower.read() == [b"two", b"three", b"four"]


def test_it_goes_on_where_it_stood(log):
    write(log, "one\ntwo\nthr")
    first = Follower(log)
    assert first.read() == [b"one", b"two"]
    write(log, "ee\n")
    assert Follower(log, first.position).read() == [b"three"]


def test_the_end_of_a_renamed_file_is_read_before_the_new_one(log):
    follower = Follower(log)
    write(log, "one\n")
    assert follower.read() == [b"one"]
    write(log, "two\nloss: 2.3")  # cut short: what it would have been nobody knows
    log.rename(f"{log}.1")
    write(log, "four\n")
    assert everything(follower) == [b"two", b"four"]


def test_a_file_renamed_while_nobody_read_is_found_beside_its_name(log):
    write(log, "one\n")
    first = Follower(log)
    assert first.read() == [b"one"]
    write(log, "two\n")
    log.rename(f"{log}.2026-03-04")
    write(log, "three\n")
    assert everything(Follower(log, first.position)) == [b"two", b"three"]


@pytest.mark.parametrize("after", ["", "x\n", "a much longer line than there was before\n"])
def test_a_file_that_was_emptied_is_read_from_its_start(log, after):
    follower = Follower(log)
    write(log, "step 1\nstep 2\n")
    assert follower.read() == [b"step 1", b"step 2"]
    shutil.copy(log, f"{log}.1")
    write(log, after, "w")
    assert everything(follower) == after.encode().splitlines()
    assert follower.truncations == 1


def test_an_inode_that_is_used_again_is_another_file(log):
    write(log, "one\n")
    first = Follower(log)
    first.read()
    inode = log.stat().st_ino
    write(log, "other\nlines\n", "w")  # the same inode, and longer
    assert log.stat().st_ino == inode
    assert everything(Follower(log, first.position)) == [b"other", b"lines"]


def test_a_line_without_end_is_cut_and_not_kept_in_memory(log, monkeypatch):
    monkeypatch.setattr(following, "CHUNK_BYTES", 1000)
    write(log, "x" * 2500 + "\nend\n")
    follower = Follower(log)
    found = everything(follower)
    assert b"".join(found) == b"x" * 2500 + b"end"
    assert max(map(len, found)) <= 1000


def test_what_is_there_at_the_first_start_may_be_left_out(log):
    write(log, "old\n")
    follower = Follower(log)
    follower.skip_to_end()
    write(log, "new\n")
    assert follower.read() == [b"new"]


class Machine(RuleBasedStateMachine):
    """Any order of writing, rotating, reading and starting anew; nothing is lost or read twice."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.log = self.folder / "log"
        self.log.touch()
        self.follower = Follower(self.log)
        self.written, self.got = [], []
        self.count = 0

    @rule(lines=st.integers(1, 5))
    def append(self, lines):
        with self.log.open("ab") as file:
            for _ in range(lines):
                self.count += 1
                self.written.append(b"line %d" % self.count)
                file.write(self.written[-1] + b"\n")

    @rule()
    def rotate(self):
        # Not of a file that was never seen: no name says which of several came next.
        if self.log.stat().st_ino == self.follower.position.inode:
            self.log.rename(self.folder / f"log.{self.count}")
            self.log.touch()

    @rule()
    def read(self):
        self.got += self.follower.read()

    @rule()
    def restart(self):
        self.follower.close()
        self.follower = Follower(self.log, self.follower.position)

    @rule()
    def read_all(self):
        self.got += everything(self.follower)

    @invariant()
    def in_order_and_once(self):
        assert self.got == self.written[: len(self.got)]

    def teardown(self):
        with self.log.open("ab") as file:
            file.write(b"last\n")
        self.written.append(b"last")
        self.got += everything(self.follower)
        assert self.got == self.written
        self.follower.close()
        shutil.rmtree(self.folder)


Machine.TestCase.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
TestAnyOrder = Machine.TestCase


def test_a_log_that_cannot_be_read_is_said(log):
    if os.geteuid() == 0:
        log.mkdir()
    else:
        write(log, "x\n")
        log.chmod(0)
    with pytest.raises(OSError, match="log"):
        Follower(log).read()
