"""The disk spool: order, durability, damage, limits, and many processes on one directory."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from andon.spool import Post, Spool
from andon.spool_slots import open_slot


def post(name: str, size: int = 10, kept: bool = False) -> Post:
    body = name.encode() * size
    return Post(id=name, path="/p", content_type="t", body=body, created_s=1.0, events=2, kept=kept)


def drain(spool: Spool) -> list[str]:
    names = []
    while (found := spool.peek()) is not None:
        assert found[0].body == found[0].id.encode() * (len(found[0].body) // len(found[0].id))
        names.append(found[0].id)
        spool.done(found[1])
    return names


def segments(directory) -> list:
    return sorted(directory.glob("*.seg"))


class TestOrder:
    def test_posts_come_out_in_order_over_many_segments(self, tmp_path):
        spool = Spool(tmp_path, segment_bytes=300)
        names = [f"p{i}" for i in range(50)]
        for name in names:
            assert spool.append(post(name))
        assert len(segments(tmp_path)) > 5
        assert spool.pending == 50
        assert drain(spool) == names
        assert spool.pending == 0

    def test_what_is_done_is_deleted(self, tmp_path):
        spool = Spool(tmp_path, segment_bytes=300)
        for i in range(50):
            spool.append(post(f"p{i}"))
        drain(spool)
        assert len(segments(tmp_path)) == 1
        spool.close()
        assert segments(tmp_path) == []

    def test_the_same_post_comes_again_until_it_is_done(self, tmp_path):
        spool = Spool(tmp_path)
        spool.append(post("a"))
        assert spool.peek()[0].id == spool.peek()[0].id == "a"


class TestDurability:
    def test_a_new_process_goes_on_where_the_old_one_stopped(self, tmp_path):
        spool = Spool(tmp_path, segment_bytes=300)
        for i in range(20):
            spool.append(post(f"p{i}"))
        for _ in range(7):
            spool.done(spool.peek()[1])
        spool.close()
        again = Spool(tmp_path, segment_bytes=300)
        assert again.pending == 13
        again.append(post("new"))
        assert drain(again) == [*(f"p{i}" for i in range(7, 20)), "new"]

    def test_what_was_appended_survives_kill_9(self, tmp_path):
        code = (
            "import sys, itertools; from pathlib import Path; from andon.spool import Post, Spool\n"
            "spool = Spool(Path(sys.argv[1]), segment_bytes=2000)\n"
            "for i in itertools.count():\n"
            "    spool.append(Post(id=f'p{i}', path='/p', content_type='t', body=b'p%d' % i))\n"
            "    print(i, flush=True)"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        while int(child.stdout.readline()) < 200:
            pass
        child.kill()
        printed = [int(line) for line in child.communicate()[0].splitlines() if line]
        names = drain(Spool(tmp_path, segment_bytes=2000))
        assert names[: max(printed, default=200) + 1] == [
            f"p{i}" for i in range(max(printed, default=200) + 1)
        ]

    def test_a_torn_last_record_costs_only_itself(self, tmp_path):
        spool = Spool(tmp_path)
        for name in ("a", "b", "c"):
            spool.append(post(name))
        (path,) = segments(tmp_path)
        whole = path.read_bytes()
        for end in range(0, len(whole), 5):
            path.write_bytes(whole[:end])
            (tmp_path / "position.json").unlink(missing_ok=True)
            again = Spool(tmp_path)
            again.append(post("next"))
            names = drain(again)
            assert names == [*["a", "b", "c"][: end // (len(whole) // 3)], "next"], end
            assert again.gap.posts == 0
            again.close()

    def test_damage_in_the_middle_is_told(self, tmp_path):
        spool = Spool(tmp_path)
        for name in ("a", "b", "c"):
            spool.append(post(name))
        (path,) = segments(tmp_path)
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 3 + 30] ^= 0xFF
        path.write_bytes(raw)
        again = Spool(tmp_path)
        again.append(post("next"))
        assert drain(again) == ["a", "next"]
        assert again.gap.reasons == {"spool damaged": 1}

    @pytest.mark.parametrize(
        "content", [b"", b"{", b"[]", b'{"segment": 99, "offset": 5}', b'{"segment": 1, "offset": -4}']
    )
    def test_a_lost_position_means_repeats_and_never_losses(self, tmp_path, content):
        spool = Spool(tmp_path)
        for name in ("a", "b"):
            spool.append(post(name))
        spool.done(spool.peek()[1])
        (tmp_path / "position.json").write_bytes(content)
        assert drain(Spool(tmp_path))[-1:] == ["b"]

    def test_a_gap_survives_a_restart(self, tmp_path):
        spool = Spool(tmp_path)
        spool.gap.add(post("a"), "too old")
        spool.close()
        assert Spool(tmp_path).gap.reasons == {"too old": 1}


class TestLimits:
    def test_above_the_cap_the_oldest_go_and_are_counted(self, tmp_path):
        spool = Spool(tmp_path, cap_bytes=4000)
        for i in range(200):
            spool.append(post(f"p{i:03d}"))
        assert sum(path.stat().st_size for path in segments(tmp_path)) <= 4000
        gap = spool.gap
        names = drain(spool)
        assert names == [f"p{i:03d}" for i in range(200 - len(names), 200)]
        assert gap.posts == 200 - len(names)
        assert gap.events == 2 * gap.posts
        assert gap.reasons == {"spool full": gap.posts}

    def test_the_post_that_is_being_sent_is_not_given_up(self, tmp_path):
        spool = Spool(tmp_path, cap_bytes=4000)
        spool.append(post("first"))
        token = spool.peek()[1]
        for i in range(200):
            spool.append(post(f"p{i:03d}"))
        before = spool.pending
        spool.done(token)
        spool.done(token)
        assert spool.pending == before - 1
        assert spool.pending + spool.gap.posts == 200
        assert len(drain(spool)) == before - 1

    def test_an_action_is_never_given_up_for_room(self, tmp_path):
        spool = Spool(tmp_path, cap_bytes=4000)
        for i in range(300):
            spool.append(post(f"action{i}" if i % 30 == 0 else f"p{i}", kept=i % 30 == 0))
        assert sum(path.stat().st_size for path in segments(tmp_path)) <= 4000
        names = drain(Spool(tmp_path, cap_bytes=4000))
        assert [name for name in names if name.startswith("action")] == [
            f"action{i}" for i in range(0, 300, 30)
        ]
        assert names == sorted(names, key=lambda name: int(name.lstrip("actionp")))
        assert len(names) + spool.gap.posts == 300
        assert spool.gap.reasons == {"spool full": spool.gap.posts}

    def test_nor_when_all_else_is_gone_and_there_still_is_no_room(self, tmp_path):
        spool = Spool(tmp_path, cap_bytes=2000)
        for i in range(100):
            spool.append(post(f"a{i}", kept=True))
        assert drain(spool) == [f"a{i}" for i in range(100)]
        assert spool.gap.posts == 0

    def test_in_memory_too_the_oldest_telemetry_goes_first(self, monkeypatch):
        monkeypatch.setattr("andon.spool.MEMORY_BYTES", 500)
        spool = Spool(None)
        for i in range(40):
            spool.append(post(f"p{i:02d}", kept=i % 10 == 0))
        names = drain(spool)
        assert {f"p{i:02d}" for i in range(0, 40, 10)} < set(names)
        assert names[-1] == "p39"
        assert len(names) + spool.gap.posts == 40
        assert spool.gap.reasons == {"memory full": spool.gap.posts}

    def test_a_disk_that_takes_nothing_does_not_lose_posts(self, tmp_path):
        folder = tmp_path / "spool"
        folder.mkdir()
        spool = Spool(folder, segment_bytes=100)
        assert spool.append(post("a"))
        hidden = tmp_path / "hidden"
        folder.rename(hidden)
        assert not spool.append(post("b"))
        assert not spool.append(post("c"))
        assert spool.disk_error
        hidden.rename(folder)
        assert spool.append(post("d"))
        assert spool.disk_error is None
        assert drain(spool) == ["a", "b", "c", "d"]

    def test_a_post_that_moves_to_the_disk_while_it_is_sent_takes_no_other_with_it(self, tmp_path):
        folder, hidden = tmp_path / "spool", tmp_path / "hidden"
        folder.mkdir()
        spool = Spool(folder)
        folder.rename(hidden)
        for name in "ab":
            assert not spool.append(post(name))
        token = spool.peek()[1]
        hidden.rename(folder)
        assert spool.append(post("c"))
        spool.done(token)
        assert drain(spool) == ["a", "b", "c"]  # "a" once more, under its id
        assert spool.pending == 0

    def test_without_a_directory_it_works_in_memory(self):
        spool = Spool(None)
        for name in ("a", "b"):
            assert not spool.append(post(name))
        assert spool.pending == 2
        assert drain(spool) == ["a", "b"]


class TestSlots:
    def test_each_has_its_own(self, tmp_path):
        first, second = open_slot(tmp_path), open_slot(tmp_path)
        first.append(post("a"))
        second.append(post("b"))
        assert (drain(first), drain(second)) == (["a"], ["b"])

    def test_the_next_adopts_what_dead_ones_left(self, tmp_path):
        spools = [open_slot(tmp_path, segment_bytes=100) for _ in range(3)]
        for number, spool in enumerate(spools):
            for name in "xyz":
                spool.append(post(f"{name}{number}"))
        for spool in spools:
            spool.close()
        heir = open_slot(tmp_path)
        heir.append(post("new"))
        assert drain(heir) == [*(f"{name}{number}" for number in range(3) for name in "xyz"), "new"]

    def test_what_a_dead_one_gave_up_is_told_by_its_heir(self, tmp_path):
        first, second = open_slot(tmp_path), open_slot(tmp_path)
        second.gap.add(post("lost"), "spool full")
        second.append(post("left"))
        for spool in (first, second):
            spool.close()
        heir = open_slot(tmp_path)
        assert heir.gap.reasons == {"spool full": 1}
        assert drain(heir) == ["left"]

    def test_a_living_one_is_left_alone(self, tmp_path):
        living = open_slot(tmp_path)
        living.append(post("mine"))
        assert drain(open_slot(tmp_path)) == []
        assert drain(living) == ["mine"]

    def test_a_forked_worker_does_not_keep_the_slot_of_a_dead_trainer(self, tmp_path):
        code = (
            "import os, sys, time; from pathlib import Path\n"
            "from andon.spool import Post; from andon.spool_slots import open_slot\n"
            "spool = open_slot(Path(sys.argv[1]))\n"
            "spool.append(Post(id='a', path='/p', content_type='t', body=b'a'))\n"
            "worker = os.fork()\n"
            "if worker == 0: time.sleep(60); os._exit(0)\n"
            "time.sleep(0.2); print(worker, flush=True); os.kill(os.getpid(), 9)"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        worker = int(child.stdout.readline())
        child.wait(30)
        try:
            assert drain(open_slot(tmp_path)) == ["a"]
        finally:
            os.kill(worker, 9)
            child.stdout.close()


class SpoolMachine(RuleBasedStateMachine):
    """Against a plain list: nothing lost, nothing reordered, over appends, sends, crashes and restarts."""

    def __init__(self):
        super().__init__()
        import tempfile
        from pathlib import Path

        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name)
        self.spool = Spool(self.path, segment_bytes=200)
        self.model: list[str] = []
        self.sent: list[str] = []
        self.count = 0

    @rule(size=st.integers(1, 40))
    def append(self, size):
        self.count += 1
        name = f"p{self.count}"
        self.spool.append(post(name, size))
        self.model.append(name)

    @precondition(lambda self: self.model)
    @rule()
    def send(self):
        found = self.spool.peek()
        assert found[0].id == self.model[0]
        self.spool.done(found[1])
        self.sent.append(self.model.pop(0))

    @rule()
    def restart(self):
        self.spool.close()
        self.spool = Spool(self.path, segment_bytes=200)

    @rule()
    def crash(self):
        # Position may lag: what was sent may come again, in order, before what was not.
        self.spool = Spool(self.path, segment_bytes=200)
        repeats = []
        while (found := self.spool.peek()) is not None and found[0].id in self.sent:
            repeats.append(found[0].id)
            self.spool.done(found[1])
        assert repeats == self.sent[len(self.sent) - len(repeats) :]

    @invariant()
    def nothing_is_lost(self):
        assert self.spool.pending == len(self.model)
        found = self.spool.peek()
        assert (found[0].id if found else None) == (self.model[0] if self.model else None)

    def teardown(self):
        self.spool.close()
        self.folder.cleanup()


SpoolMachine.TestCase.settings = settings(max_examples=30, deadline=None)
TestAgainstAList = SpoolMachine.TestCase


class Killed(BaseException):
    """The process died here."""


def killed_after(lines, act):
    """Run `act` and die before the given line of andon/spool.py; returns whether it died."""
    left = lines

    def trace(frame, what, _argument):
        nonlocal left
        if frame.f_code.co_filename != SPOOL_FILE:
            return None
        if what == "line":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise Killed
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    except Killed:
        return True
    finally:
        sys.settrace(before)
    return False


SPOOL_FILE = Spool.append.__code__.co_filename

dies = st.one_of(st.none(), st.integers(0, 300))
appends = st.tuples(st.just("append"), st.integers(1, 40), st.booleans(), dies)
acts = st.lists(
    st.one_of(
        appends,
        appends,
        appends,
        st.tuples(st.just("send"), st.integers(1, 3), st.just(False), dies),
        st.tuples(st.just("tell"), st.just(0), st.just(False), st.none()),
    ),
    min_size=25,
    max_size=50,
)


@settings(max_examples=30, deadline=None)
@given(acts=acts)
def test_killed_at_any_line_every_post_arrives_once_or_is_counted(acts):
    """`told` is what the gap events said. A post whose `append` did not return may be there or not; one that
    was sent may come again, under its id."""
    with tempfile.TemporaryDirectory() as name:
        spool = Spool(Path(name), cap_bytes=1600, segment_bytes=400)
        taken: list[str] = []
        kept: set[str] = set()
        doubtful: set[str] = set()
        arrived: list[str] = []
        unnoted: set[str] = set()
        told = 0

        def send():
            if (found := spool.peek()) is not None:
                unnoted.add(found[0].id)
                if found[0].id not in arrived:
                    arrived.append(found[0].id)
                spool.done(found[1])
                spool._save()  # as is done once a second: what is not noted is not known to have arrived
                unnoted.discard(found[0].id)

        for number, (act, size, is_kept, dies_after) in enumerate(acts):
            lines = 10**9 if dies_after is None else dies_after
            this = f"p{number}"
            if act == "append":
                doubtful.add(this)
                one = post(this, size, is_kept)
                died = killed_after(lines, lambda one=one, to=spool: to.append(one))
                if not died:
                    doubtful.discard(this)
                    taken.append(this)
                    kept |= {this} if is_kept else set()
            elif act == "send":
                died = killed_after(lines, lambda size=size: [send() for _ in range(size)])
            else:
                died = False
                told += spool.take_gap().posts
            if died:
                spool = Spool(Path(name), cap_bytes=1600, segment_bytes=400)
        while spool.pending:
            send()
        told += spool.take_gap().posts
        assert kept <= set(arrived)
        assert [one for one in arrived if one in taken] == [one for one in taken if one in arrived]
        missing = set(taken) - set(arrived)
        # Also counted may be one whose append died, and one that died between its answer and the note of it.
        assert len(missing) <= told <= len(missing) + len(doubtful - set(arrived)) + len(unnoted)


@pytest.mark.parametrize("sending", [False, True])
def test_giving_up_may_die_at_any_line(tmp_path, sending):
    """The append that is one too many, killed before each of its lines in turn."""
    names = [f"p{number}" for number in range(10)]
    for lines in range(10_000):
        folder = tmp_path / str(lines)
        folder.mkdir()
        spool = Spool(folder, cap_bytes=1600, segment_bytes=400)
        for name in names:
            spool.append(post(name, kept=name in ("p1", "p4")))
        assert spool.gap.posts == 0
        if sending:  # p0 was sent, p1 is being sent
            spool.done(spool.peek()[1])
            spool._save()
            spool.peek()
        died = killed_after(lines, lambda to=spool: to.append(post("last", 60)))
        if died:
            spool = Spool(folder, cap_bytes=1600, segment_bytes=400)
        came = drain(spool)
        assert came == [name for name in [*names, "last"] if name in came], lines
        assert {"p1", "p4"} <= set(came), lines
        missing = set(names) - set(came) - ({"p0"} if sending else set())
        assert spool.gap.posts == len(missing), lines
        assert spool.gap.events == 2 * len(missing), lines
        if not died:
            assert missing
            assert came[-1] == "last"
            return
