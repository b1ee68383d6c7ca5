"""Permits: signed permission for one resume, checked with nobody to ask."""

import json
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon import permit as permits
from andon.cli import main
from andon.permit import Change, Checkpoint, Exclusions, Permit, PermitError, Positions, SkipWindow
from andon.signing import SigningKey, sign_document
from andon.wire import parse_time

KEY = SigningKey.generate()
ISSUED, EXPIRES = "2026-01-02T03:04:05Z", "2026-01-02T15:04:05Z"
AT = parse_time("2026-01-02T04:00:00Z")[0] / 1e9


def make(**changes) -> Permit:
    plain = Permit(
        permit="pm_1",
        run="pt-13b",
        attempt=4,
        incident="2041",
        approval="ap_7",
        approval_digest="ab" * 32,
        plan="rollback_and_skip",
        checkpoint=Checkpoint(step=900, uri="file:///ckpt/step-900", digest="cd" * 32),
        positions=Positions(
            loader_position=57_600, consumed_samples=57_600, optimizer_step=900, schedule_position=900
        ),
        skip=SkipWindow(from_=57_600, to=64_000),
        exclusions=Exclusions(nodes=("node-07",), ranks=(61,), gpus=("GPU-1",)),
        changes=(Change(what="lr", was=3e-4, to=9e-5, changes_regime=True),),
        regime="b",
        issued_at=ISSUED,
        expires_at=EXPIRES,
    )
    return msgspec.structs.replace(plain, **changes)


def verify(document, **changes) -> Permit:
    return permits.verify(document, **{"trusted": {KEY.key_id}, "at": AT, **changes})


class TestVerify:
    def test_it_comes_back_as_it_was_issued(self):
        document = json.loads(json.dumps(permits.issue(make(), KEY)))
        assert document["skip"] == {"from": 57_600, "to": 64_000}
        assert verify(document, run="pt-13b", attempt=4) == make()

    @pytest.mark.parametrize(
        ("asked", "word"),
        [
            ({"run": "other"}, "run"),
            ({"attempt": 5}, "attempt"),
            ({"attempt": 3}, "attempt"),
            ({"trusted": {SigningKey.generate().key_id}}, "trusted"),
            ({"trusted": []}, "trusted"),
            ({"at": parse_time(EXPIRES)[0] / 1e9}, "expired"),
            ({"at": parse_time(ISSUED)[0] / 1e9 - 301}, "future"),
        ],
    )
    def test_it_is_for_one_run_attempt_key_and_time_only(self, asked, word):
        document = permits.issue(make(), KEY)
        with pytest.raises(PermitError, match=word):
            verify(document, **asked)

    def test_a_clock_that_says_nothing_does_not_make_it_last_for_ever(self):
        for at in (float("nan"), float("inf"), float("-inf")):
            with pytest.raises(PermitError):
                verify(permits.issue(make(), KEY), at=at)

    def test_it_holds_until_the_last_moment_and_under_a_clock_a_little_behind(self):
        document = permits.issue(make(), KEY)
        verify(document, at=parse_time(EXPIRES)[0] / 1e9 - 0.001)
        verify(document, at=parse_time(ISSUED)[0] / 1e9 - 299)

    @pytest.mark.parametrize("name", sorted(permits.issue(make(), KEY)))
    def test_no_field_can_be_changed_or_removed(self, name):
        document = permits.issue(make(), KEY)
        other = permits.issue(make(permit="pm_2", run="x", attempt=9), SigningKey.generate())
        removed = {key: value for key, value in document.items() if key != name}
        for altered in ({**document, name: other[name]}, {**document, name: "x"}, removed):
            if altered != document:
                with pytest.raises(PermitError):
                    verify(altered)

    def test_a_condition_this_version_cannot_read_is_refused_though_signed(self):
        document = sign_document({**make().to_document(), "only_on_sundays": True}, KEY)
        with pytest.raises(PermitError, match="only_on_sundays"):
            verify(document)

    def test_another_document_of_the_same_key_is_no_permit(self):
        with pytest.raises(PermitError):
            verify(sign_document({"schema": "andon.directive/1", "kind": "resume"}, KEY))

    @pytest.mark.parametrize(
        "changes",
        [
            {"schema": "andon.permit/2"},
            {"attempt": 0},
            {"checkpoint": None},
            {"skip": None},
            {"skip": SkipWindow(from_=5, to=4)},
            {"skip": SkipWindow(from_=-1, to=4)},
            {"expires_at": ISSUED},
            {"issued_at": "yesterday"},
        ],
    )
    def test_a_permit_that_contradicts_itself_is_not_issued_and_does_not_verify(self, changes):
        with pytest.raises(PermitError):
            permits.issue(make(**changes), KEY)
        with pytest.raises(PermitError):
            verify(sign_document(make(**changes).to_document(), KEY))

    def test_going_on_from_memory_needs_no_checkpoint(self):
        plain = make(plan="resume_in_place", checkpoint=None, skip=None)
        assert verify(permits.issue(plain, KEY)) == plain

    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.sampled_from(sorted(permits.issue(make(), KEY))), inner)
            ),
        )
    )
    def test_nothing_makes_anything_but_a_permit_error(self, value):
        with pytest.raises(PermitError):
            verify(value)

    @given(
        st.dictionaries(
            st.sampled_from(sorted(make().to_document())),
            st.none() | st.integers(-9, 9) | st.text(max_size=5),
        )
    )
    def test_no_signed_nonsense_makes_anything_but_a_permit_error(self, changes):
        try:
            permit = verify(sign_document({**make().to_document(), **changes}, KEY))
        except PermitError:
            return
        assert permit.expires_at == EXPIRES


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "permit.json"
    path.write_text(json.dumps(permits.issue(make(), KEY)))
    return path


