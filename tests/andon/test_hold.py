"""The hold file: held stays held, whatever dies and whoever asks."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from andon import hold
from andon import permit as permits
from andon.directive import Directive
from andon.hold import EXIT_HELD, FILE_NAME, Held
from andon.signing import SigningKey
from tests.andon.test_permit import AT, KEY, make

TRUSTED = {KEY.key_id}
HOLD = Directive(
    kind="hold", seq=7, run="pt-13b", attempt=3, incident="2041", since="2026-01-02T03:00:00Z"
).sign(KEY)


def permit(**changes) -> dict:
    return permits.issue(make(**changes), KEY)


def release(directory, document, **changes):
    return hold.release(directory, document, **{"trusted": TRUSTED, "at": AT, **changes})


class TestHolding:
    def test_a_directory_without_a_hold_may_train(self, tmp_path):
        assert hold.read(tmp_path) is None
        hold.check(tmp_path)

    def test_a_held_directory_may_not_and_says_since_when(self, tmp_path):
        path = hold.write(tmp_path, HOLD)
        assert path == tmp_path / FILE_NAME
        assert hold.read(tmp_path) == HOLD
        assert os.listdir(tmp_path) == [FILE_NAME]
        with pytest.raises(Held, match=r"attempt 3.*2041"):
            hold.check(tmp_path)

    def test_the_trainers_own_unsigned_hold_holds_too(self, tmp_path):
        hold.write(tmp_path, {"kind": "hold", "run": "pt-13b", "attempt": 3, "reason": "server unreachable"})
        with pytest.raises(Held):
            hold.check(tmp_path)

    def test_a_hold_of_an_old_attempt_does_not_replace_a_newer_one(self, tmp_path):
        hold.write(tmp_path, HOLD)
        hold.write(tmp_path, {**HOLD, "attempt": 2})
        assert hold.read(tmp_path) == HOLD
        hold.write(tmp_path, {**HOLD, "attempt": 4})
        assert hold.read(tmp_path)["attempt"] == 4

    @pytest.mark.parametrize(
        "content",
        [b"", b"{", b"[]", b"null", b"{}", b'{"run": "a", "attempt": true}', b"\xff", b"[" * 100_000],
    )
    def test_a_hold_file_that_cannot_be_read_is_a_hold(self, tmp_path, content):
        (tmp_path / FILE_NAME).write_bytes(content)
        with pytest.raises(Held, match="counts as a hold"):
            hold.check(tmp_path)
        with pytest.raises(Held):
            release(tmp_path, permit())
        assert (tmp_path / FILE_NAME).read_bytes() == content

    def test_a_broken_hold_can_be_replaced_by_a_readable_one(self, tmp_path):
        (tmp_path / FILE_NAME).write_bytes(b"{")
        hold.write(tmp_path, HOLD)
        assert hold.read(tmp_path) == HOLD

    @pytest.mark.parametrize(
        "change", [{"kind": "continue"}, {"run": None}, {"attempt": "3"}, {"attempt": None}]
    )
    def test_what_is_no_hold_is_not_written(self, tmp_path, change):
        with pytest.raises(ValueError, match="directive"):
            hold.write(tmp_path, {**HOLD, **change})
        assert os.listdir(tmp_path) == []

    def test_the_exit_code_is_the_one_launchers_know(self):
        assert EXIT_HELD == 93

    def test_a_writer_killed_at_any_moment_leaves_the_old_or_the_new_hold(self, tmp_path):
        hold.write(tmp_path, HOLD)
        code = (
            "import sys, json, itertools; from andon import hold\n"
            "document = json.loads(sys.argv[2])\n"
            "print('ready', flush=True)\n"
            "for seq in itertools.count(8): hold.write(sys.argv[1], {**document, 'seq': seq})"
        )
        for _ in range(5):
            child = subprocess.Popen(
                [sys.executable, "-c", code, str(tmp_path), json.dumps(HOLD)], stdout=subprocess.PIPE
            )
            assert child.stdout is not None
            child.stdout.readline()
            try:
                child.wait(0.05)
            except subprocess.TimeoutExpired:
                child.kill()
            child.communicate()
            assert hold.read(tmp_path)["run"] == "pt-13b"


class TestRelease:
    def test_a_valid_permit_ends_it_and_nothing_is_lost(self, tmp_path):
        hold.write(tmp_path, HOLD)
        document = permit()
        assert release(tmp_path, document) == make()
        hold.check(tmp_path)
        (archive,) = tmp_path.iterdir()
        assert archive.name.startswith("andon-hold-released-20260102T040000Z-pm_1")
        kept = json.loads(archive.read_text())
        assert (kept["hold"], kept["permit"]) == (HOLD, document)

    @pytest.mark.parametrize(
        ("changes", "word"),
        [
            ({"run": "other"}, "run"),
            ({"attempt": 3}, "attempt"),
            ({"attempt": 2}, "attempt"),
            ({"incident": "2040"}, "incident"),
            ({"issued_at": "2026-01-01T00:00:00Z"}, "before the hold"),
            ({"expires_at": "2026-01-02T03:30:00Z"}, "expired"),
        ],
    )
    def test_a_permit_for_something_else_does_not(self, tmp_path, changes, word):
        hold.write(tmp_path, HOLD)
        with pytest.raises(Held, match=word):
            release(tmp_path, permit(**changes))
        assert hold.read(tmp_path) == HOLD

    def test_the_attempt_after_a_launch_without_permit_is_accepted(self, tmp_path):
        hold.write(tmp_path, HOLD)
        assert release(tmp_path, permit(attempt=5), attempt=5).attempt == 5

    def test_what_is_launched_must_be_what_was_permitted(self, tmp_path):
        hold.write(tmp_path, HOLD)
        for asked in ({"attempt": 5}, {"run": "other"}):
            with pytest.raises(Held):
                release(tmp_path, permit(), **asked)

    def test_a_strangers_key_or_none_at_all_does_not(self, tmp_path):
        hold.write(tmp_path, HOLD)
        stranger = SigningKey.generate()
        with pytest.raises(Held, match="trusted"):
            release(tmp_path, permits.issue(make(), stranger))
        with pytest.raises(Held, match="no key is pinned"):
            release(tmp_path, permits.issue(make(), stranger), trusted=set())

    @pytest.mark.parametrize("document", [None, {}, [], "permit", {"permit": {}}, HOLD])
    def test_what_is_no_permit_does_not(self, tmp_path, document):
        hold.write(tmp_path, HOLD)
        with pytest.raises(Held):
            release(tmp_path, document)

    def test_an_unsigned_hold_without_incident_ends_by_permit_too(self, tmp_path):
        hold.write(tmp_path, {"kind": "hold", "run": "pt-13b", "attempt": 3, "incident": None})
        assert release(tmp_path, permit()).permit == "pm_1"

    def test_without_a_hold_file_the_permit_is_checked_all_the_same(self, tmp_path):
        assert release(tmp_path, permit()) == make()
        with pytest.raises(Held):
            release(tmp_path, permit(expires_at="2026-01-02T03:30:00Z"))

    def test_doing_it_again_after_a_crash_is_safe(self, tmp_path):
        hold.write(tmp_path, HOLD)
        document = permit()
        release(tmp_path, document)
        hold.write(tmp_path, HOLD)  # the unlink did not reach the disk
        assert release(tmp_path, document) == make()
        hold.check(tmp_path)

    def test_two_at_once_both_end_well(self, tmp_path):
        hold.write(tmp_path, HOLD)
        document = permit()
        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(lambda _: release(tmp_path, document), range(8)))
        assert results == [make()] * 8
        hold.check(tmp_path)