class TestCommand:
    def run(self, capsys, *arguments) -> tuple[int, str]:
        code = main(["permit", "verify", *map(str, arguments)])
        shown = capsys.readouterr()
        return code, shown.out + shown.err

    def test_verified_and_pinned_is_0(self, file, capsys):
        code, text = self.run(capsys, file, "--at", "2026-01-02T04:00:00Z", "--key", KEY.key_id.upper())
        assert code == 0
        assert text.startswith("verified")
        assert "pt-13b attempt 4" in text

    def test_consistent_but_not_pinned_is_3(self, file, capsys):
        code, text = self.run(capsys, file, "--at", str(AT))
        assert code == 3
        assert f"signed by {KEY.key_id}, not pinned" in text

    def test_the_answer_that_held_the_permit_will_do_too(self, file, capsys):
        file.write_text(json.dumps({"permit": json.loads(file.read_text())}))
        assert self.run(capsys, file, "--at", str(AT), "--key", KEY.key_id)[0] == 0

    @pytest.mark.parametrize(
        "arguments",
        [
            ["--at", "2026-01-03T00:00:00Z"],
            ["--at", str(AT), "--key", "0" * 64],
            ["--at", str(AT), "--run", "other"],
            ["--at", str(AT), "--attempt", "5"],
        ],
    )
    def test_failed_is_1_and_says_why(self, file, capsys, arguments):
        code, text = self.run(capsys, file, *arguments)
        assert code == 1
        assert "failed" in text

    def test_altered_is_1(self, file, capsys):
        file.write_text(file.read_text().replace("57600", "57601"))
        assert self.run(capsys, file, "--at", str(AT), "--key", KEY.key_id)[0] == 1

    @pytest.mark.parametrize("content", ["", "{", "[]", "7", "[" * 100_000, "\x00"])
    def test_unreadable_is_2(self, file, capsys, content):
        file.write_text(content)
        assert self.run(capsys, file)[0] == 2

    def test_a_missing_file_a_wrong_time_and_a_wrong_key_are_2(self, file, capsys):
        assert self.run(capsys, file.parent / "nowhere")[0] == 2
        assert self.run(capsys, file, "--at", "noon")[0] == 2
        assert self.run(capsys, file, "--at", "nan")[0] == 2
        assert self.run(capsys, file, "--key", "abc")[0] == 2
        assert self.run(capsys)[0] == 2

    def test_it_runs_from_a_shell_and_from_a_pipe(self, file):
        command = [
            sys.executable,
            "-m",
            "andon.cli",
            "permit",
            "verify",
            "-",
            "--at",
            str(AT),
            "--key",
            KEY.key_id,
        ]
        shown = subprocess.run(command, input=file.read_bytes(), capture_output=True, timeout=60, check=False)
        assert shown.returncode == 0, shown.stderr
